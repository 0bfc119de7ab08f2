"""Runs and budgets in, the verdict out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepsplit.analyzer.compare.verdict.budget import Budget
from stepsplit.analyzer.compare.verdict.counted import judge_counted
from stepsplit.analyzer.compare.verdict.measured import judge_measured
from stepsplit.analyzer.compare.verdict.metrics import METRICS
from stepsplit.analyzer.compare.verdict.moved import calls_moved
from stepsplit.analyzer.compare.verdict.run_facts import RunFacts
from stepsplit.analyzer.compare.verdict.samples import BANDWIDTH, Sample, sample_of, spelled_out
from stepsplit.analyzer.compare.verdict.setups import check_setups
from stepsplit.analyzer.compare.verdict.verdict import (
    Answer,
    Judged,
    Shifted,
    SideFacts,
    Verdict,
)
from stepsplit.analyzer.compare.verdict.why import causes_of
from stepsplit.analyzer.errors import UsageError

LEAST_SHIFT = 0.01
"""What moved by less of its value is not told, however sure it is."""


def judge(
    candidate: Sequence[RunFacts],
    baseline: Sequence[RunFacts],
    budgets: Sequence[Budget],
    across_setups: bool = False,
) -> Verdict:
    """Whether the candidate stays within the budgets.

    baseline may be empty where no budget needs one. Raises UsageError for runs that cannot be held
    against each other or do not tell a gated metric.
    """
    if not candidate or not budgets:
        raise UsageError("nothing to judge: name a candidate and at least one budget")
    warnings = check_setups(baseline, candidate, across_setups)
    gated = _gated(candidate, baseline, list(spelled_out(budgets, (*baseline, *candidate))))
    regressed = [one for one in gated if one.answer == "regressed"]
    calls = calls_moved(baseline, candidate)
    return Verdict(
        answer=_answer(gated),
        baseline=_side(baseline) if baseline else None,
        candidate=_side(candidate),
        gated=tuple(gated),
        causes=causes_of(regressed, calls, baseline, candidate) if regressed and baseline else (),
        calls=tuple(row for row in calls if row.baseline != row.candidate) if baseline else (),
        others=tuple(_others(candidate, baseline, {one.metric for one in gated})),
        warnings=warnings,
        low_confidence=_unsure(budgets) and 1 in (len(candidate), len(baseline)),
    )


def _unsure(budgets: Sequence[Budget]) -> bool:
    """Whether any of them is of a metric that has noise."""
    return not all(budget.meaning.exact for budget in budgets)


def _gated(
    candidate: Sequence[RunFacts], baseline: Sequence[RunFacts], budgets: Sequence[Budget]
) -> list[Judged]:
    """Each budget's answer, in their order."""
    measured = [budget for budget in budgets if not budget.meaning.exact]
    answers = judge_measured([sample_of(budget, baseline, candidate) for budget in measured])
    by_budget = dict(zip(measured, answers, strict=True))
    return [
        by_budget.get(budget) or judge_counted(budget, baseline, candidate) for budget in budgets
    ]


def _answer(gated: Sequence[Judged]) -> Answer:
    answers = {one.answer for one in gated}
    if "regressed" in answers:
        return "regressed"
    return "inconclusive" if "inconclusive" in answers else "pass"


def _side(runs: Sequence[RunFacts]) -> SideFacts:
    return SideFacts(
        tuple(run.name for run in runs), tuple(run.steps for run in runs), runs[0].setup
    )


def _others(
    candidate: Sequence[RunFacts], baseline: Sequence[RunFacts], gated: set[str]
) -> Iterator[Shifted]:
    """Metrics without a budget that surely moved."""
    names = [one.name for one in METRICS if not one.exact and one.name != BANDWIDTH]
    for name in names if baseline else ():
        known = all(run.value(name) is not None for run in (*baseline, *candidate))
        if known and name not in gated:
            sample = sample_of(Budget(name, "0%", "baseline"), baseline, candidate)
            yield from _shifted(name, sample)


def _shifted(name: str, sample: Sample) -> Iterator[Shifted]:
    found, before = sample.difference, sample.baseline
    if found is None or before is None or abs(sample.harm) <= LEAST_SHIFT * abs(before):
        return
    if found.low > 0 or found.high < 0:
        yield Shifted(name, before, sample.candidate, sample.harm, found.low, found.high)
