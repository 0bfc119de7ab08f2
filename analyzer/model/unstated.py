"""What a job leaves open: how far the step moves with the plausible values of each key that its
job.toml does not state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from stepsplit.analyzer.errors import StepsplitError
from stepsplit.analyzer.model.config import JobConfig
from stepsplit.analyzer.model.config_checks import list_violations
from stepsplit.analyzer.model.features import KEY_FEATURES, KeyFeature, change_job
from stepsplit.analyzer.model.memory import compute_memory, is_within_memory
from stepsplit.analyzer.model.prediction import UnstatedKey
from stepsplit.analyzer.model.profile import load_device

SHOWN, SHOWN_MOVES = 3, 0.01
"""How many keys are named, and the change of the step from which on."""


def describe_unstated(unstated: Sequence[UnstatedKey]) -> str:
    """The keys that move the step most: "not stated: dispatcher (-22 to +4 %), cuda_graph (-18 %)";
    empty if none is worth stating."""
    named = [
        f"{one.key.rpartition('.')[2]} ({_format_range(one.low - 1, one.high - 1)})"
        for one in unstated[:SHOWN]
        if one.moves >= SHOWN_MOVES
    ]
    return f"not stated: {', '.join(named)}" if named else ""


def _format_range(low: float, high: float) -> str:
    """Both changes in percent, or the one that is not 0."""
    ends = [f"{change:+.0%}".removesuffix("%") for change in (low, high) if abs(change) >= 0.005]
    return f"{' to '.join(ends)} %"


def list_unstated(
    job: JobConfig, step_ns: int, fits: bool, time_job: Callable[[JobConfig, KeyFeature], int]
) -> tuple[UnstatedKey, ...]:
    """The keys that move the step, the one that moves it most first.

    step_ns and fits are the predicted step and whether it fits in memory. A value with which the
    job does not fit is not plausible if it fits as predicted, for it ran or is to run.
    """
    if load_device(job.hardware.family).processor:
        return ()
    found = []
    for feature in KEY_FEATURES:
        if feature.is_stated(job):
            continue
        low = high = 1.0
        for change in feature.list_alternatives(job):
            other = change_job(job, feature.section, change)
            if list_violations(other):
                continue
            try:
                ratio = time_job(other, feature) / step_ns
            except StepsplitError:
                # The rates of this value are not known on the device.
                continue
            if not low <= ratio <= high:
                if fits and not is_within_memory(other, compute_memory(other)):
                    continue
                low, high = min(low, ratio), max(high, ratio)
        if low < high:
            found.append(UnstatedKey(feature.key, feature.describe_value(job), low, high))
    return tuple(sorted(found, key=lambda one: -one.moves))


def join_spread(unstated: Iterable[UnstatedKey]) -> tuple[float, float]:
    """The shortest and the longest step over the predicted one, if each key is what it may be,
    independently of the others: logarithms add up as squares."""
    keys = tuple(unstated)
    low = math.sqrt(sum(math.log(one.low) ** 2 for one in keys))
    high = math.sqrt(sum(math.log(one.high) ** 2 for one in keys))
    return math.exp(-low), math.exp(high)
