"""Recordings laid down by hand, split and as graphs."""

from __future__ import annotations

from pathlib import Path

from builders import GpuTrace

from stepsplit.analyzer.diagnose.dependency_graph import DependencyGraph
from stepsplit.analyzer.diagnose.replay import ReplayContext, play, scene_of
from stepsplit.analyzer.model.schedule_time import ideal_bubble_fraction
from stepsplit.analyzer.readers.recording import read_recording
from stepsplit.analyzer.split.run import RunSplit, split_run


def split_of(*places: Path | str) -> RunSplit:
    """The split of a recording."""
    recording = read_recording([str(place) for place in places])
    return split_run(recording.traces, recording.spec, ideal_bubble_fraction)


def scene(folder: Path, *traces: GpuTrace) -> ReplayContext:
    """The scene of traces built by hand."""
    return scene_of(split_of(*(trace.write(folder) for trace in traces)), 0)


def steps_us(graph: DependencyGraph) -> list[float]:
    """The steps of all ranks, in microseconds."""
    return [ns / 1000 for ns in play(graph).step_ns.tolist()]
