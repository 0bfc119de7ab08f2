"""Bottlenecks of a run: the gain of fixing each is estimated by a replay, largest gain first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from stepsplit.analyzer import units
from stepsplit.analyzer.arrays import group_ids, group_mean
from stepsplit.analyzer.diagnose.comm_causes import (
    find_lost_overlap,
    find_redundant_gathers,
    find_slow_links,
)
from stepsplit.analyzer.diagnose.dependency_graph import DependencyGraph
from stepsplit.analyzer.diagnose.replay import (
    Float,
    ReplayContext,
    build_context,
    limit_work,
    scale_transfers,
    scale_work,
)
from stepsplit.analyzer.model.schedule_time import compute_ideal_bubble_fraction
from stepsplit.analyzer.report.build import explain_idle
from stepsplit.analyzer.report.report import MIN_GAIN_SHARE, SCHEDULE_NAMES, EventRef, Finding
from stepsplit.analyzer.split.idle import IdleCause
from stepsplit.analyzer.split.lateness import SlowRank, sum_slow_ranks
from stepsplit.analyzer.split.mesh import STAGE_AXES
from stepsplit.analyzer.split.run import RunSplit
from stepsplit.analyzer.trace import Int64, Note
from stepsplit.collectors.rank_record import RankRecord

# The bottlenecks of a run, largest gain first.

MAX_FINDINGS = 5

MAX_REPLAYED_CALLS = 500_000
"""Upper limit of a replay: this many calls take about 40 s and 1 GB."""


@dataclass(frozen=True, slots=True)
class Causes:
    """The bottlenecks of a recording, largest gain first; notes list analyses that were skipped."""

    findings: tuple[Finding, ...]
    notes: tuple[Note, ...] = ()


def find_causes(split: RunSplit, origin_ns: int, records: Sequence[RankRecord] = ()) -> Causes:
    """Find the bottlenecks of a recording.

    A gain is the reduction of the mean full step if that one cause were fixed, estimated by a
    replay of the recording without it. Gains are not additive.

    Args:
        found: the split recording.
        origin_ns: the report's t0 on the common clock.
        records: what each rank recorded about its own device (clocks, throttling).
    """
    calls = sum(len(rank.trace.calls) for rank in split.ranks)
    if not any(rank.steps for rank in split.ranks):
        return Causes(())
    if calls > MAX_REPLAYED_CALLS:
        text = (
            f"bottlenecks not analyzed: {calls:,} calls are too many to replay; record fewer steps"
        )
        return Causes((), (Note("not_replayed", text),))
    context = build_context(split, origin_ns, records)
    return Causes(_select_causes(context) if context.mean_ns > 0 else ())


def _select_causes(context: ReplayContext) -> tuple[Finding, ...]:
    causes = [
        *find_stragglers(context),
        *find_load_imbalance(context),
        *find_late_hosts(context),
        *find_slow_links(context),
        *find_lost_overlap(context),
        *find_few_microbatches(context),
        *find_redundant_gathers(context),
    ]
    worth = [cause for cause in causes if cause.gain_ns >= MIN_GAIN_SHARE * context.mean_ns]
    return tuple(sorted(worth, key=lambda cause: -cause.gain_ns)[:MAX_FINDINGS])


# The bubble of the pipeline schedule, compared with twice as many microbatches.


def find_few_microbatches(context: ReplayContext) -> list[Finding]:
    """Estimate the gain of twice as many microbatches of the same size for the same work.

    The busy time of the pipeline stays the same; only the ideal bubble fraction changes.
    """
    schedule, holes = context.split.schedule, context.split.stage_bubbles
    now = schedule.ideal_bubble_fraction if schedule else None
    if schedule is None or now is None or not holes:
        return []
    stages = len(context.split.layout.pipelines[0])
    then = compute_ideal_bubble_fraction(
        schedule.name, stages, 2 * schedule.microbatches, schedule.chunks, schedule.times_ns
    )
    if then is None or then >= now:
        return []
    busy_ns = float(np.mean([hole.window_ns - hole.bubble_ns for hole in holes]))
    costs, would_cost = (busy_ns * idle / (1 - idle) for idle in (now, then))
    return [
        Finding(
            code="few_microbatches",
            bucket="bubble",
            gain_ns=round(costs - would_cost),
            measured_ns=round(costs),
            predicted_ns=round(would_cost),
            ranks=(),
            steps=context.list_steps(context.counted),
            events=(),
            message=(
                f"{SCHEDULE_NAMES.get(schedule.name, schedule.name)} bubble is "
                f"{units.format_percent(now)} with {schedule.microbatches} microbatches; "
                f"{2 * schedule.microbatches} would reduce it to {units.format_percent(then)}"
            ),
        )
    ]


# Load imbalance: between the ranks of a stage, and between the stages.

_IMBALANCE_RATIO = 1.02
"""A rank or stage counts as imbalanced above this multiple of the mean work."""


def find_load_imbalance(context: ReplayContext) -> list[Finding]:
    """Find load imbalance between stages and between the ranks of a stage.

    Compute is scaled to the speed of the peers, so that a slow device does not count as more work.
    """
    steps = context.graph.steps
    work = context.select_bucket_ns("compute") * compute_peer_speed_ratio(context)
    of_stage = group_mean(group_ids(steps.step, context.stage), work)
    stages = group_mean(group_ids(steps.step), of_stage)
    findings = [_find_rank_imbalance(context, work, of_stage)]
    if len(np.unique(context.stage)) > 1:
        findings.append(_find_stage_imbalance(context, of_stage, stages))
    return [one for one in findings if one is not None]


def _find_stage_imbalance(context: ReplayContext, of_stage: Float, mean: Float) -> Finding | None:
    heaviest = _find_heaviest(context, context.stage, of_stage / np.maximum(mean, 1))
    if heaviest is None:
        return None
    stage, ratio = heaviest
    mine = (context.stage == stage) & context.counted
    times = mean / np.maximum(of_stage, 1)
    changed = _scale_layer_comm(context, scale_work(context.graph, "compute", times), times)
    return Finding(
        code="uneven_stages",
        bucket="bubble",
        gain_ns=context.compute_gain_ns(changed),
        measured_ns=int(of_stage[mine].mean()),
        predicted_ns=int(mean[mine].mean()),
        ranks=tuple(context.ranks[np.unique(context.graph.steps.rank[mine])].tolist()),
        steps=context.list_steps(mine),
        events=(),
        message=(
            f"pipeline imbalance: stage {stage} has {units.format_percent(ratio - 1)} "
            "more compute than "
            "average; move layers off it"
        ),
    )


def _scale_layer_comm(
    context: ReplayContext, graph: DependencyGraph, times: Float
) -> DependencyGraph:
    """Scale the communication within a stage with its number of layers."""
    kernels = context.find_kernels(lambda axes: bool(axes) and axes <= STAGE_AXES)
    return scale_transfers(graph, kernels, times[graph.kernels.step[kernels]])


def _find_rank_imbalance(context: ReplayContext, work: Float, of_stage: Float) -> Finding | None:
    rank = context.ranks[context.graph.steps.rank]
    heaviest = _find_heaviest(context, rank, work / np.maximum(of_stage, 1))
    if heaviest is None:
        return None
    worst, ratio = heaviest
    mine = (rank == worst) & context.counted
    changed = scale_work(context.graph, "compute", of_stage / np.maximum(work, 1))
    return Finding(
        code="uneven_ranks",
        bucket="skew",
        gain_ns=context.compute_gain_ns(changed),
        measured_ns=int(work[mine].mean()),
        predicted_ns=int(of_stage[mine].mean()),
        ranks=(worst,),
        steps=context.list_steps(mine),
        events=(),
        message=(
            f"load imbalance: rank {worst} has {units.format_percent(ratio - 1)} more "
            "compute than the "
            "average rank of its stage"
        ),
    )


def _find_heaviest(context: ReplayContext, labels: Int64, ratio: Float) -> tuple[int, float] | None:
    """(the label with the most work on average, its ratio to the mean); None if balanced."""
    numbers, place = np.unique(labels[context.counted], return_inverse=True)
    mean = np.bincount(place, ratio[context.counted]) / np.bincount(place)
    most = int(mean.argmax())
    return (int(numbers[most]), float(mean[most])) if mean[most] > _IMBALANCE_RATIO else None


# Stragglers: ranks whose device runs the same kernels slower than its peers.


def compute_peer_speed_ratio(context: ReplayContext) -> Float:
    """For each row, its compute time at the speed of its peers as a ratio of the measured time.

    A slowdown shared by all ranks of a stage counts as work of the stage, not as a slow device.
    """
    lost: dict[int, int] = defaultdict(int)
    for one in context.split.detail.slow_kernels:
        lost[one.rank] += one.lost_ns
    lost_ns = np.array([lost[rank] for rank in context.ranks.tolist()], dtype=np.int64)
    share = lost_ns[context.graph.steps.rank] / _compute_rank_mean_ns(context)
    for stage in np.unique(context.stage).tolist():
        mine = context.stage == stage
        if len(np.unique(context.graph.steps.rank[mine])) > 1:
            share[mine] -= share[mine].min()
    return np.clip(1 - share, 0.0, 1.0)


def _compute_rank_mean_ns(context: ReplayContext) -> Float:
    """For each row, the mean compute of its rank over the full steps, in ns."""
    compute, steps = context.select_bucket_ns("compute"), context.graph.steps
    counted = context.counted
    count = np.bincount(steps.rank[counted], minlength=len(context.ranks))
    total = np.bincount(steps.rank[counted], compute[counted], minlength=len(context.ranks))
    return np.maximum(total / np.maximum(count, 1), 1.0)[steps.rank]


_FAMILY_NAMES = {"gemm": "GEMM"}


def find_stragglers(context: ReplayContext) -> list[Finding]:
    """A finding for each straggler; its gain is that of this rank alone at its peers' speed."""
    pace = compute_peer_speed_ratio(context)
    slow = {context.ranks[index] for index in context.graph.steps.rank[pace < 1].tolist()}
    return [_build_straggler_finding(context, int(rank), pace) for rank in sorted(slow)]


def _build_straggler_finding(context: ReplayContext, rank: int, pace: Float) -> Finding:
    mine = context.ranks[context.graph.steps.rank] == rank
    changed = scale_work(context.graph, "compute", np.where(mine, pace, 1.0))
    rows = [one for one in sum_slow_ranks(context.split.detail.slow_kernels) if one.rank == rank]
    gpu_state = describe_gpu_state(context.records, rank)
    return Finding(
        code="slow_rank",
        bucket="compute",
        gain_ns=context.compute_gain_ns(changed),
        measured_ns=int(context.select_bucket_ns("compute")[mine & context.counted].mean()),
        predicted_ns=int(
            (context.select_bucket_ns("compute") * pace)[mine & context.counted].mean()
        ),
        ranks=(rank,),
        steps=context.list_steps(mine),
        events=_list_slowest_kernels(context, rank, rows[0]),
        message=(
            f"rank {rank} is a straggler: its {_FAMILY_NAMES.get(rows[0].family, rows[0].family)} "
            f"kernels are {rows[0].ratio:.2f}x slower than on its peers"
            + (f"; {gpu_state}" if gpu_state else "")
        ),
    )


def _list_slowest_kernels(
    context: ReplayContext, rank: int, slow: SlowRank
) -> tuple[EventRef, ...]:
    index = int(np.flatnonzero(context.ranks == rank)[0])
    events = context.split.ranks[index].trace.events
    rows = np.flatnonzero(events.match_prefix(slow.kernel))
    longest = rows[np.argsort(-events.dur_ns[rows], kind="stable")][:3]
    return tuple(context.make_event_ref(index, row) for row in longest.tolist())


# The state of a straggler's GPU during the recording: SM clock and throttling.

_LOW_CLOCK_RATIO = 0.97
"""A clock below this fraction of the median rank's clock is reported."""

_THROTTLE_REASONS = (
    (0x0004, "power cap"),
    (0x0008, "hardware slowdown"),
    (0x0010, "sync boost"),
    (0x0020, "thermal slowdown by software"),
    (0x0040, "thermal slowdown by hardware"),
    (0x0080, "power brake"),
)
"""Bits of nvmlClocksEventReasons (nvml.h) that slow a busy device down."""


def describe_gpu_state(records: Sequence[RankRecord], rank: int) -> str:
    """The rank's SM clock compared with the median rank and its throttle reasons; "" if normal."""
    clocks = {
        one.rank.rank: clock for one in records if (clock := _read_sm_clock_mhz(one)) is not None
    }
    words = []
    if rank in clocks and clocks[rank] < _LOW_CLOCK_RATIO * median(clocks.values()):
        usual = median(clocks.values())
        words.append(f"SM clock {clocks[rank]:,.0f} MHz (median rank: {usual:,.0f} MHz)")
    reasons = _list_throttle_reasons(records, rank)
    if reasons:
        words.append(f"throttled: {', '.join(reasons)}")
    return "; ".join(words)


def _read_sm_clock_mhz(record: RankRecord) -> float | None:
    read = [state.sm_clock_mhz for state in record.gpu if state.sm_clock_mhz is not None]
    return median(read) if read else None


def _list_throttle_reasons(records: Sequence[RankRecord], rank: int) -> list[str]:
    bits = 0
    for record in records:
        if record.rank.rank == rank:
            for state in record.gpu:
                bits |= state.throttle_reasons or 0
    return [name for bit, name in _THROTTLE_REASONS if bits & bit]


# Ranks that idle or copy longer than their peers, and idle time common to all ranks (host-bound).

_LATE_RANK_TEXTS = {
    "idle": ("host_stall", "rank {rank} is host-bound: its idle time exceeds that of its peers by "
             "{more} of the step"),
    "copy": ("slow_copy", "rank {rank} is slowed by memory copies: its copy time exceeds that of "
             "its peers by {more} of the step"),
}  # fmt: skip

_NOT_HOST_CAUSES = ("launch_latency", "dependency", "unknown")

_MIN_LATE_SHARE = 0.005
"""Ranks that idle or copy less than this fraction of the mean step beyond their peers are fine."""


def find_late_hosts(context: ReplayContext) -> list[Finding]:
    """A finding for each rank that idles or copies longer than its peers, and one for the idle time
    common to all ranks."""
    findings = [one for work in _LATE_RANK_TEXTS for one in _find_late_ranks(context, work)]
    return [
        *findings,
        _find_host_bound(context, _compute_step_median(context, _sum_host_idle_ns(context))),
    ]


def _sum_host_idle_ns(context: ReplayContext) -> Float:
    """The idle time of each row caused by its host, without device latencies and unknown causes."""
    first = np.cumsum([0, *(len(rank.steps) for rank in context.split.ranks)])
    idle_ns = np.zeros(len(context.stage))
    for index, causes in enumerate(context.split.detail.idle):
        for one in causes:
            if one.cause not in _NOT_HOST_CAUSES:
                idle_ns[first[index] + one.window] += one.idle_ns
    return idle_ns


def _compute_step_median(context: ReplayContext, values: Float) -> Float:
    """For each row, the lower median over the ranks of its step."""
    steps = context.graph.steps
    medians = np.zeros(len(values))
    for step in np.unique(steps.step).tolist():
        rows = np.flatnonzero(steps.step == step)
        medians[rows] = np.sort(values[rows])[(len(rows) - 1) // 2]
    return medians


def _find_late_ranks(context: ReplayContext, work: str) -> list[Finding]:
    spent, steps = context.sum_work_ns(work), context.graph.steps
    usual = _compute_step_median(context, spent.astype(np.float64))
    beyond = np.maximum(spent - usual, 0) * context.counted
    steps_of_rank = np.maximum(np.bincount(steps.rank, context.counted), 1)
    mean = np.bincount(steps.rank, beyond) / steps_of_rank
    late = np.flatnonzero(mean > _MIN_LATE_SHARE * context.mean_ns).tolist()
    return [_build_late_rank_finding(context, work, index, usual) for index in late]


def _build_late_rank_finding(
    context: ReplayContext, work: str, index: int, usual: Float
) -> Finding:
    spent = context.sum_work_ns(work)
    mine = (context.graph.steps.rank == index) & (spent > usual) & context.counted
    changed = limit_work(context.graph, work, np.where(mine, usual, spent))
    code, words = _LATE_RANK_TEXTS[work]
    rank, more = int(context.ranks[index]), float((spent - usual)[mine].mean()) / context.mean_ns
    return Finding(
        code=code,
        bucket=work,
        gain_ns=context.compute_gain_ns(changed),
        measured_ns=int(spent[mine].mean()),
        predicted_ns=int(usual[mine].mean()),
        ranks=(rank,),
        steps=context.list_steps(mine),
        events=context.list_longest(index, work),
        message=words.format(rank=rank, more=units.format_percent(more))
        + _format_idle_reason(context, index, work),
    )


def _find_host_bound(context: ReplayContext, common: Float) -> Finding:
    """The finding for the idle time that all ranks have in common."""
    idle = context.sum_work_ns("idle")
    share = float(common[context.counted].mean()) / context.mean_ns
    what = "GPU idle" if context.split.ranks[0].trace.on_device else "idle"
    where = " on every rank" if len(context.ranks) > 1 else ""
    return Finding(
        code="host_bound",
        bucket="idle",
        gain_ns=context.compute_gain_ns(
            limit_work(context.graph, "idle", np.maximum(idle - common, 0))
        ),
        measured_ns=int(idle[context.counted].mean()),
        predicted_ns=None,
        ranks=(),
        steps=context.list_steps(context.counted),
        events=(),
        message=(
            f"{what} {units.format_percent(share)} of the step{where} (host-bound); "
            f"{explain_idle(_list_host_causes(context))}"
        ),
    )


def _format_idle_reason(context: ReplayContext, index: int, work: str) -> str:
    reason = explain_idle(context.split.detail.idle[index]) if work == "idle" else ""
    return f"; {reason}" if reason else ""


def _list_host_causes(context: ReplayContext) -> list[IdleCause]:
    return [
        one
        for causes in context.split.detail.idle
        for one in causes
        if one.cause not in _NOT_HOST_CAUSES
    ]
