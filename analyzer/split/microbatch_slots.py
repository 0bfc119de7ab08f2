"""Microbatch slots of a rank (one microbatch and phase each), from annotations or its messages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from stepsplit.analyzer.arrays import (
    collect_intervals,
    find_interval,
    group_max,
    is_inside,
    list_distinct,
    union,
)
from stepsplit.analyzer.split.autograd_links import find_partner_ns
from stepsplit.analyzer.split.call_purposes import find_backward_spans, find_issue_ns
from stepsplit.analyzer.split.mesh import DATA_AXES, STAGE_AXES, RankLayout
from stepsplit.analyzer.split.message_patterns import runs_both_ways
from stepsplit.analyzer.split.message_slots import (
    NEXT,
    PREVIOUS,
    RECEIVE,
    LaunchedWork,
    StagePosition,
    order_folded_passes,
    order_passes,
    pair_passes,
)
from stepsplit.analyzer.split.microbatch_marks import MARKERS, parse_marks
from stepsplit.analyzer.split.work import PRODUCT_FAMILIES, mask_families
from stepsplit.analyzer.trace import OP_CODE, Bool, Category, EventKind, Events, Int64, RankTrace
from stepsplit.collectors.formats.run_spec import DATA_PARALLEL


class MicrobatchSlot(Struct, frozen=True):
    """One forward, backward or weight gradient of a microbatch, on the rank's own clock."""

    stage: int
    microbatch: int
    phase: str
    start_ns: int
    end_ns: int


_PHASES = ("forward", "backward")


class DetectedSlots(Struct, frozen=True):
    """The slots of a rank in order of time, and their source: annotations, messages, or None.

    are_whole: every pass of a stage has as much work as the others of its phase, and no work lies
    outside of them. Else some backwards may be split, and their weight gradients run elsewhere.
    """

    slots: tuple[MicrobatchSlot, ...]
    source: str | None
    are_whole: bool = True

    @property
    def are_marked(self) -> bool:
        """Whether annotations mark them."""
        return self.source == "annotations"


def find_slots(trace: RankTrace, layout: RankLayout, chunks: int = 1) -> DetectedSlots:
    """The slots marked by annotations, else those inferred from messages; chunks is the number of
    stages that each rank of the pipeline has."""
    marked = read_slots(trace, layout)
    if marked:
        return DetectedSlots(marked, "annotations")
    inferred = infer_slots(trace, layout, chunks)
    if not inferred:
        return DetectedSlots((), None)
    return DetectedSlots(inferred, "messages", _are_whole(trace, inferred))


_MORE_WORK = 1.25
"""Passes of one phase differ by less than this factor in their products; weight gradients are half
of those of a backward, a third of those of a microbatch."""


def _are_whole(trace: RankTrace, slots: Sequence[MicrobatchSlot]) -> bool:
    start = trace.events.start_ns[mask_families(trace, PRODUCT_FAMILIES)]
    spans = collect_intervals(slots)
    at = find_interval(spans, start)
    inside = at >= 0
    count = np.bincount(at[inside], minlength=len(slots))
    of_pass: dict[tuple[int, str], list[int]] = defaultdict(list)
    for slot, products in zip(slots, count.tolist(), strict=True):
        of_pass[slot.stage, slot.phase].append(products)
    # Only work between the slots, or after the last one: steps without slots come before or after.
    apart = (start >= spans.start_ns[0]) & ~inside
    most = _MORE_WORK - 1
    even = all(max(one) <= _MORE_WORK * min(one) for one in of_pass.values())
    return even and bool(apart.sum() <= most * inside.sum())


def count_chunks(traces: Sequence[RankTrace], layout: RankLayout) -> dict[int, int]:
    """The number of stages on each rank of a pipeline, where messages show several: its first rank
    sends outputs of all of them, and gradients of all but the first stage, back to the last rank.

    0 for the ranks of a pipeline that runs both ways, as DualPipe: a rank that isn't the first one
    begins its steps with an output of its own, before it receives any.
    """
    by_rank, chunks = {trace.rank: trace for trace in traces}, dict[int, int]()
    for line in layout.pipelines:
        if any(_begins_with_sends(by_rank[rank], line) for rank in line[1:] if rank in by_rank):
            chunks |= dict.fromkeys(line, 0)
            continue
        if line[0] not in by_rank:
            continue
        messages = _collect_messages(by_rank[line[0]], line)
        kinds = [] if messages is None else messages.kind.tolist()
        outputs, gradients = kinds.count(NEXT), kinds.count(PREVIOUS)
        if outputs > gradients > 0 and outputs % (outputs - gradients) == 0:
            chunks |= dict.fromkeys(line, outputs // (outputs - gradients))
    return chunks


def _begins_with_sends(trace: RankTrace, line: Sequence[int]) -> bool:
    """Whether the first message of every marked step with messages of the pipeline is a send."""
    calls = trace.calls
    rows = np.flatnonzero(calls.is_message & np.isin(calls.peer, line))
    rows = rows[np.argsort(find_issue_ns(trace)[rows], kind="stable")]
    marks = np.sort(trace.events.start_ns[_mask_host_events(trace.events, "ProfilerStep#")])
    step = np.searchsorted(marks, find_issue_ns(trace)[rows], side="right")
    rows, step = rows[step > 0], step[step > 0]
    first = rows[np.unique(step, return_index=True)[1]]
    return bool(len(first) and (calls.op[first] == OP_CODE["send"]).all())


class _Messages(Struct, frozen=True):
    """The messages of a rank with its pipeline, by issue time: NEXT, PREVIOUS or RECEIVE."""

    issued_ns: Int64
    kind: Int64


def _collect_messages(
    trace: RankTrace, line: Sequence[int], *, one_stage: bool = False
) -> _Messages | None:
    """None if the messages do not say whom they go to, or go to others than neighbors.

    Both neighbors of one rank of two are the other rank. With one stage on each the place in the
    pipeline decides, else whether the send follows a backward.
    """
    calls, at = trace.calls, line.index(trace.rank)
    rows = np.flatnonzero(calls.is_message & (np.isin(calls.peer, line) | (calls.peer < 0)))
    sends, receives = (calls.op[rows] == OP_CODE[op] for op in ("send", "recv"))
    following, previous = line[(at + 1) % len(line)], line[at - 1]
    peer = calls.peer[rows]
    known = peer >= 0 if len(line) > 2 else np.ones(len(rows), dtype=np.bool_)
    near = np.isin(peer, (following, previous)) | (peer < 0)
    if not len(rows) or not ((sends | receives) & known & near).all():
        return None
    issued = find_issue_ns(trace)[rows]
    if len(line) > 2:
        onward = peer == following
    elif one_stage:
        onward = np.full(len(rows), at == 0)
    else:
        # The last kernel before the send is of a forward.
        work = np.flatnonzero(trace.kinds.computes)
        launched = trace.events.find_launch_ns(work) if trace.on_device else None
        when = np.sort(trace.events.start_ns[work] if launched is None else launched)
        latest = when[np.maximum(np.searchsorted(when, issued) - 1, 0)] if len(when) else issued
        onward = ~is_inside(find_backward_spans(trace), latest)
    order = np.argsort(issued, kind="stable")
    kind = np.where(sends, np.where(onward, NEXT, PREVIOUS), RECEIVE)
    return _Messages(issued[order], kind[order])


def infer_slots(
    trace: RankTrace, layout: RankLayout, chunks: int = 1
) -> tuple[MicrobatchSlot, ...]:
    """Infers the slots of a rank from what its host launched between its messages.

    The input of a message is launched before it and its consumer after it, so there is one slot
    between two messages; kernels launched by autograd are a backward. Without a message in between,
    autograd separates two slots: a forward on the last stage ends, and one on the first stage
    starts, where autograd does. Where that leaves no slot, the order of sends decides
    (order_passes). A slot extends from its first kernel to its last, including tp, cp
    and ep communication; microbatches are counted per step. A step with different numbers of
    forwards and backwards has no slots, nor has a rank of a pipeline that runs both ways, whose
    chunks are 0.
    """
    line = next((line for line in layout.pipelines if trace.rank in line), ())
    # The issue time of each message to another rank of the pipeline, or to an unknown peer.
    calls = trace.calls
    of_line = [len(set(group.ranks) & set(line)) > 1 for group in trace.groups]
    unknown = (calls.peer < 0) & np.array([*of_line, bool(line)])[calls.group_id]
    rows = np.flatnonzero(calls.is_message & (np.isin(calls.peer, line) | unknown))
    issued = calls.issued_ns[rows]
    messages = np.sort(np.where(issued >= 0, issued, trace.events.start_ns[calls.event[rows]]))
    if not len(messages):
        return ()
    steps = np.sort(trace.events.start_ns[_mask_host_events(trace.events, "ProfilerStep#")])
    work = _collect_work(trace, layout, steps)
    swaps = len(line) == 2 and runs_both_ways(trace, line[1 - line.index(trace.rank)])
    if not chunks or swaps:
        return _order_slots(trace, work, line, steps, 0)
    if folded := _order_slots(trace, work, line, steps, 2, in_a_v=True):
        return folded
    if chunks > 1 or _has_several_chunks(trace, line):
        return _order_slots(trace, work, line, steps, chunks)
    gaps = _assign_gaps(work, messages, _find_host_step(messages, steps))
    kind = _classify_work(gaps, first=trace.rank == line[0], last=trace.rank == line[-1])
    slots = _build_slots(work, gaps.number, kind, layout.find_stage(trace.rank))
    return slots or _order_slots(trace, work, line, steps, chunks)


def _order_slots(
    trace: RankTrace,
    work: _Work,
    line: Sequence[int],
    steps: Int64,
    chunks: int,
    *,
    in_a_v: bool = False,
) -> tuple[MicrobatchSlot, ...]:
    """The slots by the order of sends and launches in each step."""
    place, folded = StagePosition(line.index(trace.rank), len(line), chunks), in_a_v or not chunks
    messages = _collect_messages(trace, line, one_stage=chunks == 1 or folded)
    if messages is None:
        return ()
    step = _find_host_step(messages.issued_ns, steps)
    # Of two ranks all messages of one go to the other, whatever their direction.
    partner_ns = None
    if not chunks and len(line) == 2:
        partner_ns = find_partner_ns(trace, work.launch_ns)
        partner_step = _find_host_step(partner_ns, steps)
    slots = []
    for number in np.unique(work.step).tolist():
        rows, own = np.flatnonzero(work.step == number), step == number
        launched = LaunchedWork(
            name=trace.events.name_id[work.row[rows]].astype(np.int64),
            gap=np.searchsorted(messages.issued_ns[own], work.launch_ns[rows], side="right"),
            took_ns=work.end_ns[rows] - work.start_ns[rows],
            backward=work.autograd[rows],
            has_backwards=work.has_backwards,
        )
        kinds = messages.kind[own].tolist()
        passes = (
            order_folded_passes(launched, kinds, place, both_ways=not in_a_v)
            if folded
            else order_passes(launched, kinds, place)
        )
        if not passes and partner_ns is not None:
            gap = np.searchsorted(messages.issued_ns[own], partner_ns[rows], side="right")
            gap[(partner_ns[rows] < 0) | (partner_step[rows] != number)] = -1
            passes = pair_passes(launched, gap, kinds, place)
        for one in passes:
            part = rows[one.first : one.after]
            stage = one.chunk * place.stages + place.at
            if folded and one.chunk:
                stage = 2 * place.stages - 1 - place.at
            start_ns, end_ns = int(work.start_ns[part].min()), int(work.end_ns[part].max())
            slots.append(MicrobatchSlot(stage, one.microbatch, one.phase, start_ns, end_ns))
    return tuple(sorted(slots, key=lambda one: one.start_ns))


class _Work(Struct, frozen=True):
    """The events of a rank's slots, by launch time; columns of one length.

    step is the host's step; autograd marks launches by autograd, all False if has_backwards is,
    where backwards are not known.
    """

    row: Int64
    launch_ns: Int64
    start_ns: Int64
    end_ns: Int64
    step: Int64
    autograd: Bool
    has_backwards: bool


def _has_several_chunks(trace: RankTrace, line: Sequence[int]) -> bool:
    """Whether messages skip a neighbor: from the last rank to the first, for a further chunk."""
    calls, at = trace.calls, line.index(trace.rank)
    neighbors = line[max(at - 1, 0) : at + 2]
    distant = np.isin(calls.peer, line) & ~np.isin(calls.peer, neighbors)
    return bool((calls.is_message & distant).any())


def _find_host_step(when: Int64, steps: Int64) -> Int64:
    """The step of the host at each instant, -1 before the first; 0 without marks."""
    return np.searchsorted(steps, when, side="right") - (1 if len(steps) else 0)


def _collect_work(trace: RankTrace, layout: RankLayout, steps: Int64) -> _Work:
    """The rank's kernels (on a CPU: ops) without the optimizer's, by launch time."""
    events = trace.events
    works = _find_slot_kernels(trace, layout) if trace.on_device else trace.kinds.computes
    rows = np.flatnonzero(works)
    launched = events.find_launch_ns(rows) if trace.on_device else events.start_ns[rows]
    step = _find_host_step(launched, steps)
    counts = (launched >= 0) & (step >= 0) & ~_is_launched_in_optimizer(events, launched)
    backwards = find_backward_spans(trace)
    if not len(backwards):
        # No range of autograd ends the last backward. Kernels of optimizers are not part of it, and
        # the last reduction of gradients over replicas comes after it.
        counts &= ~mask_families(trace, {"optimizer"})[rows]
        end_ns = _find_reduction_ns(trace, layout, steps, int(step.max(initial=-1)) + 1)
        counts[counts] = launched[counts] < end_ns[step[counts]]
    order = np.argsort(launched, kind="stable")
    order = order[counts[order]]
    rows, launched = rows[order], launched[order]
    return _Work(
        row=rows,
        launch_ns=launched,
        start_ns=events.start_ns[rows],
        end_ns=events.ends_of(rows),
        step=step[order],
        autograd=is_inside(backwards, launched),
        has_backwards=len(backwards) > 0,
    )


def _find_reduction_ns(trace: RankTrace, layout: RankLayout, steps: Int64, count: int) -> Int64:
    """When each of so many steps issued its last reduction over replicas, if after all of its
    messages; else the largest int64."""
    calls, issued, never = trace.calls, find_issue_ns(trace), np.iinfo(np.int64).max
    axes = [layout.find_axes(group) for group in trace.groups]
    # Megatron sums over context parallelism as well; groups of it alone sum within a backward.
    replicas = np.array([*(bool(a & {*DATA_PARALLEL}) and a <= DATA_AXES for a in axes), False])
    reduces = np.isin(calls.op, [OP_CODE["all_reduce"], OP_CODE["reduce_scatter"]])
    step = _find_host_step(issued, steps)
    last = {}
    for name, mask in (("message", calls.is_message), ("sum", reduces & replicas[calls.group_id])):
        rows = np.flatnonzero(mask & (step >= 0) & (step < count))
        last[name] = group_max(step[rows], issued[rows], count)
    return np.where(last["sum"] > last["message"], last["sum"], never)


def _find_slot_kernels(trace: RankTrace, layout: RankLayout) -> Bool:
    """Which events are kernels of a slot: compute, or communication within the stage."""
    axes = [layout.find_axes(group) for group in trace.groups]
    within = np.array([*(bool(a) and a <= STAGE_AXES for a in axes), False])
    # A collective of one rank, such as the reduction over a single replica, is a copy.
    is_copy = trace.kinds.is_kind(EventKind.COPY)
    kernels = trace.events.is_category(Category.KERNEL) & ~is_copy
    kernels[trace.calls.event] &= within[trace.calls.group_id]
    return kernels


def _mask_host_events(events: Events, name: str) -> Bool:
    """Which events are ops and annotations with this name prefix."""
    return events.is_category(Category.OP, Category.ANNOTATION) & events.match_prefix(name)


def _is_launched_in_optimizer(events: Events, launched: Int64) -> Bool:
    """Which of these times are inside a step of torch's optimizers."""
    spans = _mask_host_events(events, "Optimizer.")
    covered = union(events.start_ns[spans], events.ends_of(spans))
    edges = np.stack([covered.start_ns, covered.end_ns], axis=1).ravel()
    return np.asarray(np.searchsorted(edges, launched, side="right") % 2 == 1)


class _Gaps(Struct, frozen=True):
    """For each event, the number of the interval between messages that contains its launch.

    preceded, followed: the interval starts, ends with a message of the same step; before, after:
    the event comes before, after all autograd events of its interval.
    """

    number: Int64
    preceded: Bool
    followed: Bool
    before: Bool
    after: Bool


def _assign_gaps(work: _Work, messages: Int64, message_step: Int64) -> _Gaps:
    passed = np.searchsorted(messages, work.launch_ns, side="right")
    before = np.concatenate(([-1], message_step))[passed]
    after = np.concatenate((message_step, [-1]))[passed]
    at, gaps = np.arange(len(passed)), len(messages) + 1
    first, last = np.full(gaps, len(at)), np.full(gaps, -1)
    np.minimum.at(first, passed[work.autograd], at[work.autograd])
    np.maximum.at(last, passed[work.autograd], at[work.autograd])
    return _Gaps(
        number=passed,
        preceded=before == work.step,
        followed=after == work.step,
        before=at < first[passed],
        after=at > last[passed],
    )


def _classify_work(gaps: _Gaps, *, first: bool, last: bool) -> Int64:
    """For each event 0 for a forward, 1 for a backward, -1 for neither.

    Every stage but the first receives the input of a forward; every stage but the last sends its
    output and receives the input of a backward, which on the last stage is its own forward.
    """
    alone = gaps.before & gaps.after
    forward = alone | (gaps.before & last) | (gaps.after & first)
    whole = (gaps.preceded | first) & (gaps.followed | (last & ~alone))
    back = gaps.preceded & (gaps.followed | first)
    return np.where(forward, np.where(whole, 0, -1), np.where(back, 1, -1))


def _build_slots(work: _Work, gap: Int64, kind: Int64, stage: int) -> tuple[MicrobatchSlot, ...]:
    """One slot per interval and kind, in steps with equal numbers of both kinds."""
    rows = np.flatnonzero(kind >= 0)
    codes, box = np.unique(2 * gap[rows] + kind[rows], return_inverse=True)
    start = np.full(len(codes), np.iinfo(np.int64).max)
    end, step = np.zeros(len(codes), dtype=np.int64), np.zeros(len(codes), dtype=np.int64)
    np.minimum.at(start, box, work.start_ns[rows])
    np.maximum.at(end, box, work.end_ns[rows])
    step[box] = work.step[rows]
    slots = []
    for number in np.unique(step).tolist():
        parts = [np.flatnonzero((step == number) & (codes % 2 == phase)) for phase in (0, 1)]
        if len(parts[0]) == len(parts[1]):
            slots += [
                MicrobatchSlot(stage, i, phase, int(start[row]), int(end[row]))
                for phase, part in zip(_PHASES, parts, strict=True)
                for i, row in enumerate(part.tolist())
            ]
    return tuple(sorted(slots, key=lambda one: one.start_ns))


# Slots marked by annotations.


def read_slots(trace: RankTrace, layout: RankLayout) -> tuple[MicrobatchSlot, ...]:
    """The slots marked by annotations, in order of time; on the device those of their kernels.

    Some torch schedules mark them too; if the collector did, only its marks count. torch's GPipe
    marks have no stage: the rank's pp coordinate is used, and without it they are ignored. A
    combined action is two slots with the same times.
    """
    events, stage = trace.events, layout.stage_of.get(trace.rank)
    for prefixes in MARKERS:
        marks = [
            parse_marks(name, stage) if name.startswith(prefixes) else () for name in events.names
        ]
        spans = _find_spans(trace, layout, events.name_mask(tuple(map(bool, marks))))
        if len(spans.row):
            slots = [
                MicrobatchSlot(mark.stage, mark.microbatch, mark.phase, start, end)
                for row, start, end in zip(*map(np.ndarray.tolist, spans), strict=True)
                for mark in marks[events.name_id[row]]
            ]
            return tuple(sorted(slots, key=lambda slot: slot.start_ns))
    return ()


class _Spans(NamedTuple):
    """When the work of marks ran; row is that of each mark, columns of one length."""

    row: Int64
    start_ns: Int64
    end_ns: Int64


def _find_spans(trace: RankTrace, layout: RankLayout, marked: Bool) -> _Spans:
    """When the work of the marks ran: on a device from their first kernel to their last.

    The profiler's own device range of a mark has the kernels that the marking thread launched; a
    backward is launched by autograd's threads while that thread waits for them. It is used where
    the trace has no marks or no launches of the host.
    """
    events = trace.events
    on_host = np.flatnonzero(marked & events.is_category(Category.ANNOTATION))
    if not trace.on_device:
        return _Spans(on_host, events.start_ns[on_host], events.ends_of(on_host))
    if len(on_host) and (found := _find_kernels_of_marks(trace, layout, on_host)) is not None:
        return found
    rows = np.flatnonzero(marked & events.is_category(Category.GPU_ANNOTATION))
    rows = _select_compute_stream(trace, rows) if len(rows) else rows
    return _Spans(rows, events.start_ns[rows], events.ends_of(rows))


def _find_kernels_of_marks(trace: RankTrace, layout: RankLayout, marks: Int64) -> _Spans | None:
    """From the first to the last kernel that any thread launched within each mark; None if no mark
    has a kernel.

    A mark without a kernel, such as the input gradient of the first stage, is empty and lies where
    the next launched kernel starts.
    """
    events = trace.events
    kernels = np.flatnonzero(_find_slot_kernels(trace, layout))
    launched = events.find_launch_ns(kernels)
    order = np.argsort(launched, kind="stable")
    kernels, launched = kernels[order], launched[order]
    first = np.searchsorted(launched, events.start_ns[marks], side="left")
    after = np.searchsorted(launched, events.ends_of(marks), side="right")
    if not (first < after).any():
        return None
    end = events.ends_of(kernels)
    start = np.append(events.start_ns[kernels], end.max())
    # Every second part is that between a mark's first kernel and the next one after it.
    parts = np.stack([first, after], axis=1).ravel()
    starts = np.minimum.reduceat(start, parts)[::2]
    ends = np.maximum.reduceat(np.append(end, -1), parts)[::2]
    return _Spans(marks, starts, np.where(first < after, ends, starts))


def _select_compute_stream(trace: RankTrace, rows: Int64) -> Int64:
    """Selects the marks on the stream with the most compute; a device repeats a mark per stream."""
    events = trace.events
    lanes = list_distinct(events.lane[rows]).tolist()
    if not trace.on_device or len(lanes) == 1:
        return rows
    computes = trace.kinds.computes
    work = np.bincount(
        events.lane[computes], weights=events.dur_ns[computes], minlength=len(events.lanes)
    )
    of_stream: dict[tuple[str, str], float] = defaultdict(float)
    for lane, busy in zip(events.lanes, work.tolist(), strict=True):
        of_stream[lane.pid, lane.tid] += busy
    streams = {lane: (events.lanes[lane].pid, events.lanes[lane].tid) for lane in lanes}
    busiest = max(lanes, key=lambda lane: of_stream[streams[lane]])
    return np.asarray(rows[events.lane[rows] == busiest])
