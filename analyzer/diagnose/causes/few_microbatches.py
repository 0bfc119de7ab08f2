"""Few microbatches: the bubble of the pipeline's schedule, compared with twice as many of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from stepsplit.analyzer import units
from stepsplit.analyzer.diagnose.causes.cause import CauseEntry, Remedy
from stepsplit.analyzer.diagnose.causes.context import CauseContext
from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.ideal_bubble import compute_ideal_bubble_fraction
from stepsplit.analyzer.report.build import compute_bubble_fraction, list_full_bubbles
from stepsplit.analyzer.report.report import SCHEDULE_NAMES, Finding, describe_ideal_bubble


def find_few_microbatches(context: CauseContext) -> Iterator[Remedy]:
    """Estimate the gain of twice as many microbatches of the same size for the same work.

    As what-if says, where it can; else at least that of a smaller ideal bubble, without the share
    of the optimizer and of the gradient reduction that the additional microbatches take over.
    """
    schedule, holes = context.split.schedule, context.split.stage_bubbles
    now = schedule.ideal_bubble_fraction if schedule else None
    if schedule is None or now is None or not holes:
        return
    measured = compute_bubble_fraction(list_full_bubbles(context.split) or holes)
    # No more than there is: microbatches of unequal length may fit better than equal ones.
    now = min(now, measured)
    stages = len(context.split.layout.pipelines[0])
    then = compute_ideal_bubble_fraction(
        schedule.name, stages, 2 * schedule.microbatches, schedule.chunks, schedule.times_ns
    )
    if then is None or then >= now:
        return
    # Most runs have no pipeline, and its simulation takes time to load.
    from stepsplit.analyzer.diagnose.pipeline_change import compute_microbatches_gain_ns

    busy_ns = float(np.mean([hole.window_ns - hole.bubble_ns for hole in holes]))
    costs, would_cost = (busy_ns * idle / (1 - idle) for idle in (now, then))
    try:
        gain_ns, least = compute_microbatches_gain_ns(context, 2 * schedule.microbatches), ""
    except UsageError:
        gain_ns, least = costs - would_cost, ", which gains at least this much"
    finding = Finding(
        code="",
        bucket="bubble",
        gain_ns=round(gain_ns),
        measured_ns=round(costs),
        predicted_ns=round(would_cost),
        ranks=(),
        steps=context.list_steps(context.counted),
        events=(),
        message=(
            f"{SCHEDULE_NAMES.get(schedule.name, schedule.name)} bubble is "
            f"{units.format_percent(measured)} of the pipeline window, "
            f"{describe_ideal_bubble(measured, now)} with "
            f"{units.format_microbatches(schedule.microbatches)}; "
            f"{2 * schedule.microbatches} of the same size in half as many steps would reduce "
            f"the ideal to {units.format_percent(then)}{least}"
        ),
    )
    yield Remedy(finding, change=None)


FEW_MICROBATCHES = CauseEntry("few_microbatches", find_few_microbatches, basis="inferred")
