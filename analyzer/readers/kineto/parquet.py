"""Events as a Parquet file, with whatever else is told of them as bytes in its header.

pyarrow is asked for buffers alone: its conversions from and to numpy would import pandas first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from stepsplit.analyzer.trace import Events, Lane
from stepsplit.collectors.run_spec import whole_file

_SCHEMA = pa.schema(
    {"start_ns": pa.int64(), "dur_ns": pa.int64(), "category": pa.uint8(), "name_id": pa.int32(),
     "lane": pa.int32(), "correlation": pa.int64()}
)  # fmt: skip
_GROUP_ROWS = 1 << 17
_ABOUT = b"stepsplit"


class EventsFile:
    """An open file of events. Raises OSError or ValueError for what is none, or is damaged."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = pq.ParquetFile(path, page_checksum_verification=True, memory_map=True)
        except pa.ArrowException as error:
            raise ValueError(str(error)) from None

    @property
    def about(self) -> bytes:
        """What is told beside the columns; nothing where the file is another's."""
        found: bytes = (self._file.metadata.metadata or {}).get(_ABOUT, b"")
        return found

    def events(self, names: tuple[str, ...], lanes: tuple[Lane, ...]) -> Events:
        """The columns, with these names and lanes."""
        try:
            start, dur, category, name_id, lane, correlation = self._columns()
        except pa.ArrowException as error:
            raise ValueError(str(error)) from None
        return Events(start, dur, category, name_id, lane, correlation, names, lanes)

    def _columns(self) -> list[npt.NDArray[Any]]:
        """Filled group by group, so that no column is there twice."""
        kinds = [np.dtype(str(kind)) for kind in _SCHEMA.types]
        columns = [np.empty(self._file.metadata.num_rows, dtype=kind) for kind in kinds]
        at = 0
        for group in range(self._file.num_row_groups):
            part = self._file.read_row_group(group, columns=_SCHEMA.names, use_threads=False)
            for column, values in zip(columns, part.columns, strict=True):
                _fill(column[at : at + len(part)], values)
            at += len(part)
        return columns


def _fill(column: npt.NDArray[Any], values: pa.ChunkedArray) -> None:
    at = 0
    for chunk in values.chunks:
        offset = chunk.offset * column.dtype.itemsize
        found = np.frombuffer(chunk.buffers()[1], column.dtype, len(chunk), offset)
        column[at : at + len(chunk)] = found
        at += len(chunk)


def write_events(path: Path, events: Events, about: bytes) -> None:
    """Writes the file so that a reader sees all of it or none."""
    with (
        whole_file(path) as file,
        pq.ParquetWriter(
            file, _SCHEMA, compression="none", use_dictionary=False, write_statistics=False,
            write_page_checksum=True, store_schema=False,
        ) as writer,
    ):  # fmt: skip
        writer.write_table(_table(events), row_group_size=_GROUP_ROWS)
        writer.add_key_value_metadata({_ABOUT: about})


def _table(events: Events) -> pa.Table:
    columns = [np.ascontiguousarray(getattr(events, name)) for name in _SCHEMA.names]
    arrays = [
        pa.Array.from_buffers(kind, len(column), [None, pa.py_buffer(column)])
        for kind, column in zip(_SCHEMA.types, columns, strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=_SCHEMA)
