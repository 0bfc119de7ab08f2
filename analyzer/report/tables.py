"""The detail beside report.json: tables/*.parquet, a row an interval, times as in the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from stepsplit.analyzer.report.slices import FILE_NAME as SLICES
from stepsplit.analyzer.report.slices import Slices, StoredSlices, write_slices
from stepsplit.analyzer.trace import Int32, Int64, UInt8
from stepsplit.collectors.run_spec import whole_file

PHASES = ("forward", "backward", "weight")
Text = npt.NDArray[np.str_]


@dataclass(frozen=True, slots=True)
class Segments:
    """The band of buckets of each rank: the intervals of a step touch and fill it.

    bucket indexes buckets.BUCKETS. Columns have one length; sorted by rank, then start_ns.
    """

    rank: Int32
    step: Int32
    bucket: UInt8
    start_ns: Int64
    dur_ns: Int64


@dataclass(frozen=True, slots=True)
class Boxes:
    """The pipeline's grid: each forward, backward or weight gradient of a microbatch on a stage.

    phase indexes PHASES. Columns have one length; sorted by rank, then start_ns.
    """

    rank: Int32
    step: Int32
    stage: Int32
    microbatch: Int32
    phase: UInt8
    start_ns: Int64
    dur_ns: Int64


@dataclass(frozen=True, slots=True)
class Waits:
    """What held each rank up while it waited: the skew and the bubble of a step, each instant once.

    bucket indexes buckets.BUCKETS; owner is the rank that was waited for, -1 unknown; axis is where
    the call lies, "" for along no single axis; op is one of trace.OPS. Columns have one length;
    sorted by rank, then start_ns.
    """

    rank: Int32
    step: Int32
    bucket: UInt8
    owner: Int32
    axis: Text
    op: Text
    start_ns: Int64
    dur_ns: Int64

    @classmethod
    def none(cls) -> Waits:
        """No wait at all."""
        whole, text = np.empty(0, dtype=np.int32), np.empty(0, dtype=np.str_)
        time = np.empty(0, dtype=np.int64)
        return cls(whole, whole, np.empty(0, dtype=np.uint8), whole, text, text, time, time)


@dataclass(frozen=True, slots=True)
class Tables:
    """What tables/ holds; slices by rank, which may be read or built only when asked for."""

    segments: Segments
    boxes: Boxes
    waits: Waits = field(default_factory=Waits.none)
    slices: Mapping[int, Slices] = field(default_factory=dict)


_T = TypeVar("_T", Segments, Boxes, Waits)


def write_tables(folder: Path, tables: Tables) -> None:
    """Writes a Parquet file a table into the folder, each whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    for table in (tables.segments, tables.boxes, tables.waits):
        path = _path(folder, type(table))
        columns = {column.name: getattr(table, column.name) for column in fields(table)}
        with whole_file(path) as file:
            pq.write_table(pa.table(columns), file, compression="zstd")
    write_slices(folder, tables.slices)


def read_tables(folder: Path) -> Tables:
    """The tables of the folder, without waits and slices where they are older than those tables.

    Raises FileNotFoundError where there are none.
    """
    waits = _read(folder, Waits) if _path(folder, Waits).exists() else Waits.none()
    slices = StoredSlices(folder / SLICES) if (folder / SLICES).exists() else {}
    return Tables(_read(folder, Segments), _read(folder, Boxes), waits, slices)


def _path(folder: Path, kind: type) -> Path:
    return folder / f"{kind.__name__.lower()}.parquet"


def _read(folder: Path, kind: type[_T]) -> _T:
    # read_table would load pyarrow.dataset, half a second, for a plain file.
    with pq.ParquetFile(_path(folder, kind)) as file:
        table = file.read()
    return kind(**{column.name: _column(table, column.name) for column in fields(kind)})


def _column(table: pa.Table, name: str) -> npt.NDArray[Any]:
    """The column as it was written: texts come back from Arrow as objects."""
    values: npt.NDArray[Any] = table.column(name).to_numpy()
    return values.astype(np.str_) if values.dtype == np.object_ else values
