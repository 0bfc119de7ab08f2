"""The detail tables of a report, one row per interval."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from stepsplit.analyzer.arrays import join_tables, view_numbers, wrap_numbers, wrap_texts
from stepsplit.analyzer.buckets import WAITS, Bucket
from stepsplit.analyzer.parts.breakdown import Breakdown
from stepsplit.analyzer.parts.kernel_table import KernelRow
from stepsplit.analyzer.readers.memory_snapshot import AllocationStack, MemoryCurve, MemoryRecord
from stepsplit.analyzer.readers.rank_traces import parse_rank
from stepsplit.analyzer.report.build import find_origin_ns
from stepsplit.analyzer.split.run import RankSplit, RunSplit
from stepsplit.analyzer.trace import OPS, EventKind, Int32, Int64, Lane, UInt8
from stepsplit.collectors.safe_io.atomic_file import SHARED, whole_file
from stepsplit.collectors.safe_io.regular_file import describe_special

if TYPE_CHECKING:
    import pyarrow as pa

# RunSplit -> Tables.


def build_tables(
    split: RunSplit,
    breakdown: Breakdown = Breakdown(),  # noqa: B008
    memories: Sequence[MemoryRecord] = (),
) -> Tables:
    """Build the tables of a split recording in the report's times; slices are built on access."""
    origin = find_origin_ns(split)
    bands = [rank.attribution.band for rank in split.ranks]
    steps = [np.array([s.step for s in rank.steps], dtype=np.int32) for rank in split.ranks]
    starts, ends = (
        [r.clock.map_to_common_ns(at) - origin for r, at in zip(split.ranks, edge, strict=True)]
        for edge in ([b.start_ns for b in bands], [b.end_ns for b in bands])
    )
    ranks = np.array([rank.trace.rank for rank in split.ranks], dtype=np.int32)
    waits = [_build_waits(rank, origin) for rank in split.ranks]
    return Tables(
        Segments(
            rank=np.repeat(ranks, [len(band.bucket) for band in bands]),
            step=np.concatenate([step[b.window] for step, b in zip(steps, bands, strict=True)]),
            bucket=np.concatenate([band.bucket for band in bands]),
            start_ns=np.concatenate(starts),
            dur_ns=np.concatenate(ends) - np.concatenate(starts),
        ),
        _build_boxes(split, origin),
        join_tables(*waits),
        BuiltSlices(split, origin),
        _build_parts(split, breakdown),
        breakdown.kernels,
        *_build_memory(split, memories, origin),
    )


def _build_parts(split: RunSplit, breakdown: Breakdown) -> PartTimes:
    """A row per rank, step, part and bucket with any time."""
    columns: list[list[Int64]] = [[] for _ in PartTimes.__struct_fields__]
    for rank, own in zip(split.ranks, breakdown.parts, strict=False):
        step, part, bucket = own.ns.nonzero()
        numbers = np.array([one.step for one in rank.steps], dtype=np.int64)
        of_part = np.array([(one.layer, one.kind, one.phase) for one in own.parts])[part]
        for column, values in zip(
            columns,
            (np.full(len(step), own.rank), numbers[step], *of_part.T, bucket,
             own.ns[step, part, bucket]),
            strict=True,
        ):  # fmt: skip
            column.append(values)
    kinds = (np.int32, np.int32, np.int32, np.uint8, np.uint8, np.uint8, np.int64)
    return PartTimes(
        *(
            np.concatenate(column).astype(kind) if column else np.empty(0, dtype=kind)
            for column, kind in zip(columns, kinds, strict=True)
        )
    )


def _build_boxes(split: RunSplit, origin: int) -> Boxes:
    rows = [
        (g.rank, g.step, box.stage, box.microbatch, PHASES.index(box.phase),
         box.start_ns - origin, box.end_ns - box.start_ns)
        for rank in split.ranks for g in rank.grids for box in g.slots
    ]  # fmt: skip
    table = np.array(rows, dtype=np.int64).reshape(len(rows), 7)
    return Boxes(
        rank=table[:, 0].astype(np.int32),
        step=table[:, 1].astype(np.int32),
        stage=table[:, 2].astype(np.int32),
        microbatch=table[:, 3].astype(np.int32),
        phase=table[:, 4].astype(np.uint8),
        start_ns=table[:, 5],
        dur_ns=table[:, 6],
    )


def _build_waits(rank: RankSplit, origin: int) -> Waits:
    exposed, calls = rank.attribution.exposed, rank.trace.calls
    rows = np.flatnonzero(np.isin(exposed.bucket, WAITS))
    steps = np.array([step.step for step in rank.steps], dtype=np.int32)
    axes = [rank.axis[row] or "" for row in rows.tolist()]
    start = rank.clock.map_to_common_ns(exposed.start_ns[rows])
    return Waits(
        rank=np.full(len(rows), rank.trace.rank, dtype=np.int32),
        step=steps[exposed.window[rows]],
        bucket=exposed.bucket[rows],
        owner=exposed.owner[rows],
        axis=np.array(axes, dtype=np.str_),
        op=np.array(OPS)[calls.op[exposed.call[rows]]],
        start_ns=start - origin,
        dur_ns=rank.clock.map_to_common_ns(exposed.end_ns[rows]) - start,
    )


# tables/*.parquet: one row per interval, times as in the report.

PHASES = ("forward", "backward", "weight")

Text = npt.NDArray[np.str_]


class Segments(Struct, frozen=True):
    """The bucket of every instant of each rank; the intervals of a step cover it without gaps.

    Columns of equal length, sorted by rank, then start_ns.

    Attributes:
        rank: global rank, int32.
        step: step number, int32.
        bucket: index into `BUCKETS`, uint8.
        start_ns: start in ns from the report's t0, int64.
        dur_ns: duration in ns, int64.
    """

    rank: Int32
    step: Int32
    bucket: UInt8
    start_ns: Int64
    dur_ns: Int64


class Boxes(Struct, frozen=True):
    """The pipeline grid: forward, backward and weight gradient of each microbatch on each stage.

    Columns of equal length, sorted by rank, then start_ns.

    Attributes:
        rank: global rank, int32.
        step: step number, int32.
        stage: model stage, int32.
        microbatch: number of the microbatch in the step, int32.
        phase: 0 forward, 1 backward, 2 weight gradient, uint8.
        start_ns: start in ns from the report's t0, int64.
        dur_ns: duration in ns, int64.
    """

    rank: Int32
    step: Int32
    stage: Int32
    microbatch: Int32
    phase: UInt8
    start_ns: Int64
    dur_ns: Int64


class Waits(Struct, frozen=True):
    """The waits of each rank: skew and bubble of a step, each instant once.

    Columns of equal length, sorted by rank, then start_ns.

    Attributes:
        rank: rank that waits, int32.
        step: step number, int32.
        bucket: index into `BUCKETS` (skew or bubble), uint8.
        owner: rank that it waits for, -1 if unknown, int32.
        axis: mesh axis of the call, or the name of its group as in GroupRow; "" if unknown.
        op: operation, one of `OPS`.
        start_ns: start in ns from the report's t0, int64.
        dur_ns: duration in ns, int64.
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
    def build_empty(cls) -> Waits:
        """An empty table."""
        whole, text = np.empty(0, dtype=np.int32), np.empty(0, dtype=np.str_)
        time = np.empty(0, dtype=np.int64)
        return cls(whole, whole, np.empty(0, dtype=np.uint8), whole, text, text, time, time)


class PartTimes(Struct, frozen=True):
    """The time of each part of the model in each step of each rank, by bucket; the rows of a step
    add up to it.

    Columns of equal length, sorted by rank, then step.

    Attributes:
        rank: global rank, int32.
        step: step number, int32.
        layer: number of the layer, -1 outside of the layers, int32.
        part: a PartKind, uint8.
        phase: a PartPhase, uint8.
        bucket: index into `BUCKETS`, uint8.
        ns: duration in ns, int64.
    """

    rank: Int32
    step: Int32
    layer: Int32
    part: UInt8
    phase: UInt8
    bucket: UInt8
    ns: Int64

    @classmethod
    def build_empty(cls) -> PartTimes:
        """An empty table."""
        whole, byte = np.empty(0, dtype=np.int32), np.empty(0, dtype=np.uint8)
        return cls(whole, whole, whole, byte, byte, byte, np.empty(0, dtype=np.int64))


class MemoryTimes(Struct, frozen=True):
    """Memory over time by the recordings of memory, thinned so that every peak is kept.

    Columns of equal length, sorted by rank, then time_ns. The times are the host's, which allocates
    before the device uses it.

    Attributes:
        rank: global rank, int32.
        time_ns: time in ns from the report's t0, int64.
        allocated_bytes: bytes of live tensors, int64.
        reserved_bytes: bytes that the allocator has reserved, -1 if unknown, int64.
    """

    rank: Int32
    time_ns: Int64
    allocated_bytes: Int64
    reserved_bytes: Int64

    @classmethod
    def build_empty(cls) -> MemoryTimes:
        """An empty table."""
        whole = np.empty(0, dtype=np.int64)
        return cls(np.empty(0, dtype=np.int32), whole, whole, whole)


_MOST_MEMORY_TIMES = 2_000
"""Of one rank: about as many as a chart has pixels."""


class AllocationRow(msgspec.Struct, frozen=True):
    """What one line of the program had allocated at the peak of a rank's recorded memory.

    Attributes:
        rank: Global rank.
        size_bytes: Their bytes at that moment.
        count: Their number.
        stack: File, line and function of each frame, the innermost first; () if unknown.
    """

    rank: int
    size_bytes: int
    count: int
    stack: tuple[str, ...]


def _build_memory(
    split: RunSplit, memories: Sequence[MemoryRecord], origin_ns: int
) -> tuple[MemoryTimes, tuple[AllocationRow, ...]]:
    """The curves of the ranks whose recording of memory is of the time of their steps, and what
    lived at their peaks."""
    by_rank = {rank.trace.rank: rank for rank in split.ranks}
    curves: dict[int, MemoryCurve] = {}
    stacks: dict[int, tuple[AllocationStack, ...]] = {}
    for record in memories:
        # Its file names the rank; without, it is that of the only one.
        number = parse_rank(PurePosixPath(record.source))
        if number is None and len(by_rank) == 1:
            number = next(iter(by_rank))
        rank = by_rank.get(-1 if number is None else number)
        if rank is None or not rank.steps or not record.devices:
            continue
        # A process that uses several devices has its own on one of them.
        device = max(record.devices, key=lambda one: one.peak_allocated_bytes)
        curve = device.curve
        is_known = curve.time_ns >= 0
        own_ns = curve.time_ns[is_known] - rank.trace.t0_unix_ns
        at_ns = np.maximum.accumulate(rank.clock.map_to_common_ns(own_ns) - origin_ns)
        last = rank.steps[-1]
        begin_ns = rank.steps[0].start_ns - origin_ns
        end_ns = last.start_ns + last.split.step_ns - origin_ns
        if not ((at_ns >= begin_ns) & (at_ns <= end_ns)).any():
            continue
        allocated, reserved = curve.allocated_bytes[is_known], curve.reserved_bytes[is_known]
        kept = set[int]()
        for part in np.array_split(np.arange(len(allocated)), _MOST_MEMORY_TIMES // 3):
            if len(part):
                sizes = allocated[part]
                kept |= {int(part[i]) for i in (sizes.argmax(), sizes.argmin())}
                kept.add(int(part[reserved[part].argmax()]))
        rows = np.array(sorted(kept))
        curves[rank.trace.rank] = MemoryCurve(at_ns[rows], allocated[rows], reserved[rows])
        stacks[rank.trace.rank] = device.stacks
    if not curves:
        return MemoryTimes.build_empty(), ()
    ordered = sorted(curves.items())
    times = MemoryTimes(
        np.repeat(
            np.array([number for number, _ in ordered], dtype=np.int32),
            [len(curve) for _, curve in ordered],
        ),
        np.concatenate([curve.time_ns for _, curve in ordered]),
        np.concatenate([curve.allocated_bytes for _, curve in ordered]),
        np.concatenate([curve.reserved_bytes for _, curve in ordered]),
    )
    return times, tuple(
        AllocationRow(number, one.size_bytes, one.count, one.stack)
        for number, own in sorted(stacks.items())
        for one in own
    )


class Tables(Struct, frozen=True):
    """The detail tables of a report.

    Attributes:
        segments: buckets over time.
        boxes: pipeline grid; empty without a pipeline.
        waits: waits with the rank waited for. Default: empty.
        slices: kernels and calls by rank, read or built on access. Default: empty.
        parts: time by part of the model. Default: empty.
        kernels: all kernels, longest first; the table kernels.parquet has their fields as columns.
            Default: empty.
        memory: memory over time. Default: empty.
        allocations: what lived at the peak of each rank by its stack, largest first; the table
            allocations.parquet has their fields as columns. Default: empty.
    """

    segments: Segments
    boxes: Boxes
    waits: Waits = field(default_factory=Waits.build_empty)
    slices: Mapping[int, Slices] = field(default_factory=dict)
    parts: PartTimes = field(default_factory=PartTimes.build_empty)
    kernels: tuple[KernelRow, ...] = ()
    memory: MemoryTimes = field(default_factory=MemoryTimes.build_empty)
    allocations: tuple[AllocationRow, ...] = ()


_T = TypeVar("_T", Segments, Boxes, Waits, PartTimes, MemoryTimes)


def write_tables(folder: Path, tables: Tables) -> None:
    """Write one Parquet file per table into the folder, each atomically."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True, exist_ok=True)
    made: list[Segments | Boxes | Waits | PartTimes | MemoryTimes] = [
        tables.segments,
        tables.boxes,
        tables.waits,
        tables.parts,
    ]
    # Few recordings have it.
    made += [tables.memory] if len(tables.memory.rank) else []
    for table in made:
        path = _find_path(folder, type(table))
        columns = {name: _wrap_column(getattr(table, name)) for name in table.__struct_fields__}
        with whole_file(path, SHARED) as file:
            pq.write_table(pa.table(columns), file, compression="zstd")
    _write_rows(folder / KERNELS_NAME, KernelRow, tables.kernels)
    if tables.allocations:
        _write_rows(folder / ALLOCATIONS_NAME, AllocationRow, tables.allocations)
    write_slices(folder, tables.slices)


def read_tables(folder: Path) -> Tables:
    """Read the tables of a folder; older folders have no waits and slices.

    Raises FileNotFoundError if there are no tables.
    """
    waits = _read(folder, Waits) if _find_path(folder, Waits).exists() else Waits.build_empty()
    slices = StoredSlices(folder / FILE_NAME) if (folder / FILE_NAME).exists() else {}
    has_parts, has_memory = (_find_path(folder, kind).exists() for kind in (PartTimes, MemoryTimes))
    return Tables(
        _read(folder, Segments),
        _read(folder, Boxes),
        waits,
        slices,
        _read(folder, PartTimes) if has_parts else PartTimes.build_empty(),
        _read_rows(folder / KERNELS_NAME, KernelRow),
        _read(folder, MemoryTimes) if has_memory else MemoryTimes.build_empty(),
        _read_rows(folder / ALLOCATIONS_NAME, AllocationRow),
    )


KERNELS_NAME, ALLOCATIONS_NAME = "kernels.parquet", "allocations.parquet"

_Row = TypeVar("_Row", KernelRow, AllocationRow)


def _write_rows(path: Path, kind: type[_Row], rows: Sequence[_Row]) -> None:
    """The rows with their fields as columns."""
    import pyarrow as pa
    import pyarrow.json as pj
    import pyarrow.parquet as pq

    # The types of the fields: Arrow infers none for a column without values.
    kinds = {
        "str": pa.string(), "int": pa.int64(), "float": pa.float64(), "Limit": pa.string(),
        "tuple[str, ...]": pa.list_(pa.string()), "tuple[int, ...]": pa.list_(pa.int64()),
    }  # fmt: skip
    annotations = kind.__annotations__.items()
    schema = pa.schema(
        [(name, kinds[str(one).removesuffix(" | None")]) for name, one in annotations]
    )
    # By way of JSON: Arrow's conversion of Python's own values would import pandas.
    lines = msgspec.json.Encoder().encode_lines(rows)
    table = pa.Table.from_batches([], schema)
    if rows:
        whole = pj.ReadOptions(use_threads=False, block_size=len(lines))
        table = pj.read_json(pa.BufferReader(lines), whole, pj.ParseOptions(explicit_schema=schema))
    with whole_file(path, SHARED) as file:
        pq.write_table(table, file, compression="zstd")


def _read_rows(path: Path, kind: type[_Row]) -> tuple[_Row, ...]:
    """The rows of the file; () where there is none, as in folders of earlier versions."""
    import pyarrow.parquet as pq

    if not path.exists():
        return ()
    if problem := describe_special(path):
        raise OSError(f"{path}: {problem}")
    with pq.ParquetFile(path) as file:
        rows: tuple[_Row, ...] = msgspec.convert(file.read().to_pylist(), tuple[kind, ...])  # type: ignore[valid-type]
    return rows


def _find_path(folder: Path, kind: type) -> Path:
    return folder / f"{kind.__name__.lower()}.parquet"


def _read(folder: Path, kind: type[_T]) -> _T:
    import pyarrow.parquet as pq

    names = kind.__struct_fields__
    texts = [name for name in names if name in _TEXTS]
    # read_table would import pyarrow.dataset, which takes half a second.
    path = _find_path(folder, kind)
    if problem := describe_special(path):
        raise OSError(f"{path}: {problem}")
    with pq.ParquetFile(path, read_dictionary=texts) as file:
        table = file.read()
    return kind(**{name: _read_column(table, name) for name in names})


def _wrap_column(column: npt.NDArray[Any]) -> pa.Array:
    return wrap_texts(column.tolist()) if column.dtype.kind == "U" else wrap_numbers(column)


def _read_column(table: pa.Table, name: str) -> npt.NDArray[Any]:
    """The column with its original dtype."""
    column = table.column(name)
    if column.num_chunks == 0:  # which Arrow would join by way of pandas
        return np.empty(0, np.str_ if name in _TEXTS else np.dtype(str(column.type)))
    if name not in _TEXTS:
        return view_numbers(_join_chunks(column))
    coded = _join_chunks(column.unify_dictionaries())
    texts = np.array(coded.dictionary.to_pylist(), dtype=np.str_)
    repeated: npt.NDArray[np.str_] = texts[view_numbers(coded.indices)]
    return repeated


def _join_chunks(column: pa.ChunkedArray) -> pa.Array:
    """The column as one array, without a copy where it is one already."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


_TEXTS = ("axis", "op")
"""Columns of a few different texts."""


# RunSplit -> Slices: kernels, and the parts of each call, on the common clock.

_MAX_DEPTH = 15
"""Slices deeper than this overlap in the drawing."""


class Slices(Struct, frozen=True):
    """The timeline of one rank: kernels, copies and the parts of calls (CPU runs: ops).

    Columns of equal length, sorted by lane, depth, start_ns.

    Attributes:
        lane: index into `lanes`, int32.
        depth: row within the lane for overlapping slices, uint8.
        name: index into `names`, int32.
        bucket: index into `BUCKETS`, uint8; a call that waits and then transfers is two slices.
        owner: rank that a wait waits for, -1 if none, int32.
        start_ns: start in ns from the report's t0, int64.
        dur_ns: duration in ns, int64.
        lanes: names of the lanes (streams and threads).
        names: names of the events.
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


class BuiltSlices(Mapping[int, Slices]):
    """The slices of a split run by rank, built on access."""

    def __init__(self, split: RunSplit, origin_ns: int) -> None:
        self._ranks = {rank.trace.rank: rank for rank in split.ranks}
        self._origin_ns = origin_ns

    def __getitem__(self, rank: int) -> Slices:
        return _build_rank_slices(self._ranks[rank], self._origin_ns)

    def __iter__(self) -> Iterator[int]:
        return iter(self._ranks)

    def __len__(self) -> int:
        return len(self._ranks)


def _build_rank_slices(rank: RankSplit, origin_ns: int) -> Slices:
    trace, pieces = rank.trace, rank.pieces
    events = trace.events
    compute = np.flatnonzero(trace.kinds.computes)
    copies = np.flatnonzero(trace.kinds.is_kind(EventKind.COPY))
    moved = np.flatnonzero(pieces.end_ns > pieces.start_ns)
    row = np.concatenate((compute, copies, trace.calls.event[pieces.call[moved]]))
    ran = row[: len(compute) + len(copies)]
    start = rank.clock.map_to_common_ns(
        np.concatenate((events.start_ns[ran], pieces.start_ns[moved]))
    )
    end = rank.clock.map_to_common_ns(np.concatenate((events.ends_of(ran), pieces.end_ns[moved])))
    no_owner = np.full(len(ran), -1, dtype=np.int32)
    kinds = np.repeat([Bucket.COMPUTE, Bucket.COPY], [len(compute), len(copies)])
    depth = _compute_depths(events.lane[row], start, end)
    order = np.lexsort((start, depth, events.lane[row]))
    lane, lanes = _compact_codes(
        events.lane[row], [format_lane_name(lane) for lane in events.lanes]
    )
    name, names = _compact_codes(events.name_id[row], events.names)
    return Slices(
        lane=lane[order],
        depth=depth[order],
        name=name[order],
        bucket=np.concatenate((kinds, pieces.bucket[moved]))[order].astype(np.uint8),
        owner=np.concatenate((no_owner, pieces.owner[moved]))[order],
        start_ns=start[order] - origin_ns,
        dur_ns=(end - start)[order],
        lanes=lanes,
        names=names,
    )


def format_lane_name(lane: Lane) -> str:
    """The display name of a lane."""
    if lane.stream >= 0:
        return f"stream {lane.stream}"
    return lane.tid if lane.tid.startswith(("stream", "thread")) else f"thread {lane.tid}"


def _compact_codes(code: Int32, names: Sequence[str]) -> tuple[Int32, tuple[str, ...]]:
    """Renumber the codes to the names in use; returns (new codes, names in use)."""
    used, place = np.unique(code, return_inverse=True)
    return place.astype(np.int32), tuple(names[i] for i in used.tolist())


def _compute_depths(lane: Int32, start: Int64, end: Int64) -> UInt8:
    """For each slice the first level of its lane without an overlapping earlier slice."""
    depth = np.full(len(lane), _MAX_DEPTH, dtype=np.uint8)
    left = np.lexsort((-end, start, lane))
    for level in range(_MAX_DEPTH):
        if not len(left):
            break
        # Those that start after all earlier ones on their lane have ended.
        on_top = np.ones(len(left), dtype=np.bool_)
        first = np.flatnonzero(np.diff(lane[left], prepend=lane[left[0]] - 1)).tolist()
        for low, high in pairwise([*first, len(left)]):
            reach = np.maximum.accumulate(end[left[low:high]])
            on_top[low + 1 : high] = start[left[low + 1 : high]] >= reach[:-1]
        depth[left[on_top]] = level
        left = left[~on_top]
    return depth


# tables/slices.parquet: the kernels and calls on each lane of each rank.

FILE_NAME = "slices.parquet"

_NUMBER_COLUMNS = {
    "depth": "uint8",
    "bucket": "uint8",
    "owner": "int32",
    "start_ns": "int64",
    "dur_ns": "int64",
}
"""Numeric columns with their Arrow types."""


def write_slices(folder: Path, slices: Mapping[int, Slices]) -> None:
    """Write the slices of all ranks atomically, one row group per rank that has any."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with (
        whole_file(folder / FILE_NAME, SHARED) as file,
        pq.ParquetWriter(file, _build_slice_schema(), compression="zstd") as writer,
    ):
        for rank in slices:
            own = slices[rank]
            columns = {
                "rank": wrap_numbers(np.full(len(own.lane), rank, dtype=np.int32)),
                "lane": pa.DictionaryArray.from_arrays(
                    wrap_numbers(own.lane), wrap_texts(own.lanes)
                ),
                "name": pa.DictionaryArray.from_arrays(
                    wrap_numbers(own.name), wrap_texts(own.names)
                ),
                **{name: wrap_numbers(getattr(own, name)) for name in _NUMBER_COLUMNS},
            }
            table = pa.table(columns, schema=_build_slice_schema())
            if len(table):
                writer.write_table(table, row_group_size=len(table))


class StoredSlices(Mapping[int, Slices]):
    """The slices in a file by rank, read on access."""

    def __init__(self, path: Path) -> None:
        """Raises FileNotFoundError, or ValueError if the file does not contain slices."""
        import pyarrow.parquet as pq

        if problem := describe_special(path):
            raise OSError(f"{path}: {problem}")
        self._path = path
        self._metadata = pq.read_metadata(path)
        groups = [self._metadata.row_group(i) for i in range(self._metadata.num_row_groups)]
        # Files of earlier versions also have empty groups, of ranks without slices.
        self._group = {
            group.column(0).statistics.min: i for i, group in enumerate(groups) if group.num_rows
        }

    def __getitem__(self, rank: int) -> Slices:
        import pyarrow.parquet as pq

        # Parsing the metadata of a file of hundreds of ranks takes longer than reading one rank.
        named = ["lane", "name"]
        with pq.ParquetFile(self._path, metadata=self._metadata, read_dictionary=named) as file:
            table = file.read_row_group(self._group[rank])
            lane, name = (_join_chunks(table.column(c)) for c in ("lane", "name"))
            numbers = {
                column: view_numbers(_join_chunks(table.column(column)))
                for column in _NUMBER_COLUMNS
            }
            return Slices(
                lane=view_numbers(lane.indices),
                name=view_numbers(name.indices),
                lanes=tuple(lane.dictionary.to_pylist()),
                names=tuple(name.dictionary.to_pylist()),
                **numbers,
            )

    def __iter__(self) -> Iterator[int]:
        return iter(self._group)

    def __len__(self) -> int:
        return len(self._group)


def _build_slice_schema() -> pa.Schema:
    import pyarrow as pa

    named = pa.dictionary(pa.int32(), pa.string())
    numbers = [(name, pa.type_for_alias(kind)) for name, kind in _NUMBER_COLUMNS.items()]
    return pa.schema([("rank", pa.int32()), ("lane", named), ("name", named), *numbers])
