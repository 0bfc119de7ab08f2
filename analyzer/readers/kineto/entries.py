"""A piece of a JSON array of trace entries -> the entries, damaged ones mended or counted."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, cast

import msgspec
from msgspec import Raw

from stepsplit.analyzer.readers.kineto.schema import ANY_ENTRY, NO_ARGS, Complete, Entry, Times

Text = bytes | bytearray | memoryview

_ENTRIES = msgspec.json.Decoder(list[ANY_ENTRY])
_ENTRY = msgspec.json.Decoder(ANY_ENTRY)
_TIMES = msgspec.json.Decoder(list[Times])
_PIECES = msgspec.json.Decoder(list[Raw])
_OTHER: Entry = msgspec.json.decode(b'{"ph": "i"}', type=ANY_ENTRY)
_BETWEEN = re.compile(rb"(?<=\})\s*,\s*(?=\{)")
_TRAILING = re.compile(r"trailing characters \(byte (\d+)\)")
_LONGEST_JOIN = 8
"""An entry may hold this many objects in a list before a damaged piece of text hides it."""


class CutShort(Exception):
    """The text ends before its array does."""


class EndsAt(Exception):
    """The array ends within the text, at .byte; what follows is not its."""

    def __init__(self, byte: int) -> None:
        self.byte = byte
        super().__init__(byte)


@dataclass(frozen=True, slots=True)
class Entries:
    """Entries in their order, and their text, None where it had to be mended; lost were not."""

    entries: Sequence[Entry]
    text: Text | None
    lost: int = 0


def entries_of(text: Text) -> Entries:
    """The entries of a whole JSON array. Raises CutShort and EndsAt; damage is mended."""
    try:
        return Entries(_ENTRIES.decode(text), text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _mended(text)


def begins_entries(text: bytes) -> bool:
    """Whether the text begins with an entry and goes on with others: an array cut off."""
    try:
        _PIECES.decode(b"[" + text)
    except msgspec.DecodeError as error:
        return "truncated" in str(error)
    except RecursionError:
        return False
    return False


def exact_times(found: Entries) -> list[tuple[Decimal, Decimal]]:
    """(ts, dur) of the complete entries with every digit that their text or value states."""
    if found.text is None:
        events = (e for e in found.entries if type(e) is Complete and e.ts is not None)
        return [(Decimal(str(e.ts)), Decimal(str(e.dur))) for e in events]
    return [(t.ts, t.dur) for t in _TIMES.decode(found.text) if t.ph == "X" and t.ts is not None]


def _mended(text: Text) -> Entries:
    try:
        pieces = list(map(bytes, _PIECES.decode(text)))
    except msgspec.DecodeError as error:
        _raise_where_it_ends(text, str(error))
        return _gathered(_pieces(bytes(text)))
    except RecursionError:
        return _gathered(_pieces(bytes(text)))
    return _gathered(entry_of(piece) for piece in pieces)


def salvaged(text: bytes) -> Entries:
    """The entries that can be read in a text that is no array, for damage or its cut-off end."""
    return _gathered(_pieces(text + b"]"))


def _raise_where_it_ends(text: Text, message: str) -> None:
    if "truncated" in message:
        raise CutShort
    if (match := _TRAILING.search(message)) is not None:
        # Only blanks are between the end of the array and the byte that msgspec stumbled over.
        raise EndsAt(bytes(text[: int(match[1])]).rfind(b"]") + 1)


def _gathered(found: Iterator[Entry | None]) -> Entries:
    everything = list(found)
    entries = [entry for entry in everything if entry is not None]
    return Entries(entries, None, len(everything) - len(entries))


def _pieces(text: bytes) -> Iterator[Entry | None]:
    """Each entry of a damaged array, None for one that is beyond mending."""
    starts = [1, *(match.end() for match in _BETWEEN.finditer(text))]
    ends = [*(match.start() for match in _BETWEEN.finditer(text)), len(text) - 1]
    at = 0
    while at < len(starts):
        last, entry = at, None
        while entry is None and last < min(at + _LONGEST_JOIN, len(ends)):
            entry = entry_of(text[starts[at] : ends[last]])
            last += 1
        yield entry
        at = at + 1 if entry is None else last


def entry_of(text: bytes) -> Entry | None:
    """The entry that the text means, also where JSON forbids how it says it; None for no entry."""
    try:
        return cast(Entry, _ENTRY.decode(text))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:
        stated = json.loads(
            text.decode(errors="replace"), strict=False, parse_float=Decimal, parse_constant=_none
        )
    except (ValueError, RecursionError):
        return None
    return _entry(stated) if isinstance(stated, dict) else None


def _none(_: str) -> None:
    """NaN and infinities say nothing."""


def _entry(stated: dict[str, Any]) -> Entry | None:
    if stated.get("ph") != "X":
        return _OTHER
    start, dur = _number(stated.get("ts")), _number(stated.get("dur", 0))
    if start is None or dur is None:
        return None
    args = stated.get("args")
    return Complete(
        name=_text(stated.get("name")),
        cat=_text(stated.get("cat")),
        pid=_text(stated.get("pid")),
        tid=_text(stated.get("tid")),
        ts=start,
        dur=dur,
        args=Raw(msgspec.json.encode(args)) if isinstance(args, dict) else NO_ARGS,
    )


def _number(value: Any) -> int | Decimal | None:
    if isinstance(value, int | Decimal):
        return value
    try:
        number = Decimal(value)
    except (ArithmeticError, TypeError, ValueError):
        return None
    return number if number.is_finite() else None


def _text(value: Any) -> str:
    return "" if value is None else str(value)
