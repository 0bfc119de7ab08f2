"""What each rank sent in each full step, counted by axis, op and size."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from stepsplit.analyzer.split.run import RankSplit, RunSplit
from stepsplit.analyzer.split.strategy_evidence import axis_named, host_steps, issued_in
from stepsplit.analyzer.trace import OPS, Bool, Group

UNKNOWN_GROUP = "group unknown"


@dataclass(frozen=True, slots=True)
class MeasuredMessages:
    """count calls of one kind by one rank in one full step, the step in which the host made them.

    axis is the mesh's, several as "dp_shard x cp", else what describes the group. message_bytes are
    of one call by nccl-tests' convention, -1 unknown.
    """

    rank: int
    stage: int
    step: int
    axis: str
    op: str
    message_bytes: int
    count: int


def measured_messages(found: RunSplit) -> tuple[MeasuredMessages, ...]:
    """The messages of every rank and full step, in order of rank, step, axis, op and size.

    A collective or message of several kernels counts once; sends and receives count apart.
    """
    leads = [found.matched.leads[found.matched.of_trace(i)] for i in range(len(found.ranks))]
    return tuple(
        message
        for rank, first in zip(found.ranks, leads, strict=True)
        for message in _of_rank(rank, first, found)
    )


def _of_rank(rank: RankSplit, leads: Bool, found: RunSplit) -> list[MeasuredMessages]:
    trace, steps = rank.trace, host_steps(rank.trace, rank.windows)
    calls, step = trace.calls, issued_in(trace, steps, leads)
    rows, axes = np.flatnonzero(step >= 0), axes_in_words(found, rank)
    columns = (step[rows], calls.group_id[rows], calls.op[rows], calls.message_bytes[rows])
    kinds = Counter(
        (steps.number[at], axes[group], OPS[op], size)
        for at, group, op, size in zip(*(column.tolist() for column in columns), strict=True)
    )
    stage = found.layout.stage(trace.rank)
    return [MeasuredMessages(trace.rank, stage, *kind, kinds[kind]) for kind in sorted(kinds)]


def axes_in_words(found: RunSplit, rank: RankSplit) -> tuple[str, ...]:
    """The axes of each group of the rank; behind them, at -1, the word for a group unknown."""
    return (*(axis_in_words(found, group) for group in rank.trace.groups), UNKNOWN_GROUP)


def axis_in_words(found: RunSplit, group: Group) -> str:
    """The axes of a group, by the layout or the only strategy over as many ranks; where nobody
    knows them its description, or how many ranks it has.

    Gradients may be summed over the ranks of a cp that only what attention sends tells.
    """
    layout, axis = found.layout, found.layout.axis_of(group)
    along = {one.axis for one in found.strategies if one.size == len(group.ranks)} - {None}
    told = next(iter(along)) if len(along) == 1 and layout.source != "run.json" else None
    if told is not None and (told == "cp" or (axis is None and layout.mesh is None)):
        return told
    described = group.description or f"{len(group.ranks)} ranks"
    return axis or axis_named(layout.axes_of(group), described)
