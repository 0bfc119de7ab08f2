"""Work that is shared out unevenly: over the ranks of a stage, and over the stages."""

from __future__ import annotations

import numpy as np

from stepsplit.analyzer import units
from stepsplit.analyzer.arrays import labels_of, mean_within
from stepsplit.analyzer.compare.causes.paces import pace_of
from stepsplit.analyzer.compare.causes.scene import Float, Scene
from stepsplit.analyzer.compare.replay.edits import moved_faster, paced
from stepsplit.analyzer.compare.replay.graph import Graph
from stepsplit.analyzer.report.report import Finding
from stepsplit.analyzer.split.mesh import STAGE_AXES
from stepsplit.analyzer.trace import Int64

_UNEVEN = 1.02
"""Below so many times the mean a share of work is even."""


def uneven_shares(scene: Scene) -> list[Finding]:
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


def _uneven_stages(scene: Scene, of_stage: Float, mean: Float) -> Finding | None:
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


def _with_layers(scene: Scene, graph: Graph, times: Float) -> Graph:
    """What layers communicate within their stage comes and goes with them."""
    kernels = scene.kernels_on(lambda axes: bool(axes) and axes <= STAGE_AXES)
    return moved_faster(graph, kernels, times[graph.kernels.step[kernels]])


def _uneven_ranks(scene: Scene, work: Float, of_stage: Float) -> Finding | None:
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


def _heaviest(scene: Scene, who: Int64, ratio: Float) -> tuple[int, float] | None:
    """(who has the most work on average, how many times the mean); None where all is even."""
    numbers, place = np.unique(who[scene.counted], return_inverse=True)
    mean = np.bincount(place, ratio[scene.counted]) / np.bincount(place)
    most = int(mean.argmax())
    return (int(numbers[most]), float(mean[most])) if mean[most] > _UNEVEN else None
