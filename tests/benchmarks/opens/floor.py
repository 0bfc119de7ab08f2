"""The least that any reader on msgspec does: read, unpack, and find where each entry ends.

No entry is looked into. The text must be as json.dump writes it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import BinaryIO, cast

import msgspec
from msgspec import Raw

from benchmarks.opens.telling import open_and_tell

gzip: ModuleType
try:
    from isal import igzip as gzip
except ImportError:  # the extra [fast] is not installed
    import gzip

_BLOCK_BYTES = 4 << 20
"""Those of the analyzer's reader, whose import would be in the peak of the memory here."""

_BEGIN = b'"traceEvents": ['
_ENTRIES = msgspec.json.Decoder(list[Raw])


def _entries_in(path: str) -> int:
    with _stream(path) as file:
        return sum(len(_ENTRIES.decode(block)) for block in _arrays(file))


def _stream(path: str) -> BinaryIO:
    if path.endswith(".gz"):
        return cast(BinaryIO, gzip.open(path))
    return cast(BinaryIO, Path(path).open("rb", buffering=0))


def _arrays(file: BinaryIO) -> Iterator[bytes]:
    """The array of entries as one array a block."""
    rest = file.read(_BLOCK_BYTES)
    rest = rest[rest.index(_BEGIN) + len(_BEGIN) :]
    while block := file.read(_BLOCK_BYTES):
        rest += block
        cut = rest.rindex(b"}, {") + 1
        yield b"[" + rest[:cut] + b"]"
        rest = rest[cut + 2 :]
    yield b"[" + rest[: rest.rindex(b"]") + 1]


if __name__ == "__main__":
    open_and_tell(lambda: _entries_in(sys.argv[1]), int)
