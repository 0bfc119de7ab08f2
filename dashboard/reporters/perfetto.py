"""Perfetto export: all ranks on a common clock, with a flow arrow for each wait."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from stepsplit.analyzer.arrays import select_rows
from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.report.report import Report, Run
from stepsplit.analyzer.report.step_rows import StepRow
from stepsplit.analyzer.report.tables import Boxes, Segments, Tables, Waits
from stepsplit.analyzer.trace import Int32, Int64, UInt8
from stepsplit.collectors.formats.run_spec import Mesh

_LETTERS = "FBW"
"""One letter per phase of report.tables.PHASES, as in schedule diagrams."""

_Table = TypeVar("_Table", Segments, Boxes, Waits)

_Key = TypeVar("_Key", bound=Hashable)


def perfetto_trace(report: Report, tables: Tables) -> Iterator[bytes]:
    """Encodes the trace as Perfetto protobuf, in chunks; times are those of the report, in ns.

    Each rank is a process. A flow leads to each wait from the slice of the rank that was waited for
    at the end of the wait. Chrome JSON is not used, because Perfetto reads its durations as
    floating point microseconds: adjacent slices would overlap.
    """
    tables = Tables(
        _drop_empty_rows(tables.segments),
        _drop_empty_rows(tables.boxes),
        _drop_empty_rows(tables.waits),
    )
    lanes = build_lanes(tables.boxes)
    segments, waits, boxes = tables.segments, tables.waits, tables.boxes
    end = segments.start_ns + segments.dur_ns
    track = lanes.compute_tracks(segments.rank, BAND)
    band = _Part(track, segments.bucket.astype(np.int64), BUCKETS, segments.start_ns, end)
    columns = (waits.bucket, waits.owner, waits.axis, waits.op)
    name, keys = _encode_keys(zip(*(column.tolist() for column in columns), strict=True))
    names = []
    for bucket, owner, axis, op in keys:
        whom = f"waits for rank {owner}" if owner >= 0 else "waits"
        names.append(f"{BUCKETS[bucket]}: {whom} ({f'{axis} {op}'.strip()})")
    track, end = lanes.compute_tracks(waits.rank, WAITS), waits.start_ns + waits.dur_ns
    wait_slices = _Part(track, name, tuple(names), waits.start_ns, end)
    name, boxed = _encode_keys(zip(boxes.phase.tolist(), boxes.microbatch.tolist(), strict=True))
    names = [f"{_LETTERS[phase]}{microbatch}" for phase, microbatch in boxed]
    end = boxes.start_ns + boxes.dur_ns
    box_slices = _Part(lanes.box_track, name, tuple(names), boxes.start_ns, end)
    step_slices = _build_step_slices(report.steps, segments, lanes)
    # The band comes first: the flows begin in its rows, whose numbers are those of the segments.
    parts = (band, wait_slices, step_slices, box_slices)
    source = _find_sources(tables)
    known = np.flatnonzero(source >= 0)
    yield encode_header(
        build_tracks(report.run, lanes), [name for part in parts for name in part.names]
    )
    slices = _merge_parts(parts, len(band.track) + known)
    yield from encode_slices(slices, Origins(np.arange(len(known)) + 1, source[known]))


@dataclass(frozen=True, slots=True)
class _Part:
    """Slices of one kind, columns of equal length; name is an index into names."""

    track: Int64
    name: Int64
    names: tuple[str, ...]
    start_ns: Int64
    end_ns: Int64


def _drop_empty_rows(table: _Table) -> _Table:
    """The rows with a positive duration; clock conversion can round a duration to zero."""
    return select_rows(table, table.dur_ns > 0)


def _build_step_slices(rows: Iterable[StepRow], segments: Segments, lanes: Lanes) -> _Part:
    """One slice per step, from its first segment to its last."""
    kinds = {(row.rank, row.step): row.kind for row in rows}
    new = (np.diff(segments.rank) != 0) | (np.diff(segments.step) != 0)
    # The cut keeps an empty table empty.
    edge = np.concatenate(([True], new, [True]))[: len(segments.rank) + 1]
    first, last = np.flatnonzero(edge[:-1]), np.flatnonzero(edge[1:])
    rank, step = segments.rank[first], segments.step[first]
    owners = zip(rank.tolist(), step.tolist(), strict=True)
    name, keys = _encode_keys((number, kinds.get((of, number), "full")) for of, number in owners)
    names = tuple(f"step {n}" if kind == "full" else f"step {n} ({kind})" for n, kind in keys)
    end = segments.start_ns[last] + segments.dur_ns[last]
    return _Part(lanes.compute_tracks(rank, STEPS), name, names, segments.start_ns[first], end)


def _encode_keys(keys: Iterable[_Key]) -> tuple[Int64, list[_Key]]:
    """The keys as indices into the list of distinct keys, and that list."""
    places: dict[_Key, int] = {}
    code = [places.setdefault(key, len(places)) for key in keys]
    return np.array(code, dtype=np.int64), list(places)


def _find_sources(tables: Tables) -> Int64:
    """For each wait the segment row of its owner at the end of the wait; -1 for none."""
    segments, waits = tables.segments, tables.waits
    source = np.full(len(waits.rank), -1, dtype=np.int64)
    last = waits.start_ns + waits.dur_ns - 1
    for owner in np.unique(waits.owner[waits.owner >= 0]).tolist():
        low, high = np.searchsorted(segments.rank, (owner, owner + 1)).tolist()
        rows = np.flatnonzero(waits.owner == owner)
        at = low + np.searchsorted(segments.start_ns[low:high], last[rows], side="right") - 1
        rows, at = rows[at >= low], at[at >= low]
        inside = last[rows] < segments.start_ns[at] + segments.dur_ns[at]
        source[rows[inside]] = at[inside]
    return source


def _merge_parts(parts: tuple[_Part, ...], flow_rows: Int64) -> PerfettoSlices:
    """Concatenates the slices and shifts negative times to 0.

    The n-th row in flow_rows ends flow n + 1.
    """
    track = np.concatenate([part.track for part in parts])
    start = np.concatenate([part.start_ns for part in parts])
    end = np.concatenate([part.end_ns for part in parts])
    # Clocks are aligned to rank 0, so that another rank may begin before 0; a varint is not
    # negative.
    zero = min(0, int(start.min(initial=0)))
    offset = np.cumsum([0, *(len(part.names) for part in parts[:-1])])
    name = [part.name + before for part, before in zip(parts, offset, strict=True)]
    flow = np.zeros(len(track), dtype=np.int64)
    flow[flow_rows] = np.arange(len(flow_rows)) + 1
    return PerfettoSlices(track, np.concatenate(name), start - zero, end - zero, flow)


# The tracks of each rank: steps, buckets, waits and pipeline stages.

PROCESS, STEPS, BAND, WAITS, STAGES = range(5)
"""Track indices of a rank; from STAGES on there is one track per stage."""

PID = 1_000_000
"""Rank r is process PID + r, because Perfetto treats process 0 as the idle process."""

_NAMES = {STEPS: "steps", BAND: "buckets", WAITS: "waits"}


@dataclass(frozen=True, slots=True)
class Lanes:
    """The tracks of all ranks: `count` per rank, not all in use.

    box_track is the track of each box; stage_of maps such a track to its stage.
    """

    count: int
    box_track: Int64
    stage_of: dict[int, int]

    def compute_tracks(self, rank: Int32, place: int) -> Int64:
        """The track ids of the ranks at that index."""
        return (rank.astype(np.int64) + 1) * self.count + place


def build_lanes(boxes: Boxes) -> Lanes:
    """Assigns a track to each stage of a rank, and more tracks to overlapping boxes."""
    lane = _assign_lanes(boxes)
    stages = np.unique(np.column_stack((boxes.stage, lane)), axis=0)
    rows = {pair: row for row, pair in enumerate(map(tuple, stages.tolist()))}
    pairs = zip(boxes.stage.tolist(), lane.tolist(), strict=True)
    place = STAGES + np.array([rows[pair] for pair in pairs], dtype=np.int64)
    count = STAGES + len(stages)
    track = (boxes.rank.astype(np.int64) + 1) * count + place
    return Lanes(count, track, dict(zip(track.tolist(), boxes.stage.tolist(), strict=True)))


def build_tracks(run: Run, lanes: Lanes) -> list[PerfettoTrack]:
    """The tracks of all ranks: a process track per rank and its child tracks."""
    tracks = []
    stages: dict[int, set[int]] = {rank: set() for rank in run.ranks}
    for track, stage in lanes.stage_of.items():
        stages.setdefault(track // lanes.count - 1, set()).add(stage)
    for rank, own in stages.items():
        base = (rank + 1) * lanes.count
        tracks.append(PerfettoTrack(base, _name_process(run, rank, sorted(own)), pid=PID + rank))
        tracks += [PerfettoTrack(base + place, name, base, place) for place, name in _NAMES.items()]
    for track, stage in sorted(lanes.stage_of.items()):
        base = track // lanes.count * lanes.count
        tracks.append(PerfettoTrack(track, f"stage {stage}", base, track - base))
    return tracks


def _assign_lanes(boxes: Boxes) -> Int64:
    """For each box the first lane of its stage that is free when the box begins."""
    lane = np.zeros(len(boxes.rank), dtype=np.int64)
    free_at: dict[tuple[int, int], list[int]] = {}
    order = np.lexsort((boxes.start_ns, boxes.rank)).tolist()
    columns = (boxes.rank, boxes.stage, boxes.start_ns, boxes.dur_ns)
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    for row in order:
        rank, stage, start, dur = rows[row]
        ends = free_at.setdefault((rank, stage), [])
        # Perfetto draws slices of one track over each other unless they are nested.
        free = next((i for i, end in enumerate(ends) if end <= start), len(ends))
        ends[free : free + 1] = [start + dur]
        lane[row] = free
    return lane


def _name_process(run: Run, rank: int, stages: list[int]) -> str:
    """A process name such as "rank 3 (host0, stage 1)"; omits unknown parts."""
    hosts = [host.host for host in run.hosts if rank in host.ranks and host.host != "unknown"]
    known_stages = stages
    if not stages and run.mesh is not None:
        mesh = Mesh(tuple(axis.axis for axis in run.mesh), tuple(axis.size for axis in run.mesh))
        known_stages = [mesh.coordinate(rank, "pp")] if mesh.size("pp") > 1 else []
    which = [
        f"stage {known_stages[0]}"
        if len(known_stages) == 1
        else f"stages {', '.join(map(str, known_stages))}"
    ]
    where = ", ".join(hosts + (which if known_stages else []))
    return f"rank {rank} ({where})" if where else f"rank {rank}"


# Perfetto protobuf: tracks, slices and flows as bytes.
#
# Field numbers are those of trace_packet.proto, track_descriptor.proto, track_event.proto and
# interned_data.proto in github.com/google/perfetto/tree/main/protos/perfetto/trace. Numbers that
# differ between slices have a fixed width (protobuf allows padded varints), so that many packets
# form one matrix of bytes.

_PACKET, _TIMESTAMP, _SEQUENCE, _EVENT, _INTERNED, _SEQUENCE_FLAGS, _DESCRIPTOR = (
    1, 8, 10, 11, 12, 13, 60,
)  # fmt: skip

# TrackEvent.Type of perfetto's track_event.proto: TYPE_SLICE_BEGIN, TYPE_SLICE_END.
_BEGIN, _END = 1, 2

# SEQ_INCREMENTAL_STATE_CLEARED with the interned names, and NEEDED with what uses them.
_CLEARED, _NEEDED = 1, 2

# TrackDescriptor.ChildTracksOrdering
_EXPLICIT = 3

_ONE_SEQUENCE = 1

# 56 bits of nanoseconds are two years, and 28 bits are 268 million tracks or names.
_TIME_WIDTH, _ID_WIDTH = 8, 4

# Slices that are encoded together: enough for numpy, and some MB of memory.
_BLOCK = 1 << 16


@dataclass(frozen=True, slots=True)
class PerfettoTrack:
    """A track of the Perfetto UI; parent is the id of its process track."""

    id: int
    name: str
    parent: int = 0
    place: int = 0
    pid: int | None = None


@dataclass(frozen=True, slots=True)
class PerfettoSlices:
    """Non-empty slices that do not overlap on a track, as columns of equal length.

    track is a track id, name an index into the list of names, flow the id of the flow that ends at
    the slice, 0 for none. Times are not negative.
    """

    track: Int64
    name: Int64
    start_ns: Int64
    end_ns: Int64
    flow: Int64


@dataclass(frozen=True, slots=True)
class Origins:
    """The begin of each flow: its id and a row of the slices, as columns of equal length.

    The slice must begin before the end of the slice at which the flow ends.
    """

    flow: Int64
    row: Int64


def encode_header(tracks: Sequence[PerfettoTrack], names: Sequence[str]) -> bytes:
    """Encodes the packets of the track descriptors and the interned slice names."""
    texts = [(2, _encode_message((1, i + 1), (2, name))) for i, name in enumerate(names)]
    packets = [_encode_packet((_INTERNED, _encode_message(*texts)), (_SEQUENCE_FLAGS, _CLEARED))]
    for track in tracks:
        if track.pid is None:
            descriptor = _encode_message(
                (1, track.id), (2, track.name), (5, track.parent), (12, track.place)
            )
        else:
            # A process orders its tracks by their place.
            process = _encode_message((1, track.pid), (6, track.name))
            descriptor = _encode_message((1, track.id), (3, process), (11, _EXPLICIT))
        packets.append(_encode_packet((_DESCRIPTOR, descriptor)))
    return b"".join(packets)


def encode_slices(slices: PerfettoSlices, origins: Origins) -> Iterator[bytes]:
    """Encodes the begin and end packets of all slices.

    Readers sort packets by time and keep the order of packets with equal times. Ends come first, so
    that a slice ends before the next one begins at the same time.
    """
    for block in _split_blocks(np.flatnonzero(slices.flow == 0)):
        yield _encode_packets(
            _END, slices.end_ns[block], [_encode_varint_column(11, slices.track[block])]
        )
    for block in _split_blocks(np.flatnonzero(slices.flow)):
        ending = _encode_fixed_column(48, slices.flow[block])
        yield _encode_packets(
            _END, slices.end_ns[block], [_encode_varint_column(11, slices.track[block]), ending]
        )
    # The begin packets, grouped by their number of flows.
    count = np.bincount(origins.row, minlength=len(slices.track))
    first = np.cumsum(count) - count
    flow = origins.flow[np.argsort(origins.row, kind="stable")]
    for many in np.unique(count).tolist():
        for block in _split_blocks(np.flatnonzero(count == many)):
            flows = [_encode_fixed_column(47, flow[first[block] + i]) for i in range(many)]
            named = [_encode_varint_column(10, slices.name[block] + 1)]
            on = [_encode_varint_column(11, slices.track[block])]
            yield _encode_packets(_BEGIN, slices.start_ns[block], named + on + flows)


def _split_blocks(rows: Int64) -> Iterator[Int64]:
    return (rows[at : at + _BLOCK] for at in range(0, len(rows), _BLOCK))


def _encode_packets(kind: int, at_ns: Int64, columns: Sequence[UInt8]) -> bytes:
    """Encodes one packet per row: an event of that kind at that time, with the columns."""
    event = [_repeat_bytes(_encode_message((9, kind)), len(at_ns)), *columns]
    size = sum(column.shape[1] for column in event)
    before = (
        _encode_tag(_SEQUENCE, 0)
        + _encode_varint(_ONE_SEQUENCE)
        + _encode_tag(_EVENT, 2)
        + _encode_varint(size)
    )
    after = _encode_message((_SEQUENCE_FLAGS, _NEEDED))
    body = [
        _encode_varint_column(_TIMESTAMP, at_ns, _TIME_WIDTH), _repeat_bytes(before, len(at_ns)),
        *event, _repeat_bytes(after, len(at_ns)),
    ]  # fmt: skip
    size = sum(column.shape[1] for column in body)
    opening = _repeat_bytes(_encode_tag(_PACKET, 2) + _encode_varint(size), len(at_ns))
    return np.hstack([opening, *body]).tobytes()


def _repeat_bytes(content: bytes, count: int) -> UInt8:
    return np.broadcast_to(np.frombuffer(content, dtype=np.uint8), (count, len(content)))


def _encode_varint_column(number: int, values: Int64, width: int = _ID_WIDTH) -> UInt8:
    digits = (values[:, None] >> (7 * np.arange(width)) & 0x7F).astype(np.uint8)
    # All bytes but the last say that more follow, also those that are zero.
    digits[:, :-1] |= 0x80
    return np.hstack([_repeat_bytes(_encode_tag(number, 0), len(values)), digits])


def _encode_fixed_column(number: int, values: Int64) -> UInt8:
    eight = np.ascontiguousarray(values, dtype="<u8").view(np.uint8).reshape(-1, 8)
    return np.hstack([_repeat_bytes(_encode_tag(number, 1), len(values)), eight])


def _encode_packet(*content: tuple[int, int | str | bytes]) -> bytes:
    return _encode_message((_PACKET, _encode_message((_SEQUENCE, _ONE_SEQUENCE), *content)))


def _encode_message(*content: tuple[int, int | str | bytes]) -> bytes:
    """Encodes the fields (number, value) of a message."""
    encoded = []
    for number, value in content:
        if isinstance(value, int):
            encoded.append(_encode_tag(number, 0) + _encode_varint(value))
        else:
            body = value.encode() if isinstance(value, str) else value
            encoded.append(_encode_tag(number, 2) + _encode_varint(len(body)) + body)
    return b"".join(encoded)


def _encode_tag(number: int, wire_type: int) -> bytes:
    return _encode_varint(number << 3 | wire_type)


def _encode_varint(value: int) -> bytes:
    low, rest = value & 0x7F, value >> 7
    return bytes([low | 0x80]) + _encode_varint(rest) if rest else bytes([low])
