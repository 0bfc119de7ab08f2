"""Parquet files of the events of one rank, with other data as bytes in their metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from msgspec import Struct

from stepsplit.analyzer.arrays import view_numbers, wrap_numbers
from stepsplit.analyzer.trace import Calls, CallsWithGroups, Events, EventWaits, Group, Lane, Shapes
from stepsplit.collectors.safe_io.atomic_file import whole_file

# Only pyarrow buffers are used: its conversions from and to numpy would import pandas.

_SCHEMA = pa.schema(
    {"start_ns": pa.int64(), "dur_ns": pa.int64(), "category": pa.uint8(), "name_id": pa.int32(),
     "lane": pa.int32(), "correlation": pa.int64(), "shape": pa.int32()}
)  # fmt: skip

# A row group is in memory at once.
_GROUP_ROWS = 1 << 17

# Small, or nearly in order: their differences take few bits.
_DELTAS = ("start_ns", "dur_ns", "correlation")

_ABOUT = b"stepsplit"


class EventsFile:
    """An open file of events. Raises OSError or ValueError if it is invalid or damaged."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = pq.ParquetFile(path, page_checksum_verification=True, memory_map=True)
        except pa.ArrowException as error:
            raise ValueError(str(error)) from None

    def __len__(self) -> int:
        """The number of events."""
        return int(self._file.metadata.num_rows)

    @property
    def about(self) -> bytes:
        """The metadata as bytes; empty if the file has other columns than stepsplit writes."""
        if not self._file.schema_arrow.equals(_SCHEMA):
            return b""
        found: bytes = (self._file.metadata.metadata or {}).get(_ABOUT, b"")
        return found

    def read_events(
        self, names: tuple[str, ...], lanes: tuple[Lane, ...], texts: tuple[str, ...]
    ) -> tuple[Events, Shapes]:
        """Reads the events and their shapes, with the given names, lanes and texts of shapes."""
        try:
            # Reads the columns by row group, so that no column is in memory twice.
            kinds = [np.dtype(str(kind)) for kind in _SCHEMA.types]
            columns = [np.empty(len(self), dtype=kind) for kind in kinds]
            offset = 0
            for group in range(self._file.num_row_groups):
                part = self._file.read_row_group(group, columns=_SCHEMA.names, use_threads=False)
                for column, values in zip(columns, part.columns, strict=True):
                    _fill(column[offset : offset + len(part)], values)
                offset += len(part)
            start, dur, category, name_id, lane, correlation, shape = columns
        except pa.ArrowException as error:
            raise ValueError(str(error)) from None
        shaped = np.flatnonzero(shape >= 0)
        events = Events(start, dur, category, name_id, lane, correlation, names, lanes)
        return events, Shapes(shaped, shape[shaped], texts)


def _fill(column: npt.NDArray[Any], values: pa.ChunkedArray) -> None:
    filled = 0
    for chunk in values.chunks:
        column[filled : filled + len(chunk)] = view_numbers(chunk)
        filled += len(chunk)


def write_events(
    path: Path, events: Events, shapes: Shapes, about: bytes, *, packed: bool = False
) -> None:
    """Writes the file atomically: quick to read, or packed to a fifth of that size. Most shapes are
    unknown, so that runs of them take no space."""
    delta = dict.fromkeys(_DELTAS, "DELTA_BINARY_PACKED") if packed else None
    with (
        whole_file(path) as file,
        pq.ParquetWriter(
            file, _SCHEMA, compression="zstd" if packed else "none", column_encoding=delta,
            use_dictionary=["shape"], write_statistics=False,
            write_page_checksum=True, store_schema=False,
        ) as writer,
    ):  # fmt: skip
        writer.write_table(_build_table(events, shapes), row_group_size=_GROUP_ROWS)
        writer.add_key_value_metadata({_ABOUT: about})


def _build_table(events: Events, shapes: Shapes) -> pa.Table:
    shape = np.full(len(events), -1, dtype=np.int32)
    shape[shapes.event] = shapes.text_id
    columns = [*(getattr(events, name) for name in _SCHEMA.names[:-1]), shape]
    return pa.Table.from_arrays([*map(wrap_numbers, columns)], schema=_SCHEMA)


# Calls and waits as bytes per column.

_CALLS = {
    "event": np.int64,
    "issued_ns": np.int64,
    "group_id": np.int32,
    "seq": np.int64,
    "op": np.uint8,
    "dtype": np.int32,
    "peer": np.int32,
    "input_bytes": np.int64,
    "message_bytes": np.int64,
}

_WAITS = ("correlation", "stream", "on_stream", "recorded")


class PackedCalls(Struct):
    """Calls as bytes per column, their process groups and the size of the largest one."""

    columns: dict[str, bytes]
    dtypes: tuple[str, ...]
    groups: tuple[Group, ...]
    largest: int = 0


def pack_calls(calls: CallsWithGroups) -> PackedCalls:
    """The calls as bytes."""
    columns = {name: getattr(calls.calls, name).tobytes() for name in _CALLS}
    return PackedCalls(columns, calls.calls.dtypes, calls.groups, calls.largest)


def unpack_calls(packed: PackedCalls) -> CallsWithGroups:
    """The calls. Raises KeyError or ValueError if a column is missing or damaged."""
    columns = {name: np.frombuffer(packed.columns[name], kind) for name, kind in _CALLS.items()}
    if len({len(column) for column in columns.values()}) > 1:
        raise ValueError("columns of calls of different lengths")
    calls = Calls(**columns, dtypes=packed.dtypes)
    return CallsWithGroups(calls, packed.groups, packed.largest)


def pack_waits(waits: EventWaits) -> tuple[bytes, ...]:
    """The waits as bytes."""
    return tuple(getattr(waits, name).tobytes() for name in _WAITS)


def unpack_waits(packed: tuple[bytes, ...]) -> EventWaits:
    """The waits. Raises ValueError if a column is missing or damaged."""
    columns = (np.frombuffer(column, np.int64) for column in packed)
    return EventWaits(**dict(zip(_WAITS, columns, strict=True)))
