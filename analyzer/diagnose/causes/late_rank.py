"""Late ranks: a rank that idles, or copies, longer than its peers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import numpy as np
from msgspec.structs import replace

from stepsplit.analyzer import units
from stepsplit.analyzer.arrays import group_ids, select_rows
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
from stepsplit.analyzer.significance import SIGMA_OF_MAD
from stepsplit.analyzer.trace import Float


def find_late_ranks(context: CauseContext, work: str, text: str) -> Iterator[Remedy]:
    """Find each rank that spends more time on one kind of WORK than its peers; text begins the
    message."""
    rest = context.host.rest
    spent = replace(context, graph=rest).sum_work_ns(work)
    usual = compute_step_median(context, spent.astype(np.float64))
    beyond = spent - usual
    mean = compute_rank_means(context, np.maximum(beyond, 0))
    # Of two ranks the median is the lower one: the other is never below it.
    signed = beyond
    if len(context.ranks) == 2:
        step = group_ids(context.graph.steps.step)
        signed = spent - context.average_peers(step, spent.astype(np.float64), others=True)
    # Not all ranks can have more than the mean rank.
    total = compute_rank_means(context, spent.astype(np.float64))
    counted = np.unique(context.graph.steps.rank[context.counted])
    is_late = (mean > MIN_LATE_SHARE * context.mean_ns) & (total > total[counted].mean())
    for index in np.flatnonzero(is_late).tolist():
        own = (context.graph.steps.rank == index) & context.counted
        mine = own & (beyond > 0)
        # If its excess in the mean step is no more than its spread between steps, only steps that
        # stand out count. A single step has no spread.
        count, excess = int(own.sum()), signed[own]
        if count > 1 and excess.mean() <= _SIGMAS * excess.std(ddof=1) / math.sqrt(count):
            mine &= signed > _OUTLIER * _estimate_noise(context, signed)
        if not mine.any():
            continue
        cut_ns = measure_excess(rest, work, np.where(mine, usual, spent))
        rank, more_ns = int(context.ranks[index]), np.where(mine, spent - usual, 0.0)
        more = units.format_percent(float(more_ns[own].mean()) / context.mean_ns)
        message = text.format(rank=rank, more=more)
        if work == "idle":
            # What the rank idles for in these steps, and where; named causes have own findings.
            first = int(np.flatnonzero(context.graph.steps.rank == index)[0])
            windows = set((np.flatnonzero(mine) - first).tolist())
            causes = [one for one in context.split.detail.idle[index] if one.window in windows]
            unnamed = (one for one in causes if one.cause not in context.host.named)
            reason, idle = explain_idle(unnamed), context.host.select_rest()
            spans = select_rows(idle, (idle.rank == index) & mine[idle.step]).list_spans()
            message += (f"; {reason}" if reason else "") + describe_place(context, spans)
        yield replay_remedy(
            context,
            partial(reduce_work, work=work, cut_ns=cut_ns),
            bucket=work,
            measured_ns=spent[own].mean(),
            predicted_ns=np.minimum(spent, usual)[own].mean(),
            rows=mine,
            message=message,
            ranks=(rank,),
            events=context.list_longest(index, work),
        )


_SIGMAS = 2.0
"""In its mean step a late rank exceeds its peers by so many standard errors: by chance, one rank in
twenty does, in few steps."""

_OUTLIER = 6.0
"""A rank that does not may be late in single steps, by so many standard deviations."""


def _estimate_noise(context: CauseContext, beyond: Float) -> float:
    """The standard deviation of what ranks have beyond their peers in the steps, by the median."""
    own = beyond[context.counted]
    return SIGMA_OF_MAD * float(np.median(np.abs(own - np.median(own))))


HOST_STALL = CauseEntry(
    "host_stall",
    partial(
        find_late_ranks,
        work="idle",
        text="rank {rank} is host-bound: its idle time exceeds that of its peers by {more} of the "
        "step",
    ),
    basis="measured",
    as_set="host-bound",
    with_profiler=True,
    of_peers=True,
)
SLOW_COPY = CauseEntry(
    "slow_copy",
    partial(
        find_late_ranks,
        work="copy",
        text="rank {rank} is slowed by memory copies: its copy time exceeds that of its peers by "
        "{more} of the step",
    ),
    basis="measured",
    as_set="slowed by memory copies",
    of_peers=True,
)
