"""The answer of a tool: rows with units, in pages of a bounded number of tokens, and what the
recording cannot answer.

Text out of a recording is data: it is marked by « and », and shown without control characters. Bare
is only what cannot be a sentence: one word of a few letters, such as all_reduce.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from stepsplit.collectors.safe_io.safe_text import escape_controls

MAX_TOKENS = 2_000
"""The most tokens of an answer, as the tokenizer o200k_base counts them."""

_TARGET_TOKENS = 1_800
"""The limit by the estimate, which leaves room for its error."""

Reason = Literal[
    "not_recorded", "incomplete_recording", "not_known", "needs_model", "needs_trace", "too_few"
]
"""Why a question has no answer: the recording has no such data; it has lost some; the data does not
decide; only a model of the job gives it; the raw traces are needed; too few steps or runs."""


@dataclass(frozen=True, slots=True)
class CannotAnswer:
    """A question that the recording does not answer, so that no one takes absence for zero.

    Attributes:
        question: what is not known.
        reason: why not, as a code.
        because: why not, in words.
        needed: what would answer it.
    """

    question: str
    reason: Reason
    because: str
    needed: str


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """What a tool found.

    Attributes:
        about: what the numbers are, in our words; recorded ones among them are marked.
        values: single values by name; names end in their unit.
        columns: names of the columns; they end in their unit.
        rows: the table, all of it; pages are cut when it is written.
        cannot_answer: what the recording does not answer.
    """

    about: str
    values: Mapping[str, object] = field(default_factory=dict)
    columns: tuple[str, ...] = ()
    rows: Sequence[Sequence[object]] = ()
    cannot_answer: tuple[CannotAnswer, ...] = ()


# Text of a recording.

OPEN, CLOSE = "«", "»"

_WORD = re.compile(r"[A-Za-z0-9_.+:/=%-]{1,40}", re.ASCII)
"""What stays bare."""

# A name of a kernel or a warning of ours is shorter; a longer text crowds out rows.
_MAX_CHARS = 240


class Own(str):
    """A text of ours, not of a recording, which is written as it is."""

    __slots__ = ()


def mark_recorded(text: str, max_chars: int = _MAX_CHARS) -> str:
    """The text as data: in marks that it cannot close, on one line, cut after max_chars.

    >>> mark_recorded("all_reduce"), mark_recorded("ignore\\nall» of it")
    ('all_reduce', '«ignore\\\\nall> of it»')
    """
    if not text or (_WORD.fullmatch(text) and len(text) <= max_chars):
        return text
    # Cut first: to escape a text of megabytes takes long.
    safe = escape_controls(text[: max_chars + 1]).replace(OPEN, "<").replace(CLOSE, ">")
    if len(safe) > max_chars:
        more = len(text) - max_chars
        safe = safe[:max_chars] + f"... {max(more, 1)} more characters"
    return f"{OPEN}{safe}{CLOSE}"


# Fields of records.


def pick(row: object, *names: str, **renamed: str) -> dict[str, object]:
    """These attributes of a record by name, then others under names of their own."""
    keys = dict(zip(names, names, strict=True)) | renamed
    return {key: getattr(row, name) for key, name in keys.items()}


# Pages.

_SHRINKING = ((_MAX_CHARS, 24), (100, 10), (40, 4), (16, 1))
"""The most characters of a text and items of a list, from which the first is taken that fits."""


def write_answer(answer: ToolAnswer, offset: int = 0) -> str:
    """The answer as JSON, with as many rows from offset on as fit."""
    # The head alone may be too long, if a recording has many warnings.
    for max_chars, max_items in _SHRINKING:
        head = _write_head(answer, max_chars, max_items)
        used = estimate_tokens(json.dumps(head, ensure_ascii=False))
        rows = [_write_row(row, max_chars, max_items) for row in answer.rows[offset : offset + 1]]
        if used + sum(map(_estimate_row, rows)) <= _TARGET_TOKENS:
            break
    if answer.columns:
        page: list[Any] = []
        used += 80  # of what follows
        for row in answer.rows[offset:]:
            written = _write_row(row, max_chars, max_items)
            used += _estimate_row(written)
            # At least one row, or the next page would be the same.
            if used > _TARGET_TOKENS and page:
                break
            page.append(written)
        head["columns"] = answer.columns
        head["rows"] = page
        head["row_count"] = len(answer.rows)
        end = offset + len(page)
        if end < len(answer.rows):
            head["next_offset"] = end
        if not answer.rows:
            head["rows_note"] = "no rows: see about and cannot_answer before taking this for zero"
        # An agent that counts on would take an empty page for the end of a table without rows.
        elif offset >= len(answer.rows):
            head["rows_note"] = f"offset is beyond the last row; there are {len(answer.rows)}"
    return json.dumps(head, ensure_ascii=False, separators=(",", ":"))


def _write_head(answer: ToolAnswer, max_chars: int, max_items: int) -> dict[str, Any]:
    head: dict[str, Any] = {"about": escape_controls(answer.about[:_MAX_ABOUT_CHARS])}
    # Before the numbers, or a reader may have drawn a conclusion already.
    if answer.cannot_answer:
        head["cannot_answer"] = [
            {
                "question": one.question,
                "reason": one.reason,
                "because": _cut(one.because, max_chars),
                "needed": one.needed,
            }
            for one in answer.cannot_answer[:max_items]
        ]
        if len(answer.cannot_answer) > max_items:
            head["cannot_answer_more"] = len(answer.cannot_answer) - max_items
    head |= {name: _write(one, max_chars, max_items) for name, one in answer.values.items()}
    names = " ".join((*answer.values, *answer.columns))
    units = {suffix: text for suffix, text in _UNITS.items() if re.search(rf"{suffix}\b", names)}
    if units:
        head["units"] = units
    return head


_MAX_ABOUT_CHARS = 1_500

_UNITS = {
    "_ns": "nanoseconds",
    "_bytes": "bytes",
    "_per_s": "per second",
    "_flops": "floating-point operations",
    "share": "fraction, 0..1",
    "fraction": "fraction, 0..1",
    "mfu": "fraction, 0..1",
    "hfu": "fraction, 0..1",
}
"""Units by the end of a name."""


def _cut(text: str, max_chars: int) -> str:
    text = escape_controls(text)
    return text if len(text) <= 2 * max_chars else f"{text[: 2 * max_chars]}..."


def _write(value: object, max_chars: int, max_items: int) -> Any:
    """The value for JSON: texts marked, floats of four digits, long lists cut."""
    match value:
        case Own():
            return _cut(value, max_chars)
        case str():
            return mark_recorded(value, max_chars)
        case bool() | int() | None:
            return value
        case float():
            # json would write NaN, which is no JSON.
            return float(f"{value:.4g}") if math.isfinite(value) else None
        case Mapping():
            items = list(value.items())[:max_items]
            return {
                mark_recorded(str(key), max_chars): _write(one, max_chars, max_items)
                for key, one in items
            }
        case Sequence():
            written = [_write(one, max_chars, max_items) for one in value[:max_items]]
            more = len(value) - max_items
            return [*written, f"... {more} more"] if more > 0 else written
    return mark_recorded(str(value), max_chars)


def _write_row(row: Sequence[object], max_chars: int, max_items: int) -> list[Any]:
    return [_write(one, max_chars, max_items) for one in row]


def _estimate_row(row: object) -> int:
    return estimate_tokens(json.dumps(row, ensure_ascii=False, separators=(",", ":"))) + 1


# Tokens, without a tokenizer: no package that has one is worth its size here.

_PIECE = re.compile(r"[0-9]+|[A-Za-z]+|[^\x00-\x7f]+|\s+|[^A-Za-z0-9\s\x80-\U0010ffff]+")

SKILL = Path(__file__).parent / "SKILL.md"
"""What an agent should know to use the tools."""


@cache
def _read_own_words() -> frozenset[str]:
    """The words of SKILL.md, which our own sentences are mostly made of, and those of JSON."""
    return frozenset(re.findall(r"[A-Za-z]+", SKILL.read_text())) | {"true", "false", "null"}


def estimate_tokens(text: str) -> int:
    """An upper bound of the tokens of an answer's text. A recorded text may be anything: a word
    that is none of ours counts as much as letters at random do."""
    tokens = 0
    # The ratios are the least letters per token that the tokenizer made of such texts: rare letters
    # at random make a token of 1.2 (tests/dashboard/test_agents.py draws them).
    for piece in _PIECE.findall(text):
        first = piece[0]
        if first > "\x7f":
            # Other scripts take at most one of each byte.
            tokens += len(piece.encode())
        elif first.isdigit():
            tokens += math.ceil(len(piece) / 3)
        elif first.isalpha():
            tokens += math.ceil(len(piece) / (4 if piece in _read_own_words() else 1.2))
        elif not first.isspace():
            tokens += math.ceil(len(piece) / 1.5)
    return tokens
