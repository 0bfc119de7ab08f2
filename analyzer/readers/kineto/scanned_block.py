"""Blocks of a trace that the compiled scanner has read, if it was built: see event_scanner.c."""

from __future__ import annotations

import importlib
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

VERSION = 1
"""That of event_scanner.c. A module that was compiled from another one is not used: in a clone it
stays when the source changes."""


def _import_scanner() -> Any:
    """The compiled module; None without one."""
    try:
        module = importlib.import_module("stepsplit.analyzer.readers.kineto.event_scanner")
    except ImportError:
        return None
    return module if module.VERSION == VERSION else None


event_scanner = _import_scanner()

_EVENT = np.dtype(
    [
        *((name, np.int64) for name in ("start_ns", "dur_ns", "correlation", "sequence")),
        ("args", np.int32, 2),
        *(
            (name, np.int32)
            for name in (
                "name", "category", "thread", "place", "grid", "dims", "short_type",
                "names_collective",
            )
        ),
    ]
)  # fmt: skip
"""The struct Event of the scanner: numbers are of its tables, args the place in the text."""

_GRID = msgspec.json.Decoder(tuple[int, ...])


class ScannedBlock(Struct, frozen=True):
    """The complete events of a block, in its order, and what the numbers in them mean.

    Attributes:
        text: The block, valid until the next one is read.
        entries: Number of entries, of any phase.
        asynchronous: Number of those of the phases b, n and e.
        paired: Number of those of the phases B and E.
        events: Complete events.
        metadata: Places of the entries of phase M.
    """

    text: memoryview
    entries: int
    asynchronous: int
    paired: int
    events: npt.NDArray[Any]
    metadata: list[tuple[int, int]]
    _spans: tuple[bytes, ...]
    _threads: bytes
    _places: bytes

    def list_names(self) -> list[str]:
        """The names of events."""
        return [text.decode() for text in self._list_texts(0)]

    def list_categories(self) -> list[str]:
        """The categories as written."""
        return [text.decode() for text in self._list_texts(1)]

    def list_threads(self) -> list[tuple[int | str, int | str]]:
        """The process and thread of events."""
        ids = [
            text[1:-1].decode() if text[:1] == b'"' else int(text) if text else ""
            for text in self._list_texts(2)
        ]
        pairs = np.frombuffer(self._threads, dtype=np.int64).reshape(-1, 2)
        return [(ids[pid], ids[tid]) for pid, tid in pairs.tolist()]

    def list_streams(self) -> list[tuple[int, int, int]]:
        """The number of a thread with a device and a stream."""
        pairs = np.frombuffer(self._places, dtype=np.int64).reshape(-1, 2).tolist()
        return [(thread, place >> 32, place & 0xFFFFFFFF) for thread, place in pairs]

    def list_grids(self) -> list[tuple[int, ...]]:
        """The launch grids."""
        return [_GRID.decode(text) for text in self._list_texts(3)]

    def list_dims(self) -> list[bytes]:
        """The texts of input shapes."""
        return self._list_texts(4)

    def _list_texts(self, table: int) -> list[bytes]:
        return [bytes(self.text[a:b]) for a, b in _list_spans(self._spans[table])]


def _list_spans(spans: bytes) -> list[tuple[int, int]]:
    return [(a, b) for a, b in np.frombuffer(spans, dtype=np.int32).reshape(-1, 2).tolist()]


def scan_block(text: bytes | bytearray | memoryview) -> ScannedBlock | None:
    """The events of an array of entries; None if it is to be decoded instead."""
    found = None if event_scanner is None else event_scanner.scan(text)
    if found is None:
        return None
    entries, asynchronous, paired, events, metadata, *spans, threads, places = found
    return ScannedBlock(
        memoryview(text),
        entries,
        asynchronous,
        paired,
        np.frombuffer(events, dtype=_EVENT),
        _list_spans(metadata),
        tuple(spans),
        threads,
        places,
    )
