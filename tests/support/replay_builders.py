"""Recordings laid down by hand, split and as graphs."""

from __future__ import annotations

from pathlib import Path

from stepsplit.analyzer.diagnose.replay import ReplayContext, build_context, replay
from stepsplit.analyzer.split.dependency_graph import DependencyGraph, build_dependency_graph
from support.builders import CpuTrace, GpuTrace
from support.splitting import recording_of, split_of


def scene(folder: Path, *traces: GpuTrace | CpuTrace) -> ReplayContext:
    """The scene of traces built by hand."""
    split = split_of(recording_of(*(trace.write(folder) for trace in traces)))
    return build_context(split, build_dependency_graph(split))


def steps_us(graph: DependencyGraph) -> list[float]:
    """The steps of all ranks, in microseconds."""
    return [ns / 1000 for ns in replay(graph).step_ns.tolist()]
