"""A large trace as ranges of its bytes that can be read side by side."""

from __future__ import annotations

import io
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path

from stepsplit.analyzer.readers.kineto.blocks import BETWEEN
from stepsplit.analyzer.readers.kineto.entries import begins_entries
from stepsplit.analyzer.readers.kineto.trace import Part, part_of
from stepsplit.analyzer.readers.rules import Rules
from stepsplit.analyzer.readers.rules_file import BUILT_IN

LEAST_BYTES = 32 << 20
"""A range below this is not worth a process."""
_WINDOW_BYTES = 512 << 10
_TRIES = 32


@dataclass(frozen=True, slots=True)
class ByteRange:
    """From the first byte of an entry to that of a later one, or to the end of the file."""

    begin: int
    end: int


def ranges_of(path: Path, array_at: int, most: int) -> tuple[ByteRange, ...]:
    """At most that many ranges, of about one size, that together are the array and what follows.

    array_at is where the array's text begins. Each begins where an entry does: a range that began
    elsewhere could not be read as JSON.
    """
    size = path.stat().st_size
    count = max(min(most, (size - array_at) // LEAST_BYTES), 1)
    step = (size - array_at) // count
    with path.open("rb") as file:
        found = [_entry_from(file, array_at + i * step) for i in range(1, count)]
    places = sorted({array_at, *(place for place in found if place is not None), size})
    return tuple(ByteRange(begin, end) for begin, end in pairwise(places))


def _entry_from(file: io.BufferedReader, offset: int) -> int | None:
    """The first byte at or after the offset at which an entry begins; None where none is near."""
    file.seek(offset)
    window = file.read(_WINDOW_BYTES)
    for match in islice(BETWEEN.finditer(window), _TRIES):
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


def read_range(path: Path, wanted: ByteRange, rules: Rules = BUILT_IN) -> Part:
    """The entries that begin in the range of the file."""
    with path.open("rb", buffering=0) as file:
        return part_of(_Range(file, wanted), b"", rules)
