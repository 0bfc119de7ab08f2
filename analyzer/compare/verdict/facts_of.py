"""A report -> what the gate keeps of it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from statistics import median

from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.compare.runs.calls import axis_in_words
from stepsplit.analyzer.compare.runs.side import mean_split
from stepsplit.analyzer.compare.verdict.metrics import COMMUNICATION
from stepsplit.analyzer.compare.verdict.run_facts import (
    BlameFact,
    CallsFact,
    GroupFact,
    RunFacts,
    Setup,
    TimeFact,
    Value,
)
from stepsplit.analyzer.compare.verdict.values import steady_steps, values_of
from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.report.io import prediction_of
from stepsplit.analyzer.report.report import CollectiveRow, GroupRow, Report, full_steps

MOST_BLAMED = 8
"""So many of those who cause waiting are kept of a run, the worst."""
_AGAIN = "analyze the recording again, or leave the run out"


def facts_of(report: Report, source: object) -> RunFacts:
    """The facts of the run. Raises DataError, naming the source, where it has no step to judge or a
    value that is no number."""
    steps = steady_steps(report)
    if not steps:
        raise DataError(source, "no step to judge", "record at least one whole step")
    values = values_of(report, steps)
    bad = [one.metric for one in values if not math.isfinite(one.value)]
    if bad:
        raise DataError(source, f"{bad[0]} is no finite number", _AGAIN)
    groups = {group.id: group for group in report.groups}
    return RunFacts(
        name=report.run.name,
        setup=_setup(report),
        steps=len(steps),
        values=values,
        calls=_calls(report, groups),
        times=tuple(_times(report)),
        blame=_blame(report),
        predicted=tuple(_predicted(report)),
        groups=tuple(GroupFact(g.axis, g.description, g.ranks) for g in report.groups),
    )


def _setup(report: Report) -> Setup:
    run, pipeline = report.run, report.pipeline
    mesh = None if run.mesh is None else " ".join(f"{a.axis} {a.size}" for a in run.mesh)
    return Setup(
        world_size=run.world_size,
        ranks=run.ranks,
        hosts=len(run.hosts),
        device=run.device,
        mesh=mesh,
        backend=run.backend,
        schedule=None if pipeline is None else pipeline.schedule,
        microbatches=None if pipeline is None else pipeline.microbatches,
        torch=run.torch,
        nccl=run.nccl,
        driver=run.driver,
    )


def _calls(report: Report, groups: Mapping[int, GroupRow]) -> tuple[CallsFact, ...] | None:
    """The calls by axis, op, dtype and size; None where a report does not tell calls a step."""
    if report.collectives and not report.step_calls:
        return None
    counts: dict[tuple[str, str, str | None, int | None], list[int]] = defaultdict(lambda: [0, 0])
    for row in report.step_calls:
        kind = (axis_in_words(groups.get(row.group)), row.op, row.dtype, row.message_bytes)
        counts[kind][0] += row.calls
        counts[kind][1] += row.most - row.least
    timed: dict[tuple[str, str, str | None, int | None], list[CollectiveRow]] = defaultdict(list)
    for one in report.collectives:
        kind = (axis_in_words(groups.get(one.group)), one.op, one.dtype, one.message_bytes)
        timed[kind].append(one)
    return tuple(
        CallsFact(*kind, calls, varies > 0, *_middle(timed[kind]))
        for kind, (calls, varies) in sorted(counts.items(), key=lambda item: repr(item[0]))
    )


def _middle(rows: list[CollectiveRow]) -> tuple[int, int]:
    """The medians of (a call's transfer, its wait), over groups."""
    if not rows:
        return 0, 0
    return (
        int(median(row.transfer_ns_median for row in rows)),
        int(median(row.wait_ns_median for row in rows)),
    )


def _times(report: Report) -> Iterator[TimeFact]:
    rows = full_steps(report.steps)
    mean = mean_split(rows)
    for bucket, ns in zip(BUCKETS, mean.buckets_ns, strict=True):
        yield TimeFact(bucket, None, ns)
    full = {(row.rank, row.step) for row in rows}
    sums: dict[tuple[str, str], int] = defaultdict(int)
    for row in report.exposed:
        if row.axis is not None and (row.rank, row.step) in full:
            for bucket in (*COMMUNICATION, "bubble"):
                sums[bucket, row.axis] += getattr(row, f"{bucket}_ns")
    for (bucket, axis), ns in sorted(sums.items()):
        if ns:
            yield TimeFact(bucket, axis, ns // len(rows))


def _blame(report: Report) -> tuple[BlameFact, ...]:
    steps = len({row.step for row in report.steps})
    worst = sorted(report.blame, key=lambda row: -row.caused_ns)[:MOST_BLAMED]
    return tuple(BlameFact(b.rank, b.cause, b.axis, b.caused_ns // steps) for b in worst)


def _predicted(report: Report) -> Iterator[Value]:
    """What the model says of the metrics that it knows."""
    made = prediction_of(report)
    if made is None:
        return
    split = made.split
    whole = split.step_ns or 1
    shares = zip(BUCKETS, split.buckets_ns, strict=True)
    yield Value("step", float(split.step_ns))
    yield Value("exposed_comm", split.exposed_comm_ns / whole)
    yield from (Value(bucket, ns / whole) for bucket, ns in shares)
    yield Value("bubble_fraction", made.bubble_fraction)
    yield Value("peak_memory", float(max(stage.total_bytes for stage in made.memory)))
    utilizations = (("mfu", made.mfu), ("hfu", made.hfu))
    yield from (Value(name, value) for name, value in utilizations if value is not None)
