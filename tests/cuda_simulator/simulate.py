"""A job from its description to its step time and its traces."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from .jobs import COMPUTE_STREAM, Job, build_programs, measure_step_ns
from .kineto import TraceStyle, write_traces
from .machine import Latencies, RankTimeline, run_programs


@dataclass(frozen=True)
class Simulation:
    """A job that ran."""

    job: Job
    timelines: list[RankTimeline]

    @property
    def step_ns(self) -> float:
        """Mean recorded step: from the end of one step's last compute kernel to the next one's."""
        ends_ns = []
        for timeline in self.timelines:
            ends: dict[int, int] = {}
            for run in timeline.kernels:
                if run.kernel.stream == COMPUTE_STREAM:
                    ends[run.step] = run.end_ns
            ends_ns.append(list(ends.values()))
        return measure_step_ns(self.job, ends_ns)

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
