"""A recording split, for tests of what is built upon a split."""

from __future__ import annotations

from pathlib import Path

from stepsplit.analyzer.model.schedule_time import compute_ideal_bubble_fraction
from stepsplit.analyzer.readers.recording import Recording, read_recording
from stepsplit.analyzer.split.run import RunSplit, split_run
from stepsplit.collectors import RunSpec


def recording_of(*places: str | Path) -> Recording:
    return read_recording([str(place) for place in places])


def split_of(recording: Recording, spec: RunSpec | None = None) -> RunSplit:
    """The split of what was recorded; spec stands for its run.json."""
    return split_run(recording.traces, spec or recording.spec, compute_ideal_bubble_fraction)
