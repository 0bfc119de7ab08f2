"""How a collector fails: with one line of warning, and without breaking the training."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def guarded(rank: int, lost: str) -> Iterator[None]:
    """A block of ours whose failure costs only what it would have recorded: `lost` names that."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - nothing of the user's runs in here
        reason = (str(error) or type(error).__name__).splitlines()[0]
        warn_lost(rank, f"{lost}: {reason}")


def warn_lost(rank: int, what: str) -> None:
    """Says on one line which rank lost what; also where warnings are errors."""
    text = f"stepsplit, rank {rank}: lost {what}"
    try:
        warnings.warn_explicit(text, RuntimeWarning, "stepsplit", 0)
    except RuntimeWarning:
        sys.stderr.write(f"{text}\n")
