"""Measured metrics against their budgets: Student's t over runs."""

from __future__ import annotations

from collections.abc import Sequence

from stepsplit.analyzer.compare.verdict.samples import Sample
from stepsplit.analyzer.compare.verdict.student import ALPHA, Difference, holm
from stepsplit.analyzer.compare.verdict.verdict import Answer, Judged

ZERO = ""
TELLING = 1.5
"""Runs can vouch for a pass where they would show so many times what is allowed: the noise of a
few runs may look small by chance."""
TOO_FEW = "one run does not tell its noise: record 3 to 5 runs a side"
NOISE = "over the budget, yet within the noise of the runs"
TOO_NOISY = "these runs cannot tell: record more of them"


def judge_measured(samples: Sequence[Sample]) -> list[Judged]:
    """Each metric's answer; their false alarms are kept rare together."""
    found = [None if sample.zero else sample.difference for sample in samples]
    adjusted = iter(holm([one.p for one in found if one is not None]))
    ps = [None if one is None else next(adjusted) for one in found]
    return [_judged(sample, p) for sample, p in zip(samples, ps, strict=True)]


def _judged(sample: Sample, p: float | None) -> Judged:
    found = None if p is None else sample.difference
    answer, note = _answer(sample, found, p)
    return Judged(
        metric=sample.budget.metric,
        budget=sample.budget.text,
        answer=answer,
        baseline=sample.baseline,
        candidate=sample.candidate,
        harm=sample.harm,
        allowed=sample.allowed,
        low=None if found is None else found.low,
        high=None if found is None else found.high,
        p=p,
        detectable=None if found is None else found.detectable(sample.allowed),
        note=note,
    )


def _answer(sample: Sample, found: Difference | None, p: float | None) -> tuple[Answer, str]:
    if sample.zero:
        return "pass", ZERO
    if found is None or p is None:
        return "inconclusive", TOO_FEW
    if found.mean > sample.allowed and _alarms(found, p):
        return "regressed", ""
    if _passes(found, sample.allowed):
        return "pass", "better" if found.high < 0 else ""
    return "inconclusive", NOISE if found.mean > sample.allowed else TOO_NOISY


def _alarms(found: Difference, p: float) -> bool:
    """Whether t is sure among the other metrics, where p counts for more, and the order agrees."""
    level = ALPHA * (found.p / p if p else 1.0)
    return p <= ALPHA and found.told_by_order(level)


def _passes(found: Difference, allowed: float) -> bool:
    """Whether these runs can rule out what is not allowed."""
    telling = not allowed or found.detectable(allowed) <= TELLING * allowed
    return telling and found.within(allowed)
