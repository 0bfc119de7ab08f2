"""What the schedule itself costs with so few microbatches."""

from __future__ import annotations

import numpy as np

from stepsplit.analyzer import units
from stepsplit.analyzer.compare.causes.scene import Scene
from stepsplit.analyzer.model.schedule_time import ideal_bubble_fraction
from stepsplit.analyzer.report.report import Finding


def few_microbatches(scene: Scene) -> list[Finding]:
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
