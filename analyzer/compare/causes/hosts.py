"""Ranks that do nothing, or copy, for longer than the others; and what all of them idle."""

from __future__ import annotations

import numpy as np

from stepsplit.analyzer import units
from stepsplit.analyzer.compare.causes.scene import Float, Scene
from stepsplit.analyzer.compare.replay.edits import capped
from stepsplit.analyzer.report.build import why_idle
from stepsplit.analyzer.report.report import Finding
from stepsplit.analyzer.split.idle import IdleCause

_SAYS = {
    "idle": ("host_stall", "rank {rank} runs nothing for {more} of the step longer than the "
             "others, and they wait for it: its host is late"),
    "copy": ("slow_copy", "rank {rank} copies memory for {more} of the step longer than the "
             "others, and they wait for it"),
}  # fmt: skip
_OF_NO_HOST = ("launch_latency", "dependency", "unknown")
_LEAST = 0.005
"""Of the mean step; a rank that idles or copies for less beyond the others is not looked at."""


def late_hosts(scene: Scene) -> list[Finding]:
    """A finding for each rank that idles or copies longer than the others, and one for what all
    of them idle."""
    found = [one for work in _SAYS for one in _beyond_others(scene, work)]
    return [*found, _host_bound(scene, _usual(scene, _of_host_ns(scene)))]


def _of_host_ns(scene: Scene) -> Float:
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


def _usual(scene: Scene, values: Float) -> Float:
    """For each row the lower median over the ranks in its step."""
    steps = scene.graph.steps
    found = np.zeros(len(values))
    for step in np.unique(steps.step).tolist():
        rows = np.flatnonzero(steps.step == step)
        found[rows] = np.sort(values[rows])[(len(rows) - 1) // 2]
    return found


def _beyond_others(scene: Scene, work: str) -> list[Finding]:
    spent, steps = scene.work_ns(work), scene.graph.steps
    usual = _usual(scene, spent.astype(np.float64))
    beyond = np.maximum(spent - usual, 0) * scene.counted
    steps_of_rank = np.maximum(np.bincount(steps.rank, scene.counted), 1)
    mean = np.bincount(steps.rank, beyond) / steps_of_rank
    late = np.flatnonzero(mean > _LEAST * scene.mean_ns).tolist()
    return [_of_rank(scene, work, index, usual) for index in late]


def _of_rank(scene: Scene, work: str, index: int, usual: Float) -> Finding:
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


def _host_bound(scene: Scene, common: Float) -> Finding:
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


def _why(scene: Scene, index: int, work: str) -> str:
    said = why_idle(scene.found.detail.idle[index]) if work == "idle" else ""
    return f"; {said}" if said else ""


def _host_causes(scene: Scene) -> list[IdleCause]:
    return [
        one for causes in scene.found.detail.idle for one in causes if one.cause not in _OF_NO_HOST
    ]
