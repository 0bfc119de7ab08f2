"""Simulated jobs whose calls carry no arguments, and what their reports must say."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cuda_simulator.jobs import Job, SlowRank
from cuda_simulator.kineto import TraceStyle
from cuda_simulator.simulate import Simulation, simulate
from cuda_simulator.truth import measure_exposed

from stepsplit.analyzer import Report, analyze

SHARE = 0.005
"""Of the step: how close transfers and waits are to the truth."""

CLOCK_NS = 5_000

APART = TraceStyle(largest_clock_offset_ns=100_000_000)

LATE = SlowRank(5, 1.2)

EXPERTS = Job("experts", dp=8, ep=8, microbatches=2, ranks_per_host=1, steps=4, causes=(LATE,))
TENSORS = Job("sums", tp=8, tensor_by="symm_mem", microbatches=2, ranks_per_host=1, steps=4,
              causes=(LATE,))  # fmt: skip
COPIES = Job("copies", dp=8, fsdp=True, weights_by="copy_engine", microbatches=1, layers=8,
             ranks_per_host=1, steps=4, causes=(LATE,))  # fmt: skip
GRAPH = Job("graph", tp=4, dp=2, microbatches=2, ranks_per_host=1, steps=4, described=False,
            causes=(LATE,))  # fmt: skip

LIBRARIES = (
    "deep_ep", "low_latency", "hybrid_ep", "elastic", "nccl_ep", "staged_nccl_ep", "mori",
)  # fmt: skip

SUMS = ("vllm_one_shot", "sglang_two_shot", "trt_one_shot", "trt_two_shot")


def run(job: Job, folder: Path, style: TraceStyle = APART) -> tuple[Simulation, Report]:
    simulation = simulate(job)
    simulation.write(folder, style)
    return simulation, analyze(folder)


def list_errors(simulation: Simulation, report: Report) -> list[float]:
    """How far transfers and waits of each rank are off, as a share of the step."""
    steps, errors = simulation.job.steps, []
    for rank, truth in enumerate(measure_exposed(simulation)):
        rows = [row.split for row in report.steps if row.rank == rank]
        transfer_ns = sum(row.collective_ns + row.p2p_ns for row in rows)
        wait_ns = sum(row.skew_ns + row.bubble_ns for row in rows)
        errors += [abs(transfer_ns - truth.transfer_ns), abs(wait_ns - truth.wait_ns)]
    return [error / steps / simulation.step_ns for error in errors]


def find_most_blamed(report: Report) -> int | None:
    blamed: dict[int | None, int] = {}
    for row in report.blame:
        blamed[row.rank] = blamed.get(row.rank, 0) + row.caused_ns
    return max(blamed, key=lambda rank: blamed[rank])


def list_clock_errors(simulation: Simulation, report: Report, style: TraceStyle) -> list[int]:
    job = simulation.job

    def offset_ns(rank: int) -> int:
        host, largest = rank // job.ranks_per_host, style.largest_clock_offset_ns
        clock = random.Random(f"{job.seed}/clock {host}")
        return clock.randint(-largest, largest) if host else 0

    return [abs(row.offset_ns - offset_ns(row.rank) + offset_ns(0)) for row in report.clocks]


def list_found(report: Report) -> set[tuple[int, ...]]:
    """The ranks of the groups on which calls without arguments were found."""
    ranks = {row.id: row.ranks for row in report.groups}
    return {ranks[row.group] for row in report.collectives if row.group >= 0 and not row.dtype}


def list_possible(job: Job) -> set[tuple[int, ...]]:
    """The groups of the axes on which the job's calls without arguments are."""
    by = {"tp": job.tensor_by, "ep": job.experts_by, "dp": job.weights_by}
    axes = (
        [axis for axis, library in by.items() if library != "nccl"] if job.described else job.groups
    )
    return {group.ranks for axis in axes for group in job.groups[axis]}


def assert_true(simulation: Simulation, report: Report, style: TraceStyle = APART) -> None:
    assert max(list_errors(simulation, report)) <= SHARE
    assert max(list_clock_errors(simulation, report, style)) <= CLOCK_NS
    (cause,) = simulation.job.causes
    assert isinstance(cause, SlowRank)
    assert find_most_blamed(report) == cause.rank
    gain_ns = simulation.step_ns - simulate(simulation.job.without(cause)).step_ns
    said = next(row for row in report.findings if row.ranks == (cause.rank,))
    assert said.code == "slow_rank"
    assert said.gain_ns == pytest.approx(gain_ns, rel=0.15)


def assert_costs(simulation: Simulation, report: Report, code: str, ranks: set[int]) -> None:
    """The first finding is the planted cause, with what it costs within 15 %."""
    (cause,) = simulation.job.causes
    gain_ns = simulation.step_ns - simulate(simulation.job.without(cause)).step_ns
    said = report.findings[0]
    assert (said.code, set(said.ranks)) == (code, ranks)
    assert said.gain_ns == pytest.approx(gain_ns, rel=0.15)
    assert max(list_errors(simulation, report)) <= SHARE


Trace = dict[str, Any]


def change_traces(folder: Path, change: Callable[[int, Trace], Trace | None]) -> None:
    """Changes or, where change returns None, removes the trace of each rank."""
    for path in sorted(folder.glob("rank*.json.gz")):
        rank = int(path.name.removeprefix("rank").partition(".")[0])
        trace = change(rank, json.loads(gzip.decompress(path.read_bytes())))
        if trace is None:
            path.unlink()
        else:
            path.write_bytes(gzip.compress(json.dumps(trace).encode(), 1))
