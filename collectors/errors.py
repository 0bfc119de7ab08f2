"""What a command of the collectors cannot do: one line, with the mend."""

from __future__ import annotations


class CollectError(RuntimeError):
    """Bad input or a job that cannot be reached; the message names it and the mend."""
