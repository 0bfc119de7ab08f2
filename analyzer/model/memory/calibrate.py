"""What one measured run teaches about the memory of other runs of its kind."""

from __future__ import annotations

from dataclasses import dataclass

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.prediction import StageMemory

LEAST, MOST = 0.5, 3.0
"""What a factor on the activations may be; what lies outside is taken for a constant."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Learned from one run, which run names: a factor on the activations of every stage, and
    bytes that every rank needs beside what is predicted."""

    run: str
    activations: float
    constant_bytes: int


NONE = Calibration("", 1.0, 0)


def calibrate(
    predicted: tuple[StageMemory, ...], measured_bytes: tuple[int, ...], run: str
) -> Calibration:
    """From a measured peak of allocated bytes a stage, or the one of the fullest stage.

    predicted is memory_of the same job without a calibration. One number gives the factor alone; a
    number a stage gives factor and constant by least squares. A factor outside LEAST..MOST says
    that something else than activations is missing: then the difference becomes the constant.
    Raises UsageError where there are neither one number nor as many as stages.
    """
    if len(measured_bytes) == 1:
        found = _of_fullest(predicted, measured_bytes[0])
    elif len(measured_bytes) == len(predicted):
        found = _of_stages(predicted, measured_bytes)
    else:
        given, stages = len(measured_bytes), len(predicted)
        raise UsageError(f"{given} measured peaks for {stages} stages: give 1 or {stages}")
    if LEAST <= found[0] <= MOST:
        return Calibration(run, found[0], round(found[1]))
    above = max(measured_bytes) - max(stage.total_bytes for stage in predicted)
    return Calibration(run, 1.0, above)


def _of_fullest(predicted: tuple[StageMemory, ...], measured: int) -> tuple[float, float]:
    """The factor at which the first stage reaches the measured peak."""
    factors = [
        (measured - stage.total_bytes) / stage.activations_bytes + 1
        for stage in predicted
        if stage.activations_bytes
    ]
    return min(factors, default=0.0), 0.0


def _of_stages(
    predicted: tuple[StageMemory, ...], measured: tuple[int, ...]
) -> tuple[float, float]:
    """Slope and intercept of what is not states over the predicted activations."""
    held = [float(stage.activations_bytes) for stage in predicted]
    rest = [
        total - (stage.total_bytes - stage.activations_bytes)
        for stage, total in zip(predicted, measured, strict=True)
    ]
    mean_held, mean_rest = sum(held) / len(held), sum(rest) / len(rest)
    spread = sum((each - mean_held) ** 2 for each in held)
    if spread == 0:
        return (mean_rest / mean_held if mean_held else 0.0), 0.0
    along = sum((h - mean_held) * (r - mean_rest) for h, r in zip(held, rest, strict=True))
    return along / spread, mean_rest - along / spread * mean_held
