"""What the ranks' recorded peaks teach about memory."""

from __future__ import annotations

from collections.abc import Sequence

from stepsplit.analyzer.compare.calibrate.seen import RunSeen
from stepsplit.analyzer.model.config import Learned
from stepsplit.analyzer.model.memory import NONE, calibrate_memory, memory_of


def memory_seen(runs: Sequence[RunSeen], known: Learned) -> Learned:
    """The correction by the run with the fullest rank, as known where none measured its memory."""
    fullest = max(runs, key=_peak)
    if not _peak(fullest):
        return known
    predicted = memory_of(fullest.job, NONE)
    peaks = tuple(stage.peak_bytes for stage in fullest.stages if stage.peak_bytes is not None)
    measured = peaks if len(peaks) == len(predicted) else (max(peaks),)
    found = calibrate_memory(predicted, measured, fullest.name)
    return Learned(found.activations, found.constant_bytes)


def _peak(run: RunSeen) -> int:
    return max((stage.peak_bytes or 0 for stage in run.stages), default=0)
