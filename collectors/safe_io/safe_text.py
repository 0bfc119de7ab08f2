r"""Text of others, such as names in a recording, as a terminal, a log or a CI runner may get it.

A name may hold sequences that a terminal executes, marks that turn the order of letters, and line
breaks after which a CI runner takes the rest for commands of its own. They are shown as Python
writes them: \x1b, \u202e, \n. Letters, emoji and spaces of all scripts stay, but nothing that is
invisible: with a zero-width joiner a name would look like another one.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import IO, Any, TextIO, cast
from unicodedata import category

# What is shown instead of a character.


class _Escapes(dict[int, str]):
    """A table for str.translate, filled as characters occur."""

    def __init__(self, escape: Callable[[str], str], kept: str = "") -> None:
        super().__init__({ord(letter): letter for letter in kept})
        self._escape = escape

    def __missing__(self, code: int) -> str:
        letter = chr(code)
        is_shown = letter.isprintable() or category(letter) == "Zs"
        self[code] = letter if is_shown else self._escape(letter)
        return self[code]


def _escape(letter: str) -> str:
    return letter.encode("unicode_escape").decode()


def _escape_for_json(letter: str) -> str:
    units = letter.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2))


_IN_LINE, _IN_LINES = _Escapes(_escape), _Escapes(_escape, kept="\n")
_IN_JSON = _Escapes(_escape_for_json, kept="\n")

_MARKED = re.compile(r"(?<=##)(\w*)\[")
"""GitHub and Azure look for ##[...] and ##vso[...] anywhere in a line, TeamCity for ##teamcity[."""


def escape_controls(text: str) -> str:
    r"""The text on one line, with visible escapes for what a terminal or a runner would execute.

    >>> print(escape_controls("a\x1b[31m\nb \u202e ##[error]c"))
    a\x1b[31m\nb \u202e ##\x5berror]c
    """
    return _MARKED.sub(r"\1\\x5b", text.translate(_IN_LINE))


def escape_json(document: str) -> str:
    r"""The JSON document with \u escapes for the same characters; its values stay the same."""
    return _MARKED.sub(r"\1\\u005b", document.translate(_IN_JSON))


def format_workflow_command(kind: str, title: str, text: str) -> str:
    """A line that GitHub Actions executes: an annotation with this text and nothing else."""
    title, text = (escape_controls(one).replace("%", "%25") for one in (title, text))
    return f"::{kind} title={title.replace(':', '%3A').replace(',', '%2C')}::{text}"


# The streams of a command.

COLORS = re.compile(r"(\x1b\[[0-9;]*m)")

DRAWING = re.compile(r"(\x1b\[[0-9;?]*[A-Za-z]|\r)")
"""What draws a progress bar."""

_BLANK = r"(?:[^\S\n]|\x1b\[[0-9;]*m)*"

_COMMAND = re.compile(rf"^{_BLANK}::|##\w*\[", re.MULTILINE)
"""What makes a line a command of a runner; GitHub takes :: after spaces only."""

# Longer than the beginning of any command of a runner.
_LONGEST_HEAD = 64


class SafeStream(io.TextIOBase):
    """A stream on which nothing is written that a terminal or a CI runner would execute.

    It is the last barrier: it cannot know which line break is of a name. `allowed` is for drawings
    of our own, whose texts have passed escape_controls.
    """

    def __init__(self, stream: IO[str], allowed: re.Pattern[str] | None = None) -> None:
        self.unguarded: Any = getattr(stream, "unguarded", stream)
        self._allowed = allowed
        self._head = ""
        """What the unfinished line begins with."""

    def write(self, text: str) -> int:
        """Writes the text, escaped."""
        parts = [text] if self._allowed is None else self._allowed.split(text)
        # Every second part is a match of the pattern.
        safe = (part if i % 2 else part.translate(_IN_LINES) for i, part in enumerate(parts))
        lines = _COMMAND.sub(_break_command, "".join([self._head, *safe]))
        self.unguarded.write(lines[len(self._head) :])
        last = re.sub(f"^{_BLANK}", "", lines.rpartition("\n")[2])
        self._head = last if len(last) < _LONGEST_HEAD else f"...{last[-_LONGEST_HEAD:]}"
        return len(text)

    def flush(self) -> None:
        """Flushes the stream."""
        self.unguarded.flush()

    def close(self) -> None:
        """Leaves the stream open: it belongs to the process."""

    def writable(self) -> bool:
        """Always."""
        return True

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""
        return bool(self.unguarded.isatty())

    def fileno(self) -> int:
        """The descriptor of the stream."""
        return int(self.unguarded.fileno())

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the stream."""
        return str(self.unguarded.encoding or "utf-8")

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        """How the stream treats letters that its encoding lacks."""
        return getattr(self.unguarded, "errors", None)


def _break_command(match: re.Match[str]) -> str:
    return f"{match[0][:-1]}\\x{ord(match[0][-1]):02x}"


@contextmanager
def guard_output() -> Iterator[None]:
    """Standard output and error are a SafeStream each, while the context is open."""
    # A process without a terminal may have none.
    out, err = (one and cast(TextIO, SafeStream(one)) for one in (sys.stdout, sys.stderr))
    with redirect_stdout(out), redirect_stderr(err):
        yield
