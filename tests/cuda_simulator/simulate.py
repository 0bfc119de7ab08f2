"""A job from its description to its step time and its traces."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import mean

from .jobs import COMPUTE_STREAM, Job, build_programs
from .kineto import TraceStyle, write_traces
from .machine import Latencies, RankTimeline, run_programs


@dataclass(frozen=True)
class Simulation:
    """A job that ran."""

    job: Job
    timelines: list[RankTimeline]

    @cached_property
    def steps_ns(self) -> dict[int, float]:
        """The recorded steps by number, means over the ranks: from the end of the last compute
        kernel of the step before to that of its own."""
        lengths: dict[int, list[int]] = {}
        for timeline in self.timelines:
            ends: dict[int, int] = {}
            for run in timeline.kernels:
                if run.kernel.stream == COMPUTE_STREAM:
                    ends[run.step] = run.end_ns
            for number in range(self.job.warmup, self.job.warmup + self.job.steps):
                lengths.setdefault(number, []).append(ends[number] - ends[number - 1])
        return {number: mean(own) for number, own in lengths.items()}

    @property
    def step_ns(self) -> float:
        """Mean recorded step."""
        return mean(self.steps_ns.values())

    def write(self, folder: Path, style: TraceStyle | None = None) -> None:
        write_traces(self.job, self.timelines, folder, style)


@contextmanager
def _without_collection() -> Iterator[None]:
    """Garbage collection would walk the hundreds of thousands of kernels again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def simulate(job: Job) -> Simulation:
    """Runs all ranks of the job."""
    with _without_collection():
        latencies = Latencies(launch_queue=job.launch_queue, one_queue=job.one_queue)
        if job.touching:
            latencies = replace(latencies, same_stream_ns=0, event_ns=0)
        return Simulation(job, run_programs(build_programs(job), latencies))
