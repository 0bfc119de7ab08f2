"""The detail beside report.json: tables/*.parquet, a row an interval, times as in the report."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from stepsplit.analyzer.trace import Int32, Int64, UInt8

PHASES = ("forward", "backward", "weight")


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
class Tables:
    """What tables/ holds."""

    segments: Segments
    boxes: Boxes


_T = TypeVar("_T", Segments, Boxes)


def write_tables(folder: Path, tables: Tables) -> None:
    """Writes segments.parquet and boxes.parquet into the folder, each whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    for table in (tables.segments, tables.boxes):
        path = folder / f"{type(table).__name__.lower()}.parquet"
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        columns = {field.name: getattr(table, field.name) for field in fields(table)}
        try:
            pq.write_table(pa.table(columns), draft, compression="zstd")
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)


def read_tables(folder: Path) -> Tables:
    """The tables of the folder. Raises FileNotFoundError where there are none."""
    return Tables(_read(folder, Segments), _read(folder, Boxes))


def _read(folder: Path, kind: type[_T]) -> _T:
    table = pq.read_table(folder / f"{kind.__name__.lower()}.parquet")
    return kind(**{field.name: table.column(field.name).to_numpy() for field in fields(kind)})
