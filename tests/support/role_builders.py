"""Recordings of several roles, by hand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from stepsplit.analyzer.analysis import RoleAnalysis, examine_roles_or_run
from stepsplit.collectors.formats.run_spec import RunSpec, write_run_json
from support.builders import GpuTrace

STEPS = (1, 2, 3)


@dataclass
class Job:
    """A recording of several roles, each in its folder."""

    folder: Path

    def add(self, role: str, world_size: int, *traces: GpuTrace) -> None:
        folder = self.folder / role
        folder.mkdir(parents=True, exist_ok=True)
        write_run_json(folder, RunSpec("exp1", world_size, "nccl", role=role))
        for trace in traces:
            trace.write(folder)

    def examine(self) -> RoleAnalysis:
        analysis = examine_roles_or_run([self.folder])
        assert isinstance(analysis, RoleAnalysis)
        return analysis


def make_rollouts(world_size: int = 2, **options: object) -> list[GpuTrace]:
    """Two rollouts of 100 µs a step, of which one generates for 30 µs and the other one for 80."""
    traces = [GpuTrace(rank, world_size, **options) for rank in (0, 1)]
    for trace, busy in zip(traces, (30, 80), strict=True):
        for step in STEPS:
            at = 100 * step
            trace.step(step, at, at + 100).kernel("decode", at, at + busy)
            trace.kernel("end", at + 99, at + 100)
    return traces


def make_trainer(rank: int = 0, world_size: int = 1, **options: object) -> GpuTrace:
    """A trainer that computes in the last 20 µs of each step, with an optimizer."""
    trace = GpuTrace(rank, world_size, **options)
    for step in STEPS:
        at = 100 * step
        trace.step(step, at, at + 100).kernel("gemm", at + 80, at + 100)
        trace.annotation("Optimizer.step#Adam.step", at + 98, at + 99)
    return trace


def make_one_group(folder: Path, *, with_transfer: bool = True) -> Job:
    """Roles of one process group of three ranks, which send weights in the last 20 µs of a step."""
    job = Job(folder / "exp1")
    groups = [("0", "default_pg", range(3))]
    rollouts = [GpuTrace(rank, 3, groups=groups) for rank in (0, 1)]
    trainer = GpuTrace(2, 3, groups=groups)
    for step in STEPS:
        at = 100 * step
        for trace, busy in zip((*rollouts, trainer), (30, 50, 90), strict=True):
            trace.step(step, at, at + 100).kernel("gemm", at, at + busy)
            if with_transfer:
                trace.all_reduce(at + busy, at + 100, Seq=step)
        trainer.annotation("Optimizer.step#Adam.step", at + 88, at + 89)
    job.add("rollout", 3, *rollouts)
    job.add("trainer", 3, trainer)
    return job
