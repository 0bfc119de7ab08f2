"""Validation of predicted step times and peak memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import get_args

from stepsplit.analyzer.model.config import Job
from stepsplit.analyzer.model.flops import hardware_flops
from stepsplit.analyzer.model.memory import calibrate_memory, memory_of, reserved_bytes
from stepsplit.analyzer.model.predict import predict
from stepsplit.analyzer.validation.published_runs import (
    SCHEDULES,
    SIMUMAX_TABLE,
    TORCHTITAN_TABLE,
    Case,
    Family,
    fitted_memory,
    fitted_step_times,
    nanotron,
    possible_cases,
    simumax,
    step_time_cases,
    torchtitan_job,
    zero_bubble,
)
from stepsplit.analyzer.validation.tables import (
    Build,
    Check,
    Published,
    Record,
    Row,
    check,
    gathered,
    measured,
)

# Predicted step times against published ones, beside what one constant utilization says.

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


# Predicted peaks of allocated memory against measured ones.

DENSE_BAR = (0.02, 0.035)

EXPERTS_BAR = (0.10, 0.10)
"""Mean and maximum of the absolute errors."""


def memory_checks(published: Published) -> tuple[Check, ...]:
    rows, fitted = published.records(SIMUMAX_TABLE), fitted_memory()
    dense = [row for row in rows if not row.known("experts")]
    mixtures = [row for row in rows if row.known("experts")]
    kinds: tuple[tuple[str, list[Record], Build, tuple[float, float]], ...] = (
        ("B200 dense, peak memory", dense, _fullest, DENSE_BAR),
        ("B200 dense, peak memory by stage", dense, _stages, DENSE_BAR),
        ("B200 experts, peak memory", mixtures, _fullest, EXPERTS_BAR),
    )
    checks = tuple(
        gathered(name, records, build, "mean/max", bar, fitted)
        for name, records, build, bar in kinds
    )
    return (*checks, _torchtitan(published))


def _torchtitan(published: Published) -> Check:
    rows = [row for row in published.records(TORCHTITAN_TABLE) if row.known("peak_memory_GiB")]
    found = gathered("torchtitan, peak memory", rows, _reserved, "mean/max", (), frozenset())
    if found.skipped:
        return found
    return replace(found, note="what the allocator reserves; nothing is fitted")


def _reserved(row: Record) -> tuple[Row, ...]:
    job = torchtitan_job(row)
    most = max(stage.total_bytes for stage in memory_of(job))
    found = reserved_bytes(most).bytes / 2**30
    return (Row(row.table, row.id, "reserved", row.number("peak_memory_GiB"), found, "GiB"),)


def _fullest(row: Record) -> tuple[Row, ...]:
    """The fullest stage; the table states the maximum over all ranks."""
    found = max(stage.total_bytes for stage in memory_of(simumax(row).job))
    said = row.number("real_max_allocated_GiB")
    return (Row(row.table, row.id, "allocated", said, found / 2**30, "GiB"),)


def _stages(row: Record) -> tuple[Row, ...]:
    """The fullest rank of every stage; ranks are listed with the stage varying slowest."""
    if not row.known("rank_max_allocated_MiB"):
        return ()
    ranks = [float(each) for each in row.text("rank_max_allocated_MiB").split(";")]
    memory = memory_of(simumax(row).job)
    each = len(ranks) // len(memory)
    return tuple(
        Row(
            row.table, row.id, f"stage {stage.stage}",
            max(ranks[stage.stage * each : (stage.stage + 1) * each]) / 1024,
            stage.total_bytes / 2**30, "GiB",
        )
        for stage in memory
    )  # fmt: skip


# The simplest model that there is: every run reaches the same share of the peak.


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


# Peak memory of other programs, after one of each model's runs has been looked at.

BAR = (0.10, 0.10)
"""Mean and maximum of the absolute errors."""

TABLE4, NANOTRON = "zero_bubble_table4_throughput_memory", "nanotron_best_configs_h100"


def calibrated_checks(published: Published) -> tuple[Check, ...]:
    pipelines = [row for row in published.records(TABLE4) if row.text("schedule") in SCHEDULES]
    plain = sorted(pipelines, key=lambda row: row.text("schedule") != "1F1B")
    grid = published.records(NANOTRON)
    first, later = _firsts(plain, "model"), _firsts(grid, "params_B")
    return (
        gathered(
            "Zero Bubble table 4, peak memory", plain,
            lambda row: _peak(row, first[row.text("model")], "memory_GB", zero_bubble),
            "mean/max", BAR, {row.id for row in first.values()},
            note="calibrated on the first 1F1B run of each model",
        ),
        gathered(
            "nanotron, peak memory", grid,
            lambda row: _peak(row, later[row.text("params_B")], "memory_GB_as_printed", nanotron),
            "mean/max", (), {row.id for row in later.values()},
            note="calibrated on the first run of each model; allocated or reserved is not said",
        ),
    )  # fmt: skip


def _firsts(records: Iterable[Record], column: str) -> dict[str, Record]:
    """The first record of each model: it is calibrated on, and so not reported."""
    found: dict[str, Record] = {}
    for row in records:
        found.setdefault(row.text(column), row)
    return found


def _peak(
    row: Record, first: Record, column: str, job_of: Callable[[Record], Job]
) -> tuple[Row, ...]:
    measured = (round(first.number(column) * 2**30),)
    calibration = calibrate_memory(memory_of(job_of(first)), measured, first.id)
    stages = memory_of(job_of(row), calibration)
    predicted = max(stage.total_bytes for stage in stages) / 2**30
    return (Row(row.table, row.id, "peak", row.number(column), predicted, "GiB"),)
