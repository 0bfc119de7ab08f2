"""Ranks whose device computes the same kernels more slowly than its peers do."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from stepsplit.analyzer.compare.causes.devices import said_of
from stepsplit.analyzer.compare.causes.scene import Float, Scene
from stepsplit.analyzer.compare.replay.edits import paced
from stepsplit.analyzer.report.report import EventRef, Finding
from stepsplit.analyzer.split.lateness import SlowRank, slow_ranks


def pace_of(scene: Scene) -> Float:
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


def _usual_compute(scene: Scene) -> Float:
    """The mean compute of each row's rank in its full steps."""
    compute, steps = scene.bucket_ns("compute"), scene.graph.steps
    counted = scene.counted
    count = np.bincount(steps.rank[counted], minlength=len(scene.ranks))
    total = np.bincount(steps.rank[counted], compute[counted], minlength=len(scene.ranks))
    return np.maximum(total / np.maximum(count, 1), 1.0)[steps.rank]


def slow_paces(scene: Scene) -> list[Finding]:
    """A finding for each slow rank, as if it alone kept its peers' pace."""
    pace = pace_of(scene)
    slow = {scene.ranks[index] for index in scene.graph.steps.rank[pace < 1].tolist()}
    return [_finding(scene, int(rank), pace) for rank in sorted(slow)]


def _finding(scene: Scene, rank: int, pace: Float) -> Finding:
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


def _slowest(scene: Scene, rank: int, slow: SlowRank) -> tuple[EventRef, ...]:
    index = int(np.flatnonzero(scene.ranks == rank)[0])
    events = scene.found.ranks[index].trace.events
    rows = np.flatnonzero(events.named(slow.kernel))
    longest = rows[np.argsort(-events.dur_ns[rows], kind="stable")][:3]
    return tuple(scene.event(index, row) for row in longest.tolist())
