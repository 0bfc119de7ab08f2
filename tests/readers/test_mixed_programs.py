"""Folders whose traces are not all of one run: two programs of a job, two captures, some ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.builders import GpuTrace

from stepsplit.analyzer import DataError, analyze


def write(folder: Path, name: str, rank: int, world: int) -> None:
    """A rank of a program of so many ranks, in a file of that name."""
    folder.mkdir(exist_ok=True)
    trace = GpuTrace(rank, world, groups=[("0", "default_pg", range(world))])
    for step in (1, 2, 3):
        at = 100 * step
        trace.step(step, at, at + 100).kernel("gemm", at, at + 60)
        trace.all_reduce(at + 60, at + 90, Seq=step)
    trace.write(folder).rename(folder / name)


def test_two_programs_with_the_same_ranks_are_refused_with_the_fix(tmp_path: Path) -> None:
    for rank in range(4):
        write(tmp_path, f"trainer{rank}.json.gz", rank, 4)
    write(tmp_path, "rollout0.json.gz", 0, 2)
    with pytest.raises(DataError) as caught:
        analyze(tmp_path)
    assert "second trace of rank 0" in str(caught.value)
    assert "of a job of 2 ranks, and this one is of a job of 4" in str(caught.value)
    assert "analyze each one alone" in caught.value.hint


def test_two_programs_with_other_ranks_are_named(tmp_path: Path) -> None:
    """Of three ranks of a trainer of eight, and one of rollouts of six."""
    for rank in (1, 2, 3):
        write(tmp_path, f"rank{rank}.json.gz", rank, 8)
    write(tmp_path, "rank0.json.gz", 0, 6)
    report = analyze(tmp_path)
    (message,) = [row.message for row in report.warnings if row.code == "mixed_world_sizes"]
    assert message == (
        "traces of different world sizes (6 by rank 0; 8 by rank 1, 2, 3): of two programs, such "
        "as a trainer and its rollouts, or of two runs; analyze each one's traces by themselves"
    )


def test_ranks_of_one_program_that_share_no_group_are_not_accused(tmp_path: Path) -> None:
    """Of a grid search, each rank trains alone."""
    for rank in range(3):
        trace = GpuTrace(rank, 3)
        for step in (1, 2, 3):
            trace.step(step, 100 * step, 100 * step + 100)
            trace.kernel("gemm", 100 * step, 100 * step + 60)
        trace.write(tmp_path)
    codes = {row.code for row in analyze(tmp_path).warnings}
    assert not codes & {"mixed_world_sizes", "mixed_devices"}


def test_parts_of_a_recording_that_no_call_joins_are_named(tmp_path: Path) -> None:
    """As of a trainer and its rollouts of two ranks each, of which each says that there are 4."""
    for rank in range(4):
        pair = [0, 1] if rank < 2 else [2, 3]
        trace = GpuTrace(rank, 4, groups=[("0", "", pair)])
        for step in (1, 2, 3):
            at = 100 * step
            trace.step(step, at, at + 100).kernel("gemm", at, at + 60)
            trace.all_reduce(at + 60, at + 90, Seq=step)
        trace.write(tmp_path)
    (message,) = [row.message for row in analyze(tmp_path).warnings if row.code == "separate_ranks"]
    assert message == (
        "no call joins these parts of the recording (ranks 0, 1; ranks 2, 3): their steps are "
        "compared by their numbers; of two programs, analyze each one's traces by themselves"
    )


def test_a_list_of_traces_says_what_it_is(tmp_path: Path) -> None:
    bodies = [GpuTrace(rank, 2).step(1, 0, 10).kernel("gemm", 0, 5).body() for rank in (0, 1)]
    (tmp_path / "ranks.json").write_text(json.dumps(bodies))
    with pytest.raises(DataError, match="a list of traces, as of several ranks: each needs a file"):
        analyze(tmp_path)


def test_two_ranks_merged_into_one_file_are_said_to_be(tmp_path: Path) -> None:
    bodies = []
    for rank in (0, 1):
        trace = GpuTrace(rank, 2).step(1, 0, 100).kernel("gemm", 10 * rank, 60)
        bodies.append(trace.body())
        for event in bodies[-1]["traceEvents"]:
            event["pid"] = 4000 + rank
    bodies[0]["traceEvents"] += bodies[1]["traceEvents"]
    (tmp_path / "merged.json").write_text(json.dumps(bodies[0]))
    (message,) = [
        row.message for row in analyze(tmp_path).warnings if row.code == "several_processes"
    ]
    assert message == (
        "2 processes made the runtime calls of the file (4000, 4001), which is split as one rank: "
        "merged ranks need a file each"
    )


def test_some_of_the_ranks(tmp_path: Path) -> None:
    for rank in (0, 2, 5):
        write(tmp_path, f"rank{rank}.json.gz", rank, 8)
    (message,) = [row.message for row in analyze(tmp_path).warnings if row.code == "ranks_missing"]
    assert message == "5 of 8 ranks are missing from the recording: 1, 3, 4, 6, 7"


def test_two_captures_of_a_rank(tmp_path: Path) -> None:
    for step in (10, 20):
        for rank in range(2):
            write(tmp_path, f"step{step}_rank{rank}.json.gz", rank, 2)
    (message,) = [row.message for row in analyze(tmp_path).warnings if row.code == "older_captures"]
    assert message.startswith("the run was captured several times; the latest is used (")


def test_a_rank_twice_under_two_names_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "rank0.json.gz", 0, 2)
    write(tmp_path, "copy_of_it.json.gz", 0, 2)
    with pytest.raises(DataError, match="second trace of rank 0; the first is"):
        analyze(tmp_path)
