"""What can go wrong, and how it is told.

StepsplitError                  catch this one
├── UsageError                  the call itself cannot be
└── DataError                   a file is missing, torn or not what it should be
"""

from __future__ import annotations

from pathlib import Path

from stepsplit.collectors.run_spec import write_whole

RECORD_AGAIN = "record it again or leave it out"
"""How a file that is beyond use is fixed."""


class StepsplitError(Exception):
    """An error with one line for the person: what, in which file or rank, and how to fix it."""


class UsageError(StepsplitError):
    """The command or call does not make sense as given."""


class DataError(StepsplitError):
    """An input that cannot be used; names the file, the rank where known, and the hint."""

    def __init__(self, where: object, problem: str, hint: str, rank: int | None = None) -> None:
        self.where, self.problem, self.hint, self.rank = str(where), problem, hint, rank
        of_rank = "" if rank is None else f" (rank {rank})"
        super().__init__(f"{self.where}{of_rank}: {problem}; {hint}")

    def __reduce__(self) -> tuple[type[DataError], tuple[str, str, str, int | None]]:
        """Errors come back whole from worker processes."""
        return DataError, (self.where, self.problem, self.hint, self.rank)


# Files that people ask for: written whole or not at all, refused in one line.


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
