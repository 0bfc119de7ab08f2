"""The pipeline's window under another schedule, or with more microbatches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np

from stepsplit.analyzer.arrays import Intervals, overlap_ns
from stepsplit.analyzer.compare.causes.scene import Scene
from stepsplit.analyzer.compare.what_if.change import Change
from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.config import SCHEDULES, Schedule
from stepsplit.analyzer.model.schedule_time import Costs, pipeline_ns
from stepsplit.analyzer.split.run import Schedule as Seen


def window_gain_ns(scene: Scene, change: Change) -> float:
    """How much shorter a pipeline of the measured forwards and backwards is, by the schedule's own
    order, both sides without messages; of more microbatches for the same work.

    Raises UsageError where the run has no pipeline grid or the schedule is unknown.
    """
    seen = scene.found.schedule
    if seen is None or not scene.found.holes:
        raise UsageError("the recording shows no pipeline whose schedule could be another")
    stages, costs = len(scene.found.layout.pipelines[0]), _costs(scene)
    before = _makespan_ns(_known(seen.name), stages, seen, seen.microbatches, costs)
    if change.kind == "microbatches":
        after = _makespan_ns(_known(seen.name), stages, seen, change.count, costs)
        return before - after * seen.microbatches / change.count
    return before - _makespan_ns(_known(change.name), stages, seen, seen.microbatches, costs)


def _known(name: str) -> Schedule:
    for schedule in SCHEDULES:
        if schedule == name:
            return schedule
    raise UsageError(f"no schedule {name!r} to compare with; write {', '.join(SCHEDULES)}")


def _makespan_ns(
    schedule: Schedule, stages: int, seen: Seen, microbatches: int, costs: Costs
) -> float:
    return pipeline_ns(schedule, stages, microbatches, seen.chunks, costs).makespan_ns


def _costs(scene: Scene) -> Costs:
    """The median forward and backward of each model stage; a backward that was not split is half
    input and half weight gradient."""
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
