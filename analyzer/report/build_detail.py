"""Detail -> the rows of a report: sums over the full steps, and times from the report's t0."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from stepsplit.analyzer.buckets import StepSplit
from stepsplit.analyzer.report.report import ContentionRow, IdleRow
from stepsplit.analyzer.split.critical_path import PathPart, PathStep
from stepsplit.analyzer.split.idle import IdleCause
from stepsplit.analyzer.split.run import RankSplit, RunSplit
from stepsplit.analyzer.split.steps import StepTimes

_MOST_OPS = 5
"""Of each cause, so many ops of a rank are named."""


def idle_rows(found: RunSplit) -> tuple[IdleRow, ...]:
    """Why each rank idled, over its full steps, the largest causes of a rank first."""
    pairs = zip(found.ranks, found.detail.idle, strict=True)
    return tuple(row for rank, causes in pairs for row in _idle_of(rank, causes))


def _idle_of(rank: RankSplit, causes: Sequence[IdleCause]) -> list[IdleRow]:
    full = _full(rank.steps)
    sums: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))
    for one in causes:
        if one.window in full:
            pair = sums[one.cause][one.op]
            pair[0], pair[1] = pair[0] + one.idle_ns, pair[1] + one.count
    rows = [row for cause, ops in sums.items() for row in _of_cause(rank.trace.rank, cause, ops)]
    held = sum(rank.steps[window].split.idle_ns for window in full)
    assert sum(row.idle_ns for row in rows) == held, f"rank {rank.trace.rank}: idle is lost"
    return sorted(rows, key=lambda row: -row.idle_ns)


def _of_cause(rank: int, cause: str, ops: dict[str, list[int]]) -> Iterable[IdleRow]:
    named = sorted(ops.items(), key=lambda item: -item[1][0])
    for op, (idle_ns, count) in named[:_MOST_OPS]:
        yield IdleRow(rank, cause, op, idle_ns, count)
    if rest := named[_MOST_OPS:]:
        yield IdleRow(rank, cause, None, sum(v[0] for _, v in rest), sum(v[1] for _, v in rest))


def _full(steps: Sequence[StepSplit]) -> frozenset[int]:
    """The places of the full steps, of all where none is full."""
    full = frozenset(i for i, step in enumerate(steps) if step.kind == "full")
    return full or frozenset(range(len(steps)))


def contention_rows(found: RunSplit) -> tuple[ContentionRow, ...]:
    """How much communication slows the compute of each rank whose recording tells it."""
    return tuple(
        ContentionRow(rank.trace.rank, one.ratio, one.places, one.lost_ns)
        for rank, one in zip(found.ranks, found.detail.contention, strict=True)
        if one is not None
    )


def path_rows(found: RunSplit, origin: int) -> tuple[tuple[PathPart, ...], tuple[PathStep, ...]]:
    """The critical paths of the steps that are full on some rank."""
    steps = [rank.steps for rank in found.ranks]
    full = {of_rank[i].step for of_rank in steps for i in _full(of_rank)}
    paths = found.detail.paths
    return (
        tuple(part for part in paths.parts if part.step in full),
        tuple(
            replace(step, start_ns=step.start_ns - origin, end_ns=step.end_ns - origin)
            for step in paths.steps
            if step.step in full
        ),
    )


def step_times(found: RunSplit) -> tuple[StepTimes, ...]:
    """How long steps take, of the run (rank None) first, then of each rank."""
    variation = found.detail.variation
    return (*((variation.run,) if variation.run else ()), *variation.ranks)
