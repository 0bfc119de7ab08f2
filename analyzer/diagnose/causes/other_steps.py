"""Steps of another kind: every n-th step also evaluates, logs, saves or synchronizes, which the
mean step of the headline does not show."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from stepsplit.analyzer import units
from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.diagnose.causes.cause import CauseEntry, Remedy
from stepsplit.analyzer.diagnose.causes.context import CauseContext
from stepsplit.analyzer.report.report import EventRef, Finding
from stepsplit.analyzer.split.step_kinds import describe_steps


def find_other_steps(context: CauseContext) -> Iterator[Remedy]:
    """Find the kind of steps that takes most time beyond the headline's, over all complete steps.

    Nothing is replayed: what such steps take longer is measured, and shared out over all steps.
    """
    kinds = context.split.kinds
    if not kinds:
        return
    headline, *others = kinds
    every = [step for rank in context.split.ranks for step in rank.steps if step.kind != "partial"]
    usual = np.array([step.split.buckets_ns for step in every if step.step in headline.steps]).mean(
        axis=0
    )
    found = []
    for kind in others:
        own = [step for step in every if step.step in kind.steps]
        more = np.array([step.split.buckets_ns for step in own]).mean(axis=0) - usual
        gain_ns = int(more.sum() * len(own) / len(every))
        found.append((gain_ns, kind, more, own))
    gain_ns, kind, more, own = max(found, key=lambda one: one[0])
    if gain_ns <= 0:
        return
    longest = max(own, key=lambda step: step.split.step_ns)
    extra = kind.describe_extra(
        headline, len(context.ranks), on_device=context.split.ranks[0].trace.on_device
    )
    takes = "takes" if len(kind.steps) == 1 or kind.period else "take"
    which = describe_steps(kind.steps, kind.period)
    message = (
        f"{which} {takes} {units.format_milliseconds(more.sum())} more than the others,"
        f" most of it {BUCKETS[int(more.argmax())]}"
    )
    message += f": {extra} more" if extra else ""
    whole_ns = float(usual.sum() + more.sum())
    yield Remedy(
        Finding(
            code="",
            bucket=BUCKETS[int(more.argmax())],
            gain_ns=gain_ns,
            measured_ns=int(whole_ns),
            predicted_ns=int(usual.sum()),
            ranks=(),
            steps=kind.steps,
            events=(
                EventRef(
                    longest.rank,
                    longest.start_ns - context.origin_ns,
                    longest.split.step_ns,
                    f"step {longest.step}",
                ),
            ),
            message=message,
        ),
        None,
        names_steps=True,
    )


OTHER_STEPS = CauseEntry("other_steps", find_other_steps, basis="measured")
