"""The check of a candidate against a baseline: exact for counts, statistical for times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from stepsplit.analyzer.errors import DataError, UsageError
from stepsplit.analyzer.regression.attribution import calls_moved, causes_of
from stepsplit.analyzer.regression.budgets import Budget
from stepsplit.analyzer.regression.check_result import Answer, Judged, Shifted, SideFacts, Verdict
from stepsplit.analyzer.regression.metrics import METRICS, CallsFact, RunFacts
from stepsplit.analyzer.regression.statistics import (
    ALPHA,
    BANDWIDTH,
    Difference,
    Sample,
    holm,
    sample_of,
    spelled_out,
)

# Runs and budgets in, the verdict out.

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
        answer=_run_answer(gated),
        baseline=_side_facts(baseline) if baseline else None,
        candidate=_side_facts(candidate),
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


def _run_answer(gated: Sequence[Judged]) -> Answer:
    answers = {one.answer for one in gated}
    if "regressed" in answers:
        return "regressed"
    return "inconclusive" if "inconclusive" in answers else "pass"


def _side_facts(runs: Sequence[RunFacts]) -> SideFacts:
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


# Counted metrics against their budgets: calls and bytes a step, without statistics.

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
    own = _counted_side(budget, candidate)
    if budget.against == "model":
        raise UsageError(f"the model has no count of {budget.metric} by that name; give a limit")
    if budget.against == "limit":
        over = own.most_total - budget.amount
        return _counted_judged(
            budget, None, own, over, 0.0, "regressed" if over > 0 else "pass", ""
        )
    if not baseline:
        raise UsageError(
            f"budget {budget.metric}:{budget.text} needs a baseline; name --baseline B"
        )
    before = _counted_side(budget, baseline)
    if budget.text == "exact":
        return _exactly(budget, before, own)
    allowed = max(budget.ratio * before.most_total, budget.amount)
    harm = own.most_total - before.most_total
    answer: Answer = "regressed" if harm > allowed else "pass"
    return _counted_judged(budget, before, own, harm, allowed, answer, "")


def _exactly(budget: Budget, before: _Side, own: _Side) -> Judged:
    kinds = dict.fromkeys((*before.most, *own.most))
    more = [kind for kind in kinds if own.most.get(kind, 0) > before.most.get(kind, 0)]
    harm = own.most_total - before.most_total
    if more:
        told = ", ".join(_moved(kind, before, own) for kind in more)
        return _counted_judged(budget, before, own, harm, 0.0, "regressed", told)
    if before.least != before.most:
        return _counted_judged(budget, before, own, harm, 0.0, "inconclusive", UNSTEADY)
    note = "fewer: bring the baseline up to date" if harm < 0 else ""
    return _counted_judged(budget, before, own, harm, 0.0, "pass", note)


def _moved(kind: tuple[str, str], before: _Side, own: _Side) -> str:
    axis, op = kind
    return f"{axis} {op} {before.most.get(kind, 0):,} -> {own.most.get(kind, 0):,}"


def _counted_judged(
    budget: Budget, before: _Side | None, own: _Side, harm: float, allowed: float,
    answer: Answer, note: str,
) -> Judged:  # fmt: skip
    baseline = None if before is None else float(before.most_total)
    candidate = float(own.most_total)
    return Judged(budget.metric, budget.text, answer, baseline, candidate, harm, allowed, note=note)


def _counted_side(budget: Budget, runs: Sequence[RunFacts]) -> _Side:
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


# Measured metrics against their budgets: Student's t over runs.

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
    return [_measured_judged(sample, p) for sample, p in zip(samples, ps, strict=True)]


def _measured_judged(sample: Sample, p: float | None) -> Judged:
    found = None if p is None else sample.difference
    answer, note = _metric_answer(sample, found, p)
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


def _metric_answer(sample: Sample, found: Difference | None, p: float | None) -> tuple[Answer, str]:
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


# Whether runs may be held against each other.

MUST = ("device", "world_size", "mesh", "backend", "ranks")
"""Of another of these a run is no candidate for this baseline, unless told so."""

MAY = ("torch", "nccl", "driver", "hosts", "schedule", "microbatches")
"""Another of these may well be the reason of what moved: it is told."""

_WORDS = {"world_size": "world size", "ranks": "ranks recorded", "nccl": "NCCL"}


def check_setups(
    baseline: Sequence[RunFacts], candidate: Sequence[RunFacts], across_setups: bool
) -> tuple[str, ...]:
    """What differs between the runs and may be, in words. Raises UsageError for what may not."""
    for side in (baseline, candidate):
        _check_apart(side)
    runs = [*baseline, *candidate]
    refused = [told for name in MUST if (told := _differs(name, runs))]
    if refused and not across_setups:
        raise UsageError(
            f"these runs are not of one kind: {'; '.join(refused)}; name runs that are, or compare "
            "them all the same with --across-setups"
        )
    return (*refused, *(told for name in MAY if (told := _differs(name, runs))))


def _check_apart(side: Sequence[RunFacts]) -> None:
    """Runs to the same nanosecond are one run named twice, which would tell a noise of zero."""
    seen: dict[object, str] = {}
    for run in side:
        if run.values in seen:
            told = f"{seen[run.values]} and {run.name}"
            raise UsageError(f"{told} are one recording; name each run of a side once")
        seen[run.values] = run.name


def _differs(name: str, runs: Sequence[RunFacts]) -> str | None:
    """The setting's values with a run of each, None where all that know it agree."""
    seen: dict[object, str] = {}
    for run in runs:
        value = getattr(run.setup, name)
        if value is not None:
            seen.setdefault(value, run.name)
    if len(seen) < 2:
        return None
    told = (f"{_short(value)} in {run}" for value, run in seen.items())
    return f"{_WORDS.get(name, name)} is {', '.join(told)}"


def _short(value: object) -> str:
    if isinstance(value, tuple):
        return f"{len(value)} of them ({', '.join(map(str, value[:4]))}, ...)"
    return str(value)
