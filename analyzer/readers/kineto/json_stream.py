"""Streams the JSON of a trace: blocks, byte ranges, entries, and damaged text."""

from __future__ import annotations

import io
import json
import re
from collections import deque
from collections.abc import Iterator, Sequence
from decimal import Decimal
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Protocol

import msgspec
from msgspec import Raw, Struct

from stepsplit.analyzer.readers.kineto.scanned_block import ScannedBlock, scan_block
from stepsplit.analyzer.readers.kineto.schema import (
    ANY_ENTRY,
    NO_ARGS,
    UNDECODABLE,
    Complete,
    Entry,
)
from stepsplit.collectors.safe_io.regular_file import open_regular

# A stream of JSON text -> the entries of its array, block by block, and the text after it.

BLOCK_BYTES = 4 << 20
"""At once. Compiled, reading three traces of 200 MB takes 5 to 16 % more CPU with half of it; with
twice, 5 % less to 3 % more, and up to 17 MB more memory. Uncompiled no size is best for all."""

MAX_BLOCK_BYTES = 32 << 20
"""A larger entry is treated as damaged."""

MAX_TAIL_BYTES = 64 << 20
"""Of the fields after the entries, which are small; the rest is not read. Chosen, not measured."""

_BLOCK_TRIES, _NEAR_BYTES = 4, 1 << 16
"""A comma that looks like the boundary of two entries may be in a text or in arguments: so many are
tried, the last first, of those in the last 64 KiB if it has any, else of all."""

_FIRST_BYTES = 1 << 16
"""Small files need no buffer of a whole block."""

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
    it. The text of a yielded block is valid until the next block is read. scan is whether blocks
    may be scanned instead of decoded.
    """

    def __init__(self, stream: Stream, begin: bytes, scan: bool = False) -> None:
        self._stream, self._scan = stream, scan
        self._buffer = bytearray(b"[" + begin)
        self._have = len(self._buffer)
        self.tail = b""
        self.whole = False

    def __iter__(self) -> Iterator[Entries]:
        want = _FIRST_BYTES
        while not self.whole and self._fill(want):
            before = self._have
            yield from self._read_to_cut()
            want = BLOCK_BYTES if self._have < before else self._have
            if self._have > MAX_BLOCK_BYTES:
                # The readable entries of a buffer without a valid boundary.
                found = read_last_entries(self._copy_text())
                self._have = 1
                yield found
        if not self.whole:
            yield from self._read_last()

    def _fill(self, want: int) -> bool:
        """Reads up to `want` more bytes; returns whether there were any."""
        begin, end = self._have, self._have + want
        if end >= len(self._buffer):
            # A larger one; views of the old one stay valid.
            self._buffer = self._buffer + bytearray(end + 1)
        room = memoryview(self._buffer)
        while self._have < end and (got := self._stream.readinto(room[self._have : end])):
            self._have += got
        return self._have > begin

    def _read_to_cut(self) -> Iterator[Entries]:
        """The entries up to the last boundary between two entries in the buffer, if any."""
        for comma in self._find_cuts():
            try:
                found = self._decode_up_to(comma)
            except TruncatedText:
                continue
            except ArrayEnd as end:
                yield self._close(end.byte)
            except DamagedText:
                yield self._read_one_by_one()
            else:
                yield found
                self._drop(comma + 1)
            return

    def _read_one_by_one(self) -> Entries:
        """The entries of a damaged buffer, read one by one."""
        walk = walk_entries(self._copy_text())
        if walk.closed:
            self._end_at(walk.end)
        else:
            self._drop(walk.end)
        return walk.found

    def _find_cuts(self) -> Iterator[int]:
        """Possible commas between two entries, searched from the end, then from the middle."""
        for stop in (self._have, self._have // 2):
            yield from self._find_cuts_within(stop - _NEAR_BYTES, stop) or self._find_cuts_within(
                0, stop
            )

    def _find_cuts_within(self, begin: int, end: int) -> list[int]:
        """The last few commas within the range that look like entry boundaries, last first."""
        found = deque(BETWEEN.finditer(self._buffer, max(begin, 0), end), _BLOCK_TRIES)
        return [self._buffer.index(_COMMA, match.start()) for match in reversed(found)]

    def _decode_up_to(self, place: int) -> Entries:
        """The entries before `place`, if the array can be closed there."""
        original, self._buffer[place] = self._buffer[place], _CLOSE
        try:
            return decode_entries(memoryview(self._buffer)[: place + 1], self._scan)
        except (TruncatedText, ArrayEnd, DamagedText):
            self._buffer[place] = original
            raise

    def _drop(self, end: int) -> None:
        """Drops the buffer up to `end` and keeps the rest as the beginning of an array."""
        rest = self._buffer[end : self._have]
        self._buffer[1 : len(rest) + 1] = rest
        self._have = len(rest) + 1

    def _close(self, end: int) -> Entries:
        """The last entries of an array that ends at `end`."""
        text = self._copy_text()[:end]
        self._end_at(end)
        try:
            return decode_entries(text, self._scan)
        except (TruncatedText, ArrayEnd, DamagedText):
            return read_last_entries(text)

    def _end_at(self, end: int) -> None:
        self.tail = self._copy_text()[end:] + self._stream.read(MAX_TAIL_BYTES)
        self.whole = True

    def _read_last(self) -> Iterator[Entries]:
        """The remaining entries at the end of the text."""
        yield from self._read_to_cut()
        if self.whole:
            return
        try:
            found = decode_entries(self._copy_text(), self._scan)
        except ArrayEnd as end:
            yield self._close(end.byte)
        except TruncatedText:
            yield read_last_entries(self._copy_text())
        except DamagedText:
            yield self._read_one_by_one()
            if not self.whole:
                yield read_last_entries(self._copy_text())
        else:
            self.whole = True
            yield found

    def _copy_text(self) -> bytes:
        return bytes(self._buffer[: self._have])


# Byte ranges of a large trace that can be read in parallel.

LEAST_RANGE_BYTES = 32 << 20
"""Minimum size of a range: a smaller one is not worth a process."""

_WINDOW_BYTES, _RANGE_TRIES = 512 << 10, 32
"""Where the first entry of a range is looked for: over a thousand entries, of which nearly always
the first is one. Without one among them, the range before goes on."""


class ByteRange(Struct, frozen=True):
    """A range from the first byte of one entry to that of a later one, or to the file's end."""

    begin: int
    end: int


def split_ranges(path: Path, array_at: int, max_count: int) -> tuple[ByteRange, ...]:
    """Splits the array and the text after it into at most `most` ranges of similar size.

    array_at is the offset of the array's text. Each range begins at an entry, otherwise it could
    not be read as JSON.
    """
    size = path.stat().st_size
    count = max(min(max_count, (size - array_at) // LEAST_RANGE_BYTES), 1)
    step = (size - array_at) // count
    with open_regular(path) as file:
        entry_starts = [_find_entry_start(file, array_at + i * step) for i in range(1, count)]
    places = sorted({array_at, *(place for place in entry_starts if place is not None), size})
    return tuple(ByteRange(begin, end) for begin, end in pairwise(places))


def _find_entry_start(file: io.FileIO, offset: int) -> int | None:
    """The offset of the first entry at or after `offset`; None if none is near."""
    file.seek(offset)
    window = file.read(_WINDOW_BYTES)
    for match in islice(BETWEEN.finditer(window), _RANGE_TRIES):
        if is_entry_prefix(window[match.end() - 1 :]):
            return offset + match.end() - 1
    return None


class _Range(io.RawIOBase):
    """The bytes of a range, as a stream."""

    def __init__(self, file: io.FileIO, byte_range: ByteRange) -> None:
        self._file, self._left = file, byte_range.end - byte_range.begin
        file.seek(byte_range.begin)

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

_PIECES = msgspec.json.Decoder(list[Raw])

_OTHER: Entry = msgspec.json.decode(b'{"ph": "i"}', type=ANY_ENTRY)

_AFTER_ARRAY = rb"\s*(?:\}|,\s*\"|\Z)"
"""Text that may follow the array: the end of the object, another field, or the end of the file."""

_END = re.compile(rb"\]" + _AFTER_ARRAY)

_GAP = re.compile(rb"(?:[\s,\[]++|\](?!" + _AFTER_ARRAY + rb"))*+")

_TO_THE_NEXT = re.compile(rb"\}\s*,\s*(?=\{)")

_TRAILING = re.compile(r"trailing characters \(byte (\d+)\)")

_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|,\s*+\{|[{}\[\]"]', re.DOTALL)

_CLOSES = {b"}": b"{", b"]": b"["}

_OF_NUMBERS = b"+-.0123456789Ee"

_MAX_DAMAGED_BYTES = 4 << 20
"""Of an entry in a damaged text, so that one bracket that is open does not take the whole file."""

_MAX_TOKENS = 1 << 16
"""Maximum number of tokens of an entry in a damaged text."""

_MAX_FAILURES = 2000
"""After this many consecutive unreadable entries the search skips ahead."""


class TruncatedText(Exception):
    """The text ends before its array is closed."""


class ArrayEnd(Exception):
    """The array ends within the text, at offset .byte."""

    def __init__(self, byte: int) -> None:
        self.byte = byte
        super().__init__(byte)


class DamagedText(Exception):
    """The text is not valid JSON; walked finds the readable entries."""


class Entries(Struct, frozen=True):
    """Entries in order, their text (None if it had to be fixed), and the number lost.

    If the block was scanned, scanned has its complete events, and entries is empty.
    """

    entries: Sequence[Entry]
    text: Text | None
    lost: int = 0
    scanned: ScannedBlock | None = None


class WalkResult(Struct, frozen=True):
    """The entries of a damaged text, and the offset after them.

    The offset is the end of the array if it was closed, else the first incomplete entry.
    """

    found: Entries
    end: int
    closed: bool


def decode_entries(text: Text, scan: bool = False) -> Entries:
    """Scans or decodes a JSON array and fixes invalid entries.

    Raises TruncatedText, ArrayEnd or DamagedText.
    """
    if scan and (scanned := scan_block(text)) is not None:
        return Entries((), text, scanned=scanned)
    try:
        return Entries(_ENTRIES.decode(text), text)
    except UNDECODABLE:
        return _fix_entries(text)


def is_entry_prefix(text: bytes) -> bool:
    """Whether the text is a valid but truncated part of the array."""
    try:
        _PIECES.decode(b"[" + text.rstrip(_OF_NUMBERS))  # a truncated number is malformed
    except msgspec.DecodeError as error:
        return "truncated" in str(error)
    except RecursionError:
        return False
    return False


def walk_entries(text: bytes) -> WalkResult:
    """Reads the entries of a damaged array one by one."""
    found: list[Entry | None] = []
    failures, offset = 0, _skip_gap(text, 1)
    while offset < len(text) and text[offset : offset + 1] != b"]":
        entry, end = _read_entry_at(text, offset)
        if end is None:
            return WalkResult(_collect_entries(found), offset, False)
        found.append(entry)
        failures = 0 if entry is not None else failures + 1
        if failures >= _MAX_FAILURES:
            # Ever further to a later entry: what is not JSON at all must not take quadratic time.
            following = _TO_THE_NEXT.search(text, end + 16 * (failures - _MAX_FAILURES))
            end = following.start() + 1 if following else end
        offset = _skip_gap(text, end)
    return WalkResult(_collect_entries(found), min(offset + 1, len(text)), offset < len(text))


def read_last_entries(text: bytes) -> Entries:
    """The entries of an array that was not closed."""
    walk = walk_entries(text)
    lost = 0 if walk.closed or is_entry_prefix(text[walk.end :]) else 1
    return Entries(walk.found.entries, None, walk.found.lost + lost)


def _fix_entries(text: Text) -> Entries:
    try:
        pieces = list(map(bytes, _PIECES.decode(text)))
    except msgspec.DecodeError as error:
        _raise_where_it_ends(text, str(error))
        raise DamagedText from None
    except RecursionError:
        raise DamagedText from None
    return _collect_entries([decode_entry(piece) for piece in pieces])


def _raise_where_it_ends(text: Text, message: str) -> None:
    if "truncated" in message:
        raise TruncatedText from None
    if (match := _TRAILING.search(message)) is not None:
        # Only whitespace is between the end of the array and the byte that msgspec rejected.
        end = bytes(text[: int(match[1])]).rfind(b"]")
        if _END.match(text, end):
            raise ArrayEnd(end + 1) from None


def _collect_entries(found: Sequence[Entry | None]) -> Entries:
    entries = [entry for entry in found if entry is not None]
    return Entries(entries, None, len(found) - len(entries))


def _skip_gap(text: bytes, at: int) -> int:
    match = _GAP.match(text, at)
    assert match is not None
    return match.end()


def _read_entry_at(text: bytes, at: int) -> tuple[Entry | None, int | None]:
    """The entry at `at` (None if it cannot be fixed) and the offset to continue at.

    The offset is None if no complete entry follows: the text may end within the entry.
    """
    stop = min(at + _MAX_DAMAGED_BYTES, len(text))
    following = _TO_THE_NEXT.search(text, at, stop)
    entry_end = following.start() + 1 if following else None
    if entry_end is not None and (entry := _decode_strict(text[at:entry_end])) is not None:
        return entry, entry_end
    end = _find_object_end(text, at, stop)
    if end is not None and (entry := decode_entry(text[at:end])) is not None:
        return entry, end
    if end == len(text) and is_entry_prefix(text[at:]):
        return None, None
    return None, entry_end or (end if end != stop else None)


def _find_object_end(text: bytes, at: int, stop: int) -> int | None:
    """The end of the object that begins at `at`, at most stop; None if it is not an object."""
    open_brackets: list[bytes] = []
    for match in islice(_TOKEN.finditer(text, at, stop), _MAX_TOKENS):
        token = match[0]
        if token in _CLOSES:
            if not open_brackets or open_brackets.pop() != _CLOSES[token]:
                return None
            if not open_brackets:
                return match.end()
        elif token[:1] == b",":
            if open_brackets[-1:] != [b"["]:
                return None
            open_brackets.append(b"{")
        elif token in (b"{", b"["):
            open_brackets.append(token)
        elif token == b'"':
            break
    return stop


def decode_entry(text: bytes) -> Entry | None:
    """Decodes an entry, also from slightly invalid JSON; None if it cannot be decoded."""
    if (found := _decode_strict(text)) is not None:
        return found
    # The lenient parser is slow, and most damaged pieces are no entry.
    fields = parse_loose_object(text) if b'"ph"' in text else None
    return None if fields is None else _build_entry(fields)


def _decode_strict(text: bytes) -> Entry | None:
    try:
        entry: Entry = _ENTRY.decode(text)
    except UNDECODABLE:
        return None
    return entry


def _build_entry(fields: dict[str, Any]) -> Entry | None:
    if fields.get("ph") != "X":
        return _OTHER
    start, dur = _convert_number(fields.get("ts")), _convert_number(fields.get("dur", 0))
    if start is None or dur is None:
        return None
    return Complete(
        name=_convert_text(fields.get("name")),
        cat=_convert_text(fields.get("cat")),
        pid=_convert_text(fields.get("pid")),
        tid=_convert_text(fields.get("tid")),
        ts=Raw(str(start).encode()),
        dur=Raw(str(dur).encode()),
        args=_encode_args(fields.get("args")),
    )


def _convert_number(value: Any) -> int | Decimal | None:
    if isinstance(value, int | Decimal) and not isinstance(value, bool):
        return value
    if not isinstance(value, str):
        return None
    number = parse_decimal(value)
    return number if number is not None and number.is_finite() else None


def _convert_text(value: Any) -> str:
    """The value as a string; "" for other types."""
    if not isinstance(value, str | int | Decimal):
        return ""
    return str(value).encode(errors="replace").decode()


def _encode_args(value: Any) -> Raw:
    """The arguments as JSON text; empty if they cannot be encoded."""
    try:
        return Raw(msgspec.json.encode(value)) if isinstance(value, dict) else NO_ARGS
    except (ValueError, RecursionError):
        return NO_ARGS


# Invalid JSON in the forms that trace writers are known to produce.

_NO_VALUE = re.compile(r'":\s*(?=[,}\]])')

_LAST_COMMA = re.compile(r",\s*(?=[}\]])")


def parse_loose_object(text: bytes) -> dict[str, Any] | None:
    """Parses an object leniently, with fractions as Decimal; None if it cannot be parsed.

    NaN and infinities become None. Invalid UTF-8 is replaced, control characters are kept. Some
    builds of torch write a key without a value, which becomes None too.
    """
    known = text.decode(errors="replace")
    found = _parse_object(known)
    if found is None:
        found = _parse_object(_LAST_COMMA.sub("", _NO_VALUE.sub('": null', known)))
    return found


def _parse_object(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(
            text, strict=False, parse_float=parse_decimal, parse_constant=_ignore_constant
        )
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def parse_decimal(text: str) -> Decimal | None:
    """The number as Decimal; None if it is invalid."""
    try:
        return Decimal(text)
    except ArithmeticError:
        return None


def _ignore_constant(_: str) -> None:
    """Replaces NaN and infinities by None."""
