"""What two runs computed, by families of kernels."""

from __future__ import annotations

from collections.abc import Iterable

from stepsplit.analyzer.compare.runs.comparison import FamilyChange, most_changed
from stepsplit.analyzer.report.report import Report, full_steps
from stepsplit.analyzer.split.kernels import KernelFamily


def family_changes(baseline: Report, candidate: Report) -> tuple[FamilyChange, ...]:
    """A row for each family that either run has; none where a report does not tell them."""
    if not (baseline.kernels and candidate.kernels):
        return ()
    families = dict.fromkeys(row.family for row in (*baseline.kernels, *candidate.kernels))
    rows = [_change(family, baseline, candidate) for family in families]
    return tuple(sorted(rows, key=most_changed))


def _change(family: str, baseline: Report, candidate: Report) -> FamilyChange:
    one, other = ([row for row in r.kernels if row.family == family] for r in (baseline, candidate))
    steps, others = len(full_steps(baseline.steps)), len(full_steps(candidate.steps))
    return FamilyChange(
        baseline_ns=_total_ns(one) // steps,
        candidate_ns=_total_ns(other) // others,
        family=family,
        baseline_count=sum(row.count for row in one) / steps,
        candidate_count=sum(row.count for row in other) / others,
    )


def _total_ns(rows: Iterable[KernelFamily]) -> int:
    return sum(row.total_ns for row in rows)
