"""Metrics of a run that a budget may name, and the baseline file that keeps them."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

import msgspec
from msgspec import Struct

from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.ops import busbw_factor
from stepsplit.analyzer.regression.compare import axis_in_words, mean_split, peak_bytes
from stepsplit.analyzer.report.io import prediction_of
from stepsplit.analyzer.report.report import GroupRow, Report, StepRow, full_steps
from stepsplit.analyzer.split.bandwidth import CollectiveRow

# What the gate keeps of a run: small enough for a file in git, enough to say what moved.


class Setup(Struct, frozen=True):
    """What ran where. None is unknown; ranks are those recorded; mesh is such as "pp 2 tp 4"."""

    world_size: int
    ranks: tuple[int, ...]
    hosts: int
    device: str
    mesh: str | None
    backend: str | None
    schedule: str | None
    microbatches: int | None
    torch: str | None
    nccl: str | None
    driver: str | None


class Value(Struct, frozen=True):
    """A metric of one run by its name, in the unit of metrics.py: shares 0..1, ns, bytes."""

    metric: str
    value: float


class CallsFact(Struct, frozen=True):
    """The calls of one kind: how many a full step, of all recorded ranks together, and the medians
    of one call. varies: not all steps of the run have as many."""

    axis: str
    op: str
    dtype: str | None
    message_bytes: int | None
    calls: int
    varies: bool
    transfer_ns: int
    wait_ns: int


class TimeFact(Struct, frozen=True):
    """The mean time of a bucket in a step of a rank, in ns; axis None: of all of the bucket."""

    bucket: str
    axis: str | None
    mean_ns: int


class BlameFact(Struct, frozen=True):
    """How much waiting one rank causes in a step, over all ranks; rank None is nobody."""

    rank: int | None
    cause: str
    axis: str | None
    caused_ns: int


class GroupFact(Struct, frozen=True):
    """A process group."""

    axis: str | None
    description: str
    ranks: tuple[int, ...]


class RunFacts(Struct, frozen=True):
    """One run. steps counts those that its values are medians of; calls is None where the report is
    older than the count of calls a step; predicted are the model's values, where there is a model.
    """

    name: str
    setup: Setup
    steps: int
    values: tuple[Value, ...]
    calls: tuple[CallsFact, ...] | None
    times: tuple[TimeFact, ...]
    blame: tuple[BlameFact, ...] = ()
    predicted: tuple[Value, ...] = ()
    groups: tuple[GroupFact, ...] = ()

    def value(self, metric: str) -> float | None:
        """The metric's value, None where the run does not tell it."""
        return next((one.value for one in self.values if one.metric == metric), None)

    def model(self, metric: str) -> float | None:
        """What the model says the metric should be, None where it says nothing of it."""
        return next((one.value for one in self.predicted if one.metric == metric), None)


# A report -> what the gate keeps of it.

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
        calls=_call_facts(report, groups),
        times=tuple(_time_facts(report)),
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


def _call_facts(report: Report, groups: Mapping[int, GroupRow]) -> tuple[CallsFact, ...] | None:
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


def _time_facts(report: Report) -> Iterator[TimeFact]:
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


# A report -> the values of its metrics: medians over the steady steps of the run.

WARMUP, FEWEST = 1, 3
"""So many full steps are left out at a run's beginning, where at least FEWEST are left."""

_ByStep = Mapping[int, list[StepRow]]

_WAITS = ("collective", "p2p", "skew", "bubble")


def steady_steps(report: Report) -> _ByStep:
    """The rows of each full step by its number, the warm-up left out; empty without any step."""
    by_step: dict[int, list[StepRow]] = defaultdict(list)
    for row in full_steps(report.steps):
        by_step[row.step].append(row)
    numbers = sorted(by_step)
    kept = numbers[WARMUP:] if len(numbers) >= WARMUP + FEWEST else numbers
    return {number: by_step[number] for number in kept}


def values_of(report: Report, steps: _ByStep) -> tuple[Value, ...]:
    """All values that the report tells."""
    values = [
        *_time_values(steps),
        *_by_axis(report, steps),
        *_busbw(report),
        *_call_values(report),
    ]
    others = {
        "bubble_fraction": report.pipeline.bubble_fraction if report.pipeline else None,
        "mfu": report.mfu,
        "hfu": report.hfu,
        "peak_memory": peak_bytes(report),
    }
    known = [Value(name, float(value)) for name, value in others.items() if value is not None]
    return (*values, *known)


def _time_values(steps: _ByStep) -> Iterator[Value]:
    every = list(steps.values())
    yield Value("step", float(median(median(row.step_ns for row in rows) for rows in every)))
    yield Value("exposed_comm", median(_share(rows, COMMUNICATION) for rows in every))
    for bucket in BUCKETS:
        yield Value(bucket, median(_share(rows, (bucket,)) for rows in every))
    hidden = [found for rows in every if (found := _hidden(rows)) is not None]
    if hidden:
        yield Value("overlap", median(hidden))


def _share(rows: Sequence[StepRow], buckets: Sequence[str]) -> float:
    whole = sum(row.step_ns for row in rows)
    part = sum(int(getattr(row, f"{name}_ns")) for row in rows for name in buckets)
    return part / (whole or 1)


def _hidden(rows: Sequence[StepRow]) -> float | None:
    """Of the time in which data moved, the part under compute; None where none moved."""
    hidden = sum(row.overlapped_ns for row in rows)
    moved = hidden + sum(row.collective_ns + row.p2p_ns for row in rows)
    return hidden / moved if moved else None


def _by_axis(report: Report, steps: _ByStep) -> Iterator[Value]:
    """The shares of waiting and moving on each axis that has any."""
    whole = {number: sum(row.step_ns for row in rows) or 1 for number, rows in steps.items()}
    ranks = {number: {row.rank for row in rows} for number, rows in steps.items()}
    sums: dict[str, dict[int, int]] = defaultdict(lambda: dict.fromkeys(whole, 0))
    for row in report.exposed:
        if row.axis is None or row.rank not in ranks.get(row.step, ()):
            continue
        for bucket in _WAITS:
            names = (bucket, "exposed_comm") if bucket in COMMUNICATION else (bucket,)
            for name in names:
                sums[f"{name}.{row.axis}"][row.step] += getattr(row, f"{bucket}_ns")
    for name, of_step in sorted(sums.items()):
        if any(of_step.values()):
            yield Value(name, median(ns / whole[number] for number, ns in of_step.items()))


def _busbw(report: Report) -> Iterator[Value]:
    """By axis and op: all that its calls moved by all the time that this took."""
    groups = {group.id: group for group in report.groups}
    same: dict[str, list[CollectiveRow]] = defaultdict(list)
    for row in report.collectives:
        group = groups.get(row.group)
        if group is not None and group.axis is not None and row.busbw_bytes_per_s is not None:
            same[f"busbw.{group.axis}.{row.op}"].append(row)
    for name, rows in sorted(same.items()):
        taken_s = sum(row.count * row.transfer_ns_median for row in rows) / 1e9
        moved = sum(
            row.count
            * (row.message_bytes or 0)
            * busbw_factor(row.op, len(groups[row.group].ranks))
            for row in rows
        )
        yield Value(name, moved / taken_s)


def _call_values(report: Report) -> Iterator[Value]:
    """How many calls, and bytes of messages, a full step has, of all recorded ranks together."""
    if not report.step_calls:
        return
    axes = {group.id: group.axis for group in report.groups}
    sums: dict[str, int] = defaultdict(int)
    for row in report.step_calls:
        axis = axes.get(row.group)
        for suffix in ("", f".{axis}") if axis else ("",):
            sums[f"calls{suffix}"] += row.calls
            sums[f"bytes{suffix}"] += row.calls * (row.message_bytes or 0)
    yield from (Value(name, float(count)) for name, count in sorted(sums.items()))


# The metrics that a budget may name.
#
# A name may be followed by an axis, and busbw by an axis and an op: exposed_comm.tp,
# busbw.dp_replicate.all_reduce. Plain busbw is each axis and op that both sides have.

Unit = Literal["share", "ns", "bytes", "bytes_per_s", "count"]

COMMUNICATION = ("collective", "p2p", "skew")
"""The buckets that are exposed communication."""


@dataclass(frozen=True, slots=True)
class Metric:
    """What a metric means. worse is +1 where more is worse, -1 where less is; exact ones are the
    same in each run of the same job; by_axis ones may be asked of one axis."""

    name: str
    words: str
    unit: Unit
    worse: Literal[1, -1] = 1
    exact: bool = False
    by_axis: bool = False


METRICS = (
    Metric("step", "median step", "ns"),
    Metric("exposed_comm", "communication that held ranks up", "share", by_axis=True),
    Metric("compute", "compute", "share"),
    Metric("collective", "collectives that moved data", "share", by_axis=True),
    Metric("p2p", "messages that moved data", "share", by_axis=True),
    Metric("skew", "waits for a rank of the same stage", "share", by_axis=True),
    Metric("bubble", "waits for another pipeline stage", "share", by_axis=True),
    Metric("copy", "copies", "share"),
    Metric("idle", "nothing runs", "share"),
    Metric("overlap", "communication hidden under compute", "share", worse=-1),
    Metric("busbw", "bandwidth of the links, waits left out", "bytes_per_s", worse=-1),
    Metric("bubble_fraction", "bubble of the schedule", "share"),
    Metric("mfu", "model FLOPs utilization", "share", worse=-1),
    Metric("hfu", "hardware FLOPs utilization", "share", worse=-1),
    Metric("peak_memory", "peak memory of the fullest rank", "bytes"),
    Metric("calls", "collectives and messages a step", "count", exact=True, by_axis=True),
    Metric("bytes", "bytes of their messages a step", "bytes", exact=True, by_axis=True),
)

BY_NAME = {metric.name: metric for metric in METRICS}


def meaning_of(name: str) -> Metric:
    """What the name of a judged metric means; judged ones have one."""
    found = metric_named(name)
    assert found is not None, name
    return found


def metric_named(name: str) -> Metric | None:
    """What a name means, its axis and op left out; None where it means nothing."""
    first, *rest = name.split(".")
    metric = BY_NAME.get(first)
    if metric is None or (rest and not (metric.by_axis or first == "busbw")):
        return None
    return metric if len(rest) <= (2 if first == "busbw" else 1) else None


# A baseline as a small file that fits git: schema "stepsplit.baseline/1", a RunFacts a run.

SCHEMA = "stepsplit.baseline/1"

_HEAD = re.compile(rb'\s*\{\s*"schema"\s*:\s*"stepsplit\.baseline/')

_MEND = "write it anew with stepsplit baseline"


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """The runs that candidates are held against."""

    schema: str = SCHEMA
    runs: tuple[RunFacts, ...]


def to_json(runs: Sequence[RunFacts]) -> bytes:
    """The runs as JSON text, a fact a line so that a diff can be read; groups are left out."""
    body = b",\n".join(_run(msgspec.structs.replace(run, groups=())) for run in runs)
    return b'{"schema": "%s", "runs": [\n%s\n]}\n' % (SCHEMA.encode(), body)


def _run(run: RunFacts) -> bytes:
    fields = (
        b' "%s": %s' % (name.encode(), _lines(getattr(run, name))) for name in run.__struct_fields__
    )
    return b"{\n" + b",\n".join(fields) + b"\n}"


def _lines(value: object) -> bytes:
    """The value on a line, or each of its parts on one."""
    if not isinstance(value, tuple) or not value:
        return msgspec.json.encode(value)
    return b"[\n  " + b",\n  ".join(map(msgspec.json.encode, value)) + b"\n ]"


def is_baseline(path: Path) -> bool:
    """Whether the file says that it is a baseline, of whatever schema."""
    try:
        with path.open("rb") as file:
            return _HEAD.match(file.read(256)) is not None
    except (OSError, ValueError):
        return False


def read_baseline(path: Path) -> tuple[RunFacts, ...]:
    """The runs in the file. Raises DataError."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Baseline)
    except OSError as error:
        raise DataError(path, error.strerror or "unreadable", "name a baseline") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(path, f"not a stepsplit baseline ({error})", _MEND) from None
    if found.schema != SCHEMA:
        raise DataError(path, f"of schema {found.schema}, not {SCHEMA}", _MEND)
    if not found.runs:
        raise DataError(path, "holds no run", _MEND)
    return found.runs
