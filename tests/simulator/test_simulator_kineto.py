"""The traces of simulated jobs: what they hold, and that an analysis finds the truth in them."""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from simulator.engine import simulate
from simulator.kineto import START_NS, write_recording
from simulator.program import (
    COMM,
    Begin,
    Collective,
    Compute,
    Copy,
    End,
    Graph,
    Instruction,
    Job,
    Message,
    Messages,
    ProcessGroup,
    Record,
    Scenario,
    StepBegin,
    StepEnd,
    Synchronize,
    WaitFor,
)
from simulator.run_json import write_run_json
from simulator.truth import TrueSplit, truth_of
from stepsplit.analyzer import analyze

LARGE = 1 << 20


def write(folder: Path, scenario: Scenario) -> tuple[TrueSplit, ...]:
    """Writes the recording; returns the true splits."""
    run = simulate(scenario.job)
    write_recording(scenario, run, folder)
    write_run_json(scenario.job, folder)
    return truth_of(run).splits


def written(folder: Path, *program: Instruction, drift_ppm: float = 0.0) -> list[dict[str, Any]]:
    """The trace's entries of one rank that runs the program."""
    groups = (ProcessGroup("0", (0,)),)
    job = Job("story", (program,), groups, (("dp_replicate", 1),), ("host0",), (0,))
    write(folder, Scenario(job, 0, offset_ns={"host0": 500}, drift_ppm={"host0": drift_ppm}))
    body = json.loads(gzip.decompress((folder / "rank0_trace.json.gz").read_bytes()))
    entries: list[dict[str, Any]] = body["traceEvents"]
    return entries


def named(entries: list[dict[str, Any]], *columns: str) -> list[tuple[Any, ...]]:
    return [tuple(entry[column] for column in columns) for entry in entries]


def steps(*bodies: tuple[Instruction, ...]) -> tuple[Instruction, ...]:
    marked = [(Synchronize(), StepBegin(n), *body) for n, body in enumerate(bodies, start=1)]
    return (*(one for part in marked for one in part), Synchronize(), StepEnd())


def reduced(first_ns: int) -> tuple[Instruction, ...]:
    return (Compute(first_ns), Record("a"), WaitFor("a", COMM),
            Collective("0", "all_reduce", LARGE, 200_000), Record("b", COMM), WaitFor("b"),
            Copy(15_000), Compute(300_000))  # fmt: skip


def straggler(hosts: tuple[str, str], **clocks: Any) -> Scenario:
    """Rank 0 is 400 us late in each of two steps."""
    programs = (steps(*[reduced(500_000)] * 2), steps(*[reduced(100_000)] * 2))
    mesh = (("dp_replicate", 2),)
    return Scenario(
        Job("straggler", programs, (ProcessGroup("0", (0, 1)),), mesh, hosts, (0, 0)), 0, **clocks
    )


def pipeline() -> Scenario:
    """Two stages, one microbatch: forward, then backward the other way, and an optimizer."""
    first = (Begin("PP:0F0"), Compute(300_000), End(), Record("f"), WaitFor("f", "pp"),
             Messages("0", (Message("send", 1, LARGE, 40_000),), "pp"),
             Messages("0", (Message("recv", 1, LARGE, 40_000),), "pp"),
             Record("g", "pp"), WaitFor("g"), Begin("PP:0B0"), Compute(500_000), End())  # fmt: skip
    last = (Messages("0", (Message("recv", 0, LARGE, 40_000),), "pp"), Record("f", "pp"),
            WaitFor("f"), Begin("PP:1F0"), Compute(300_000), End(), Begin("PP:1B0"),
            Compute(500_000), End(), Record("g"), WaitFor("g", "pp"),
            Messages("0", (Message("send", 0, LARGE, 40_000),), "pp"), Record("h", "pp"),
            WaitFor("h"), Compute(100_000))  # fmt: skip
    job = Job("pipeline", (steps(first, first), steps(last, last)), (ProcessGroup("0", (0, 1)),),
              (("pp", 2),), ("host0", "host0"), (0, 1))  # fmt: skip
    return Scenario(job, 0)


@pytest.mark.parametrize(
    "scenario",
    [
        straggler(("host0", "host0")),
        straggler(("host0", "host1"), offset_ns={"host1": -200_000_000}),
        pipeline(),
    ],
    ids=["one_host", "two_clocks", "pipeline"],
)
def test_an_analysis_finds_the_true_split_of_every_step(tmp_path: Path, scenario: Scenario) -> None:
    true = {(split.rank, split.step): asdict(split) for split in write(tmp_path, scenario)}
    found = {(row.rank, row.step): row.split for row in analyze(tmp_path).steps}
    assert {key: split.buckets_ns for key, split in found.items()} == {
        key: tuple(
            split[f"{name}_ns"]
            for name in ("compute", "collective", "p2p", "skew", "bubble", "copy", "idle")
        )
        for key, split in true.items()
    }


def test_times_are_those_of_the_hosts_clock(tmp_path: Path) -> None:
    entries = written(tmp_path, Compute(1_000_000), drift_ppm=50.0)
    start_us = (START_NS + 500) / 1000
    assert named(entries, "name", "ts", "dur") == [
        ("cudaLaunchKernel", start_us, 4.0),
        ("gemm", start_us + 4, 1000.05),
    ]


def test_a_launch_and_its_kernel_share_a_correlation(tmp_path: Path) -> None:
    entries = written(tmp_path, Copy(1000), Graph((Compute(1000), Compute(2000, "relu"))))
    assert [(e["name"], e["cat"], e["args"]["correlation"]) for e in entries] == [
        ("cudaMemcpyAsync", "cuda_runtime", 1),
        ("cudaGraphLaunch", "cuda_runtime", 2),
        ("Memcpy HtoD", "gpu_memcpy", 1),
        ("gemm", "kernel", 2),
        ("relu", "kernel", 2),
    ]


def test_an_annotation_is_on_the_device_around_what_was_launched_in_it(tmp_path: Path) -> None:
    program = (Compute(9_000), Begin("PP:0F0"), Compute(6_000), Compute(7_000), End(), Compute(5))
    entries = written(tmp_path, *program)
    boxes = [entry for entry in entries if entry["name"] == "PP:0F0"]
    zero_us = (START_NS + 500) / 1000
    assert named(boxes, "cat", "ts", "dur") == [
        ("user_annotation", zero_us + 4, 8.0),
        ("gpu_user_annotation", zero_us + 13, 13.0),
    ]


def test_a_gathered_call_states_its_part_and_the_whole(tmp_path: Path) -> None:
    gathering = steps((Compute(1000), Collective("0", "all_gather", 4096, 1000)))
    groups = (ProcessGroup("0", (0, 1), "mesh_tp"),)
    job = Job("story", (gathering, gathering), groups, (("tp", 2),), ("host0", "host0"), (0, 0))
    write(tmp_path, Scenario(job, 0))
    body = json.loads(gzip.decompress((tmp_path / "rank1_trace.json.gz").read_bytes()))
    (kernel,) = [e for e in body["traceEvents"] if e["name"].startswith("ncclDevKernel_AllGather")]
    assert kernel["args"] == {
        "device": 0, "stream": kernel["tid"], "correlation": 3,
        "Collective name": "_allgather_base", "In msg nelems": 1024, "Out msg nelems": 2048,
        "Group size": 2, "dtype": "BFloat16", "Process Group Name": "0",
        "Process Group Description": "mesh_tp", "Process Group Ranks": "[0, 1]", "Seq": 0,
    }  # fmt: skip


def test_the_kernel_of_a_batch_does_not_say_what_it_carries(tmp_path: Path) -> None:
    def batch(peer: int) -> Messages:
        legs = (Message("send", peer, LARGE, 1000), Message("recv", peer, LARGE, 1000))
        return Messages("0", legs)

    groups = (ProcessGroup("0", (0, 1)),)
    job = Job("story", ((batch(1),), (batch(0),)), groups, (("cp", 2),), ("h", "h"), (0, 0))
    write(tmp_path, Scenario(job, 0))
    body = json.loads(gzip.decompress((tmp_path / "rank0_trace.json.gz").read_bytes()))
    named = [(e["name"][:18], e["args"].get("Collective name")) for e in body["traceEvents"]]
    assert named == [
        ("record_param_comms", "send"),
        ("record_param_comms", "recv"),
        ("cudaLaunchKernel", None),
        ("ncclDevKernel_Send", None),
    ]
