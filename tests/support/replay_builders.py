"""Recordings laid down by hand, split and as graphs."""

from __future__ import annotations

from pathlib import Path

from stepsplit.analyzer.diagnose.causes.context import CauseContext
from stepsplit.analyzer.diagnose.graph.dependency_graph import (
    DependencyGraph,
    build_dependency_graph,
)
from stepsplit.analyzer.diagnose.graph.replay import replay
from stepsplit.analyzer.diagnose.slow_kernels import find_slow_kernels
from support.builders import CpuTrace, GpuTrace
from support.splitting import recording_of, split_of


def scene(folder: Path, *traces: GpuTrace | CpuTrace) -> CauseContext:
    """The scene of traces built by hand."""
    split = split_of(recording_of(*(trace.write(folder) for trace in traces)))
    return CauseContext.build(split, build_dependency_graph(split), find_slow_kernels(split))


def steps_us(graph: DependencyGraph) -> list[float]:
    """The steps of all ranks, in microseconds."""
    return [ns / 1000 for ns in replay(graph).step_ns.tolist()]
