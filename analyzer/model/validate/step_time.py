"""Predicted step times against published ones, beside what one constant utilization says."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import get_args

from stepsplit.analyzer.model.predict import predict
from stepsplit.analyzer.model.validate.baseline import baseline_rows
from stepsplit.analyzer.model.validate.fitted import fitted_step_times
from stepsplit.analyzer.model.validate.jobs.case import Case, Family
from stepsplit.analyzer.model.validate.jobs.cases import possible_cases, step_time_cases
from stepsplit.analyzer.model.validate.records import Published
from stepsplit.analyzer.model.validate.tables import Check, Row, check, measured

BARS: dict[Family, tuple[float, float]] = {
    "A100 Megatron": (0.04, 0.08),
    "B200 dense": (0.05, 0.09),
    "llm-foundry": (0.06, 0.15),
}
"""Mean and 90th percentile of the absolute errors; other families are shown without a bar."""


def step_time_checks(published: Published) -> tuple[Check, ...]:
    """One check a family, against the baseline that knows the same rows as the model does."""
    cases, fitted = possible_cases(published), fitted_step_times()
    known = [case for case in step_time_cases(Published()) if case.id in fitted]
    return tuple(
        replace(
            _check(family, _of(family, cases.found), _of(family, known), fitted),
            left_out=tuple(each for each in cases.left_out if _whose(each) == family),
        )
        for family in get_args(Family)
    )


def _whose(left_out: str) -> Family:
    """The family that a row which is no case would most likely be of, by its id."""
    match left_out.partition("/")[0]:
        case "simumax":
            return "B200 dense"
        case "llm-foundry":
            return "llm-foundry"
        case "torchtitan":
            return "torchtitan"
    return "A100 Megatron"


def _of(family: Family, cases: Iterable[Case]) -> list[Case]:
    return [case for case in cases if case.family == family]


def _check(
    family: Family, cases: Sequence[Case], known: Sequence[Case], fitted: Collection[str]
) -> Check:
    name, bar = f"{family}, step time", BARS.get(family, ())
    rows = [step_time_row(case, fitted) for case in cases]
    plain = baseline_rows([case for case in cases if case.id not in fitted], known)
    baseline = measured("mean/p90", plain) if plain else None
    found = check(name, rows, "mean/p90", bar, baseline)
    if found.skipped or baseline is None or found.result[0] <= baseline[0]:
        return found
    return replace(found, note="one constant utilization does better on these rows")


def step_time_row(case: Case, fitted: Collection[str]) -> Row:
    """The slowest stage's predicted step beside the published one."""
    predicted = predict(case.job).split.step_ns
    return Row(
        case.table, case.id, "step time", case.step_ns, float(predicted), "ns",
        fitted=case.id in fitted,
    )  # fmt: skip
