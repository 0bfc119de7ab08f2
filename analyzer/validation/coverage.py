"""Predictions of each publisher's runs by constants and bands that know none of its runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, cast

from stepsplit.analyzer.model.confidence import (
    LEVEL,
    BandIndex,
    RunKind,
    StepBand,
    find_error_band,
    find_run_kind,
)
from stepsplit.analyzer.model.config_decode import read_table
from stepsplit.analyzer.model.hardware_config import PRESETS
from stepsplit.analyzer.model.predict import predict
from stepsplit.analyzer.validation.tables import Case


@dataclass(frozen=True, slots=True)
class UnseenRun:
    """A run as predicted without its publisher's runs; doubted: with low confidence."""

    case: Case
    predicted_ns: int
    kind: RunKind
    doubted: bool

    @property
    def error(self) -> float:
        """By what factor the prediction is off, less one: 0.25 for 25 % more, and for 20 % less."""
        return math.expm1(abs(math.log(self.predicted_ns / self.case.step_ns)))


def predict_unseen(cases: Iterable[Case]) -> tuple[UnseenRun, ...]:
    """Predict each run by the constants that were fitted without its publisher."""
    return tuple(map(_predict_one, cases))


def _predict_one(case: Case) -> UnseenRun:
    hardware = case.job.hardware
    constants = load_left_out().get((hardware.family, case.source), {})
    efficiency = replace(hardware.efficiency, **cast(dict[str, Any], constants))
    job = replace(case.job, hardware=replace(hardware, efficiency=efficiency))
    prediction = predict(job)
    doubted = prediction.confidence == "low"
    return UnseenRun(case, prediction.split.step_ns, find_run_kind(job), doubted)


@lru_cache(maxsize=1)
def load_left_out() -> Mapping[tuple[str, str], Mapping[str, float]]:
    """The constants of left_out.toml, by family and publisher. Raises DataError."""
    families = read_table(PRESETS / "left_out.toml").values
    return {
        (family, source): constants
        for family, sources in families.items()
        if isinstance(sources, dict)
        for source, constants in sources.items()
    }


def compute_bands(runs: Iterable[UnseenRun]) -> BandIndex:
    """The error that LEVEL of the runs stay below, by kind and each wider kind."""
    groups: dict[tuple[RunKind, bool], list[UnseenRun]] = {}
    for run in runs:
        for kind in run.kind.list_wider():
            groups.setdefault((kind, run.doubted), []).append(run)
    return {
        (kind, doubted): StepBand(
            compute_conformal_error([run.error for run in group]),
            len(group),
            len({run.case.source for run in group}),
            kind,
        )
        for (kind, doubted), group in groups.items()
    }


def compute_conformal_error(errors: Sequence[float]) -> float:
    """The error that a further run of the same kind stays below with probability LEVEL.

    Split conformal prediction: of n errors that of rank ceil((n + 1) LEVEL), the largest if there
    are too few (Lei et al., Distribution-Free Predictive Inference for Regression, 2018).
    """
    rank = min(len(errors), math.ceil((len(errors) + 1) * LEVEL))
    return sorted(errors)[rank - 1]


def find_unseen_bands(runs: Sequence[UnseenRun]) -> tuple[StepBand, ...]:
    """The band of each run, from the runs of the other publishers."""
    sources = {run.case.source for run in runs}
    by_source = {
        source: compute_bands(run for run in runs if run.case.source != source)
        for source in sources
    }
    return tuple(find_error_band(run.kind, run.doubted, by_source[run.case.source]) for run in runs)
