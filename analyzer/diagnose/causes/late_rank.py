"""Late ranks: a rank that idles, or copies, longer than its peers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from stepsplit.analyzer import units
from stepsplit.analyzer.diagnose.causes.cause import CauseEntry, Remedy, replay_remedy
from stepsplit.analyzer.diagnose.causes.code_places import describe_place
from stepsplit.analyzer.diagnose.causes.context import CauseContext
from stepsplit.analyzer.diagnose.causes.host_time import (
    MIN_LATE_SHARE,
    compute_rank_means,
    compute_step_median,
)
from stepsplit.analyzer.diagnose.graph.replay import measure_excess, reduce_work
from stepsplit.analyzer.report.explain import explain_idle
from stepsplit.analyzer.trace import Bool, Float

_NEARLY_ALL, _SEVERAL = 0.9, 3
"""Nearly all of what happened in a step, of several, is named with it."""


def find_late_ranks(context: CauseContext, work: str, text: str) -> Iterator[Remedy]:
    """Find each rank that spends more time on one kind of WORK than its peers; text begins the
    message."""
    rest = context.host.rest
    spent = replace(context, graph=rest).sum_work_ns(work)
    usual = compute_step_median(context, spent.astype(np.float64))
    mean = compute_rank_means(context, np.maximum(spent - usual, 0))
    for index in np.flatnonzero(mean > MIN_LATE_SHARE * context.mean_ns).tolist():
        own = (context.graph.steps.rank == index) & context.counted
        mine = own & (spent > usual)
        cut_ns = measure_excess(rest, work, np.where(mine, usual, spent))
        rank, excess = int(context.ranks[index]), np.where(mine, spent - usual, 0.0)
        more = units.format_percent(float(excess[own].mean()) / context.mean_ns)
        yield replay_remedy(
            context,
            partial(reduce_work, work=work, cut_ns=cut_ns),
            bucket=work,
            measured_ns=spent[own].mean(),
            predicted_ns=np.minimum(spent, usual)[own].mean(),
            rows=mine,
            message=text.format(rank=rank, more=more)
            + _name_only_step(context, excess, own)
            + (_explain_idle(context, index, mine) if work == "idle" else ""),
            ranks=(rank,),
            events=context.list_longest(index, work),
        )


def _name_only_step(context: CauseContext, excess: Float, own: Bool) -> str:
    """The step with nearly all of a rank's excess; "" if there is none, or hardly another step."""
    largest = int(np.argmax(excess))
    if own.sum() < _SEVERAL or excess[largest] < _NEARLY_ALL * excess.sum():
        return ""
    return f", nearly all of it in step {context.graph.steps.step[largest]}"


def _explain_idle(context: CauseContext, index: int, rows: Bool) -> str:
    """What these rows of the rank's steps idle for, and where."""
    host = context.host
    first = int(np.flatnonzero(context.graph.steps.rank == index)[0])
    windows = set((np.flatnonzero(rows) - first).tolist())
    causes = [
        one
        for one in context.split.detail.idle[index]
        if one.window in windows and one.cause not in host.named
    ]
    reason = explain_idle(causes)
    idle = host.select_rest()
    own = idle.select((idle.rank == index) & rows[idle.step])
    return (f"; {reason}" if reason else "") + describe_place(context, own.list_spans())


HOST_STALL = CauseEntry(
    "host_stall",
    partial(
        find_late_ranks,
        work="idle",
        text="rank {rank} is host-bound: its idle time exceeds that of its peers by {more} of the "
        "step",
    ),
    as_set="host-bound",
    with_profiler=True,
)
SLOW_COPY = CauseEntry(
    "slow_copy",
    partial(
        find_late_ranks,
        work="copy",
        text="rank {rank} is slowed by memory copies: its copy time exceeds that of its peers by "
        "{more} of the step",
    ),
    as_set="slowed by memory copies",
)
