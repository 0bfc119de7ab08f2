"""Recordings laid down by hand, split and as graphs."""

from __future__ import annotations

from pathlib import Path

from builders import GpuTrace
from splitting import recording_of, split_of

from stepsplit.analyzer.diagnose.dependency_graph import DependencyGraph
from stepsplit.analyzer.diagnose.replay import ReplayContext, build_context, replay


def scene(folder: Path, *traces: GpuTrace) -> ReplayContext:
    """The scene of traces built by hand."""
    return build_context(split_of(recording_of(*(trace.write(folder) for trace in traces))), 0)


def steps_us(graph: DependencyGraph) -> list[float]:
    """The steps of all ranks, in microseconds."""
    return [ns / 1000 for ns in replay(graph).step_ns.tolist()]
