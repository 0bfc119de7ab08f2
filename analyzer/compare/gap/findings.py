"""What of a gap is worth mending and only the model tells."""

from __future__ import annotations

from collections.abc import Sequence

from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.report.report import Finding, Gap, GapRow

WORTH = 0.01
"""Parts of the gap below this share of the step are not worth a line."""
_CODES = {
    "kernels": "slower_kernels",
    "calls": "extra_calls",
    "link": "slower_calls",
    "latency": "slower_small_calls",
    "overlap": "less_overlap",
}
"""The parts of a gap that only the model tells, as findings."""
_SAID = {"calls": "needless_calls", "link": "slow_link", "overlap": "no_overlap"}
"""The causes that say the same by a replay: one line for both."""
_COUNTED = "calls"
"""How many calls there are is no matter of the model's doubt."""


def gap_findings(gap: Gap, causes: Sequence[Finding]) -> tuple[Finding, ...]:
    """The parts that are worth a line and beyond what the model doubts of itself, largest first;
    none that a cause says already."""
    said = {one.code for one in causes}
    rows = [
        row for row in gap.rows
        if row.cause in _CODES and _SAID.get(row.cause) not in said and _worth(gap, row)
    ]  # fmt: skip
    return tuple(_finding(gap, row) for row in sorted(rows, key=lambda row: -row.ns))


def _worth(gap: Gap, row: GapRow) -> bool:
    """Whether the row is more than WORTH, and more than its bucket may be longer by the band of the
    predicted step."""
    if row.ns < max(1, WORTH * gap.shown.measured.step_ns):
        return False
    doubt = gap.high_ns / gap.shown.predicted.step_ns - 1
    return row.cause == _COUNTED or row.ns > doubt * _sides(gap, row.bucket)[1]


def _sides(gap: Gap, bucket: str) -> tuple[int, int]:
    """(measured, predicted) ns of the bucket."""
    place = BUCKETS.index(bucket)
    return gap.shown.measured.buckets_ns[place], gap.shown.predicted.buckets_ns[place]


def _finding(gap: Gap, row: GapRow) -> Finding:
    measured, predicted = _sides(gap, row.bucket)
    return Finding(
        code=_CODES[row.cause],
        bucket=row.bucket,
        gain_ns=row.ns,
        measured_ns=measured,
        predicted_ns=predicted,
        ranks=(gap.shown.rank,),
        steps=(gap.shown.step,),
        events=(),
        message=row.message,
    )
