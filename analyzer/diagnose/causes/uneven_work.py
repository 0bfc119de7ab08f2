"""Uneven work: ranks of a stage process different numbers of tokens in a step, and wait for the one
with the most, another one in each step: variable lengths that are not packed evenly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial

import numpy as np

from stepsplit.analyzer import units
from stepsplit.analyzer.arrays import group_ids
from stepsplit.analyzer.diagnose.causes.cause import CauseEntry, Remedy, replay_remedy
from stepsplit.analyzer.diagnose.causes.context import CauseContext
from stepsplit.analyzer.diagnose.counted_work import MIN_STEPS
from stepsplit.analyzer.diagnose.graph.replay import scale_work
from stepsplit.analyzer.report.work_rows import WORK_NOUNS

_NEARLY_ALWAYS = 0.8
"""A rank that has the most work in this share of the steps is named."""


def find_uneven_work(context: CauseContext) -> Iterator[Remedy]:
    """The saving of a packing that gives all ranks of a stage as much work in each step."""
    law = context.law
    if law is None:
        return
    rows = law.uneven & context.counted
    if not rows.any():
        return
    steps = context.graph.steps
    # The rank with the most work of each stage and step.
    label = group_ids(context.stage, steps.step)
    order = np.lexsort((-np.nan_to_num(law.of_row), label))
    order = order[rows[order]]
    most = order[np.unique(label[order], return_index=True)[1]]
    rank, often = Counter(context.ranks[steps.rank[most]].tolist()).most_common(1)[0]
    always = len(most) > 1 and often >= _NEARLY_ALWAYS * len(most)
    summary, compute = law.summary, context.select_bucket_ns("compute")
    noun = WORK_NOUNS[summary.unit]
    more = units.format_percent(summary.most_ratio - 1)
    n_steps = len(np.unique(steps.step[most]))
    which = "another one from step to step" if n_steps > 1 else "from a single step"
    which = f"mostly rank {rank}" if always else which
    known = summary.power is not None
    law_text = (
        f"compute grows as {noun} to the power {summary.power:.2f}"
        if known
        else f"as if {noun} were all that makes them differ: "
        + ("those of a rank hardly vary" if n_steps >= MIN_STEPS else "too few steps to tell")
    )
    yield replay_remedy(
        context,
        partial(scale_work, work="compute", times=law.factor),
        bucket="skew",
        measured_ns=compute[most].mean(),
        predicted_ns=(compute * law.factor)[most].mean(),
        rows=rows,
        message=(
            f"uneven work: in each step the rank with the most {noun} ({which}) has {more} more "
            f"than the mean rank; saving if they are packed evenly, {law_text}"
        ),
        ranks=(rank,) if always else (),
        would_settle=() if known else ("more_steps",),
        is_doubtful=not known,
    )


UNEVEN_WORK = CauseEntry(
    "uneven_work", find_uneven_work, basis="measured", as_set="unevenly loaded", of_peers=True
)
