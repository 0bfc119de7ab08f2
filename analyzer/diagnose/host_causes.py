"""Bottlenecks on the host: data loading, allocation, garbage collection, synchronization, and ranks
that idle or copy longer than their peers; each with the place in the user's code."""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from stepsplit.analyzer import units
from stepsplit.analyzer.arrays import Intervals, intersect, is_inside, union
from stepsplit.analyzer.buckets import Bucket
from stepsplit.analyzer.diagnose.graph.dependency_graph import WORK, DependencyGraph
from stepsplit.analyzer.diagnose.graph.replay import (
    Float,
    Remedy,
    ReplayContext,
    WeightedSpans,
    measure_excess,
    measure_spans,
    reduce_work,
)
from stepsplit.analyzer.report.explain import explain_idle
from stepsplit.analyzer.report.report import MIN_GAIN_SHARE, EventRef, Finding
from stepsplit.analyzer.split.host_threads import NestedEvents, build_nested
from stepsplit.analyzer.split.idle import CAUSES, IdleCause
from stepsplit.analyzer.trace import PYTHON_FUNCTION, Bool, Category, Events, Int64
from stepsplit.collectors.formats.rank_record import CodeFrame, RankRecord

# The findings of a recording.


class HostCauses(Struct, frozen=True):
    """ranks: what costs single ranks time, each with its remedy; common: what costs all of them."""

    ranks: tuple[Remedy, ...]
    common: tuple[Finding, ...]


def find_host_causes(context: ReplayContext) -> HostCauses:
    """Find what the hosts cost.

    Data loading, allocation, garbage collection and common synchronization are findings of their
    own if they cost enough, and then left out of the idle time in which ranks are compared.
    """
    ranks = range(len(context.ranks))
    first = np.cumsum([0, *(len(rank.steps) for rank in context.split.ranks)])
    parts = [_collect_rank_idle(context, rank, int(first[rank])) for rank in ranks]
    host = _HostTime(
        context,
        _HostIdle(
            rank=np.concatenate([part.rank for part in parts]),
            step=np.concatenate([part.step for part in parts]),
            start_ns=np.concatenate([part.start_ns for part in parts]),
            end_ns=np.concatenate([part.end_ns for part in parts]),
            cause=np.concatenate([part.cause for part in parts]),
        ),
        context.graph,
    )
    named = [
        found
        for cause in _NAMED_CAUSES
        if (found := _find_named(host, cause)) is not None
        and found.remedy.finding.gain_ns >= MIN_GAIN_SHARE * context.mean_ns
    ]
    host = host.set_aside(named)
    late = (one for work in _LATE_RANK_TEXTS for one in _find_late_ranks(host, work))
    removable = (one.remedy for one in named if one.cause != _SYNCHRONIZE)
    synchronizing = (one.remedy.finding for one in named if one.cause == _SYNCHRONIZE)
    return HostCauses((*removable, *late), (*synchronizing, _find_host_bound(host)))


# The idle time caused by the hosts.

_GC_PAUSE, _SYNCHRONIZE = "gc_pause", "synchronize"

_NOT_HOST_CAUSES = ("launch_latency", "dependency", "late_start", "unknown")

_SPECIFIC_CAUSES = ("data_loading", "allocation", "synchronize")
"""A garbage collection inside of these is part of them."""


class _HostIdle(Struct, frozen=True):
    """Idle time caused by hosts, on each rank's own clock and sorted by rank and start; columns.

    rank is an index of the context's ranks, step a row of its steps, cause a name of CAUSES or
    gc_pause.
    """

    rank: Int64
    step: Int64
    start_ns: Int64
    end_ns: Int64
    cause: npt.NDArray[np.str_]

    def select(self, rows: Bool) -> _HostIdle:
        return _HostIdle(
            self.rank[rows], self.step[rows], self.start_ns[rows], self.end_ns[rows],
            self.cause[rows],
        )  # fmt: skip

    def get_intervals(self, rank: int) -> Intervals:
        own = self.rank == rank
        return Intervals(self.start_ns[own], self.end_ns[own])


def _collect_rank_idle(context: ReplayContext, rank: int, first_step: int) -> _HostIdle:
    """The idle time of one rank; first_step is the row of its first step."""
    split, parts = context.split.ranks[rank], context.split.detail.idle_parts[rank]
    order = np.argsort(parts.start_ns, kind="stable")
    cause = np.array(CAUSES)[parts.cause[order]]
    window = split.attribution.band.window[parts.gap[order]]
    cut = intersect(
        Intervals(parts.start_ns[order], parts.end_ns[order]), _find_gc_cells(context, rank)
    )
    in_pause = (cut.right % 2 == 1) & ~np.isin(cause[cut.left], _SPECIFIC_CAUSES)
    found = _HostIdle(
        rank=np.full(len(cut.left), rank),
        step=first_step + window[cut.left].astype(np.int64),
        start_ns=cut.start_ns,
        end_ns=cut.end_ns,
        cause=np.where(in_pause, _GC_PAUSE, cause[cut.left]),
    )
    return found.select(~np.isin(found.cause, _NOT_HOST_CAUSES))


def _find_gc_cells(context: ReplayContext, rank: int) -> Intervals:
    """All time, cut at the begin and end of each garbage collection: every second cell is one."""
    pauses = [p for one in _find_records(context, rank) for p in one.host.gc_pauses]
    t0_ns = context.split.ranks[rank].trace.t0_unix_ns
    starts = np.array([one.at_unix_ns for one in pauses], dtype=np.int64) - t0_ns
    covered = union(starts, starts + np.array([one.took_ns for one in pauses], dtype=np.int64))
    limits = np.iinfo(np.int64)
    inner = np.column_stack((covered.start_ns, covered.end_ns)).ravel()
    edges = np.concatenate(([limits.min], inner, [limits.max]))
    return Intervals(edges[:-1], edges[1:])


def _find_records(context: ReplayContext, rank: int) -> list[RankRecord]:
    return [one for one in context.records if one.rank.rank == context.ranks[rank]]


@dataclass(frozen=True, slots=True)
class _HostTime:
    """The input of every search here: named are the findings that were made before it, rest is the
    graph without their idle time."""

    context: ReplayContext
    idle: _HostIdle
    rest: DependencyGraph
    named: tuple[_NamedCause, ...] = ()

    def set_aside(self, named: Sequence[_NamedCause]) -> _HostTime:
        """The time without what these findings explain."""
        rest = self.context.graph
        for one in named:
            rest = one.remedy.change(rest)
        return replace(self, rest=rest, named=tuple(named))

    def is_unnamed(self, cause: str) -> bool:
        return all(one.cause != cause for one in self.named)

    def sum_rest_ns(self) -> Float:
        """The idle time of each step that hosts caused, without that of the named causes."""
        total = _sum_steps_ns(self.context, self.idle)
        for one in self.named:
            total = total - one.removed_ns
        return total

    def select_rest(self, rank: int | None = None) -> _HostIdle:
        """The idle time without named causes, of one rank or of all."""
        rows = ~np.isin(self.idle.cause, [one.cause for one in self.named])
        return self.idle.select(rows if rank is None else rows & (self.idle.rank == rank))


def _sum_steps_ns(context: ReplayContext, idle: _HostIdle) -> Float:
    """The sum of idle time in each row of the steps."""
    spent = (idle.end_ns - idle.start_ns).astype(np.float64)
    sums = np.bincount(idle.step, spent, minlength=len(context.stage))
    return np.asarray(sums, dtype=np.float64)


def _compute_step_median(context: ReplayContext, values: Float) -> Float:
    """For each row, the lower median over the ranks of its step."""
    steps = context.graph.steps
    medians = np.zeros(len(values))
    for step in np.unique(steps.step).tolist():
        rows = np.flatnonzero(steps.step == step)
        medians[rows] = np.sort(values[rows])[(len(rows) - 1) // 2]
    return medians


# Causes of idle time that are findings of their own.

_NAMED_CAUSES = {
    "data_loading": ("data_loading", "{who} waits for its data loader {share} of the step"),
    "allocation": ("allocation", "{who} allocates or frees memory within the step: GPU idle "
                   "{share} of it"),
    _GC_PAUSE: ("gc_pause", "Python's garbage collector stops {who} for {share} of the step"),
    _SYNCHRONIZE: ("host_sync", "{who} waits for its device and launches late: GPU idle {share} of "
                   "the step"),
}  # fmt: skip
"""By cause: the code of its finding and the begin of its message."""


class _NamedCause(Struct, frozen=True):
    """A cause of idle time with its finding; removed_ns: its time in each row of the steps."""

    cause: str
    removed_ns: Float
    remedy: Remedy


def _find_named(host: _HostTime, cause: str) -> _NamedCause | None:
    """The finding for all idle time with this cause.

    Of synchronization only what all ranks have: a host that stalls after it is late, and not
    because of it.
    """
    context, idle = host.context, host.idle.select(host.idle.cause == cause)
    if not len(idle.rank):
        return None
    spent_ns = _sum_steps_ns(context, idle)
    removed_ns = spent_ns
    if cause == _SYNCHRONIZE:
        removed_ns = np.minimum(spent_ns, _compute_step_median(context, spent_ns))
    part = removed_ns / np.maximum(spent_ns, 1)
    cut_ns = _measure_cut(context, idle, part)

    def remove(graph: DependencyGraph) -> DependencyGraph:
        return reduce_work(graph, "idle", cut_ns)

    mean_ns = _compute_rank_means(context, removed_ns)
    ranks = np.flatnonzero(mean_ns > _MIN_LATE_SHARE * context.mean_ns)
    if not len(ranks):
        return None
    mine = np.isin(context.graph.steps.rank, ranks) & (removed_ns > 0) & context.counted
    code, text = _NAMED_CAUSES[cause]
    share = units.format_percent(float(mean_ns[ranks].mean()) / context.mean_ns)
    finding = Finding(
        code=code,
        bucket="idle",
        gain_ns=context.compute_gain_ns(remove(context.graph)),
        measured_ns=int(mean_ns[ranks].mean()),
        predicted_ns=0,
        ranks=() if len(ranks) == len(context.ranks) else tuple(context.ranks[ranks].tolist()),
        steps=context.list_steps(mine),
        events=_list_longest_parts(context, idle),
        message=text.format(who=_name_ranks(context, ranks), share=share)
        + _describe_cause(context, cause, ranks)
        + describe_place(context, idle.select(np.isin(idle.rank, ranks))),
    )
    return _NamedCause(cause, removed_ns, Remedy(finding, remove))


def _measure_cut(context: ReplayContext, idle: _HostIdle, part: Float) -> Int64:
    """For each node of the graph, the idle time before it that is due to this, times the part of
    its step.

    A host may also be late while communication moves data, which is not idle time of the split: it
    then has the causes of the idle time in the same gap between kernels.
    """
    shares = [_measure_gap_shares(context, idle, index) for index in range(len(context.ranks))]
    whole = [replace(one, weight=np.ones(len(one.weight))) for one in shares]
    covered = np.maximum(measure_spans(context.graph, whole), 1.0)
    ratio = measure_spans(context.graph, shares) / covered
    step, spent = context.graph.step, context.graph.work_ns[:, WORK.index("idle")]
    return np.rint(ratio * spent * np.where(step >= 0, part[step], 0)).astype(np.int64)


def _measure_gap_shares(context: ReplayContext, idle: _HostIdle, index: int) -> WeightedSpans:
    """The gaps between kernels of a rank that have idle time, and what share of it this is."""
    rank = context.split.ranks[index]
    band = rank.attribution.band
    busy = np.isin(band.bucket, (Bucket.COMPUTE, Bucket.COPY))
    gaps = union(band.start_ns[~busy], band.end_ns[~busy])
    is_idle = band.bucket == Bucket.IDLE
    idle_ns = _sum_overlaps(gaps, Intervals(band.start_ns[is_idle], band.end_ns[is_idle]))
    own_ns = _sum_overlaps(gaps, idle.get_intervals(index))
    rows = idle_ns > 0
    to_common = rank.clock.map_to_common_ns
    return WeightedSpans(
        to_common(gaps.start_ns[rows]), to_common(gaps.end_ns[rows]), own_ns[rows] / idle_ns[rows]
    )


def _sum_overlaps(spans: Intervals, others: Intervals) -> Float:
    """For each span, its overlap with the others."""
    both = intersect(spans, others)
    lengths = (both.end_ns - both.start_ns).astype(np.float64)
    return np.asarray(np.bincount(both.left, lengths, minlength=len(spans)), dtype=np.float64)


def _compute_rank_means(context: ReplayContext, values: Float) -> Float:
    """The mean of a column over the counted steps of each rank."""
    rank, counted = context.graph.steps.rank, context.counted
    sums = np.bincount(rank, values * counted, minlength=len(context.ranks))
    return sums / np.maximum(np.bincount(rank, counted, minlength=len(context.ranks)), 1)


def _name_ranks(context: ReplayContext, ranks: Int64) -> str:
    if len(ranks) == 1:
        return f"rank {context.ranks[ranks[0]]}"
    if len(ranks) == len(context.ranks):
        return "every rank"
    return f"each of ranks {units.format_number_list(context.ranks[ranks].tolist())}"


def _list_longest_parts(context: ReplayContext, idle: _HostIdle) -> tuple[EventRef, ...]:
    longest = np.argsort(idle.start_ns - idle.end_ns, kind="stable")[:3]
    return tuple(
        EventRef(
            context.split.ranks[rank].trace.rank,
            context.split.ranks[rank].clock.map_instant_to_common_ns(start) - context.origin_ns,
            end - start,
            "idle",
        )
        for rank, start, end in zip(
            idle.rank[longest].tolist(),
            idle.start_ns[longest].tolist(),
            idle.end_ns[longest].tolist(),
            strict=True,
        )
    )


_IN_PROCESS_LOADER = "_SingleProcessDataLoaderIter"


def _describe_cause(context: ReplayContext, cause: str, ranks: Int64) -> str:
    """What is known of the cause besides its time; "" if nothing."""
    if cause == _GC_PAUSE:
        pauses = [
            pause
            for rank in ranks.tolist()
            for one in _find_records(context, rank)
            for pause in one.host.gc_pauses
        ]
        longest = max(pauses, key=lambda pause: pause.took_ns)
        return (
            f" (up to {units.format_milliseconds(longest.took_ns)} at once, generation "
            f"{longest.generation}); gc.freeze() after the setup shortens it"
        )
    ops = Counter[str]()
    for rank in ranks.tolist():
        for one in context.split.detail.idle[rank]:
            if one.cause == cause and one.op:
                ops[one.op] += one.idle_ns
    op = max(ops, key=lambda name: ops[name], default="")
    if cause == "data_loading":
        in_process = "; it loads in the training process (num_workers=0)"
        return in_process if _IN_PROCESS_LOADER in op else ""
    text = f"; mostly in {op}" if op else ""
    return text + (_describe_retries(context, ranks) if cause == "allocation" else "")


def _describe_retries(context: ReplayContext, ranks: Int64) -> str:
    memories = [
        one.memory
        for rank in ranks.tolist()
        for one in _find_records(context, rank)
        if one.memory is not None
    ]
    retries = sum(memory.allocation_retries or 0 for memory in memories)
    return f"; the allocator ran full {retries} times and freed its cache" if retries else ""


# Ranks that idle or copy longer than their peers, and idle time common to all ranks (host-bound).

_LATE_RANK_TEXTS = {
    "idle": ("host_stall", "rank {rank} is host-bound: its idle time exceeds that of its peers by "
             "{more} of the step"),
    "copy": ("slow_copy", "rank {rank} is slowed by memory copies: its copy time exceeds that of "
             "its peers by {more} of the step"),
}  # fmt: skip

_MIN_LATE_SHARE = 0.005
"""Ranks that idle or copy less than this fraction of the mean step beyond their peers are fine."""


def _find_late_ranks(host: _HostTime, work: str) -> list[Remedy]:
    """A finding for each rank that spends more time idle, or copying, than its peers."""
    context = host.context
    spent = replace(context, graph=host.rest).sum_work_ns(work)
    usual = _compute_step_median(context, spent.astype(np.float64))
    mean = _compute_rank_means(context, np.maximum(spent - usual, 0))
    late = np.flatnonzero(mean > _MIN_LATE_SHARE * context.mean_ns).tolist()
    return [_build_late_rank_remedy(host, work, index, spent, usual) for index in late]


def _build_late_rank_remedy(
    host: _HostTime, work: str, index: int, spent: Int64, usual: Float
) -> Remedy:
    context = host.context
    own = (context.graph.steps.rank == index) & context.counted
    mine = own & (spent > usual)
    cut_ns = measure_excess(host.rest, work, np.where(mine, usual, spent))

    def shorten(graph: DependencyGraph) -> DependencyGraph:
        return reduce_work(graph, work, cut_ns)

    code, words = _LATE_RANK_TEXTS[work]
    rank, excess = int(context.ranks[index]), np.where(mine, spent - usual, 0.0)
    more = float(excess[own].mean()) / context.mean_ns
    finding = Finding(
        code=code,
        bucket=work,
        gain_ns=context.compute_gain_ns(shorten(context.graph)),
        measured_ns=int(spent[own].mean()),
        predicted_ns=int(np.minimum(spent, usual)[own].mean()),
        ranks=(rank,),
        steps=context.list_steps(mine),
        events=context.list_longest(index, work),
        message=words.format(rank=rank, more=units.format_percent(more))
        + _name_only_step(context, excess, own)
        + (_explain_late_rank(host, index, mine) if work == "idle" else ""),
    )
    return Remedy(finding, shorten)


_NEARLY_ALL, _SEVERAL = 0.9, 3


def _name_only_step(context: ReplayContext, excess: Float, own: Bool) -> str:
    """The step with nearly all of a rank's excess; "" if there is none, or hardly another step."""
    largest = int(np.argmax(excess))
    if own.sum() < _SEVERAL or excess[largest] < _NEARLY_ALL * excess.sum():
        return ""
    return f", nearly all of it in step {context.graph.steps.step[largest]}"


def _explain_late_rank(host: _HostTime, index: int, rows: Bool) -> str:
    """What these rows of the rank's steps idle for, and where."""
    context = host.context
    first = int(np.flatnonzero(context.graph.steps.rank == index)[0])
    windows = set((np.flatnonzero(rows) - first).tolist())
    causes = [
        one
        for one in context.split.detail.idle[index]
        if one.window in windows and host.is_unnamed(one.cause)
    ]
    idle = host.select_rest(index)
    reason = explain_idle(causes)
    return (f"; {reason}" if reason else "") + describe_place(context, idle.select(rows[idle.step]))


def _find_host_bound(host: _HostTime) -> Finding:
    """The finding for the idle time that all ranks have in common."""
    context = host.context
    common = _compute_step_median(context, host.sum_rest_ns())
    idle = replace(context, graph=host.rest).sum_work_ns("idle")
    cut_ns = measure_excess(host.rest, "idle", np.maximum(idle - common, 0))
    share = float(common[context.counted].mean()) / context.mean_ns
    what = "GPU idle" if context.split.ranks[0].trace.on_device else "idle"
    where = {1: "", 2: " on both ranks"}.get(len(context.ranks), " on most ranks")
    return Finding(
        code="host_bound",
        bucket="idle",
        gain_ns=context.compute_gain_ns(reduce_work(context.graph, "idle", cut_ns)),
        measured_ns=int(idle[context.counted].mean()),
        predicted_ns=None,
        ranks=(),
        steps=context.list_steps(context.counted),
        events=(),
        message=(
            f"{what} {units.format_percent(share)} of the step{where} (host-bound); "
            f"{explain_idle(_list_host_causes(host))}"
            f"{describe_place(context, host.select_rest(), common=True)}"
        ),
    )


def _list_host_causes(host: _HostTime) -> list[IdleCause]:
    return [
        one
        for causes in host.context.split.detail.idle
        for one in causes
        if one.cause not in _NOT_HOST_CAUSES and host.is_unnamed(one.cause)
    ]


# The place in the user's code.

_MOSTLY, _PARTLY = 0.5, 0.2
"""A place is named if at least this share of the time is spent there."""

_MIN_LOOKS = 4
"""Of fewer looks no place is named, nor of a single one."""

_GRID_NS = 100_000
"""Where the trace has Python functions, they are looked up at this distance."""

_MAX_GRID = 100_000

_LIBRARY_FILE = re.compile(
    r"(?:^|/)(?:torch|stepsplit)/|/(?:site|dist)-packages/|/lib/python\d[^/]*/"
)

_Place = tuple[CodeFrame, ...]

_Function = tuple[str, str]
"""File and name."""


def describe_place(context: ReplayContext, idle: _HostIdle, common: bool = False) -> str:
    """The place in the user's code at which most of this idle time is spent; "" if unknown.

    common: counts what all ranks have (the lower median of them) instead of the sum of all. From
    the recorder's looks at the stack, else from the Python functions in the trace.
    """
    seen = [
        _count_places(context, index, idle.get_intervals(index))
        for index in (range(len(context.ranks)) if common else np.unique(idle.rank).tolist())
    ]
    functions: dict[_Function, Counter[_Place]] = defaultdict(Counter)
    for places in seen:
        for place, count in places.items():
            functions[place[0].file, place[0].function][place] += count
    counts = {one: _count_function(one, seen, common) for one in functions}
    total = sum(counts.values())
    most = max(counts, key=lambda one: counts[one], default=None)
    if most is None or total < _MIN_LOOKS or counts[most] < max(2, _PARTLY * total):
        return ""
    (place, _), *_ = functions[most].most_common(1)
    caller = f", called from {_format_frame(place[1])}" if len(place) > 1 else ""
    how = "mostly" if counts[most] >= _MOSTLY * total else "partly"
    return f", {how} at {_format_frame(place[0])}{caller}"


def _count_function(function: _Function, seen: Sequence[Counter[_Place]], common: bool) -> int:
    """How often a function was seen: on all ranks together, or on the rank of the lower median."""
    by_rank = sorted(
        sum(n for place, n in places.items() if (place[0].file, place[0].function) == function)
        for places in seen
    )
    return by_rank[(len(by_rank) - 1) // 2] if common else sum(by_rank)


def _format_frame(frame: CodeFrame) -> str:
    return f"{frame.file}:{frame.line} in {frame.function}"


def _count_places(context: ReplayContext, index: int, times: Intervals) -> Counter[_Place]:
    """How often each place was seen at these times of a rank's clock."""
    times = union(times.start_ns, times.end_ns)
    found, trace = Counter[_Place](), context.split.ranks[index].trace
    for record in _find_records(context, index):
        looks = np.array(record.host.at_unix_ns, dtype=np.int64) - trace.t0_unix_ns
        place = np.array(record.host.place, dtype=np.int64)
        inside = place[is_inside(times, looks)]
        for one, count in zip(*np.unique(inside, return_counts=True), strict=True):
            found[record.host.places[one]] += int(count)
    return found or _count_functions(trace.events, times)


def _count_functions(events: Events, times: Intervals) -> Counter[_Place]:
    """The same from the innermost Python function of the user's code in the trace."""
    is_python = events.is_category(Category.PYTHON)
    if not is_python.any():
        return Counter()
    frames = [_parse_function(name) for name in events.names]
    is_user = events.name_mask(tuple(frame is not None for frame in frames))
    lookup: NestedEvents = build_nested(events, is_python & is_user)
    found = Counter[_Place]()
    if not len(lookup.row):
        return found
    step_ns = max(_GRID_NS, times.total_ns // _MAX_GRID)
    for start, end in zip(times.start_ns.tolist(), times.end_ns.tolist(), strict=True):
        rows = lookup.find_innermost_at(np.arange(start, end, step_ns))
        names = events.name_id[rows[rows >= 0]]
        for one, count in zip(*np.unique(names, return_counts=True), strict=True):
            frame = frames[one]
            assert frame is not None
            found[(frame,)] += int(count)
    return found


def _parse_function(name: str) -> CodeFrame | None:
    """The function of a Python event, by its definition; None if it is of a library."""
    match = PYTHON_FUNCTION.fullmatch(name)
    if match is None or _LIBRARY_FILE.search(match["file"]):
        return None
    if match["file"].removesuffix(".py").split("/")[0] in sys.stdlib_module_names:
        return None
    return CodeFrame(match["function"], match["file"], int(match["line"]))
