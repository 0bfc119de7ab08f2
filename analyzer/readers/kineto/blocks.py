"""A stream of JSON text -> the entries of its array, block after block, and what follows it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from typing import Protocol

from stepsplit.analyzer.readers.kineto.entries import (
    CutShort,
    EndsAt,
    Entries,
    entries_of,
    salvaged,
)

BLOCK_BYTES = 2 << 20
MOST_BLOCK_BYTES = 32 << 20
"""An entry beyond this size is damage."""
MOST_TAIL_BYTES = 64 << 20
_TRIES = 4
_MOST_TRIED_BYTES = 256 << 20
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
                return
            yield found
            self._drop(comma + 1)
            return

    def _cuts(self) -> Iterator[int]:
        """Where the comma between two entries may be, from the end, then from the middle."""
        for stop in (self._have, self._have // 2):
            yield from islice(self._cuts_before(stop), _TRIES)

    def _cuts_before(self, stop: int) -> Iterator[int]:
        while (stop := self._buffer.rfind(b"}", 0, stop)) > 0:
            if BETWEEN.match(self._buffer, stop, self._have):
                yield self._buffer.index(_COMMA, stop)

    def _closed_at(self, place: int) -> Entries:
        """The entries before that place, if one may close the array there."""
        kept, self._buffer[place] = self._buffer[place], _CLOSE
        try:
            return entries_of(memoryview(self._buffer)[: place + 1])
        except (CutShort, EndsAt):
            self._buffer[place] = kept
            raise

    def _drop(self, end: int) -> None:
        """Keeps what is behind that place, as the beginning of an array."""
        rest = self._buffer[end : self._have]
        self._buffer[1 : len(rest) + 1] = rest
        self._have = len(rest) + 1

    def _close(self, end: int) -> Entries:
        """The last entries, of an array that ends at that place."""
        found = entries_of(bytes(self._buffer[:end]))
        self.tail = bytes(self._buffer[end : self._have]) + self._stream.read(MOST_TAIL_BYTES)
        self.whole = True
        return found

    def _last(self) -> Iterator[Entries]:
        """What is left when the text has ended."""
        yield from self._up_to_a_cut()
        if self.whole:
            return
        try:
            found = entries_of(bytes(self._buffer[: self._have]))
        except EndsAt as end:
            yield self._close(end.byte)
        except CutShort:
            yield self._before_the_cut()
        else:
            self.whole = True
            yield found

    def _before_the_cut(self) -> Entries:
        """The entries of an array that nobody closed."""
        tries = max(_MOST_TRIED_BYTES // self._have, _TRIES)
        for brace in islice(self._braces(), tries):
            try:
                return self._closed_at(brace + 1)
            except (CutShort, EndsAt):
                continue
        cut_one = BETWEEN.search(self._buffer, 0, self._have) is None
        return Entries((), None) if cut_one else self._salvaged()

    def _braces(self) -> Iterator[int]:
        stop = self._have
        while (stop := self._buffer.rfind(b"}", 0, stop)) > 0:
            yield stop

    def _given_up(self) -> Entries:
        """What can be read of a buffer in which no cut is right."""
        found = self._salvaged()
        self._have = 1
        return found

    def _salvaged(self) -> Entries:
        return salvaged(bytes(self._buffer[: self._have]))
