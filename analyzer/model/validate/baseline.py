"""The simplest model that there is: every run reaches the same share of the peak."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from statistics import fmean

from stepsplit.analyzer.model.validate.jobs.case import Case
from stepsplit.analyzer.model.validate.tables import Row
from stepsplit.analyzer.model.work.flops import hardware_flops


def baseline_rows(cases: Iterable[Case], known: Collection[Case]) -> tuple[Row, ...]:
    """The step times of the cases by one hardware-FLOP utilization for each kind of run.

    A kind is a GPU and a dtype. Its utilization is the mean of the known cases', on which the
    model's constants were fitted too. A kind without known cases takes the mean of all of them;
    with none at all nothing is said.
    """
    if not known:
        return ()
    means = {kind: fmean(map(utilization, of_kind(known, kind))) for kind in map(kind_of, known)}
    everywhere = fmean(map(utilization, known))
    return tuple(
        Row(
            case.table, case.id, "step time", case.step_ns,
            utilization(case) / means.get(kind_of(case), everywhere) * case.step_ns, "ns",
        )
        for case in cases
    )  # fmt: skip


def of_kind(cases: Iterable[Case], kind: tuple[str, str]) -> list[Case]:
    return [case for case in cases if kind_of(case) == kind]


def kind_of(case: Case) -> tuple[str, str]:
    return case.job.hardware.name, case.job.recipe.dtype


def utilization(case: Case) -> float:
    """Hardware FLOPs (C1) of the published step over what the peak allows, a ratio."""
    peak = case.job.hardware.peak_flops_per_s(case.job.recipe.dtype)
    assert peak, f"{case.id}: no peak of {case.job.hardware.name} at {case.job.recipe.dtype}"
    allowed = peak * case.job.layout.world_size * case.step_ns * 1e-9
    return hardware_flops(case.job, "C1") / allowed
