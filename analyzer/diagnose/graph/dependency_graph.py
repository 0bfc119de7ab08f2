"""The dependency graph of a recorded run: events and the events that they depend on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from stepsplit.analyzer.arrays import group_ids, group_max, is_inside, union
from stepsplit.analyzer.buckets import BUCKETS, COMMUNICATION, WAITS, Bucket
from stepsplit.analyzer.diagnose.graph.topological_order import NEVER, NO_LEVELS, Levels, Needs
from stepsplit.analyzer.ops import SYMMETRIC_OPS
from stepsplit.analyzer.split.event_waits import find_first_waiting
from stepsplit.analyzer.split.host_threads import SYNCHRONIZES
from stepsplit.analyzer.split.run import RankSplit, RunSplit
from stepsplit.analyzer.split.steps import is_on_main_stream
from stepsplit.analyzer.split.transfers import Arrivals
from stepsplit.analyzer.trace import OP_CODE, Bool, Category, Int32, Int64, RankTrace

# The dependency graph of a run, input of a replay.

WORK = ("compute", "copy", "idle")
"""Kinds of local work of a rank, the columns of DependencyGraph.work_ns."""


class TimelineNodes(Struct, frozen=True):
    """The nodes of the ranks' timelines: rank i has the nodes from first[i] to first[i + 1], cut at
    cut_ns of the recording."""

    first: Int64
    cut_ns: Int64

    def slice_rank(self, index: int) -> slice:
        """The nodes of one rank in order of time."""
        return slice(int(self.first[index]), int(self.first[index + 1]))

    def find(self, index: int, when_ns: Int64) -> Int64:
        """The last node of a rank at or before each instant of the recording; at least its
        first."""
        cuts = self.cut_ns[self.slice_rank(index)]
        at = np.maximum(np.searchsorted(cuts, when_ns, side="right") - 1, 0)
        return at + int(self.first[index])


class CommKernels(Struct, frozen=True):
    """The recorded collectives and messages, a row per event of a rank; columns of equal length.

    rank indexes the ranks of the split; call is the first of the rank's calls in the event and row
    the row of that call among all calls; start and end are nodes: its arrival and its end. resume
    is the node of the rank's timeline that waited for the event, -1 if none; step is the row of the
    steps in which it began; follows is the event of another stream after whose end it starts, -1 if
    none. of_row is the event of each row of MatchedCalls.
    """

    rank: Int64
    call: Int64
    row: Int64
    start: Int64
    end: Int64
    resume: Int64
    step: Int64
    follows: Int64
    of_row: Int64

    def __len__(self) -> int:
        return len(self.rank)

    def list_rows(self, index: int) -> Int64:
        """The rows of one rank, an index; they follow each other."""
        return np.arange(*np.searchsorted(self.rank, (index, index + 1)).tolist())


class StepEdges(Struct, frozen=True):
    """The steps of all ranks; begin and end are nodes. Columns of equal length.

    rank indexes the ranks of the split; full marks steps that enter the mean.
    """

    rank: Int64
    step: Int64
    full: np.ndarray[tuple[int], np.dtype[np.bool_]]
    begin: Int64
    end: Int64


class DependencyGraph(Struct, frozen=True):
    """The dependency graph of a run.

    A node is an instant of a rank's timeline, the arrival at a call, the synchronization of a call
    or its end. Its time is the latest of its dependencies (needs) and of its predecessor on the
    timeline (before, -1 for none) plus the work in between (work_ns, shape (nodes, WORK)), plus
    rest_ns. step is the row of the steps that contain a node's work, -1 if none. levels is a
    topological order. A replay of an unchanged graph reproduces the measured times.

    at_ns is the measured time of each node and binding its predecessor in the recording that
    determined it: the latest one, -1 for a node without predecessors.

    has_lasting_leads: a lead that a change gives a rank at the begin of the later steps is one at
    that of the first step, too; not after a change of single steps.
    """

    before: Int32
    work_ns: Int64
    step: Int32
    needs: Needs
    rest_ns: Int64
    levels: Levels
    timelines: TimelineNodes
    kernels: CommKernels
    steps: StepEdges
    at_ns: Int64
    binding: Int32
    has_lasting_leads: bool = True

    def __len__(self) -> int:
        return len(self.before)

    def find_ranks(self, nodes: Int64) -> Int64:
        """The index of the rank of each of these nodes, -1 for a synchronization."""
        first, kernels = self.timelines.first, self.kernels
        timeline = np.searchsorted(first, nodes, side="right") - 1
        event = (nodes - int(first[-1])) // 2
        of_event = np.append(kernels.rank, -1)[np.clip(event, -1, len(kernels))]
        return np.where(timeline < len(first) - 1, timeline, of_event)


# RunSplit -> DependencyGraph.


class _GraphParts(Struct, frozen=True):
    """The parts of a graph by rank.

    The nodes of all timelines come first, then two nodes per event, then the synchronization nodes.
    node, kernel and step are the offsets of each rank's nodes, events and steps.
    """

    mains: tuple[RankTimeline, ...]
    calls: tuple[CommCalls, ...]
    node: tuple[int, ...]
    kernel: tuple[int, ...]
    step: tuple[int, ...]

    @classmethod
    def build(cls, split: RunSplit) -> _GraphParts:
        rows = [split.matched.slice_trace(i) for i in range(len(split.ranks))]
        graphs = GraphLaunches.compare(rank.trace for rank in split.ranks)
        calls = tuple(
            build_comm_calls(rank, split.arrivals, own, graphs)
            for rank, own in zip(split.ranks, rows, strict=True)
        )
        mains = tuple(
            build_timeline(rank, made) for rank, made in zip(split.ranks, calls, strict=True)
        )
        return cls(
            mains,
            calls,
            _compute_offsets([len(main.at_ns) for main in mains]),
            _compute_offsets([len(made.call) for made in calls]),
            _compute_offsets([len(main.begin) for main in mains]),
        )

    @property
    def main_nodes(self) -> int:
        return self.node[-1]

    @property
    def measured_ns(self) -> Int64:
        """The measured time of each node of the timelines and of the events."""
        events = [np.stack((m.start_ns, m.end_ns), axis=1).ravel() for m in self.calls]
        return np.concatenate([*(main.at_ns for main in self.mains), *events])


def _compute_offsets(counts: Sequence[int]) -> tuple[int, ...]:
    """The offset of each part, and the end of the last."""
    return tuple(np.cumsum([0, *counts]).tolist())


def build_dependency_graph(split: RunSplit) -> DependencyGraph:
    """Build the graph of a recording."""
    # First the graph without levels, with the times of its nodes as measured.
    parts = _GraphParts.build(split)
    kernels = _build_kernels(parts, split)
    edges = _build_edges(parts, kernels, split)
    measured = parts.measured_ns
    count = int(max(len(measured) - 1, edges[0].max(initial=-1), edges[1].max(initial=-1))) + 1
    work = np.zeros((count, len(WORK)), dtype=np.int64, order="F")
    work[: parts.main_nodes] = np.concatenate([main.work_ns for main in parts.mains])
    step = np.full(count, -1, dtype=np.int32)
    step[: parts.main_nodes] = np.concatenate(
        [main.window + first for main, first in zip(parts.mains, parts.step, strict=False)]
    )
    before = np.full(count, -1, dtype=np.int32)
    before[1 : parts.main_nodes] = np.arange(parts.main_nodes - 1)
    before[[first for first in parts.node[:-1] if first < parts.main_nodes]] = -1
    # A synchronization has no recorded time of its own: it takes place when its last member
    # arrives.
    at = np.concatenate((measured, np.full(count - len(measured), NEVER)))
    into = edges[1] >= len(measured)
    np.maximum.at(at, edges[1][into], at[edges[0][into]])
    first = np.cumsum(np.append(0, np.bincount(edges[1], minlength=count)), dtype=np.int32)
    graph = DependencyGraph(
        before=before,
        work_ns=work,
        step=step,
        needs=Needs(first, edges[0][np.argsort(edges[1], kind="stable")].astype(np.int32)),
        rest_ns=np.zeros(count, dtype=np.int64),
        levels=NO_LEVELS,
        timelines=TimelineNodes(np.array(parts.node), measured[: parts.main_nodes].copy()),
        kernels=kernels,
        steps=_build_steps(parts, split),
        at_ns=at,
        binding=np.full(count, -1, dtype=np.int32),
    )
    levels = Levels.build(graph.before, graph.needs, graph.at_ns)
    # Arrivals and ends keep the delay that they have after their last dependency (a launch, a
    # transfer), so that a replay of the unchanged graph gives the measured times.
    total_ns, known_ns = graph.work_ns.sum(axis=1), np.full(len(graph), NEVER)
    events = np.concatenate((kernels.start, kernels.end))
    for known in (events, np.flatnonzero(~levels.has_sources)):
        known_ns[known] = graph.at_ns[known]
    times = levels.compute_times(total_ns, graph.rest_ns, known_ns)
    latest_ns, binding = levels.find_latest(times, total_ns)
    rest_ns = np.where(known_ns > NEVER, known_ns - latest_ns, 0)
    return replace(graph, levels=levels, rest_ns=rest_ns, at_ns=times, binding=binding)


def _build_kernels(parts: _GraphParts, split: RunSplit) -> CommKernels:
    calls, mains = parts.calls, parts.mains
    start = parts.main_nodes + 2 * np.arange(parts.kernel[-1], dtype=np.int64)
    resume = [
        np.where(made.blocking, main.find_cut(made.end_ns) + first, -1)
        for made, main, first in zip(calls, mains, parts.node, strict=False)
    ]
    step = []
    for made, main, first in zip(calls, mains, parts.step, strict=False):
        # The window of a cut is that of the work before it, so the next cut has that of the call.
        after = np.clip(main.find_cut(made.start_ns) + 1, 0, max(len(main.window) - 1, 0))
        step.append(np.append(main.window, -1)[after] + first)
    row = [made.call + split.matched.slice_trace(i).start for i, made in enumerate(calls)]
    return CommKernels(
        rank=np.repeat(np.arange(len(calls)), np.diff(parts.kernel)),
        call=np.concatenate([made.call for made in calls]),
        row=np.concatenate(row),
        start=start,
        end=start + 1,
        resume=np.concatenate(resume),
        step=np.concatenate(step),
        follows=np.concatenate(
            [
                np.where(made.follows >= 0, made.follows + first, -1)
                for made, first in zip(calls, parts.kernel, strict=False)
            ]
        ),
        of_row=np.concatenate(
            [made.of_call + first for made, first in zip(calls, parts.kernel, strict=False)]
        ),
    )


def _build_edges(parts: _GraphParts, kernels: CommKernels, split: RunSplit) -> Edges:
    """All dependencies except those along the timelines."""
    start_deps, behind, ended, found = [], [], [], []
    for made, main, node, first in zip(
        parts.calls, parts.mains, parts.node, parts.kernel, strict=False
    ):
        at = main.find_cut(made.awaited_ns[made.hidden])
        # A kernel after the last step is no part of the timeline.
        known = np.append(main.at_ns, _AFTER_ALL)[at] == made.awaited_ns[made.hidden]
        ended.append(kernels.end[made.hidden[known] + first])
        found.append(at[known] + node)
        cut = main.find_cut(made.start_dep_ns)
        start_deps.append(np.where(cut >= 0, cut + node, -1))
        behind.append(np.where(made.previous >= 0, made.previous + first, -1))
    start_dep, prior = np.concatenate(start_deps), np.concatenate(behind)
    resumed, started, queued, follows = (
        np.flatnonzero(part >= 0) for part in (kernels.resume, start_dep, prior, kernels.follows)
    )
    first_sync = parts.main_nodes + 2 * len(kernels)
    sync = build_sync_edges(split, kernels, first_sync)
    return (
        np.concatenate(
            (
                kernels.end[resumed],
                *ended,
                start_dep[started],
                kernels.end[prior[queued]],
                kernels.end[kernels.follows[follows]],
                sync[0],
            )
        ),
        np.concatenate(
            (
                kernels.resume[resumed],
                *found,
                kernels.start[started],
                kernels.start[queued],
                kernels.start[follows],
                sync[1],
            )
        ),
    )


def _build_steps(parts: _GraphParts, split: RunSplit) -> StepEdges:
    windows = [rank.windows.windows for rank in split.ranks]
    first = parts.node[:-1]
    return StepEdges(
        rank=np.repeat(np.arange(len(windows)), [len(own) for own in windows]),
        step=np.array([w.step for own in windows for w in own], dtype=np.int64),
        full=np.array([w.kind == "full" for own in windows for w in own], dtype=np.bool_),
        begin=np.concatenate([m.begin + f for m, f in zip(parts.mains, first, strict=True)]),
        end=np.concatenate([m.end + f for m, f in zip(parts.mains, first, strict=True)]),
    )


# The ranks' timelines, cut at each dependency.

_BEFORE_ALL, _AFTER_ALL = np.iinfo(np.int64).min, np.iinfo(np.int64).max
"""Instants before and after all that is recorded."""

_WORK_BUCKETS = [BUCKETS.index(name) for name in WORK]


class RankTimeline(Struct, frozen=True):
    """The timeline of one rank on the common clock, a row per cut.

    work_ns, shape (cuts, WORK), is the local work since the previous cut; window is the index of
    the step that contains it. begin and end are the cuts at which the steps begin and end.
    """

    at_ns: Int64
    work_ns: Int64
    window: Int64
    begin: Int64
    end: Int64

    def find_cut(self, when_ns: Int64) -> Int64:
        """The last cut at or before each instant, -1 before the first."""
        return np.searchsorted(self.at_ns, when_ns, side="right") - 1


_NOTHING = np.empty(0, dtype=np.int64)

_EMPTY_TIMELINE = RankTimeline(
    _NOTHING, np.empty((0, len(WORK)), dtype=np.int64), _NOTHING, _NOTHING, _NOTHING
)


def build_timeline(rank: RankSplit, calls: CommCalls) -> RankTimeline:
    """The timeline of a rank, cut at its calls; empty without steps."""
    clock, band = rank.clock, rank.attribution.band
    windows = rank.windows.windows
    if not windows:
        return _EMPTY_TIMELINE
    edges = clock.map_to_common_ns(
        np.array([(w.start_ns, w.end_ns) for w in windows], dtype=np.int64).reshape(-1, 2)
    )
    # A cut wherever the rank may depend on another one, so that a path can leave it there, and at
    # each forward and backward of a pipeline, because a change may be of one phase only.
    exposed = rank.attribution.exposed
    boxes = [box for grid in rank.grids for box in grid.slots]
    wanted = np.concatenate(
        (
            edges.ravel(),
            np.array([ns for box in boxes for ns in (box.start_ns, box.end_ns)], dtype=np.int64),
            clock.map_to_common_ns(exposed.start_ns[np.isin(exposed.bucket, WAITS)]),
            calls.end_ns[calls.blocking],
            calls.awaited_ns[calls.hidden],
            calls.start_dep_ns,
        )
    )
    at = np.unique(wanted[(wanted >= edges[0, 0]) & (wanted <= edges[-1, 1])])
    # A part of the band is communication only if a call that blocked the rank ends before compute
    # goes on or the step ends; else the rank was idle, and the call is hidden behind that.
    compute = rank.work.compute
    over = np.append(np.sort(clock.map_to_own_ns(calls.end_ns[calls.blocking])), _AFTER_ALL)
    step_ends = np.array([one.end_ns for one in windows], dtype=np.int64)
    resumes = np.append(np.sort(np.concatenate((compute.start_ns, step_ends))), _AFTER_ALL)
    waited = over[np.searchsorted(over, band.end_ns - _ROUNDING_NS)]
    goes_on = resumes[np.searchsorted(resumes, band.end_ns)]
    alone = waited > np.minimum(goes_on, _AFTER_ALL - _ROUNDING_NS) + _ROUNDING_NS
    bucket = np.where(np.isin(band.bucket, COMMUNICATION) & alone, Bucket.IDLE, band.bucket)
    bucket = bucket.astype(np.uint8)
    start, end = clock.map_to_common_ns(band.start_ns), clock.map_to_common_ns(band.end_ns)
    # The time in each bucket before each cut: that of all earlier parts of the band, and of the
    # part that contains the cut what lies before it.
    took, part = end - start, np.clip(np.searchsorted(start, at, side="right") - 1, 0, None)
    inside = np.clip(at, start[part], end[part]) - start[part]
    spent = np.empty((len(at), len(WORK)), dtype=np.int64)
    for column, kind in enumerate(_WORK_BUCKETS):
        own = np.where(bucket == kind, took, 0)
        spent[:, column] = (np.cumsum(own) - own)[part] + np.where(bucket[part] == kind, inside, 0)
    window = np.searchsorted(edges[:, 0], at, side="left") - 1
    return RankTimeline(
        at_ns=at,
        work_ns=np.diff(spent, axis=0, prepend=spent[:1]),
        window=np.clip(window, 0, len(windows) - 1),
        begin=np.searchsorted(at, edges[:, 0]),
        end=np.searchsorted(at, edges[:, 1]),
    )


# The arrivals that the end of each collective and message depends on.

_NEED_ALL = [OP_CODE[op] for op in (*SYMMETRIC_OPS, "all_to_all", "barrier", "unknown")]

Edges = tuple[Int64, Int64]
"""(source nodes, dependent nodes), of equal length."""


def build_sync_edges(split: RunSplit, kernels: CommKernels, first: int) -> Edges:
    """The edges from arrivals to ends.

    The members of a synchronizing call share one node, numbered from first on. A rooted collective
    depends only on the rank that arrived last before its end; a message depends on its peer, unless
    the sender finished before the receiver arrived.
    """
    matched, kernel = split.matched, kernels.of_row
    # The pairs of a rooted collective (broadcast, reduce): the call of the rank that arrived last,
    # and the call of each member.
    place = {rank.trace.rank: i for i, rank in enumerate(split.ranks)}
    rows = np.flatnonzero(
        (matched.shared >= 0) & ~matched.is_message & ~np.isin(matched.op, _NEED_ALL)
    )
    lead = {
        (call, trace): row
        for row, call, trace in zip(
            rows.tolist(), matched.shared[rows].tolist(), matched.trace[rows].tolist(), strict=True
        )
        if matched.leads[row]
    }
    pairs = [
        (lead[key], row)
        for row, call, rank in zip(
            rows.tolist(),
            matched.shared[rows].tolist(),
            split.arrivals.last[rows].tolist(),
            strict=True,
        )
        if (key := (call, place.get(rank, -1))) in lead
    ]
    both = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    rooted = kernels.start[kernel[both[:, 0]]], kernels.end[kernel[both[:, 1]]]
    # All others share a node.
    # A message needs both of its ranks, unless the sender finished before the receiver arrived.
    early = split.arrivals.end_ns < split.arrivals.moves_ns
    synchronizes = np.isin(matched.op, _NEED_ALL) | (matched.is_message & ~early)
    meet = np.flatnonzero((matched.shared >= 0) & synchronizes)
    node = first + group_ids(matched.shared[meet])
    who, arrives, waits = kernel[meet], matched.arrives[meet], matched.waits[meet]
    return (
        np.concatenate((kernels.start, rooted[0], kernels.start[who[arrives]], node[waits])),
        np.concatenate((kernels.end, rooted[1], node[arrives], kernels.end[who[waits]])),
    )


# The collectives and messages of one rank as device events (gloo: as calls).

LAUNCH_LATENCY_NS = 20_000
"""A kernel starts within this time of the last event that it depends on."""

_SOON_ON_HOST_NS = 500_000

_ROUNDING_NS = 10_000
"""Kernels of one stream overlap by up to this much, because timestamps and clocks are rounded."""

CLOSE_NS = 5_000
"""An event may seem to begin by so much before the one that it waited for ends, as ends may be
recorded late. A choice: 3 us, as some simulated jobs have it, and 1 us of rounding at either time.
In recorded jobs with NCCL (five of HTA's examples, Megatron on V100) ends are not late: of 99
kernels on an idle stream that begin within 10 us of one, 98 begin 1 us or more after it."""

_USUAL_GAP_NS = 3_000
"""Between two kernels of one stream that wait for nothing pass 1 to 3 us."""

_WAIT_DIVISOR = 4
"""Work that starts within the soon limits, or within 1/4 of the wait, was waiting as well."""


class CommCalls(Struct, frozen=True):
    """The events of a rank's calls in order of start; columns of equal length.

    of_call is the event of each call. Then, per event: the instant of the rank's timeline that its
    start depends on, the previous event on the same stream (-1 for none), the event of another
    stream after whose end it starts (-1 for none), whether it blocked the rank until its end, and,
    if it ended before that, the instant at which a kernel started that waited for it (_AFTER_ALL if
    not known).
    """

    call: Int64
    of_call: Int64
    start_ns: Int64
    end_ns: Int64
    start_dep_ns: Int64
    previous: Int64
    follows: Int64
    blocking: Bool
    awaited_ns: Int64

    @property
    def hidden(self) -> Int64:
        """The events that had ended before the kernel that waited for them started."""
        return np.flatnonzero(self.awaited_ns != _AFTER_ALL)


def build_comm_calls(
    rank: RankSplit, arrivals: Arrivals, rows: slice, graphs: GraphLaunches
) -> CommCalls:
    """The events of a rank; rows is the slice of its calls among all calls."""
    trace = rank.trace
    # Calls of one kernel are one event. gloo has no kernels: each call is its own event.
    label = group_ids(trace.calls.event) if trace.on_device else np.arange(len(trace.calls))
    count = int(label.max(initial=-1)) + 1
    start = -group_max(label, -arrivals.start_ns[rows], count)
    life = rank.clock.map_to_common_ns(rank.pieces.life_end_ns[: len(label)])
    end = group_max(label, np.maximum(life, arrivals.start_ns[rows]), count)
    order = np.lexsort((end, start))
    place = np.empty(count, dtype=np.int64)
    place[order] = np.arange(count)
    of_call = place[label]
    call = np.zeros(count, dtype=np.int64)
    call[of_call[::-1]] = np.arange(len(label))[::-1]
    # Nor has gloo streams: each event gets its own.
    lane = trace.events.lane[trace.calls.event[call]] if trace.on_device else np.arange(len(call))
    lane = lane.astype(np.int64)
    start, end = start[order], end[order]
    # An event of another stream that begins just before this one ends may have waited for it, so
    # it is taken to end when that one begins.
    after = np.searchsorted(start, np.maximum(end - CLOSE_NS, start + 1), side="left")
    begun = np.append(start, _AFTER_ALL)[after]
    elsewhere = np.append(lane, -1)[after] != lane
    end = np.where(elsewhere, np.minimum(end, begun), end)
    behind = _find_previous(lane, start, end)
    # A message may end before the kernel that waits for it starts: it is hidden then, and that
    # kernel depends on it.
    awaited = np.full(len(call), _AFTER_ALL)
    receives = np.flatnonzero(trace.calls.op == OP_CODE["recv"])
    received, one = np.unique(of_call[receives], return_index=True)
    if trace.on_device and len(received):
        kernels = np.flatnonzero(trace.kinds.computes)
        kernels = kernels[is_on_main_stream(trace, kernels)]
        first = find_first_waiting(trace, kernels, receives[one])
        known = first >= 0
        awaited[received[known]] = rank.clock.map_to_common_ns(trace.events.start_ns[first[known]])
    blocking = _find_blocking(rank, of_call, lane, start, end, awaited)
    hidden = ~blocking & (end <= awaited)
    return CommCalls(
        call=call,
        of_call=of_call,
        start_ns=start,
        end_ns=end,
        start_dep_ns=_find_start_dep_ns(
            rank, call, start, np.where(behind >= 0, end[behind], _BEFORE_ALL), graphs
        ),
        previous=behind,
        follows=_find_followed(trace, lane, start, end, behind),
        blocking=blocking,
        awaited_ns=np.where(hidden, awaited, _AFTER_ALL),
    )


def _find_blocking(
    rank: RankSplit, of_call: Int64, lane: Int64, start: Int64, end: Int64, awaited: Int64
) -> Bool:
    """Which events blocked the rank; awaited is when the first kernel started that waited for each.

    In each compute gap these are the event that ended last and events at whose end another one
    began on another stream. Other events ended there by coincidence; so did, on a device, events
    that ended in a gap no longer than is usual between two kernels, or while the host was late,
    unless the host was synchronizing. Of several that ended right before compute resumed, one that
    only a later kernel waited for is a coincidence, too, and so is a send of a script that does not
    wait for its sends.
    """
    gap = np.full(len(start), -1)
    gap[of_call[: len(rank.attribution.gap)]] = rank.attribution.gap
    resumes = np.append(rank.clock.map_to_common_ns(rank.work.compute.start_ns), _AFTER_ALL)
    # Of the events that ended just before their gap did.
    just = (gap >= 0) & (resumes[gap] - end <= LAUNCH_LATENCY_NS)
    later = just & (awaited != _AFTER_ALL) & (awaited > resumes[gap])
    later |= just & _find_sends_without_wait(rank, of_call, start, end)
    gap[later & np.isin(gap, gap[just & ~later])] = -1
    rows = np.flatnonzero(gap >= 0)
    rows = rows[np.lexsort((end[rows], gap[rows]))]
    soon = np.full(len(rows), LAUNCH_LATENCY_NS)
    if not rank.trace.on_device:
        # A host that has waited may need a while until it makes its next call.
        soon = np.maximum(_SOON_ON_HOST_NS, (end - start)[rows] // _WAIT_DIVISOR)
    after = np.searchsorted(start, end[rows], side="left")
    begun = np.append(start, _AFTER_ALL)[after]
    elsewhere = np.append(lane, -1)[after] != lane[rows]
    begins = (begun - end[rows] <= soon) & elsewhere
    last = np.append(gap[rows][1:] != gap[rows][:-1], True)[: len(rows)]
    if rank.trace.on_device:
        # The event that ended last is why the rank resumed if compute started soon after, relative
        # to the wait, or if the host was synchronizing with the device.
        own, compute = rank.clock.map_to_own_ns(end[rows]), rank.work.compute
        begin = np.append(_BEFORE_ALL // 2, compute.end_ns)[gap[rows]]
        resume = np.append(compute.start_ns, _AFTER_ALL)[gap[rows]]
        waited, late = own - begin, resume - own
        events = rank.trace.events
        waits = events.is_category(Category.RUNTIME) & events.match_names(SYNCHRONIZES)
        synchronizing = union(events.start_ns[waits], events.ends_of(waits))
        soon_after = np.maximum(LAUNCH_LATENCY_NS, waited // _WAIT_DIVISOR)
        unusual = resume - begin > _USUAL_GAP_NS
        last &= unusual & ((late <= soon_after) | is_inside(synchronizing, own))
    blocking = np.zeros(len(start), dtype=np.bool_)
    blocking[rows[begins | last]] = True
    return blocking


def _find_sends_without_wait(rank: RankSplit, of_call: Int64, start: Int64, end: Int64) -> Bool:
    """The events that only send, of a rank that computes beside several of them.

    A send starts when the compute launched before it is done: what runs beside it was launched
    after it and did not wait for it.
    """
    sends = np.ones(len(start), dtype=np.bool_)
    sends[of_call[rank.trace.calls.op != OP_CODE["send"]]] = False
    if not rank.trace.on_device or not sends.any():
        return np.zeros(len(start), dtype=np.bool_)
    compute = rank.work.compute
    resumes = rank.clock.map_to_common_ns(compute.start_ns)
    begun = np.searchsorted(resumes, start + LAUNCH_LATENCY_NS)
    beside = sends & (np.append(resumes, _AFTER_ALL)[begun] < end - LAUNCH_LATENCY_NS)
    beside |= sends & is_inside(compute, rank.clock.map_to_own_ns((start + end) // 2))
    return sends & bool(beside.sum() >= _SEVERAL)


def _find_previous(lane: Int64, start: Int64, end: Int64) -> Int64:
    """For each event the previous one on its stream, else -1.

    A stream runs in order: of two of its kernels that overlap by less than _ROUNDING_NS the second
    one waited for the first one.
    """
    order = np.argsort(lane, kind="stable")
    before, after = order[:-1], order[1:]
    follows = (lane[before] == lane[after]) & (end[before] - start[after] <= _ROUNDING_NS)
    behind = np.full(len(lane), -1)
    behind[after[follows]] = before[follows]
    return behind


_FOLLOWS_NS = 5_000
"""A kernel that waited for an event of another stream starts within so much of it: 1 to 3 us."""

_MOSTLY, _SEVERAL = 0.8, 4
"""Streams follow each other if at least this share of the kernels do, and so many: by coincidence
some start when another one ends."""


def _find_followed(trace: RankTrace, lane: Int64, start: Int64, end: Int64, behind: Int64) -> Int64:
    """For each event the one of another stream after whose end it starts, else -1: HSDP's
    all_reduce of the shards follows their reduce_scatter.

    Only between streams of which nearly all kernels do so that do not queue on their own stream.
    """
    followed = np.full(len(start), -1)
    if not trace.on_device:
        return followed
    free = (behind < 0) | (end[behind] < start - _FOLLOWS_NS)
    by_end = np.argsort(end, kind="stable")
    for own in np.unique(lane).tolist():
        mine = np.flatnonzero((lane == own) & free)
        if len(mine) < _SEVERAL:
            continue
        for other in np.unique(lane).tolist():
            theirs = by_end[lane[by_end] == other]
            if other == own:
                continue
            at = np.searchsorted(end[theirs], start[mine] + CLOSE_NS, side="right") - 1
            last = theirs[np.maximum(at, 0)]
            after = (
                (at >= 0) & (start[mine] - end[last] <= _FOLLOWS_NS) & (start[last] < start[mine])
            )
            if after.sum() >= max(_SEVERAL, _MOSTLY * len(mine)):
                followed[mine[after]] = last[after]
    return followed


def _find_start_dep_ns(
    rank: RankSplit, call: Int64, start: Int64, free_ns: Int64, graphs: GraphLaunches
) -> Int64:
    """The instant of the rank's timeline that the start of each event depends on.

    A kernel depends on the compute launched before it, if it started soon after that and after its
    stream was free (free_ns), or while the rank computed. A kernel that started late in a compute
    gap, and any gloo call, depends on the timeline at its own start.
    """
    if not rank.trace.on_device:
        return start
    own_launched = _find_launched_before(rank.trace, rank.trace.calls.event[call], graphs)
    launched = rank.clock.map_to_common_ns(own_launched)
    known = (own_launched >= 0) & (launched <= start)
    soon = start - np.maximum(launched, free_ns) <= LAUNCH_LATENCY_NS
    own = rank.clock.map_to_own_ns(start)
    compute = rank.work.compute
    last = np.searchsorted(compute.start_ns, own, side="left") - 1
    under = last >= 0
    under[under] = compute.end_ns[last[under]] > own[under]
    return np.where(known & (soon | under), launched, start)


def _find_launched_before(trace: RankTrace, event: Int64, graphs: GraphLaunches) -> Int64:
    """The end of the last compute kernel on the main stream that was launched before each event, on
    the rank's own clock; -1 if there is none."""
    events, rows = trace.events, _list_main_kernels(trace)
    launched = events.find_launch_ns(rows)
    order = np.lexsort((events.start_ns[rows], launched))
    order = order[launched[order] >= 0]
    ends = np.maximum.accumulate(events.ends_of(rows[order]))
    called = events.find_launch_ns(event)
    before = np.searchsorted(launched[order], called, side="left")
    found = np.full(len(events), -1)
    found[event] = np.where(called >= 0, np.append(-1, ends)[before], -1)
    for launch in graphs.launches[trace.rank]:
        at = graphs.fewest[launch.key]
        has = at >= 0
        own = launch.events[has]
        found[own] = np.minimum(launch.ends_ns[at[has]], events.start_ns[own])
    return found[event]


def _list_main_kernels(trace: RankTrace) -> Int64:
    """The compute kernels of the main streams."""
    kernels = trace.events.is_category(Category.KERNEL)
    kernels[trace.calls.event] = False
    rows = np.flatnonzero(kernels)
    return rows[is_on_main_stream(trace, rows)]


class _GraphLaunch(Struct, frozen=True):
    """One launch of a graph: its collectives and messages, by stream and start; the ends of its
    compute kernels in order; how many of these, less one, had ended when each call started. key is
    the same for launches that run the same kernels and calls in the same order."""

    key: int
    events: Int64
    ends_ns: Int64
    at: Int64


class GraphLaunches(Struct, frozen=True):
    """What calls in graphs start after.

    A graph launches all its kernels at once. Of its compute, that counts that had ended when a call
    started, in the launch on whichever rank in which it is the least: in others the call queued on
    its stream.
    """

    launches: dict[int, list[_GraphLaunch]]
    fewest: dict[int, Int64]

    @classmethod
    def compare(cls, traces: Iterable[RankTrace]) -> GraphLaunches:
        """Compare the launches of graphs of all ranks."""
        launches = {trace.rank: _list_graph_launches(trace) for trace in traces}
        fewest: dict[int, Int64] = {}
        for one in chain.from_iterable(launches.values()):
            fewest[one.key] = np.minimum(fewest.get(one.key, one.at), one.at)
        return cls(launches, fewest)


def _list_graph_launches(trace: RankTrace) -> list[_GraphLaunch]:
    if not trace.on_device:
        return []
    events, rows = trace.events, _list_main_kernels(trace)
    event, first = np.unique(trace.calls.event, return_index=True)
    # Launches of one time are not one launch.
    launches, own_launch = events.find_launches(rows), events.find_launches(event)
    is_launch = np.zeros(len(events) + 1, dtype=np.bool_)  # the last one of kernels without (-1)
    is_launch[launches] = True
    in_graph = is_launch[own_launch] & (own_launch >= 0)
    if not in_graph.any():
        return []
    name = np.array([hash(one) for one in events.names], dtype=np.int64)
    by_end = rows[np.lexsort((events.ends_of(rows), launches))]
    of_launch = events.find_launches(by_end)
    found = []
    for launch in np.unique(own_launch[in_graph]).tolist():
        own = by_end[slice(*np.searchsorted(of_launch, (launch, launch + 1)).tolist())]
        mine = np.flatnonzero((own_launch == launch) & in_graph)
        mine = mine[np.lexsort((events.start_ns[event[mine]], events.lane[event[mine]]))]
        lanes = np.unique(events.lane[event[mine]], return_inverse=True)[1]
        ops = trace.calls.op[first[mine]]
        key = hash((name[events.name_id[own]].tobytes(), lanes.tobytes(), ops.tobytes()))
        start = events.start_ns[event[mine]]
        at = np.searchsorted(events.ends_of(own), start + CLOSE_NS, side="right") - 1
        found.append(_GraphLaunch(key, event[mine], events.ends_of(own), at))
    return found
