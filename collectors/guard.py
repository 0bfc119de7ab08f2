"""How a collector fails: with one line of warning, and without breaking the training."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

# What torch's profiler, its store and the file system raise. Nothing of the user's runs in here.
_FAILURES = (
    OSError, RuntimeError, ValueError, TypeError, AttributeError, AssertionError, ImportError,
)  # fmt: skip


@contextmanager
def guarded(rank: int, lost: str) -> Iterator[None]:
    """A block whose failure costs only what it would have recorded: `lost` names that."""
    try:
        yield
    except _FAILURES as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        warn_lost(rank, f"{lost}: {reason}")


def warn_lost(rank: int, what: str) -> None:
    """Says on one line which rank lost what."""
    warnings.warn(f"stepsplit, rank {rank}: lost {what}", RuntimeWarning, stacklevel=3)
