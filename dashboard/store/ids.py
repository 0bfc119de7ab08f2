"""Ids, names, paths and texts as a store writes them; without SQL."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path, PurePosixPath

from stepsplit.analyzer.errors import UsageError
from stepsplit.collectors.safe_io.safe_text import escape_controls

_RUN_ID = re.compile(r"[0-9a-f]{8,32}")

RUN_OR_ROLE = r"([0-9a-f]{8,32})(?:\.(0|[1-9][0-9]{0,3}))?"
"""The id of a run, or of one role of it: its number follows after a dot."""

_RUN_OR_ROLE = re.compile(RUN_OR_ROLE)

NAME_LENGTH = 200
"""Longest name of a watched run."""

_PART_BYTES, _DEEPEST = 240, 16
"""Longest part of a path, which a file system takes with a suffix, and the most parts of one."""


def is_run_id(text: object) -> bool:
    """Whether the text may be the id of a run or a token, which names a folder."""
    return isinstance(text, str) and _RUN_ID.fullmatch(text) is not None


def split_role_id(text: str) -> tuple[str, int | None]:
    """The id of a run and the number of the role of it that the text names, None if it names
    none."""
    found = _RUN_OR_ROLE.fullmatch(text)
    if found is None or found[2] is None:
        return text, None
    return found[1], int(found[2])


def locate_run(run_id: str) -> str:
    """The folder of a run below that of all runs: its id. "ID.N" is the role number N of a run.

    A role has a number, and none of its texts names a file. Raises UsageError for another text.
    """
    found = _RUN_OR_ROLE.fullmatch(run_id)
    if found is None:
        raise UsageError(f"invalid run id {run_id!r:.100}; use an id from the list of runs")
    return found[1] if found[2] is None else f"{found[1]}/roles/{found[2]}"


def is_relative_path(text: object) -> bool:
    """Whether the text may be the path of a file of a run: plain names, none of them `..`."""
    return isinstance(text, str) and _has_plain_names(text) and text.count("/") < _DEEPEST


def _has_plain_names(path: str) -> bool:
    return (
        path.isprintable()
        # Names that are no UTF-8 arrive with U+FFFD: two of them would be one file.
        and not set(path) & {"\\", "\ufffd"}
        and all(
            part not in ("", ".", "..") and len(part.encode("utf-8", "replace")) <= _PART_BYTES
            for part in path.split("/")
        )
    )


def is_watch_name(text: object) -> bool:
    """Whether a watched run may have this name, which is part of its page's address."""
    if not isinstance(text, str) or not 0 < len(text) <= NAME_LENGTH:
        return False
    return text.isprintable() and not set(text) & set("/\\%?#") and text.strip(" .") == text


_LOOK_ALIKES = {
    "a": "\u0430\u03b1", "b": "\u0432\u044c\u03b2", "c": "\u0441\u03c2\u03f2", "d": "\u0501",
    "e": "\u0435\u03b5", "h": "\u04bb\u043d\u03b7", "j": "\u0458\u03f3", "k": "\u043a\u03ba",
    "l": "1i|\u0456\u03b9\u01c0\u04cf", "m": "\u043c\u03bc", "n": "\u03bd", "o": "0\u043e\u03bf",
    "p": "\u0440\u03c1", "q": "\u051b", "s": "\u0455", "t": "\u0442\u03c4", "w": "\u051d",
    "x": "\u0445\u03c7", "y": "\u0443\u03c5", "z": "\u03b6",
}  # fmt: skip
"""Cyrillic and Greek letters, and digits, that look like a Latin letter in one of its cases."""

_FOLDED = str.maketrans({one: latin for latin, all_ in _LOOK_ALIKES.items() for one in all_})


def fold_name(name: str) -> str:
    """A form that names of watched runs share if one could be taken for the other."""
    plain = unicodedata.normalize("NFKD", name).casefold()
    letters = (one for one in plain if not unicodedata.combining(one) and not one.isspace())
    return "".join(letters).translate(_FOLDED)


def find_below(root: Path, path: str) -> Path:
    """The place of a relative path below the root, which no symbolic link leads out of it.

    Raises UsageError for `..`, an absolute path, or a symbolic link on the way; the root itself may
    be one.
    """
    if _has_plain_names(path):
        place = root
        for part in PurePosixPath(path).parts:
            place = place / part
            if place.is_symlink():
                raise UsageError(f"{place}: a symbolic link among the files of runs; remove it")
        if place.resolve().is_relative_to(root.resolve()):
            return place
    raise UsageError(f"{path!r:.200} is not a path among the files of runs")


# Cleaning of untrusted text before it is stored.


def clean_text(text: str, max_length: int) -> str:
    """The text on one line of at most max_length characters, with controls as escapes."""
    line = escape_controls(" ".join(text.split()))
    return line if len(line) <= max_length else line[: max_length - 1] + "…"
