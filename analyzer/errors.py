"""The errors that the analyzer raises.

StepsplitError                  the base class
├── UsageError                  the command or call is invalid
└── DataError                   a file is missing, damaged or of the wrong kind
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from stepsplit.collectors.safe_io.atomic_file import SHARED, write_whole
from stepsplit.collectors.safe_io.regular_file import open_regular

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
        self.where, self.problem, self.hint, self.rank = str(where), _cut(problem), _cut(hint), rank
        of_rank = "" if rank is None else f" (rank {rank})"
        super().__init__(f"{self.where}{of_rank}: {self.problem}; {self.hint}")

    def __reduce__(self) -> tuple[type[DataError], tuple[str, str, str, int | None]]:
        """Lets worker processes return the error with all its fields."""
        return DataError, (self.where, self.problem, self.hint, self.rank)


_MAX_PART = 4_000
"""Letters of a problem or a hint: 20 mistakes of a job.toml take some 3,000."""


def _cut(text: str) -> str:
    """Both ends of a long text: the file may hold a key or a value of a megabyte."""
    if len(text) <= _MAX_PART:
        return text
    return f"{text[: _MAX_PART // 2]} ... {text[-_MAX_PART // 2 :]}"


# TOML files: read within limits.

_MAX_TOML_BYTES = 1 << 20

_DEEP_KEY = re.compile(rb"""(?<![\w.'"-])(?:(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){32}""")
"""A key of more than 32 parts; tomllib takes quadratic time for their number."""


def read_toml(path: str | Path, hint: str = "fix that line") -> dict[str, Any]:
    """The tables of a TOML file; hint is the fix of a damaged one. Raises DataError."""
    return parse_toml(Path(path), read_file(path), hint)


def read_file(path: str | Path) -> bytes:
    """The bytes of a config file, one more than it may have at most. Raises DataError."""
    path = Path(path)
    # What a shell hands over, as <(...) or -, is a pipe that the user has made.
    is_handed_over = path.is_relative_to("/dev") or path.is_relative_to("/proc")
    try:
        with path.open("rb") if is_handed_over else open_regular(path) as file:
            return file.read(_MAX_TOML_BYTES + 1)
    except OSError as error:
        raise DataError(path, error.strerror or "unreadable", "check the path") from None


def parse_toml(where: object, text: bytes, hint: str = "fix that line") -> dict[str, Any]:
    """The tables of a TOML text; where is the file name in errors. Raises DataError."""
    if len(text) > _MAX_TOML_BYTES:
        raise DataError(where, "too large for a TOML file", "check the path")
    if _DEEP_KEY.search(text):
        raise DataError(where, "has a key of more than 32 parts", hint)
    try:
        return tomllib.loads(text.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise DataError(where, "is not UTF-8 text", "write it as TOML: key = value") from None
    except (ValueError, RecursionError) as error:
        if text.lstrip()[:1] == b"{":
            raise DataError(where, "is JSON, not TOML", "write it as TOML: key = value") from None
        # Python's own words name a setting of the interpreter.
        is_long = "set_int_max_str_digits" in str(error)
        reason = "a number has over 4,300 digits" if is_long else error
        raise DataError(where, f"not valid TOML ({reason})", hint) from None


# Output files: written atomically.


def write(path: Path, content: bytes, mode: int = SHARED) -> None:
    """Writes the file atomically. Raises UsageError if it cannot be written.

    mode: of a new file; the umask is taken from it.
    """
    try:
        write_whole(path, content, mode)
    except (OSError, ValueError) as error:
        raise make_write_error(path, error) from None


def make_write_error(path: Path, error: OSError | ValueError) -> UsageError:
    """The error for a path that cannot be written, with the reason of the operating system."""
    reason = getattr(error, "strerror", None) or "not a file"
    return UsageError(f"{path}: {reason}; choose a place that can be written")
