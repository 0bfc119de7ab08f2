"""Steps of another kind: every n-th step also evaluates, logs, saves or synchronizes, which the
mean step of the headline does not show."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from stepsplit.analyzer import units
from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.diagnose.causes.cause import SIGMAS, CauseEntry, Remedy
from stepsplit.analyzer.diagnose.causes.context import CauseContext
from stepsplit.analyzer.report.report import Basis, EventRef, Finding, Settle
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
    usual_steps = [step for step in every if step.step in headline.steps]
    usual = np.array([step.split.buckets_ns for step in usual_steps]).mean(axis=0)
    found = []
    for kind in others:
        own = [step for step in every if step.step in kind.steps]
        more = np.array([step.split.buckets_ns for step in own]).mean(axis=0) - usual
        doing = [step for step in every if step.step in (*kind.steps, *kind.with_more)]
        gain_ns = int(more.sum() * len(doing) / len(every))
        found.append((gain_ns, kind, more, own, doing))
    gain_ns, kind, more, own, doing = max(found, key=lambda one: one[0])
    if gain_ns <= 0:
        return
    longest = max(own, key=lambda step: step.split.step_ns)
    extra = kind.describe_extra(
        headline, len(context.ranks), on_device=context.split.ranks[0].trace.on_device
    )
    numbers = tuple(sorted((*kind.steps, *kind.with_more)))
    takes = "takes" if len(numbers) == 1 or kind.period else "take"
    which = describe_steps(numbers, kind.period)
    message = (
        f"{which} {takes} {units.format_milliseconds(more.sum())} more than the others,"
        f" most of it {BUCKETS[int(more.argmax())]}"
    )
    message += f": {extra} more" if extra else ""
    spread_ns: float | None = None
    would_settle: tuple[Settle, ...] = ()
    if len(headline.steps) > 1:
        # Of the usual steps alone: an evaluation may be longer one time than another, and is no
        # noise.
        usual_ns = [
            np.mean([step.split.step_ns for step in usual_steps if step.step == number])
            for number in headline.steps
        ]
        spread_ns = float(np.std(usual_ns, ddof=1))
        error_ns = spread_ns * math.sqrt(1 / len(headline.steps) + 1 / len(kind.steps))
        if more.sum() < SIGMAS * error_ns:
            spread = units.format_milliseconds(spread_ns)
            message += f"; not distinguishable from the spread of the other steps ({spread})"
            would_settle = ("more_steps",)
    whole_ns = float(usual.sum() + more.sum())
    yield Remedy(
        Finding(
            code="",
            bucket=BUCKETS[int(more.argmax())],
            gain_ns=gain_ns,
            measured_ns=int(whole_ns),
            predicted_ns=int(usual.sum()),
            ranks=(),
            steps=numbers,
            events=(
                EventRef(
                    longest.rank,
                    longest.start_ns - context.origin_ns,
                    longest.split.step_ns,
                    f"step {longest.step}",
                ),
            ),
            message=message,
            basis=Basis(
                "measured",
                len(numbers),
                len({step.step for step in every}),
                repeats=len(doing),
                spread_ns=None if spread_ns is None else round(spread_ns * len(doing) / len(every)),
                would_settle=would_settle,
            ),
        ),
        None,
        names_steps=True,
    )


OTHER_STEPS = CauseEntry("other_steps", find_other_steps, basis="measured")
