"""Files that people ask for: written whole or not at all, refused in one line."""

from __future__ import annotations

from pathlib import Path

from stepsplit.analyzer.errors import UsageError
from stepsplit.collectors.run_spec import write_whole


def write(path: Path, content: bytes) -> None:
    """Writes the file, whole or not at all. Raises UsageError where it cannot be written."""
    try:
        write_whole(path, content)
    except (OSError, ValueError) as error:
        raise unwritable(path, error) from None


def unwritable(path: Path, error: OSError | ValueError) -> UsageError:
    """The error for a place that cannot be written, with the system's reason."""
    reason = getattr(error, "strerror", None) or "not a file"
    return UsageError(f"{path}: {reason}; choose a place that can be written")
