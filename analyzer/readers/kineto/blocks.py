"""A stream of JSON text -> the entries of its array, block after block, and what follows it."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from typing import Protocol

from stepsplit.analyzer.readers.kineto.entries import (
    CutShort,
    Damaged,
    EndsAt,
    Entries,
    entries_of,
    last_entries,
    walked,
)

BLOCK_BYTES = 2 << 20
MOST_BLOCK_BYTES = 32 << 20
"""An entry beyond this size is damage."""
MOST_TAIL_BYTES = 64 << 20
_TRIES = 4
_NEAR_BYTES = 1 << 16
BETWEEN = re.compile(rb"\}\s*,\s*\{")
_OPEN, _CLOSE, _COMMA = b"[],"


class Stream(Protocol):
    """Where the text comes from, piece by piece; 0 or no bytes are its end."""

    def read(self, size: int, /) -> bytes: ...
    def readinto(self, room: memoryview, /) -> int: ...


class ArrayBlocks:
    """The entries of an array of objects, of which begin was read before; iterate once.

    Memory is bounded by the block, not by the file. A file cut anywhere yields every entry that is
    whole before the cut. Afterwards whole says whether the array was closed, and tail is the text
    behind it. The text of what is yielded holds until the next is asked for.
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
        """Reads that many bytes more, where there are."""
        begin, end = self._have, self._have + want
        self._room(end + 1)
        room = memoryview(self._buffer)
        while self._have < end and (got := self._stream.readinto(room[self._have : end])):
            self._have += got
        return self._have > begin

    def _room(self, end: int) -> None:
        """A larger buffer, where that place is beyond it; texts of the old one stay as they are."""
        if end > len(self._buffer):
            self._buffer = self._buffer + bytearray(end)

    def _up_to_a_cut(self) -> Iterator[Entries]:
        """The entries up to the last cut between two, where one is in the buffer."""
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
        """The entries of a damaged buffer."""
        walk = walked(self._text())
        if walk.closed:
            self._end_at(walk.end)
        else:
            self._drop(walk.end)
        return walk.found

    def _cuts(self) -> Iterator[int]:
        """Where the comma between two entries may be, from the end, then from the middle."""
        for stop in (self._have, self._have // 2):
            yield from self._cuts_within(stop - _NEAR_BYTES, stop) or self._cuts_within(0, stop)

    def _cuts_within(self, begin: int, end: int) -> list[int]:
        """The last few commas between what looks like two entries there, from the end."""
        found = deque(BETWEEN.finditer(self._buffer, max(begin, 0), end), _TRIES)
        return [self._buffer.index(_COMMA, match.start()) for match in reversed(found)]

    def _closed_at(self, place: int) -> Entries:
        """The entries before that place, if one may close the array there."""
        kept, self._buffer[place] = self._buffer[place], _CLOSE
        try:
            return entries_of(memoryview(self._buffer)[: place + 1])
        except (CutShort, EndsAt, Damaged):
            self._buffer[place] = kept
            raise

    def _drop(self, end: int) -> None:
        """Keeps what is behind that place, as the beginning of an array."""
        rest = self._buffer[end : self._have]
        self._buffer[1 : len(rest) + 1] = rest
        self._have = len(rest) + 1

    def _close(self, end: int) -> Entries:
        """The last entries, of an array that ends at that place."""
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
        """What is left when the text has ended."""
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
        """What can be read of a buffer in which no cut is right."""
        found = last_entries(self._text())
        self._have = 1
        return found

    def _text(self) -> bytes:
        return bytes(self._buffer[: self._have])
