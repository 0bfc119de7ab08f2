"""A report -> the values of its metrics: medians over the steady steps of the run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.compare.runs.side import peak_bytes
from stepsplit.analyzer.compare.verdict.metrics import COMMUNICATION
from stepsplit.analyzer.compare.verdict.run_facts import Value
from stepsplit.analyzer.ops import busbw_factor
from stepsplit.analyzer.report.report import CollectiveRow, GroupRow, Report, StepRow, full_steps

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
    values = [*_times(steps), *_by_axis(report, steps), *_busbw(report), *_calls(report)]
    others = {
        "bubble_fraction": report.pipeline.bubble_fraction if report.pipeline else None,
        "mfu": report.mfu,
        "hfu": report.hfu,
        "peak_memory": peak_bytes(report),
    }
    known = [Value(name, float(value)) for name, value in others.items() if value is not None]
    return (*values, *known)


def _times(steps: _ByStep) -> Iterator[Value]:
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


def _moved_bytes(row: CollectiveRow, group: GroupRow) -> float:
    """What all calls of the row moved, as busbw counts it."""
    return row.count * (row.message_bytes or 0) * busbw_factor(row.op, len(group.ranks))


def _calls(report: Report) -> Iterator[Value]:
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
