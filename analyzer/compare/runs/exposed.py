"""The communication that held two runs up, by axis."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from stepsplit.analyzer.compare.runs.comparison import ExposedChange, most_changed
from stepsplit.analyzer.report.report import Report, full_steps

_BUCKETS = ("collective", "p2p", "skew", "bubble")
_Sums = Mapping[tuple[str, str | None], int]
"""Mean ns of a step of a rank, by bucket and axis."""


def exposed_changes(baseline: Report, candidate: Report) -> tuple[ExposedChange, ...]:
    """A row for each axis and bucket in which either run lost time."""
    one, other = _means(baseline), _means(candidate)
    rows = [
        ExposedChange(one.get(kind, 0), other.get(kind, 0), *kind)
        for kind in dict.fromkeys((*one, *other))
    ]
    return tuple(sorted(rows, key=most_changed))


def _means(report: Report) -> _Sums:
    full = {(row.rank, row.step) for row in full_steps(report.steps)}
    sums: dict[tuple[str, str | None], int] = defaultdict(int)
    for row in report.exposed:
        if (row.rank, row.step) in full:
            for bucket in _BUCKETS:
                sums[bucket, row.axis] += getattr(row, f"{bucket}_ns")
    return {kind: ns // len(full) for kind, ns in sums.items() if ns}
