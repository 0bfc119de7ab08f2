"""Attribution of time: each instant of a step belongs to exactly one bucket, axis and phase."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from msgspec import Struct

from stepsplit.analyzer.arrays import (
    Intervals,
    group_ids,
    intersect,
    is_inside,
    list_distinct,
    make_empty_intervals,
    overlap_ns,
    trim_overlaps,
    union,
)
from stepsplit.analyzer.buckets import BUCKETS, COMMUNICATION, MEMOS, TRANSFERS, Bucket, Split
from stepsplit.analyzer.split.classify import DDP_FORWARD, Work, find_issue_ns, parse_marks
from stepsplit.analyzer.split.gaps import HeldGaps
from stepsplit.analyzer.split.matching import MatchedCalls
from stepsplit.analyzer.split.mesh import DATA_AXES, RankLayout
from stepsplit.analyzer.split.steps import StepWindow
from stepsplit.analyzer.split.transfers import Pieces
from stepsplit.analyzer.trace import (
    OP_CODE,
    OPS,
    Bool,
    Calls,
    Category,
    Events,
    Int32,
    Int64,
    RankTrace,
    UInt8,
)

# The phase of the step in which each call was issued.


def infer_phases(trace: RankTrace, windows: Sequence[StepWindow], layout: RankLayout) -> list[str]:
    """The phase of each call: forward, backward, grad_sync, optimizer or other.

    A call belongs to the phase in which the host issued it; a pipeline message is classified by its
    direction.
    """
    calls, events = trace.calls, trace.events
    when = find_issue_ns(trace)
    marks = _Marks(
        optimizer=is_inside(_merge_spans(events, events.match_prefix("Optimizer.step#")), when),
        backward=is_inside(
            _merge_spans(
                events,
                events.match_prefix("autograd::engine")
                | _mask_microbatch_marks(events, "backward"),
            ),
            when,
        ),
        forward=is_inside(
            _merge_spans(
                events,
                events.match_prefix(DDP_FORWARD) | _mask_microbatch_marks(events, "forward"),
            ),
            when,
        ),
        early=_mask_before_backward(events, windows, when),
    )
    ahead = _compute_stage_distance(trace, layout)
    sends, receives = calls.op == OP_CODE["send"], calls.op == OP_CODE["recv"]
    # A device runs behind its host: there, calls before the first backward of a window may be those
    # that end the step before it.
    own_early = marks.early & (not trace.on_device)
    phase_names = np.select(
        [
            sends & (ahead > 0) | receives & (ahead < 0),
            sends & (ahead < 0) | receives & (ahead > 0),
            # An optimizer that is given a closure, as by Lightning, runs the passes itself.
            marks.optimizer & ~marks.forward & ~marks.backward,
            ~marks.forward & ~own_early & _find_gradient_syncs(trace, layout),
            marks.backward,
            marks.forward | marks.early,
        ],
        ["forward", "backward", "optimizer", "grad_sync", "backward", "forward"],
        "other",
    )
    phases: list[str] = phase_names.tolist()
    return phases


class _Marks(Struct, frozen=True):
    """For each call, whether it was issued in this part of the step; early: before the first
    backward."""

    optimizer: Bool
    backward: Bool
    forward: Bool
    early: Bool


def _find_gradient_syncs(trace: RankTrace, layout: RankLayout) -> Bool:
    """Whether each call reduces gradients, by its group and op."""
    syncs = [list_gradient_sync_ops(layout.find_axes(group)) for group in trace.groups]
    table = np.array([[op in of_group for op in OPS] for of_group in (*syncs, frozenset())])
    return np.asarray(table[trace.calls.group_id, trace.calls.op])


def list_gradient_sync_ops(axes: frozenset[str]) -> frozenset[str]:
    """The ops that reduce gradients on a group of these axes.

    Data and context parallel ranks have the same weights. On cp alone, reduce_scatter belongs to
    attention.
    """
    if not axes or not axes <= DATA_AXES:
        return frozenset()
    return frozenset({"all_reduce"} if axes == {"cp"} else {"all_reduce", "reduce_scatter"})


def _compute_stage_distance(trace: RankTrace, layout: RankLayout) -> Int64:
    """How many stages later in the pipeline the peer of each message is; 0 for collectives.

    Activations go to later stages, gradients to earlier ones.
    """
    peers, place = np.unique(trace.calls.peer, return_inverse=True)
    own_stage = layout.find_stage(trace.rank)
    ahead = [layout.find_stage(peer) - own_stage if peer >= 0 else 0 for peer in peers.tolist()]
    return np.array(ahead, dtype=np.int64)[place]


def _mask_microbatch_marks(events: Events, phase: str) -> Bool:
    """Which events mark forwards (or backwards) of microbatches, of any stage."""
    marked = (any(mark.phase == phase for mark in parse_marks(name, 0)) for name in events.names)
    return events.name_mask(tuple(marked))


def _merge_spans(events: Events, mask: Bool) -> Intervals:
    mask = mask & events.is_category(Category.OP, Category.ANNOTATION)
    return union(events.start_ns[mask], events.ends_of(mask))


def _mask_before_backward(events: Events, windows: Sequence[StepWindow], when: Int64) -> Bool:
    """Which calls were issued before the first backward of their step."""
    backward = events.start_ns[events.match_prefix("autograd::engine")]
    early = np.zeros(len(when), dtype=np.bool_)
    for window in windows:
        first = int(np.searchsorted(backward, window.start_ns))
        limit = int(backward[first]) if first < len(backward) else window.start_ns
        early |= (when >= window.start_ns) & (when < min(limit, window.end_ns))
    return early


# Overlapped and exposed communication by axis and operation.


@dataclass(frozen=True, slots=True)
class Overlap:
    """Overlap of one kind of communication with compute.

    Time that is neither hidden nor exposed falls into a gap of compute that something else caused.
    Kinds can transfer data concurrently, so their times do not add up.

    Attributes:
        rank: Global rank; None for the sum over all ranks.
        axis: Mesh axis of the groups; None if unknown or along several axes.
        op: Operation, such as "all_gather".
        moved_ns: Time in which data was transferred, in ns.
        hidden_ns: Part of moved_ns overlapped by compute, in ns.
        exposed_ns: Part of moved_ns that blocked the rank, in ns.

    Examples:
        >>> report = analyze("sample_traces/tp2_pp2")
        >>> [(row.axis, row.op, round(row.efficiency, 3)) for row in report.overlap][:2]
        [('pp', 'send', 0.0), ('pp', 'recv', 0.0)]
    """

    rank: int | None
    axis: str | None
    op: str
    moved_ns: int
    hidden_ns: int
    exposed_ns: int

    @property
    def efficiency(self) -> float:
        """Overlapped fraction of the transfer time: hidden_ns / moved_ns, 0..1."""
        return self.hidden_ns / self.moved_ns


def compute_overlaps(
    rank: int,
    calls: Calls,
    axes: Sequence[str | None],
    windows: Sequence[StepWindow],
    pieces: Pieces,
    held: HeldGaps,
    compute: Intervals,
) -> tuple[Overlap, ...]:
    """The rows of one rank, by axis and op, for transfers inside the windows.

    axes has one entry per group of the rank; waits are excluded. The windows are in order.
    """
    moving = pieces.select(np.isin(pieces.bucket, TRANSFERS))
    blocking = held.select_blocking(moving)
    inside = union(
        np.array([window.start_ns for window in windows], dtype=np.int64),
        np.array([window.end_ns for window in windows], dtype=np.int64),
    )
    names = tuple(dict.fromkeys((*axes, None)))
    axis = np.array([names.index(name) for name in (*axes, None)])[calls.group_id]
    kind = group_ids(axis, calls.op)
    exposed_by_kind = dict(_split_by_kind(kind, blocking, inside))
    rows = []
    for number, moved in _split_by_kind(kind, moving, inside):
        call = int(np.flatnonzero(kind == number)[0])
        hidden = overlap_ns(moved, compute)
        exposed = exposed_by_kind.get(number, make_empty_intervals())
        exposed_ns = exposed.total_ns - overlap_ns(exposed, compute)
        name = names[int(axis[call])]
        rows.append(Overlap(rank, name, OPS[calls.op[call]], moved.total_ns, hidden, exposed_ns))
    return tuple(rows)


def sum_overlaps(rows: Sequence[Overlap]) -> tuple[Overlap, ...]:
    """The sums over all ranks, by decreasing exposed time."""
    kinds = dict.fromkeys((row.axis, row.op) for row in rows)
    summed = []
    for axis, op in kinds:
        same = [row for row in rows if (row.axis, row.op) == (axis, op)]
        summed.append(
            Overlap(
                None, axis, op, sum(row.moved_ns for row in same),
                sum(row.hidden_ns for row in same), sum(row.exposed_ns for row in same),
            )
        )  # fmt: skip
    return tuple(sorted(summed, key=lambda row: (-row.exposed_ns, -row.moved_ns)))


def _split_by_kind(
    kind: Int64, pieces: Pieces, inside: Intervals
) -> Iterator[tuple[int, Intervals]]:
    """(kind, intervals of its pieces inside the given intervals), for kinds with any."""
    of_piece = kind[pieces.call]
    for number in list_distinct(of_piece).tolist():
        rows = of_piece == number
        both = intersect(union(pieces.start_ns[rows], pieces.end_ns[rows]), inside)
        if len(both.start_ns):
            yield number, Intervals(both.start_ns, both.end_ns)


# The bucket of each instant of a step.

_MOVING, _FUSED, _AMBIGUOUS = 6, 7, 8
"""Bits of the sets that only memos count, after those of the buckets; idle has no set."""

_BY_RANK = [bucket for bucket in Bucket if bucket != Bucket.IDLE]

_MASK_TO_BUCKET = np.array(
    [next((b for b in _BY_RANK if mask >> b & 1), Bucket.IDLE) for mask in range(1 << 9)],
    dtype=np.uint8,
)


class BucketBands(Struct, frozen=True):
    """The windows of a rank, cut where the bucket changes; columns of one length.

    window indexes the rank's steps, bucket indexes BUCKETS. Sorted; the bands of a window fill it.
    """

    window: Int32
    bucket: UInt8
    start_ns: Int64
    end_ns: Int64


class Exposed(Struct, frozen=True):
    """The exposed part of a rank's pieces, each instant once; columns of one length.

    Per communication bucket they add up to the bucket. call and owner: as in Pieces.
    """

    window: Int32
    bucket: UInt8
    call: Int32
    owner: Int32
    start_ns: Int64
    end_ns: Int64


class Attribution(Struct, frozen=True):
    """Attribution of one rank: a Split per window, and the intervals that it sums.

    gap is the gap of compute that each of the rank's calls held up, -1 for none: the index of the
    compute interval that ended it.
    """

    splits: tuple[Split, ...]
    band: BucketBands
    exposed: Exposed
    gap: Int64


def attribute(
    windows: Sequence[StepWindow], work: Work, pieces: Pieces, held: HeldGaps
) -> Attribution:
    """Splits the windows of a rank into buckets, to the nanosecond."""
    blocking = held.select_blocking(pieces)
    sets = [
        work.compute,
        *(_merge_bucket(blocking, bucket) for bucket in COMMUNICATION),
        work.copy,
    ]
    moving = np.isin(pieces.bucket, TRANSFERS)
    sets += [union(pieces.start_ns[moving], pieces.end_ns[moving]), work.fused, held.ambiguous]
    band, mask = _sweep_windows(windows, sets)
    splits = _sum_splits(len(windows), band, mask)
    for window, split in zip(windows, splits, strict=True):
        assert split.step_ns == window.end_ns - window.start_ns, f"buckets do not fill {window}"
    band = _merge_bands(band)
    exposed = _build_exposed(blocking, band)
    _check(splits, exposed)
    gap = np.full(len(held.gap), -1, dtype=np.int64)
    gap[blocking.call] = held.gap[blocking.call]
    return Attribution(splits, band, exposed, gap)


def _merge_bucket(pieces: Pieces, bucket: Bucket) -> Intervals:
    chosen = pieces.bucket == bucket
    return union(pieces.start_ns[chosen], pieces.end_ns[chosen])


def _sweep_windows(
    windows: Sequence[StepWindow], sets: Sequence[Intervals]
) -> tuple[BucketBands, Int64]:
    """Sorts the edges of all sets once; mask gives the sets that are open between two edges."""
    window_start = np.array([w.start_ns for w in windows], dtype=np.int64)
    window_end = np.array([w.end_ns for w in windows], dtype=np.int64)
    at = np.concatenate(
        [window_start, window_end, *(e for s in sets for e in (s.start_ns, s.end_ns))]
    )
    bits = [np.zeros(2 * len(windows), dtype=np.int64)]
    bits += [np.full(len(s), sign << c) for c, s in enumerate(sets) for sign in (1, -1)]
    order = np.argsort(at, kind="stable")
    at, mask = at[order], np.cumsum(np.concatenate(bits)[order])
    start, end, mask = at[:-1], at[1:], mask[:-1]
    window = np.searchsorted(window_start, start, side="right") - 1
    inside = (end > start) & (window >= 0)
    inside[inside] &= start[inside] < window_end[window[inside]]
    start, end, mask, window = start[inside], end[inside], mask[inside], window[inside]
    return BucketBands(window.astype(np.int32), _MASK_TO_BUCKET[mask], start, end), mask


def _sum_splits(count: int, band: BucketBands, mask: Int64) -> tuple[Split, ...]:
    length = band.end_ns - band.start_ns
    totals = np.zeros((count, len(BUCKETS)), dtype=np.int64)
    np.add.at(totals, (band.window, band.bucket), length)
    memos = np.zeros((count, len(MEMOS)), dtype=np.int64)
    np.add.at(memos[:, 0], band.window, length * (mask >> Bucket.COMPUTE & mask >> _MOVING & 1))
    np.add.at(memos[:, 2], band.window, length * (mask >> _FUSED & 1))
    np.add.at(memos[:, 3], band.window, length * (mask >> _AMBIGUOUS & 1))
    return tuple(Split(*row) for row in np.hstack((totals, memos)).tolist())


def _merge_bands(band: BucketBands) -> BucketBands:
    """Merges adjacent bands of the same bucket."""
    if not len(band.start_ns):
        return band
    same = (band.bucket[1:] == band.bucket[:-1]) & (band.window[1:] == band.window[:-1])
    same &= band.start_ns[1:] == band.end_ns[:-1]
    first, last = np.concatenate(([True], ~same)), np.concatenate((~same, [True]))
    return BucketBands(
        band.window[first], band.bucket[first], band.start_ns[first], band.end_ns[last]
    )


def _build_exposed(blocking: Pieces, band: BucketBands) -> Exposed:
    """Each exposed instant, assigned to the call of its bucket that started first."""
    parts = [_extract_exposed(blocking, band, bucket) for bucket in COMMUNICATION]
    order = np.argsort(np.concatenate([part.start_ns for part in parts]), kind="stable")
    columns = ("window", "bucket", "call", "owner", "start_ns", "end_ns")
    return Exposed(*(np.concatenate([getattr(p, name) for p in parts])[order] for name in columns))


def _extract_exposed(blocking: Pieces, band: BucketBands, bucket: Bucket) -> Exposed:
    rows = np.flatnonzero(blocking.bucket == bucket)
    rows = rows[np.argsort(blocking.start_ns[rows], kind="stable")]
    owned = trim_overlaps(blocking.start_ns[rows], blocking.end_ns[rows])
    left = owned.end_ns > owned.start_ns
    rows, owned = rows[left], Intervals(owned.start_ns[left], owned.end_ns[left])
    here = np.flatnonzero(band.bucket == bucket)
    both = intersect(owned, Intervals(band.start_ns[here], band.end_ns[here]))
    rows, cut = rows[both.left], here[both.right]
    return Exposed(
        window=band.window[cut],
        bucket=np.full(len(rows), bucket, dtype=np.uint8),
        call=blocking.call[rows],
        owner=blocking.owner[rows],
        start_ns=both.start_ns,
        end_ns=both.end_ns,
    )


def _check(splits: Sequence[Split], exposed: Exposed) -> None:
    """Asserts that the exposed time of the calls equals the communication buckets."""
    for bucket in COMMUNICATION:
        rows = exposed.bucket == bucket
        owned = int((exposed.end_ns - exposed.start_ns)[rows].sum())
        bucket_ns = sum(split.buckets_ns[bucket] for split in splits)
        assert owned == bucket_ns, (
            f"{bucket.label}: {owned} of {bucket_ns} ns are assigned to calls"
        )


# Which numbers are measured if only some ranks of a job were recorded.

Holds = Literal["measured", "partly", "estimated"]


@dataclass(frozen=True, slots=True)
class Coverage:
    """Which share of the waits on one mesh axis is measured rather than estimated.

    Waits are measured in groups whose members were all recorded. With some members missing they are
    estimated from the recorded members, with a single member from the usual time of such a call.
    Compute, copy and idle time, and the sum of all buckets, are always measured.

    Attributes:
        axis: Mesh axis; None for groups along several axes.
        groups: Number of groups that the recorded ranks used.
        whole: Groups with all members recorded.
        alone: Groups with a single member recorded.
        calls: Calls of the recorded ranks on these groups.
        unmatched: Calls without a matching call on the peers.

    Examples:
        >>> report = analyze("sample_traces/tp2_pp2")
        >>> [(row.axis, row.holds) for row in report.coverage]
        [('pp', 'measured'), ('tp', 'measured')]
    """

    axis: str | None
    groups: int
    whole: int
    alone: int
    calls: int
    unmatched: int

    @property
    def holds(self) -> Holds:
        """Is "measured", "partly" (some calls are unmatched) or "estimated" (all are)."""
        if not self.unmatched:
            return "measured"
        return "estimated" if self.unmatched == self.calls else "partly"


def compute_coverage(
    traces: Sequence[RankTrace], matched: MatchedCalls, layout: RankLayout
) -> tuple[Coverage, ...]:
    """One row per axis on which the recorded ranks communicate."""
    present = {trace.rank for trace in traces}
    present_counts = [len(present & set(group.ranks)) for group in matched.groups]
    axis_of = [layout.find_axis(group) for group in matched.groups]
    used = list_distinct(matched.group[matched.group >= 0]).tolist()
    rows = []
    for axis in dict.fromkeys(axis_of[group] for group in used):
        axis_groups = [group for group in used if axis_of[group] == axis]
        calls = np.isin(matched.group, axis_groups)
        rows.append(
            Coverage(
                axis,
                len(axis_groups),
                sum(
                    present_counts[group] == len(matched.groups[group].ranks)
                    for group in axis_groups
                ),
                sum(present_counts[group] == 1 for group in axis_groups),
                int(calls.sum()),
                int((calls & (matched.key < 0)).sum()),
            )
        )
    return tuple(rows)
