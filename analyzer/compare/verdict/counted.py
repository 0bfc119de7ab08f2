"""Counted metrics against their budgets: calls and bytes a step, without statistics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stepsplit.analyzer.compare.verdict.budget import Budget
from stepsplit.analyzer.compare.verdict.run_facts import CallsFact, RunFacts
from stepsplit.analyzer.compare.verdict.verdict import Answer, Judged
from stepsplit.analyzer.errors import DataError, UsageError

UNSTEADY = "the baseline's runs differ in it: it cannot be compared exactly; write 5%"
_Counts = Mapping[tuple[str, str], int]
"""By (axis, op): so many in a full step, of all recorded ranks together."""


@dataclass(frozen=True, slots=True)
class _Side:
    """The least and the most that a run of one side has, by axis and op, and the most in all."""

    least: _Counts
    most: _Counts
    most_total: int


def judge_counted(
    budget: Budget, baseline: Sequence[RunFacts], candidate: Sequence[RunFacts]
) -> Judged:
    """Exact: worse where any axis and op has more than the baseline. Else the total counts.

    Raises UsageError without the baseline that it needs, DataError for runs that do not tell it.
    """
    own = _side(budget, candidate)
    if budget.against == "model":
        raise UsageError(f"the model has no count of {budget.metric} by that name; give a limit")
    if budget.against == "limit":
        over = own.most_total - budget.amount
        return _judged(budget, None, own, over, 0.0, "regressed" if over > 0 else "pass", "")
    if not baseline:
        raise UsageError(
            f"budget {budget.metric}:{budget.text} needs a baseline; name --baseline B"
        )
    before = _side(budget, baseline)
    if budget.text == "exact":
        return _exactly(budget, before, own)
    allowed = max(budget.ratio * before.most_total, budget.amount)
    harm = own.most_total - before.most_total
    answer: Answer = "regressed" if harm > allowed else "pass"
    return _judged(budget, before, own, harm, allowed, answer, "")


def _exactly(budget: Budget, before: _Side, own: _Side) -> Judged:
    kinds = dict.fromkeys((*before.most, *own.most))
    more = [kind for kind in kinds if own.most.get(kind, 0) > before.most.get(kind, 0)]
    harm = own.most_total - before.most_total
    if more:
        told = ", ".join(_moved(kind, before, own) for kind in more)
        return _judged(budget, before, own, harm, 0.0, "regressed", told)
    if before.least != before.most:
        return _judged(budget, before, own, harm, 0.0, "inconclusive", UNSTEADY)
    note = "fewer: bring the baseline up to date" if harm < 0 else ""
    return _judged(budget, before, own, harm, 0.0, "pass", note)


def _moved(kind: tuple[str, str], before: _Side, own: _Side) -> str:
    axis, op = kind
    return f"{axis} {op} {before.most.get(kind, 0):,} -> {own.most.get(kind, 0):,}"


def _judged(
    budget: Budget, before: _Side | None, own: _Side, harm: float, allowed: float,
    answer: Answer, note: str,
) -> Judged:  # fmt: skip
    baseline = None if before is None else float(before.most_total)
    candidate = float(own.most_total)
    return Judged(budget.metric, budget.text, answer, baseline, candidate, harm, allowed, note=note)


def _side(budget: Budget, runs: Sequence[RunFacts]) -> _Side:
    counts = [_counts(budget, run) for run in runs]
    totals = [sum(one.values()) for one in counts]
    kinds = dict.fromkeys(kind for one in counts for kind in one)
    return _Side(
        {kind: min(one.get(kind, 0) for one in counts) for kind in kinds},
        {kind: max(one.get(kind, 0) for one in counts) for kind in kinds},
        max(totals),
    )


def _counts(budget: Budget, run: RunFacts) -> _Counts:
    if run.calls is None:
        mend = "analyze its recording again: this report is older than the count of calls a step"
        raise DataError(run.name, f"does not tell {budget.metric}", mend)
    name, _, axis = budget.metric.partition(".")
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for row in run.calls:
        if not axis or row.axis == axis:
            counts[row.axis, row.op] += _count(name, row)
    return counts


def _count(name: str, row: CallsFact) -> int:
    return row.calls if name == "calls" else row.calls * (row.message_bytes or 0)
