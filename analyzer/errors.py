"""The errors that the analyzer raises.

StepsplitError                  the base class
├── UsageError                  the command or call is invalid
└── DataError                   a file is missing, damaged or of the wrong kind
"""

from __future__ import annotations

from pathlib import Path

from stepsplit.collectors.run_spec import write_whole

RECORD_AGAIN = "record it again or leave it out"
"""The hint for a file that cannot be used."""


class StepsplitError(Exception):
    """Base class of all errors; the message is one line: what, in which file or rank, the fix.

    Catch it to handle UsageError and DataError alike.

    Examples:
        >>> from stepsplit.analyzer import analyze
        >>> try:
        ...     report = analyze("no/such/folder")
        ... except StepsplitError as error:
        ...     print(error)
        no/such/folder: no such file or folder; check the path
    """


class UsageError(StepsplitError):
    """The command or call is invalid as given, for example a missing or contradicting option.

    For example, `plan` raises it for fewer than 1 GPU, and `validate` for a folder without any of
    the published tables. An input file that cannot be used is a DataError.
    """


class DataError(StepsplitError):
    """An input that cannot be used; the message names the file, the rank if known, and the fix.

    Args:
        where: The file, folder or URL.
        problem: What is wrong with it.
        hint: How to fix it.
        rank: The rank of the file; default None: unknown.
    """

    def __init__(self, where: object, problem: str, hint: str, rank: int | None = None) -> None:
        self.where, self.problem, self.hint, self.rank = str(where), problem, hint, rank
        of_rank = "" if rank is None else f" (rank {rank})"
        super().__init__(f"{self.where}{of_rank}: {problem}; {hint}")

    def __reduce__(self) -> tuple[type[DataError], tuple[str, str, str, int | None]]:
        """Lets worker processes return the error with all its fields."""
        return DataError, (self.where, self.problem, self.hint, self.rank)


# Output files: written atomically.


def write(path: Path, content: bytes) -> None:
    """Writes the file atomically. Raises UsageError if it cannot be written."""
    try:
        write_whole(path, content)
    except (OSError, ValueError) as error:
        raise make_write_error(path, error) from None


def make_write_error(path: Path, error: OSError | ValueError) -> UsageError:
    """The error for a path that cannot be written, with the reason of the operating system."""
    reason = getattr(error, "strerror", None) or "not a file"
    return UsageError(f"{path}: {reason}; choose a place that can be written")
