"""Bottlenecks of a run: the gain of fixing each is estimated by a replay, largest gain first."""

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
from stepsplit.analyzer.report.build import SCHEDULE_NAMES, why_idle
from stepsplit.analyzer.report.report import WORTH, EventRef, Finding
from stepsplit.analyzer.split.idle import IdleCause
from stepsplit.analyzer.split.lateness import SlowRank, slow_ranks
from stepsplit.analyzer.split.mesh import STAGE_AXES
from stepsplit.analyzer.split.run import RunSplit
from stepsplit.analyzer.trace import Int64, Note
from stepsplit.collectors.rank_record import RankRecord

# The bottlenecks of a run, largest gain first.

MOST = 5

MOST_CALLS = 500_000
"""Upper limit of a replay: this many calls take about 40 s and 1 GB."""


@dataclass(frozen=True, slots=True)
class Causes:
    """The bottlenecks of a recording, largest gain first; notes list analyses that were skipped."""

    findings: tuple[Finding, ...]
    notes: tuple[Note, ...] = ()


def find_causes(found: RunSplit, origin_ns: int, records: Sequence[RankRecord] = ()) -> Causes:
    """Find the bottlenecks of a recording.

    A gain is the reduction of the mean full step if that one cause were fixed, estimated by a
    replay of the recording without it. Gains are not additive.

    Args:
        found: the split recording.
        origin_ns: the report's t0 on the common clock.
        records: what each rank recorded about its own device (clocks, throttling).
    """
    calls = sum(len(rank.trace.calls) for rank in found.ranks)
    if not any(rank.steps for rank in found.ranks):
        return Causes(())
    if calls > MOST_CALLS:
        text = (
            f"bottlenecks not analyzed: {calls:,} calls are too many to replay; record fewer steps"
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


# The bubble of the pipeline schedule, compared with twice as many microbatches.


def few_microbatches(scene: ReplayContext) -> list[Finding]:
    """Estimate the gain of twice as many microbatches of the same size for the same work.

    The busy time of the pipeline stays the same; only the ideal bubble fraction changes.
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
                f"{SCHEDULE_NAMES.get(schedule.name, schedule.name)} bubble is "
                f"{units.percent(now)} with {schedule.microbatches} microbatches; "
                f"{2 * schedule.microbatches} would reduce it to {units.percent(then)}"
            ),
        )
    ]


# Load imbalance: between the ranks of a stage, and between the stages.

_UNEVEN = 1.02
"""A rank or stage counts as imbalanced above this multiple of the mean work."""


def uneven_shares(scene: ReplayContext) -> list[Finding]:
    """Find load imbalance between stages and between the ranks of a stage.

    Compute is scaled to the speed of the peers, so that a slow device does not count as more work.
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
            f"pipeline imbalance: stage {stage} has {units.percent(ratio - 1)} more compute than "
            "average; move layers off it"
        ),
    )


def _with_layers(scene: ReplayContext, graph: DependencyGraph, times: Float) -> DependencyGraph:
    """Scale the communication within a stage with its number of layers."""
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
            f"load imbalance: rank {worst} has {units.percent(ratio - 1)} more compute than the "
            "average rank of its stage"
        ),
    )


def _heaviest(scene: ReplayContext, who: Int64, ratio: Float) -> tuple[int, float] | None:
    """(the label with the most work on average, its ratio to the mean); None if balanced."""
    numbers, place = np.unique(who[scene.counted], return_inverse=True)
    mean = np.bincount(place, ratio[scene.counted]) / np.bincount(place)
    most = int(mean.argmax())
    return (int(numbers[most]), float(mean[most])) if mean[most] > _UNEVEN else None


# Stragglers: ranks whose device runs the same kernels slower than its peers.


def pace_of(scene: ReplayContext) -> Float:
    """For each row, its compute time at the speed of its peers as a ratio of the measured time.

    A slowdown shared by all ranks of a stage counts as work of the stage, not as a slow device.
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
    """For each row, the mean compute of its rank over the full steps, in ns."""
    compute, steps = scene.bucket_ns("compute"), scene.graph.steps
    counted = scene.counted
    count = np.bincount(steps.rank[counted], minlength=len(scene.ranks))
    total = np.bincount(steps.rank[counted], compute[counted], minlength=len(scene.ranks))
    return np.maximum(total / np.maximum(count, 1), 1.0)[steps.rank]


_FAMILY_NAMES = {"gemm": "GEMM"}


def slow_paces(scene: ReplayContext) -> list[Finding]:
    """A finding for each straggler; its gain is that of this rank alone at its peers' speed."""
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
            f"rank {rank} is a straggler: its {_FAMILY_NAMES.get(rows[0].family, rows[0].family)} "
            f"kernels are {rows[0].ratio:.2f}x slower than on its peers"
            + (f"; {said}" if said else "")
        ),
    )


def _slowest(scene: ReplayContext, rank: int, slow: SlowRank) -> tuple[EventRef, ...]:
    index = int(np.flatnonzero(scene.ranks == rank)[0])
    events = scene.found.ranks[index].trace.events
    rows = np.flatnonzero(events.named(slow.kernel))
    longest = rows[np.argsort(-events.dur_ns[rows], kind="stable")][:3]
    return tuple(scene.event(index, row) for row in longest.tolist())


# The state of a straggler's GPU during the recording: SM clock and throttling.

_LOWER = 0.97
"""A clock below this fraction of the median rank's clock is reported."""

_REASONS = (
    (0x0004, "power cap"),
    (0x0008, "hardware slowdown"),
    (0x0010, "sync boost"),
    (0x0020, "thermal slowdown by software"),
    (0x0040, "thermal slowdown by hardware"),
    (0x0080, "power brake"),
)
"""Bits of nvmlClocksEventReasons (nvml.h) that slow a busy device down."""


def said_of(records: Sequence[RankRecord], rank: int) -> str:
    """The rank's SM clock compared with the median rank and its throttle reasons; "" if normal."""
    clocks = {one.rank.rank: clock for one in records if (clock := _clock_mhz(one)) is not None}
    words = []
    if rank in clocks and clocks[rank] < _LOWER * median(clocks.values()):
        usual = median(clocks.values())
        words.append(f"SM clock {clocks[rank]:,.0f} MHz (median rank: {usual:,.0f} MHz)")
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


# Ranks that idle or copy longer than their peers, and idle time common to all ranks (host-bound).

_SAYS = {
    "idle": ("host_stall", "rank {rank} is host-bound: its idle time exceeds that of its peers by "
             "{more} of the step"),
    "copy": ("slow_copy", "rank {rank} is slowed by memory copies: its copy time exceeds that of "
             "its peers by {more} of the step"),
}  # fmt: skip

_OF_NO_HOST = ("launch_latency", "dependency", "unknown")

_LEAST = 0.005
"""Ranks that idle or copy less than this fraction of the mean step beyond their peers are fine."""


def late_hosts(scene: ReplayContext) -> list[Finding]:
    """A finding for each rank that idles or copies longer than its peers, and one for the idle time
    common to all ranks."""
    found = [one for work in _SAYS for one in _beyond_others(scene, work)]
    return [*found, _host_bound(scene, _usual(scene, _of_host_ns(scene)))]


def _of_host_ns(scene: ReplayContext) -> Float:
    """The idle time of each row caused by its host, without device latencies and unknown causes."""
    first = np.cumsum([0, *(len(rank.steps) for rank in scene.found.ranks)])
    found = np.zeros(len(scene.stage))
    for index, causes in enumerate(scene.found.detail.idle):
        for one in causes:
            if one.cause not in _OF_NO_HOST:
                found[first[index] + one.window] += one.idle_ns
    return found


def _usual(scene: ReplayContext, values: Float) -> Float:
    """For each row, the lower median over the ranks of its step."""
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
    """The finding for the idle time that all ranks have in common."""
    idle = scene.work_ns("idle")
    share = float(common[scene.counted].mean()) / scene.mean_ns
    what = "GPU idle" if scene.found.ranks[0].trace.on_device else "idle"
    where = " on every rank" if len(scene.ranks) > 1 else ""
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
            f"{what} {units.percent(share)} of the step{where} (host-bound); "
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
