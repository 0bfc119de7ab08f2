"""calibrate: recorded runs in, the hardware that explains them out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stepsplit.analyzer.buckets import Split
from stepsplit.analyzer.compare.calibrate.compute import efficiency_seen
from stepsplit.analyzer.compare.calibrate.links import links_seen, sweeps_seen
from stepsplit.analyzer.compare.calibrate.memory import memory_seen
from stepsplit.analyzer.compare.calibrate.peaks import within_peaks
from stepsplit.analyzer.compare.calibrate.seen import RunSeen, StageSeen, run_seen
from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.comm_measured import Rates, TransferSweep
from stepsplit.analyzer.model.config import Hardware
from stepsplit.analyzer.model.config_table import Table, read_table
from stepsplit.analyzer.model.predict import predict

ONE_RUN_ERROR = 0.2
"""How far off other layouts may be after a single run, a ratio: the bar of tests/
test_calibrate_demo.py."""
LEAST_ERROR = 0.05
"""Runs of one day agree by accident more than that."""


@dataclass(frozen=True, slots=True)
class Explained:
    """A stage of a run as it was measured, and as it is predicted with the fitted constants."""

    run: str
    stage: int
    step_ns: int
    measured: Split
    predicted: Split


@dataclass(frozen=True, slots=True)
class Calibration:
    """What the runs tell: hardware with its constants, the transfers' times, how well they fit.

    known is the hardware before.
    """

    known: Hardware
    hardware: Hardware
    transfers: tuple[TransferSweep, ...]
    stages: tuple[Explained, ...]

    @property
    def rates(self) -> Rates:
        """The measured transfers, as predict takes them."""
        return Rates(self.transfers)


def calibrate(*places: str | Path, run: str | Path | None = None) -> Calibration:
    """The constants that explain the recorded runs at the places.

    run is a RUN.toml, whole or a part, for what a recording does not tell of its job. Raises
    DataError and UsageError.
    """
    if not places:
        raise UsageError("no run to calibrate from; name the folder of a recording")
    stated: Table | None = None if run is None else read_table(run)
    return calibration_of([run_seen(str(place), stated) for place in places])


def calibration_of(runs: Sequence[RunSeen]) -> Calibration:
    """The constants that explain the runs. Raises UsageError for runs on different hardware."""
    known = runs[0].job.hardware
    other = next((one for one in runs if one.job.hardware.name != known.name), None)
    if other is not None:
        raise UsageError(
            f"{runs[0].name} ran on {known.name}, {other.name} on {other.job.hardware.name};"
            " calibrate each from its own runs"
        )
    fitted, transfers = _hardware(runs, known), sweeps_seen(runs)
    fitted = replace(fitted, efficiency=replace(fitted.efficiency, error=_error(runs, known)))
    rates = Rates(transfers)
    stages = tuple(each for one in runs for each in _explained(one, fitted, rates))
    return Calibration(known, fitted, transfers, stages)


def _hardware(runs: Sequence[RunSeen], known: Hardware) -> Hardware:
    linked = links_seen(runs, known)
    dtypes = dict.fromkeys(one.job.recipe.dtype for one in runs)
    efficiency = replace(
        efficiency_seen(runs, known.efficiency),
        frameworks=(),
        devices=(known.name,),
        dtypes=tuple(dtypes),
        rows=tuple(dict.fromkeys(f"run:{one.name}" for one in runs)),
    )
    learned = memory_seen(runs, known.learned)
    return within_peaks(replace(linked, efficiency=efficiency, learned=learned))


def _error(runs: Sequence[RunSeen], known: Hardware) -> float:
    """How far off the worst run is when the others alone are calibrated from."""
    if len(runs) == 1:
        return ONE_RUN_ERROR
    missed = [LEAST_ERROR]
    for i, one in enumerate(runs):
        others = [*runs[:i], *runs[i + 1 :]]
        found = _explained(one, _hardware(others, known), Rates(sweeps_seen(others)))
        missed += (abs(each.predicted.step_ns / each.step_ns - 1) for each in found)
    return max(missed)


def _explained(run: RunSeen, hardware: Hardware, rates: Rates) -> list[Explained]:
    splits = predict(replace(run.job, hardware=hardware), rates).splits
    return [_beside(run.name, seen, splits[seen.stage]) for seen in run.stages]


def _beside(run: str, seen: StageSeen, predicted: Split) -> Explained:
    return Explained(run, seen.stage, seen.step_ns, seen.split, predicted)
