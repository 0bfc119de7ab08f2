"""A piece of a JSON array of trace entries -> the entries, damaged ones mended or counted."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import islice
from typing import Any

import msgspec
from msgspec import Raw

from stepsplit.analyzer.readers.kineto.loose import decimal_of, loose_object
from stepsplit.analyzer.readers.kineto.schema import (
    ANY_ENTRY,
    ANY_TIMES,
    NO_ARGS,
    UNDECODABLE,
    Complete,
    Entry,
    Times,
)
from stepsplit.analyzer.readers.kineto.timestamps import EXACT_BELOW_US

Text = bytes | bytearray | memoryview

_ENTRIES = msgspec.json.Decoder(list[ANY_ENTRY])
_ENTRY = msgspec.json.Decoder(ANY_ENTRY)
_TIMES = msgspec.json.Decoder(list[ANY_TIMES])
_TIMES_OF_ONE = msgspec.json.Decoder(Times)
_PIECES = msgspec.json.Decoder(list[Raw])
_OTHER: Entry = msgspec.json.decode(b'{"ph": "i"}', type=ANY_ENTRY)
_BEHIND = rb"\s*(?:\}|,\s*\"|\Z)"
"""What may follow the array: the end of the trace's object, another field of it, or nothing."""
_END = re.compile(rb"\]" + _BEHIND)
_GAP = re.compile(rb"(?:[\s,\[]++|\](?!" + _BEHIND + rb"))*+")
_TO_THE_NEXT = re.compile(rb"\}\s*,\s*(?=\{)")
_TRAILING = re.compile(r"trailing characters \(byte (\d+)\)")
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|,\s*+\{|[{}\[\]"]', re.DOTALL)
_CLOSES = {b"}": b"{", b"]": b"["}
_OF_NUMBERS = b"+-.0123456789Ee"
_MOST_DAMAGED_BYTES = 4 << 20
_MOST_TOKENS = 1 << 16
"""Beyond this, what began as an entry of a damaged text is none."""
_PATIENCE = 2000
"""So many entries in a row that cannot be read make it likely that more follow."""


class CutShort(Exception):
    """The text ends before its array does."""


class EndsAt(Exception):
    """The array ends within the text, at .byte; what follows is not its."""

    def __init__(self, byte: int) -> None:
        self.byte = byte
        super().__init__(byte)


class Damaged(Exception):
    """The text is no JSON; walked tells what can be read in it."""


@dataclass(frozen=True, slots=True)
class Entries:
    """Entries in their order, and their text, None where it had to be mended; lost were not."""

    entries: Sequence[Entry]
    text: Text | None
    lost: int = 0


@dataclass(frozen=True, slots=True)
class Walked:
    """The entries of a damaged text, and the place behind them.

    That is the end of the array where it was closed, else what is not whole or beyond mending.
    """

    found: Entries
    end: int
    closed: bool


def entries_of(text: Text) -> Entries:
    """The entries of a whole JSON array, odd ones mended. Raises CutShort, EndsAt and Damaged."""
    try:
        return Entries(_ENTRIES.decode(text), text)
    except UNDECODABLE:
        return _mended(text)


def begins_entries(text: bytes) -> bool:
    """Whether the text is a piece of the array that ends early, and nothing is wrong with it."""
    try:
        _PIECES.decode(b"[" + text.rstrip(_OF_NUMBERS))  # half a number is one that is malformed
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
    times = (t for t in _TIMES.decode(found.text) if type(t) is Times)
    return [(t.ts, t.dur) for t in times if t.ts is not None]


def walked(text: bytes) -> Walked:
    """The entries of a damaged array, found one by one."""
    found: list[Entry | None] = []
    in_vain, at = 0, _gap(text, 1)
    while at < len(text) and text[at : at + 1] != b"]":
        entry, end = _entry_at(text, at)
        if end is None:
            return Walked(_gathered(found), at, False)
        found.append(entry)
        in_vain = 0 if entry is not None else in_vain + 1
        at = _gap(text, end if in_vain < _PATIENCE else _farther(text, end, in_vain))
    return Walked(_gathered(found), min(at + 1, len(text)), at < len(text))


def _farther(text: bytes, at: int, in_vain: int) -> int:
    """Behind an entry some way ahead: the more were read in vain, the longer is the stride."""
    following = _TO_THE_NEXT.search(text, at + 16 * (in_vain - _PATIENCE))
    return following.start() + 1 if following else at


def last_entries(text: bytes) -> Entries:
    """The entries of an array that nobody closed."""
    walk = walked(text)
    lost = 0 if walk.closed or begins_entries(text[walk.end :]) else 1
    return Entries(walk.found.entries, None, walk.found.lost + lost)


def _mended(text: Text) -> Entries:
    try:
        pieces = list(map(bytes, _PIECES.decode(text)))
    except msgspec.DecodeError as error:
        _raise_where_it_ends(text, str(error))
        raise Damaged from None
    except RecursionError:
        raise Damaged from None
    return _gathered([entry_of(piece) for piece in pieces])


def _raise_where_it_ends(text: Text, message: str) -> None:
    if "truncated" in message:
        raise CutShort from None
    if (match := _TRAILING.search(message)) is not None:
        # Only blanks are between the end of the array and the byte that msgspec stumbled over.
        end = bytes(text[: int(match[1])]).rfind(b"]")
        if _END.match(text, end):
            raise EndsAt(end + 1) from None


def _gathered(found: Sequence[Entry | None]) -> Entries:
    entries = [entry for entry in found if entry is not None]
    return Entries(entries, None, len(found) - len(entries))


def _gap(text: bytes, at: int) -> int:
    match = _GAP.match(text, at)
    assert match is not None
    return match.end()


def _entry_at(text: bytes, at: int) -> tuple[Entry | None, int | None]:
    """The entry at that place, None where it is beyond mending, and where to read on.

    That is None where nothing whole follows: the text may end within the entry.
    """
    stop = min(at + _MOST_DAMAGED_BYTES, len(text))
    following = _TO_THE_NEXT.search(text, at, stop)
    near = following.start() + 1 if following else None
    if near is not None and (entry := _strictly(text[at:near])) is not None:
        return entry, near
    end = _object_end(text, at, stop)
    if end is not None and (entry := entry_of(text[at:end])) is not None:
        return entry, end
    if end == len(text) and begins_entries(text[at:]):
        return None, None
    return None, near or (end if end != stop else None)


def _object_end(text: bytes, at: int, stop: int) -> int | None:
    """Where the object that begins at that place ends, at most stop; None where none begins."""
    opened: list[bytes] = []
    for match in islice(_TOKEN.finditer(text, at, stop), _MOST_TOKENS):
        token = match[0]
        if token in _CLOSES:
            if not opened or opened.pop() != _CLOSES[token]:
                return None
            if not opened:
                return match.end()
        elif token[:1] == b",":
            if opened[-1:] != [b"["]:
                return None
            opened.append(b"{")
        elif token in (b"{", b"["):
            opened.append(token)
        elif token == b'"':
            break
    return stop


def entry_of(text: bytes) -> Entry | None:
    """The entry that the text means, also where JSON forbids how it says it; None for no entry."""
    found = _strictly(text)
    return _loosely(text) if found is None else found


def _strictly(text: bytes) -> Entry | None:
    try:
        entry: Entry = _ENTRY.decode(text)
    except UNDECODABLE:
        return None
    if type(entry) is Complete and type(entry.ts) is float and abs(entry.ts) >= EXACT_BELOW_US:
        entry.ts = _TIMES_OF_ONE.decode(text).ts
    return entry


def _loosely(text: bytes) -> Entry | None:
    """The entry, by what passes as JSON elsewhere."""
    stated = loose_object(text) if b'"ph"' in text else None
    return None if stated is None else _entry(stated)


def _entry(stated: dict[str, Any]) -> Entry | None:
    if stated.get("ph") != "X":
        return _OTHER
    start, dur = _number(stated.get("ts")), _number(stated.get("dur", 0))
    if start is None or dur is None:
        return None
    return Complete(
        name=_text(stated.get("name")),
        cat=_text(stated.get("cat")),
        pid=_text(stated.get("pid")),
        tid=_text(stated.get("tid")),
        ts=start,
        dur=dur,
        args=_args(stated.get("args")),
    )


def _number(value: Any) -> int | Decimal | None:
    if isinstance(value, int | Decimal) and not isinstance(value, bool):
        return value
    if not isinstance(value, str):
        return None
    number = decimal_of(value)
    return number if number is not None and number.is_finite() else None


def _text(value: Any) -> str:
    """A name; what is none has none."""
    if not isinstance(value, str | int | Decimal):
        return ""
    return str(value).encode(errors="replace").decode()


def _args(value: Any) -> Raw:
    """The arguments as text, none where that cannot be."""
    try:
        return Raw(msgspec.json.encode(value)) if isinstance(value, dict) else NO_ARGS
    except (ValueError, RecursionError):
        return NO_ARGS
