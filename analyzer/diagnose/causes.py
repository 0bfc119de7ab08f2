"""Causes of lost step time, each sized by a replay without it, the largest first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from stepsplit.analyzer import units
from stepsplit.analyzer.arrays import labels_of, mean_within
from stepsplit.analyzer.diagnose.comm_causes import lost_overlap, needless_calls, slow_links
from stepsplit.analyzer.diagnose.dependency_graph import DependencyGraph
from stepsplit.analyzer.diagnose.replay import (
    Float,
    ReplayContext,
    capped,
    moved_faster,
    paced,
    scene_of,
)
from stepsplit.analyzer.model.schedule_time import ideal_bubble_fraction
from stepsplit.analyzer.report.build import why_idle
from stepsplit.analyzer.report.report import WORTH, EventRef, Finding
from stepsplit.analyzer.split.idle import IdleCause
from stepsplit.analyzer.split.lateness import SlowRank, slow_ranks
from stepsplit.analyzer.split.mesh import STAGE_AXES
from stepsplit.analyzer.split.run import RunSplit
from stepsplit.analyzer.trace import Int64, Note
from stepsplit.collectors.rank_record import RankRecord

# What holds a run up, the cause that is worth most first.

MOST = 5

MOST_CALLS = 500_000
"""Of more calls a replay takes minutes and gigabytes: some 40 s and 1 GB for so many."""


@dataclass(frozen=True, slots=True)
class Causes:
    """What holds a recording up, largest gain first; notes say what was not looked for."""

    findings: tuple[Finding, ...]
    notes: tuple[Note, ...] = ()


def find_causes(found: RunSplit, origin_ns: int, records: Sequence[RankRecord] = ()) -> Causes:
    """The causes of a recording; origin_ns is the report's t0, records are what its ranks told.

    A gain is what the mean full step would be shorter by if that one cause were fixed, by a replay
    of the recording without it. Gains do not add up.
    """
    calls = sum(len(rank.trace.calls) for rank in found.ranks)
    if not any(rank.steps for rank in found.ranks):
        return Causes(())
    if calls > MOST_CALLS:
        text = (
            f"{calls:,} calls are too many to replay: causes are not looked for; record fewer steps"
        )
        return Causes((), (Note("not_replayed", text),))
    scene = scene_of(found, origin_ns, records)
    return Causes(_worth(scene) if scene.mean_ns > 0 else ())


def _worth(scene: ReplayContext) -> tuple[Finding, ...]:
    causes = [
        *slow_paces(scene),
        *uneven_shares(scene),
        *late_hosts(scene),
        *slow_links(scene),
        *lost_overlap(scene),
        *few_microbatches(scene),
        *needless_calls(scene),
    ]
    worth = [cause for cause in causes if cause.gain_ns >= WORTH * scene.mean_ns]
    return tuple(sorted(worth, key=lambda cause: -cause.gain_ns)[:MOST])


# What the schedule itself costs with so few microbatches.


def few_microbatches(scene: ReplayContext) -> list[Finding]:
    """As if the same work came in twice as many microbatches of the same size.

    What the schedule's window works stays; its ideal bubble is that of so many.
    """
    schedule, holes = scene.found.schedule, scene.found.holes
    now = schedule.ideal_bubble_fraction if schedule else None
    if schedule is None or now is None or not holes:
        return []
    stages = len(scene.found.layout.pipelines[0])
    then = ideal_bubble_fraction(
        schedule.name, stages, 2 * schedule.microbatches, schedule.chunks, schedule.times_ns
    )
    if then is None or then >= now:
        return []
    busy_ns = float(np.mean([hole.window_ns - hole.holes_ns for hole in holes]))
    costs, would_cost = (busy_ns * idle / (1 - idle) for idle in (now, then))
    return [
        Finding(
            code="few_microbatches",
            bucket="bubble",
            gain_ns=round(costs - would_cost),
            measured_ns=round(costs),
            predicted_ns=round(would_cost),
            ranks=(),
            steps=scene.steps_of(scene.counted),
            events=(),
            message=(
                f"the {schedule.name} schedule itself idles {units.percent(now)} of the pipeline's "
                f"time with {schedule.microbatches} microbatches; twice as many of the same size "
                f"idle {units.percent(then)}"
            ),
        )
    ]


# Work that is shared out unevenly: over the ranks of a stage, and over the stages.

_UNEVEN = 1.02
"""Below so many times the mean a share of work is even."""


def uneven_shares(scene: ReplayContext) -> list[Finding]:
    """Findings for stages of unequal compute, and for unequal ranks within a stage.

    Compute is taken at the peers' pace: a slow device has no more work.
    """
    steps = scene.graph.steps
    work = scene.bucket_ns("compute") * pace_of(scene)
    of_stage = mean_within(labels_of(steps.step, scene.stage), work)
    stages = mean_within(labels_of(steps.step), of_stage)
    found = [_uneven_ranks(scene, work, of_stage)]
    if len(np.unique(scene.stage)) > 1:
        found.append(_uneven_stages(scene, of_stage, stages))
    return [one for one in found if one is not None]


def _uneven_stages(scene: ReplayContext, of_stage: Float, mean: Float) -> Finding | None:
    heaviest = _heaviest(scene, scene.stage, of_stage / np.maximum(mean, 1))
    if heaviest is None:
        return None
    stage, ratio = heaviest
    mine = (scene.stage == stage) & scene.counted
    times = mean / np.maximum(of_stage, 1)
    changed = _with_layers(scene, paced(scene.graph, "compute", times), times)
    return Finding(
        code="uneven_stages",
        bucket="bubble",
        gain_ns=scene.gain_ns(changed),
        measured_ns=int(of_stage[mine].mean()),
        predicted_ns=int(mean[mine].mean()),
        ranks=tuple(scene.ranks[np.unique(scene.graph.steps.rank[mine])].tolist()),
        steps=scene.steps_of(mine),
        events=(),
        message=(
            f"stage {stage} computes {units.percent(ratio - 1)} more than the mean stage, and the "
            "others wait for it: give it fewer layers"
        ),
    )


def _with_layers(scene: ReplayContext, graph: DependencyGraph, times: Float) -> DependencyGraph:
    """What layers communicate within their stage comes and goes with them."""
    kernels = scene.kernels_on(lambda axes: bool(axes) and axes <= STAGE_AXES)
    return moved_faster(graph, kernels, times[graph.kernels.step[kernels]])


def _uneven_ranks(scene: ReplayContext, work: Float, of_stage: Float) -> Finding | None:
    rank = scene.ranks[scene.graph.steps.rank]
    heaviest = _heaviest(scene, rank, work / np.maximum(of_stage, 1))
    if heaviest is None:
        return None
    worst, ratio = heaviest
    mine = (rank == worst) & scene.counted
    changed = paced(scene.graph, "compute", of_stage / np.maximum(work, 1))
    return Finding(
        code="uneven_ranks",
        bucket="skew",
        gain_ns=scene.gain_ns(changed),
        measured_ns=int(work[mine].mean()),
        predicted_ns=int(of_stage[mine].mean()),
        ranks=(worst,),
        steps=scene.steps_of(mine),
        events=(),
        message=(
            f"rank {worst} has {units.percent(ratio - 1)} more to compute than the mean rank of "
            "its stage, and the others wait for it"
        ),
    )


def _heaviest(scene: ReplayContext, who: Int64, ratio: Float) -> tuple[int, float] | None:
    """(who has the most work on average, how many times the mean); None where all is even."""
    numbers, place = np.unique(who[scene.counted], return_inverse=True)
    mean = np.bincount(place, ratio[scene.counted]) / np.bincount(place)
    most = int(mean.argmax())
    return (int(numbers[most]), float(mean[most])) if mean[most] > _UNEVEN else None


# Ranks whose device computes the same kernels more slowly than its peers do.


def pace_of(scene: ReplayContext) -> Float:
    """For each row how long its compute would take at the peers' pace, a ratio of what it took.

    What all ranks of a stage are slower by is the stage's own work, no device's.
    """
    lost: dict[int, int] = defaultdict(int)
    for one in scene.found.detail.slow_kernels:
        lost[one.rank] += one.lost_ns
    lost_ns = np.array([lost[rank] for rank in scene.ranks.tolist()], dtype=np.int64)
    share = lost_ns[scene.graph.steps.rank] / _usual_compute(scene)
    for stage in np.unique(scene.stage).tolist():
        mine = scene.stage == stage
        if len(np.unique(scene.graph.steps.rank[mine])) > 1:
            share[mine] -= share[mine].min()
    return np.clip(1 - share, 0.0, 1.0)


def _usual_compute(scene: ReplayContext) -> Float:
    """The mean compute of each row's rank in its full steps."""
    compute, steps = scene.bucket_ns("compute"), scene.graph.steps
    counted = scene.counted
    count = np.bincount(steps.rank[counted], minlength=len(scene.ranks))
    total = np.bincount(steps.rank[counted], compute[counted], minlength=len(scene.ranks))
    return np.maximum(total / np.maximum(count, 1), 1.0)[steps.rank]


def slow_paces(scene: ReplayContext) -> list[Finding]:
    """A finding for each slow rank, as if it alone kept its peers' pace."""
    pace = pace_of(scene)
    slow = {scene.ranks[index] for index in scene.graph.steps.rank[pace < 1].tolist()}
    return [_slow_rank_finding(scene, int(rank), pace) for rank in sorted(slow)]


def _slow_rank_finding(scene: ReplayContext, rank: int, pace: Float) -> Finding:
    mine = scene.ranks[scene.graph.steps.rank] == rank
    changed = paced(scene.graph, "compute", np.where(mine, pace, 1.0))
    rows = [one for one in slow_ranks(scene.found.detail.slow_kernels) if one.rank == rank]
    said = said_of(scene.records, rank)
    return Finding(
        code="slow_rank",
        bucket="compute",
        gain_ns=scene.gain_ns(changed),
        measured_ns=int(scene.bucket_ns("compute")[mine & scene.counted].mean()),
        predicted_ns=int((scene.bucket_ns("compute") * pace)[mine & scene.counted].mean()),
        ranks=(rank,),
        steps=scene.steps_of(mine),
        events=_slowest(scene, rank, rows[0]),
        message=(
            f"rank {rank} computes slowly and all wait for it: its {rows[0].family} kernels take "
            f"{rows[0].ratio:.2f} times as long as its peers'" + (f"; {said}" if said else "")
        ),
    )


def _slowest(scene: ReplayContext, rank: int, slow: SlowRank) -> tuple[EventRef, ...]:
    index = int(np.flatnonzero(scene.ranks == rank)[0])
    events = scene.found.ranks[index].trace.events
    rows = np.flatnonzero(events.named(slow.kernel))
    longest = rows[np.argsort(-events.dur_ns[rows], kind="stable")][:3]
    return tuple(scene.event(index, row) for row in longest.tolist())


# What a slow rank's device said of itself while it was recorded.

_LOWER = 0.97
"""A clock below this part of the median rank's is worth a word."""

_REASONS = (
    (0x0004, "power cap"),
    (0x0008, "hardware slowdown"),
    (0x0010, "sync boost"),
    (0x0020, "too hot, by software"),
    (0x0040, "too hot, by hardware"),
    (0x0080, "power brake"),
)
"""Bits of nvmlClocksEventReasons (nvml.h) that slow a busy device down."""


def said_of(records: Sequence[RankRecord], rank: int) -> str:
    """Its SM clock beside the median rank's, and what throttled it; "" where nothing tells."""
    clocks = {one.rank.rank: clock for one in records if (clock := _clock_mhz(one)) is not None}
    words = []
    if rank in clocks and clocks[rank] < _LOWER * median(clocks.values()):
        usual = median(clocks.values())
        words.append(f"its SM clock is {clocks[rank]:,.0f} MHz, the median rank's {usual:,.0f}")
    reasons = _throttled(records, rank)
    if reasons:
        words.append(f"throttled: {', '.join(reasons)}")
    return "; ".join(words)


def _clock_mhz(record: RankRecord) -> float | None:
    read = [state.sm_clock_mhz for state in record.gpu if state.sm_clock_mhz is not None]
    return median(read) if read else None


def _throttled(records: Sequence[RankRecord], rank: int) -> list[str]:
    bits = 0
    for record in records:
        if record.rank.rank == rank:
            for state in record.gpu:
                bits |= state.throttle_reasons or 0
    return [name for bit, name in _REASONS if bits & bit]


# Ranks that do nothing, or copy, for longer than the others; and what all of them idle.

_SAYS = {
    "idle": ("host_stall", "rank {rank} runs nothing for {more} of the step longer than the "
             "others, and they wait for it: its host is late"),
    "copy": ("slow_copy", "rank {rank} copies memory for {more} of the step longer than the "
             "others, and they wait for it"),
}  # fmt: skip

_OF_NO_HOST = ("launch_latency", "dependency", "unknown")

_LEAST = 0.005
"""Of the mean step; a rank that idles or copies for less beyond the others is not looked at."""


def late_hosts(scene: ReplayContext) -> list[Finding]:
    """A finding for each rank that idles or copies longer than the others, and one for what all
    of them idle."""
    found = [one for work in _SAYS for one in _beyond_others(scene, work)]
    return [*found, _host_bound(scene, _usual(scene, _of_host_ns(scene)))]


def _of_host_ns(scene: ReplayContext) -> Float:
    """What each row idles because of its host.

    A device's own latencies are left out, and what the trace does not tell.
    """
    first = np.cumsum([0, *(len(rank.steps) for rank in scene.found.ranks)])
    found = np.zeros(len(scene.stage))
    for index, causes in enumerate(scene.found.detail.idle):
        for one in causes:
            if one.cause not in _OF_NO_HOST:
                found[first[index] + one.window] += one.idle_ns
    return found


def _usual(scene: ReplayContext, values: Float) -> Float:
    """For each row the lower median over the ranks in its step."""
    steps = scene.graph.steps
    found = np.zeros(len(values))
    for step in np.unique(steps.step).tolist():
        rows = np.flatnonzero(steps.step == step)
        found[rows] = np.sort(values[rows])[(len(rows) - 1) // 2]
    return found


def _beyond_others(scene: ReplayContext, work: str) -> list[Finding]:
    spent, steps = scene.work_ns(work), scene.graph.steps
    usual = _usual(scene, spent.astype(np.float64))
    beyond = np.maximum(spent - usual, 0) * scene.counted
    steps_of_rank = np.maximum(np.bincount(steps.rank, scene.counted), 1)
    mean = np.bincount(steps.rank, beyond) / steps_of_rank
    late = np.flatnonzero(mean > _LEAST * scene.mean_ns).tolist()
    return [_of_rank(scene, work, index, usual) for index in late]


def _of_rank(scene: ReplayContext, work: str, index: int, usual: Float) -> Finding:
    spent = scene.work_ns(work)
    mine = (scene.graph.steps.rank == index) & (spent > usual) & scene.counted
    changed = capped(scene.graph, work, np.where(mine, usual, spent))
    code, words = _SAYS[work]
    rank, more = int(scene.ranks[index]), float((spent - usual)[mine].mean()) / scene.mean_ns
    return Finding(
        code=code,
        bucket=work,
        gain_ns=scene.gain_ns(changed),
        measured_ns=int(spent[mine].mean()),
        predicted_ns=int(usual[mine].mean()),
        ranks=(rank,),
        steps=scene.steps_of(mine),
        events=scene.longest(index, work),
        message=words.format(rank=rank, more=units.percent(more)) + _why(scene, index, work),
    )


def _host_bound(scene: ReplayContext, common: Float) -> Finding:
    """As if no rank had the idle time that all have."""
    idle = scene.work_ns("idle")
    share = float(common[scene.counted].mean()) / scene.mean_ns
    who = "every rank" if len(scene.ranks) > 1 else "the rank"
    return Finding(
        code="host_bound",
        bucket="idle",
        gain_ns=scene.gain_ns(capped(scene.graph, "idle", np.maximum(idle - common, 0))),
        measured_ns=int(idle[scene.counted].mean()),
        predicted_ns=None,
        ranks=(),
        steps=scene.steps_of(scene.counted),
        events=(),
        message=(
            f"{who} runs nothing for {units.percent(share)} of the step: "
            f"{why_idle(_host_causes(scene))}"
        ),
    )


def _why(scene: ReplayContext, index: int, work: str) -> str:
    said = why_idle(scene.found.detail.idle[index]) if work == "idle" else ""
    return f"; {said}" if said else ""


def _host_causes(scene: ReplayContext) -> list[IdleCause]:
    return [
        one for causes in scene.found.detail.idle for one in causes if one.cause not in _OF_NO_HOST
    ]
