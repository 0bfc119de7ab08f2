"""What-if analysis: the mean step of a recording after a change, by a replay of its graph."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np

from stepsplit.analyzer.arrays import Intervals, labels_of, mean_within, overlap_ns
from stepsplit.analyzer.diagnose.causes import pace_of
from stepsplit.analyzer.diagnose.comm_causes import moves_of
from stepsplit.analyzer.diagnose.dependency_graph import WORK, DependencyGraph
from stepsplit.analyzer.diagnose.replay import (
    ReplayContext,
    capped,
    earlier,
    moved_faster,
    paced,
    scene_of,
)
from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.config import SCHEDULES, Schedule
from stepsplit.analyzer.model.schedule import Order, Places, orders, places
from stepsplit.analyzer.model.schedule_time import (
    Costs,
    ScheduleTimeline,
    graph,
    ideal_bubble_fraction,
    pipeline_ns,
    simulate,
)
from stepsplit.analyzer.readers.kernel_rules import BUILT_IN, Rules
from stepsplit.analyzer.readers.recording import read_recording
from stepsplit.analyzer.report.tables import PHASES, Boxes
from stepsplit.analyzer.split.mesh import DATA_AXES
from stepsplit.analyzer.split.run import RunSplit, split_run
from stepsplit.analyzer.split.run import Schedule as MeasuredSchedule
from stepsplit.analyzer.trace import Int64

# What-ifs as JSON, schema "stepsplit.what_if/1".

SCHEMA = "stepsplit.what_if/1"


def to_json(found: WhatIfs) -> str:
    """{"schema", "step_ns", "slowdown", "changes": [{"change", "step_ns", "gain_ns"}]}"""
    rows = [
        {"change": str(one.change), "step_ns": one.step_ns, "gain_ns": one.gain_ns}
        for one in found.changes
    ]
    body = {
        "schema": SCHEMA, "step_ns": found.step_ns, "slowdown": found.slowdown, "changes": rows,
    }  # fmt: skip
    return json.dumps(body, indent=1, allow_nan=False) + "\n"


# The mean step of a recording after a change.

_BY_SCHEDULE = ("microbatches", "schedule")


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The mean full step with one change, and the gain.

    Attributes:
        change: the change, such as `WhatIfChange("link", axis="tp", times=2.0)`.
        step_ns: mean full step with the change, in ns.
        gain_ns: reduction of the mean full step, in ns; negative if the step gets longer.
    """

    change: WhatIfChange
    step_ns: int
    gain_ns: int


@dataclass(frozen=True, slots=True)
class WhatIfs:
    """The mean full step of a recording, and the estimate for each change alone.

    Attributes:
        step_ns: mean full step as recorded, in ns.
        changes: one `WhatIf` per change, in the order of the request.
        slowdown: cost of stragglers as a ratio: the step divided by the step in which all ranks and
            stages have equal compute and no call transfers longer than the median of its op and
            size, both without idle hosts. The metric S of Lin et al., Understanding Stragglers in
            Large Model Training Using What-if Analysis, arXiv:2505.05713.
    """

    step_ns: int
    changes: tuple[WhatIf, ...]
    slowdown: float


def what_ifs(found: RunSplit, words: Sequence[str] = ()) -> WhatIfs:
    """Estimate each change given as text; without any, all default changes that apply.

    Raises UsageError for an invalid change, or one that does not apply to the recording.
    """
    scene = scene_of(found, 0)
    if words:
        rows = [_with(scene, change_of(each)) for each in words]
    else:
        rows = [row for each in USUAL if (row := _if_any(scene, change_of(each))) is not None]
    return WhatIfs(round(scene.mean_ns), tuple(rows), slowdown_of(scene))


def slowdown_of(scene: ReplayContext) -> float:
    """The slowdown by stragglers, as defined in WhatIfs."""
    idle = WhatIfChange("no-idle")
    before = scene.gain_ns(replayed(scene, idle))
    even = scene.over(replayed(scene, WhatIfChange("even")))
    after = even.gain_ns(replayed(even, idle))
    return (scene.mean_ns - before) / (even.mean_ns - after)


def _with(scene: ReplayContext, change: WhatIfChange) -> WhatIf:
    if change.kind in _BY_SCHEDULE:
        gain = round(window_gain_ns(scene, change))
    else:
        gain = scene.gain_ns(replayed(scene, change))
    return WhatIf(change, round(scene.mean_ns) - gain, gain)


def _if_any(scene: ReplayContext, change: WhatIfChange) -> WhatIf | None:
    try:
        return _with(scene, change)
    except UsageError:
        return None


def what_if(*places: str | Path, changes: Sequence[str] = (), rules: Rules = BUILT_IN) -> WhatIfs:
    """Estimate how changes would affect the step time of a recording, by a replay.

    Args:
        places: files, folders, archives or URLs of the recording.
        changes: changes as text: even, even-ranks, even-stages, no-slow-ranks, no-idle, overlap,
            link:AXIS=FACTOR, microbatches=N, schedule=NAME or replicas=N. Default: all that apply.
        rules: kernel rules, see `read_rules`. Default: the built-in rules.

    Returns:
        A `WhatIfs` with the recorded step, the step after each change (ns) and the slowdown by
        stragglers.

    Raises:
        DataError: a place is missing or cannot be read.
        UsageError: a change is invalid or does not apply to the recording.

    Example:
        >>> from stepsplit.analyzer import what_if
        >>> result = what_if("runs/exp1", changes=["link:tp=2"])  # doctest: +SKIP
        >>> result.changes[0].gain_ns  # doctest: +SKIP
        1250000
    """
    recording = read_recording(places, rules=rules)
    return what_ifs(split_run(recording.traces, recording.spec, ideal_bubble_fraction), changes)


# The pipeline under another schedule, or with more microbatches.


def window_gain_ns(scene: ReplayContext, change: WhatIfChange) -> float:
    """The gain of another schedule, or of more microbatches for the same work, in ns.

    Both sides are simulated with the measured forwards and backwards, without messages.
    Raises UsageError if the run has no pipeline grid or the schedule is unknown.
    """
    seen = scene.found.schedule
    if seen is None or not scene.found.holes:
        raise UsageError("cannot change the schedule: no pipeline detected in the recording")
    stages, costs = len(scene.found.layout.pipelines[0]), _median_costs(scene)
    before = _makespan_ns(_known(seen.name), stages, seen, seen.microbatches, costs)
    if change.kind == "microbatches":
        after = _makespan_ns(_known(seen.name), stages, seen, change.count, costs)
        return before - after * seen.microbatches / change.count
    return before - _makespan_ns(_known(change.name), stages, seen, seen.microbatches, costs)


def _known(name: str) -> Schedule:
    for schedule in SCHEDULES:
        if schedule == name:
            return schedule
    raise UsageError(f"unknown schedule {name!r}; use one of {', '.join(SCHEDULES)}")


def _makespan_ns(
    schedule: Schedule, stages: int, seen: MeasuredSchedule, microbatches: int, costs: Costs
) -> float:
    return pipeline_ns(schedule, stages, microbatches, seen.chunks, costs).makespan_ns


def _median_costs(scene: ReplayContext) -> Costs:
    """The median forward and backward of each model stage; a backward that is not split counts half
    as input gradient and half as weight gradient."""
    took: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank in scene.found.ranks:
        for grid in rank.grids:
            for box in grid.boxes:
                here = Intervals(np.array([box.start_ns]), np.array([box.end_ns]))
                took[box.stage][box.phase].append(overlap_ns(here, grid.busy))
    return tuple(_cost(took[stage]) for stage in sorted(took))


def _cost(took: Mapping[str, Sequence[int]]) -> tuple[float, float, float]:
    forward, backward = (float(median(took.get(p) or [0])) for p in ("forward", "backward"))
    if "weight" in took:
        return (forward, backward, float(median(took["weight"])))
    return (forward, backward / 2, backward / 2)


# WhatIfChange -> DependencyGraph.


def replayed(scene: ReplayContext, change: WhatIfChange) -> DependencyGraph:
    """The graph with the change applied. Raises UsageError if it does not apply to the run."""
    every = np.zeros(len(scene.stage), dtype=np.int64)
    match change.kind:
        case "even":
            return usual_transfers(scene, evened(scene, every))
        case "even-ranks":
            return evened(scene, scene.stage)
        case "even-stages":
            return evened(scene, every)
        case "no-slow-ranks":
            return paced(scene.graph, "compute", pace_of(scene))
        case "no-idle":
            return capped(scene.graph, "idle", np.zeros(len(scene.stage)))
        case "overlap":
            return earlier(scene.graph, moves_of(scene))
        case "link":
            kernels = _on(scene, change.axis)
            return moved_faster(scene.graph, kernels, np.full(len(kernels), 1 / change.times))
    return _replicas(scene, change.count)


def _on(scene: ReplayContext, axis: str) -> Int64:
    """The collectives and messages on an axis; all of them for "all"."""
    if axis == "all":
        return np.arange(len(scene.graph.kernels))
    found = scene.kernels_on(lambda axes: axis in axes)
    if not len(found):
        every = map(scene.found.layout.axes_of, scene.found.matched.groups)
        known = ", ".join(sorted({one for axes in every for one in axes})) or "no axis"
        raise UsageError(f"the recording has no communication on {axis!r}; it has {known}")
    return found


def _replicas(scene: ReplayContext, times: int) -> DependencyGraph:
    """Multiply the number of data-parallel ranks at equal link speed: each rank of a ring of n
    sends (n - 1) / n of the bytes."""
    matched = scene.found.matched
    kernels = scene.kernels_on(lambda axes: bool(axes) and axes <= DATA_AXES)
    sizes = np.array([len(group.ranks) for group in matched.groups], dtype=np.int64)
    ranks = sizes[matched.group[scene.graph.kernels.row[kernels]]]
    kernels, ranks = kernels[ranks > 1], ranks[ranks > 1]
    if not len(kernels):
        raise UsageError("cannot change replicas: the recording has no data-parallel communication")
    share, then = ((n - 1) / n for n in (ranks, ranks * times))
    return moved_faster(scene.graph, kernels, then / share)


# Changes as text: "link:tp=2", "microbatches=8".

PLAIN = ("even", "even-ranks", "even-stages", "no-slow-ranks", "no-idle", "overlap")

EXAMPLES = (*PLAIN, "link:tp=2", "microbatches=8", "schedule=zb-h1", "replicas=2")

USUAL = (*PLAIN, "link:all=2", "replicas=2")
"""The changes that are estimated by default."""

_FORM = re.compile(
    r"(link):([a-z_]+)=([0-9.]+)|(microbatches|replicas)=(\d+)|(schedule)=([a-z0-9-]+)"
)


@dataclass(frozen=True, slots=True)
class WhatIfChange:
    """One change of a what-if analysis.

    Attributes:
        kind: even, even-ranks, even-stages, no-slow-ranks, no-idle, overlap, link, microbatches,
            replicas or schedule.
        axis: axis of a link change, "all" for every axis. Default "".
        times: speed-up factor of a link change. Default 1.0.
        count: number of microbatches, or factor of the replicas. Default 0.
        name: schedule name. Default "".

    Example:
        >>> from stepsplit.analyzer import WhatIfChange
        >>> str(WhatIfChange("link", axis="tp", times=2.0))
        'link:tp=2'
    """

    kind: str
    axis: str = ""
    times: float = 1.0
    count: int = 0
    name: str = ""

    def __str__(self) -> str:
        match self.kind:
            case "link":
                return f"link:{self.axis}={self.times:g}"
            case "schedule":
                return f"schedule={self.name}"
            case "microbatches" | "replicas":
                return f"{self.kind}={self.count}"
        return self.kind


def change_of(words: str) -> WhatIfChange:
    """Parse a change. Raises UsageError with the valid forms."""
    if words in PLAIN:
        return WhatIfChange(words)
    found = _FORM.fullmatch(words)
    if found is None or float(found[3] or found[5] or 1) <= 0:
        raise UsageError(f"{words!r} is not a valid change; use one of {', '.join(EXAMPLES)}")
    if found[1]:
        return WhatIfChange("link", axis=found[2], times=float(found[3]))
    if found[4]:
        return WhatIfChange(found[4], count=int(found[5]))
    return WhatIfChange("schedule", name=found[7])


# The run without load imbalance and stragglers.

_PHASES = 3

_COMPUTE = WORK.index("compute")


def evened(scene: ReplayContext, among: Int64) -> DependencyGraph:
    """Set the compute of every row to the mean of its step and group, per phase.

    among is the group number of each row: rows of one group share their work equally.
    """
    graph, steps = scene.graph, scene.graph.steps
    nodes = np.flatnonzero(graph.step >= 0)
    cell = graph.step[nodes] * _PHASES + scene.phases()[nodes]
    own = np.bincount(cell, graph.work_ns[nodes, _COMPUTE], minlength=_PHASES * len(steps.step))
    table = own.astype(np.float64).reshape(-1, _PHASES)
    label = labels_of(steps.step, among)
    even = np.stack([mean_within(label, table[:, phase]) for phase in range(_PHASES)], axis=1)
    times = (even / np.maximum(table, 1)).ravel()[cell]
    work = graph.work_ns.copy()
    work[nodes, _COMPUTE] = np.rint(work[nodes, _COMPUTE] * times)
    return replace(graph, work_ns=work)


def usual_transfers(scene: ReplayContext, graph: DependencyGraph) -> DependencyGraph:
    """Limit the transfer time of each call to the median of its op and size."""
    kernels, matched = graph.kernels, scene.found.matched
    kind = labels_of(matched.op[kernels.row], matched.message_bytes[kernels.row])
    took = graph.rest_ns[kernels.end]
    usual = np.array([np.median(took[kind == one]) for one in range(int(kind.max(initial=-1)) + 1)])
    rest = graph.rest_ns.copy()
    rest[kernels.end] = np.minimum(took, usual[kind].astype(np.int64)) if len(kind) else took
    return replace(graph, rest_ns=rest)


# The ideal grid of a pipeline schedule: equal stages, no communication.

_PHASE = {"F": "forward", "B": "backward", "I": "backward", "W": "weight"}


def ideal_grid(measured: Boxes, schedule: str | None, microbatches: int) -> Boxes | None:
    """The boxes of one step, from time 0, if every stage took the measured mean.

    measured holds one step with one rank per stage. None if the schedule is not modelled or does
    not support this number of stages and microbatches.
    """
    ranks, positions = np.unique(measured.rank), len(np.unique(measured.stage))
    if schedule not in SCHEDULES or not len(ranks) or positions % len(ranks):
        return None
    shape = (schedule, len(ranks), microbatches, positions // len(ranks))
    held = 1 if schedule in ("zb-v", "dualpipe", "dualpipe-v") else shape[3]
    try:
        ordered, at = orders(*shape[:3], held), places(*shape[:2], held)
        timeline = simulate(graph(*shape[:3], held), (_mean_costs(measured),) * positions)
    except UsageError:
        return None
    if max(place for one in at for place in one) != positions - 1:
        return None
    return _boxes(measured, _by_coordinate(measured, at), ordered, at, timeline)


def _mean_costs(measured: Boxes) -> tuple[float, float, float]:
    """The mean forward, backward and weight gradient of a microbatch on a stage, in ns."""
    forward, backward, weight = (measured.dur_ns[measured.phase == i] for i in range(len(PHASES)))
    return tuple(float(one.mean()) if len(one) else 0.0 for one in (forward, backward, weight))  # type: ignore[return-value]


def _by_coordinate(measured: Boxes, at: Places) -> list[int]:
    """The measured rank of each pp coordinate: the rank of its first stage."""
    return [int(measured.rank[measured.stage == one[0]][0]) for one in at]


def _boxes(
    measured: Boxes,
    ranks: list[int],
    ordered: tuple[Order, ...],
    at: Places,
    timeline: ScheduleTimeline,
) -> Boxes:
    rows = [
        (ranks[i], at[i][one.chunk], one.microbatch, PHASES.index(_PHASE[one.kind]), start, end)
        for i, order in enumerate(ordered)
        for one, start, end in zip(order, timeline.starts_ns[i], timeline.ends_ns[i], strict=True)
    ]
    table = np.array(rows, dtype=np.float64).astype(np.int64)
    return Boxes(
        rank=table[:, 0].astype(np.int32),
        step=np.full(len(table), int(measured.step[0]), dtype=np.int32),
        stage=table[:, 1].astype(np.int32),
        microbatch=table[:, 2].astype(np.int32),
        phase=table[:, 3].astype(np.uint8),
        start_ns=table[:, 4],
        dur_ns=table[:, 5] - table[:, 4],
    )
