"""A recording split, for tests of what is built upon a split."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from stepsplit.analyzer.readers.recording import Recording, read_recording
from stepsplit.analyzer.split.run import RunSplit
from stepsplit.analyzer.split_recording import split_recording
from stepsplit.collectors import RunSpec


def recording_of(*places: str | Path) -> Recording:
    return read_recording([str(place) for place in places])


def split_of(recording: Recording, spec: RunSpec | None = None) -> RunSplit:
    """The split of what was recorded; spec stands for its run.json."""
    return split_recording(replace(recording, spec=spec) if spec else recording)
