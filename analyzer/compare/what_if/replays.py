"""Change -> Graph: what each change makes of the dependencies and their times."""

from __future__ import annotations

import numpy as np

from stepsplit.analyzer.compare.causes.overlap import moves_of
from stepsplit.analyzer.compare.causes.paces import pace_of
from stepsplit.analyzer.compare.causes.scene import Scene
from stepsplit.analyzer.compare.replay.earlier import earlier
from stepsplit.analyzer.compare.replay.edits import capped, moved_faster, paced
from stepsplit.analyzer.compare.replay.graph import Graph
from stepsplit.analyzer.compare.what_if.change import Change
from stepsplit.analyzer.compare.what_if.evened import evened, usual_transfers
from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.split.mesh import DATA_AXES
from stepsplit.analyzer.trace import Int64


def replayed(scene: Scene, change: Change) -> Graph:
    """The graph with the change made. Raises UsageError where the run has nothing to change."""
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


def _on(scene: Scene, axis: str) -> Int64:
    """The collectives and messages along an axis; all of them for "all"."""
    if axis == "all":
        return np.arange(len(scene.graph.kernels))
    found = scene.kernels_on(lambda axes: axis in axes)
    if not len(found):
        every = map(scene.found.layout.axes_of, scene.found.matched.groups)
        known = ", ".join(sorted({one for axes in every for one in axes})) or "no axis"
        raise UsageError(f"the recording has no communication on {axis!r}; it has {known}")
    return found


def _replicas(scene: Scene, times: int) -> Graph:
    """So many times the data-parallel ranks on links as fast: of a ring's bytes each rank sends
    (n - 1) / n, which grows towards 1."""
    matched = scene.found.matched
    kernels = scene.kernels_on(lambda axes: bool(axes) and axes <= DATA_AXES)
    sizes = np.array([len(group.ranks) for group in matched.groups], dtype=np.int64)
    ranks = sizes[matched.group[scene.graph.kernels.row[kernels]]]
    kernels, ranks = kernels[ranks > 1], ranks[ranks > 1]
    if not len(kernels):
        raise UsageError("the recording has no data-parallel communication to spread further")
    share, then = ((n - 1) / n for n in (ranks, ranks * times))
    return moved_faster(scene.graph, kernels, then / share)
