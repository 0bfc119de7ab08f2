"""Collectives and messages, measured and predicted: how many, how large, how long, how exposed."""

from __future__ import annotations

from collections import defaultdict

from stepsplit.analyzer.compare.gap.seen import Seen
from stepsplit.analyzer.compare.gap.wires import Wire, Wires, no_wires
from stepsplit.analyzer.compare.messages import MessageRow, compare_messages
from stepsplit.analyzer.model.prediction import Prediction
from stepsplit.analyzer.ops import busbw_factor
from stepsplit.analyzer.report.report import ComparedCalls

_Kind = tuple[int, str, str]
"""(stage, axis, op)"""
_Times = dict[_Kind, tuple[int, int]]


def compared_calls(
    seen: Seen, prediction: Prediction, wires: Wires = no_wires
) -> tuple[ComparedCalls, ...]:
    """A row for each stage, axis and op of tensors, by the prediction's words for the axes."""
    rows = compare_messages(seen.messages, prediction).rows
    measured, predicted = _measured(seen), _predicted(prediction)
    return tuple(_row(row, measured, predicted, wires(row.axis)) for row in rows)


def _row(row: MessageRow, measured: _Times, predicted: _Times, wire: Wire | None) -> ComparedCalls:
    kind = (row.stage, row.axis, row.op)
    (time_ns, exposed_ns), (expected_ns, left_ns) = (
        times.get(kind, (0, 0)) for times in (measured, predicted)
    )
    return ComparedCalls(
        stage=row.stage,
        axis=row.axis,
        op=row.op,
        count=row.measured.count,
        predicted_count=row.predicted.count,
        bytes=row.measured.bytes,
        predicted_bytes=row.predicted.bytes,
        time_ns=time_ns,
        predicted_time_ns=expected_ns,
        exposed_ns=exposed_ns,
        predicted_exposed_ns=left_ns,
        equal=row.equal,
        busbw_bytes_per_s=_busbw(row.op, row.measured.bytes, time_ns, wire),
        predicted_busbw_bytes_per_s=_busbw(row.op, row.predicted.bytes, expected_ns, wire),
        link_bytes_per_s=wire.bytes_per_s if wire else None,
    )


def _busbw(op: str, total_bytes: int | None, time_ns: int, wire: Wire | None) -> float | None:
    """Of all calls together; None where size, time or ranks are unknown."""
    if not total_bytes or not time_ns or wire is None:
        return None
    return total_bytes / (time_ns / 1e9) * busbw_factor(op, wire.ranks)


def _measured(seen: Seen) -> _Times:
    """(how long it moved, how much of that was exposed) a step of the mean rank, by kind."""
    sums: dict[_Kind, list[int]] = defaultdict(lambda: [0, 0])
    steps: dict[int, int] = defaultdict(int)
    for rank in seen.found.ranks:
        stage, windows = seen.found.layout.stage(rank.trace.rank), rank.windows.counted
        steps[stage] += len(windows)
        for (axis, op), (moved, held) in seen.moved_ns(rank, windows).items():
            total = sums[stage, axis, op]
            total[0] += moved
            total[1] += held
    return {kind: (moved // steps[kind[0]], held // steps[kind[0]])
            for kind, (moved, held) in sums.items()}  # fmt: skip


def _predicted(prediction: Prediction) -> _Times:
    sums: dict[_Kind, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for one in prediction.communication:
        total = sums[one.message.stage, one.message.axis, one.message.op]
        total[0] += one.time.ns
        total[1] += one.exposed_ns
    return {kind: (round(time), round(held)) for kind, (time, held) in sums.items()}
