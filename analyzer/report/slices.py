"""What ran on each lane of each rank, kernel by kernel: tables/slices.parquet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from stepsplit.analyzer.trace import Int32, Int64, UInt8
from stepsplit.collectors.run_spec import whole_file

FILE_NAME = "slices.parquet"
_NUMBERS = {
    "depth": pa.uint8(),
    "bucket": pa.uint8(),
    "owner": pa.int32(),
    "start_ns": pa.int64(),
    "dur_ns": pa.int64(),
}
_NAMED = pa.dictionary(pa.int32(), pa.string())
_SCHEMA = pa.schema([("rank", pa.int32()), ("lane", _NAMED), ("name", _NAMED), *_NUMBERS.items()])


@dataclass(frozen=True, slots=True)
class Slices:
    """What ran on one rank: kernels, copies and the pieces of calls, or the ops of a CPU run.

    lane and name index lanes and names; depth tells apart what overlaps on a lane. bucket indexes
    buckets.BUCKETS: a call that waits and then moves data is a slice of each. owner is the rank
    that a wait waits for, -1 nobody. Columns have one length; sorted by lane, depth, start_ns.
    """

    lane: Int32
    depth: UInt8
    name: Int32
    bucket: UInt8
    owner: Int32
    start_ns: Int64
    dur_ns: Int64
    lanes: tuple[str, ...]
    names: tuple[str, ...]


def write_slices(folder: Path, slices: Mapping[int, Slices]) -> None:
    """Writes the slices of every rank, a row group a rank, whole or not at all."""
    with (
        whole_file(folder / FILE_NAME) as file,
        pq.ParquetWriter(file, _SCHEMA, compression="zstd") as writer,
    ):
        for rank in slices:
            table = _table(rank, slices[rank])
            writer.write_table(table, row_group_size=max(1, len(table)))


class StoredSlices(Mapping[int, Slices]):
    """The slices of a file by rank, each read when it is asked for."""

    def __init__(self, path: Path) -> None:
        """Raises FileNotFoundError, and ValueError where the file is none of these."""
        self._path = path
        groups = pq.read_metadata(path)
        self._group = {
            groups.row_group(i).column(0).statistics.min: i for i in range(groups.num_row_groups)
        }

    def __getitem__(self, rank: int) -> Slices:
        with pq.ParquetFile(self._path, read_dictionary=["lane", "name"]) as file:
            return _slices(file.read_row_group(self._group[rank]))

    def __iter__(self) -> Iterator[int]:
        return iter(self._group)

    def __len__(self) -> int:
        return len(self._group)


def _table(rank: int, own: Slices) -> pa.Table:
    columns = {
        "rank": np.full(len(own.lane), rank, dtype=np.int32),
        "lane": pa.DictionaryArray.from_arrays(own.lane, pa.array(own.lanes, pa.string())),
        "name": pa.DictionaryArray.from_arrays(own.name, pa.array(own.names, pa.string())),
        **{name: getattr(own, name) for name in _NUMBERS},
    }
    return pa.table(columns, schema=_SCHEMA)


def _slices(table: pa.Table) -> Slices:
    lane, name = (table.column(c).combine_chunks() for c in ("lane", "name"))
    numbers = {column: table.column(column).to_numpy() for column in _NUMBERS}
    return Slices(
        lane=lane.indices.to_numpy(),
        name=name.indices.to_numpy(),
        lanes=tuple(lane.dictionary.to_pylist()),
        names=tuple(name.dictionary.to_pylist()),
        **numbers,
    )
