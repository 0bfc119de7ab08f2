"""Streams the JSON of a trace: blocks, byte ranges, entries, and damaged text."""

from __future__ import annotations

import io
import json
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Protocol

import msgspec
from msgspec import Raw

from stepsplit.analyzer.readers.kineto.schema import (
    ANY_ENTRY,
    ANY_TIMES,
    EXACT_BELOW_US,
    NO_ARGS,
    UNDECODABLE,
    Complete,
    Entry,
    EntryTimes,
)

# A stream of JSON text -> the entries of its array, block by block, and the text after it.

BLOCK_BYTES = 2 << 20

MOST_BLOCK_BYTES = 32 << 20
"""A larger entry is treated as damaged."""

MOST_TAIL_BYTES = 64 << 20

_BLOCK_TRIES = 4

_NEAR_BYTES = 1 << 16

BETWEEN = re.compile(rb"\}\s*,\s*\{")

_OPEN, _CLOSE, _COMMA = b"[],"


class Stream(Protocol):
    """A binary stream; 0 or no bytes mark its end."""

    def read(self, size: int, /) -> bytes: ...
    def readinto(self, room: memoryview, /) -> int: ...


class ArrayBlocks:
    """The entries of an array of objects whose first bytes, begin, were already read; iterate once.

    Memory is bounded by the block size, not by the file. A truncated file yields every complete
    entry. After the iteration, whole is whether the array was closed, and tail is the text after
    it. The text of a yielded block is valid until the next block is read.
    """

    def __init__(self, stream: Stream, begin: bytes) -> None:
        self._stream = stream
        self._buffer = bytearray(b"[" + begin)
        self._have = len(self._buffer)
        self.tail = b""
        self.whole = False

    def __iter__(self) -> Iterator[Entries]:
        want = BLOCK_BYTES
        while not self.whole and self._fill(want):
            before = self._have
            yield from self._up_to_a_cut()
            want = BLOCK_BYTES if self._have < before else self._have
            if self._have > MOST_BLOCK_BYTES:
                yield self._given_up()
        if not self.whole:
            yield from self._last()

    def _fill(self, want: int) -> bool:
        """Reads up to `want` more bytes; returns whether there were any."""
        begin, end = self._have, self._have + want
        self._room(end + 1)
        room = memoryview(self._buffer)
        while self._have < end and (got := self._stream.readinto(room[self._have : end])):
            self._have += got
        return self._have > begin

    def _room(self, end: int) -> None:
        """Replaces the buffer by a larger one if needed; views of the old one stay valid."""
        if end > len(self._buffer):
            self._buffer = self._buffer + bytearray(end)

    def _up_to_a_cut(self) -> Iterator[Entries]:
        """The entries up to the last boundary between two entries in the buffer, if any."""
        for comma in self._cuts():
            try:
                found = self._closed_at(comma)
            except CutShort:
                continue
            except EndsAt as end:
                yield self._close(end.byte)
            except Damaged:
                yield self._one_by_one()
            else:
                yield found
                self._drop(comma + 1)
            return

    def _one_by_one(self) -> Entries:
        """The entries of a damaged buffer, read one by one."""
        walk = walked(self._text())
        if walk.closed:
            self._end_at(walk.end)
        else:
            self._drop(walk.end)
        return walk.found

    def _cuts(self) -> Iterator[int]:
        """Possible commas between two entries, searched from the end, then from the middle."""
        for stop in (self._have, self._have // 2):
            yield from self._cuts_within(stop - _NEAR_BYTES, stop) or self._cuts_within(0, stop)

    def _cuts_within(self, begin: int, end: int) -> list[int]:
        """The last few commas within the range that look like entry boundaries, last first."""
        found = deque(BETWEEN.finditer(self._buffer, max(begin, 0), end), _BLOCK_TRIES)
        return [self._buffer.index(_COMMA, match.start()) for match in reversed(found)]

    def _closed_at(self, place: int) -> Entries:
        """The entries before `place`, if the array can be closed there."""
        kept, self._buffer[place] = self._buffer[place], _CLOSE
        try:
            return entries_of(memoryview(self._buffer)[: place + 1])
        except (CutShort, EndsAt, Damaged):
            self._buffer[place] = kept
            raise

    def _drop(self, end: int) -> None:
        """Drops the buffer up to `end` and keeps the rest as the beginning of an array."""
        rest = self._buffer[end : self._have]
        self._buffer[1 : len(rest) + 1] = rest
        self._have = len(rest) + 1

    def _close(self, end: int) -> Entries:
        """The last entries of an array that ends at `end`."""
        text = self._text()[:end]
        self._end_at(end)
        try:
            return entries_of(text)
        except (CutShort, EndsAt, Damaged):
            return last_entries(text)

    def _end_at(self, end: int) -> None:
        self.tail = self._text()[end:] + self._stream.read(MOST_TAIL_BYTES)
        self.whole = True

    def _last(self) -> Iterator[Entries]:
        """The remaining entries at the end of the text."""
        yield from self._up_to_a_cut()
        if self.whole:
            return
        try:
            found = entries_of(self._text())
        except EndsAt as end:
            yield self._close(end.byte)
        except CutShort:
            yield last_entries(self._text())
        except Damaged:
            yield self._one_by_one()
            if not self.whole:
                yield last_entries(self._text())
        else:
            self.whole = True
            yield found

    def _given_up(self) -> Entries:
        """The readable entries of a buffer without a valid boundary."""
        found = last_entries(self._text())
        self._have = 1
        return found

    def _text(self) -> bytes:
        return bytes(self._buffer[: self._have])


# Byte ranges of a large trace that can be read in parallel.

LEAST_RANGE_BYTES = 32 << 20
"""Minimum size of a range: a smaller one is not worth a process."""

_WINDOW_BYTES = 512 << 10

_RANGE_TRIES = 32


@dataclass(frozen=True, slots=True)
class ByteRange:
    """A range from the first byte of one entry to that of a later one, or to the file's end."""

    begin: int
    end: int


def ranges_of(path: Path, array_at: int, most: int) -> tuple[ByteRange, ...]:
    """Splits the array and the text after it into at most `most` ranges of similar size.

    array_at is the offset of the array's text. Each range begins at an entry, otherwise it could
    not be read as JSON.
    """
    size = path.stat().st_size
    count = max(min(most, (size - array_at) // LEAST_RANGE_BYTES), 1)
    step = (size - array_at) // count
    with path.open("rb") as file:
        found = [_entry_from(file, array_at + i * step) for i in range(1, count)]
    places = sorted({array_at, *(place for place in found if place is not None), size})
    return tuple(ByteRange(begin, end) for begin, end in pairwise(places))


def _entry_from(file: io.BufferedReader, offset: int) -> int | None:
    """The offset of the first entry at or after `offset`; None if none is near."""
    file.seek(offset)
    window = file.read(_WINDOW_BYTES)
    for match in islice(BETWEEN.finditer(window), _RANGE_TRIES):
        if begins_entries(window[match.end() - 1 :]):
            return offset + match.end() - 1
    return None


class _Range(io.RawIOBase):
    """The bytes of a range, as a stream."""

    def __init__(self, file: io.FileIO, wanted: ByteRange) -> None:
        self._file, self._left = file, wanted.end - wanted.begin
        file.seek(wanted.begin)

    def readable(self) -> bool:
        return True

    def readinto(self, room: memoryview, /) -> int:  # type: ignore[override]
        got = self._file.readinto(room[: self._left])
        self._left -= got
        return got


# Decodes part of a JSON array of trace entries; damaged entries are fixed or counted.

Text = bytes | bytearray | memoryview

_ENTRIES = msgspec.json.Decoder(list[ANY_ENTRY])

_ENTRY = msgspec.json.Decoder(ANY_ENTRY)

_TIMES = msgspec.json.Decoder(list[ANY_TIMES])

_TIMES_OF_ONE = msgspec.json.Decoder(EntryTimes)

_PIECES = msgspec.json.Decoder(list[Raw])

_OTHER: Entry = msgspec.json.decode(b'{"ph": "i"}', type=ANY_ENTRY)

_BEHIND = rb"\s*(?:\}|,\s*\"|\Z)"
"""Text that may follow the array: the end of the object, another field, or the end of the file."""

_END = re.compile(rb"\]" + _BEHIND)

_GAP = re.compile(rb"(?:[\s,\[]++|\](?!" + _BEHIND + rb"))*+")

_TO_THE_NEXT = re.compile(rb"\}\s*,\s*(?=\{)")

_TRAILING = re.compile(r"trailing characters \(byte (\d+)\)")

_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|,\s*+\{|[{}\[\]"]', re.DOTALL)

_CLOSES = {b"}": b"{", b"]": b"["}

_OF_NUMBERS = b"+-.0123456789Ee"

_MOST_DAMAGED_BYTES = 4 << 20

_MOST_TOKENS = 1 << 16
"""Maximum number of tokens of an entry in a damaged text."""

_PATIENCE = 2000
"""After this many consecutive unreadable entries the search skips ahead."""


class CutShort(Exception):
    """The text ends before its array is closed."""


class EndsAt(Exception):
    """The array ends within the text, at offset .byte."""

    def __init__(self, byte: int) -> None:
        self.byte = byte
        super().__init__(byte)


class Damaged(Exception):
    """The text is not valid JSON; walked finds the readable entries."""


@dataclass(frozen=True, slots=True)
class Entries:
    """Entries in order, their text (None if it had to be fixed), and the number lost."""

    entries: Sequence[Entry]
    text: Text | None
    lost: int = 0


@dataclass(frozen=True, slots=True)
class Walked:
    """The entries of a damaged text, and the offset after them.

    The offset is the end of the array if it was closed, else the first incomplete entry.
    """

    found: Entries
    end: int
    closed: bool


def entries_of(text: Text) -> Entries:
    """Decodes a JSON array and fixes invalid entries. Raises CutShort, EndsAt or Damaged."""
    try:
        return Entries(_ENTRIES.decode(text), text)
    except UNDECODABLE:
        return _fixed(text)


def begins_entries(text: bytes) -> bool:
    """Whether the text is a valid but truncated part of the array."""
    try:
        _PIECES.decode(b"[" + text.rstrip(_OF_NUMBERS))  # a truncated number is malformed
    except msgspec.DecodeError as error:
        return "truncated" in str(error)
    except RecursionError:
        return False
    return False


def exact_times(found: Entries) -> list[tuple[Decimal, Decimal]]:
    """(ts, dur) of the complete entries, with all digits of their text or value."""
    if found.text is None:
        events = (e for e in found.entries if type(e) is Complete and e.ts is not None)
        return [(Decimal(str(e.ts)), Decimal(str(e.dur))) for e in events]
    times = (t for t in _TIMES.decode(found.text) if type(t) is EntryTimes)
    return [(t.ts, t.dur) for t in times if t.ts is not None]


def walked(text: bytes) -> Walked:
    """Reads the entries of a damaged array one by one."""
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
    """Skips to a later entry; the distance grows with the number of failures."""
    following = _TO_THE_NEXT.search(text, at + 16 * (in_vain - _PATIENCE))
    return following.start() + 1 if following else at


def last_entries(text: bytes) -> Entries:
    """The entries of an array that was not closed."""
    walk = walked(text)
    lost = 0 if walk.closed or begins_entries(text[walk.end :]) else 1
    return Entries(walk.found.entries, None, walk.found.lost + lost)


def _fixed(text: Text) -> Entries:
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
        # Only whitespace is between the end of the array and the byte that msgspec rejected.
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
    """The entry at `at` (None if it cannot be fixed) and the offset to continue at.

    The offset is None if no complete entry follows: the text may end within the entry.
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
    """The end of the object that begins at `at`, at most stop; None if it is not an object."""
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
    """Decodes an entry, also from slightly invalid JSON; None if it cannot be decoded."""
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
    """Decodes an entry with the lenient parser."""
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
    """The value as a string; "" for other types."""
    if not isinstance(value, str | int | Decimal):
        return ""
    return str(value).encode(errors="replace").decode()


def _args(value: Any) -> Raw:
    """The arguments as JSON text; empty if they cannot be encoded."""
    try:
        return Raw(msgspec.json.encode(value)) if isinstance(value, dict) else NO_ARGS
    except (ValueError, RecursionError):
        return NO_ARGS


# Invalid JSON in the forms that trace writers are known to produce.

_NO_VALUE = re.compile(r'":\s*(?=[,}\]])')

_LAST_COMMA = re.compile(r",\s*(?=[}\]])")


def loose_object(text: bytes) -> dict[str, Any] | None:
    """Parses an object leniently, with fractions as Decimal; None if it cannot be parsed.

    NaN and infinities become None. Invalid UTF-8 is replaced, control characters are kept. Some
    builds of torch write a key without a value, which becomes None too.
    """
    known = text.decode(errors="replace")
    found = _parsed(known)
    if found is None:
        found = _parsed(_LAST_COMMA.sub("", _NO_VALUE.sub('": null', known)))
    return found


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text, strict=False, parse_float=decimal_of, parse_constant=_none)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def decimal_of(text: str) -> Decimal | None:
    """The number as Decimal; None if it is invalid."""
    try:
        return Decimal(text)
    except ArithmeticError:
        return None


def _none(_: str) -> None:
    """Replaces NaN and infinities by None."""
