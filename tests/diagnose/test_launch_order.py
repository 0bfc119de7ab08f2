"""Overlap lost to the order in which a GPU starts kernels: planted, and the same job without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from cuda_simulator.kineto import TraceStyle
from cuda_simulator.planted import LAYOUTS
from cuda_simulator.simulate import simulate
from support.builders import COMM_STREAM, COMPUTE_STREAM, GpuTrace

from stepsplit.analyzer import Finding, analyze
from stepsplit.collectors.formats.rank_record import RankRecord, write_record
from stepsplit.collectors.formats.run_spec import RankInfo

STEPS = (1, 2, 3)


def find_lost_overlap(folder: Path, connections: int | None = 0) -> list[Finding]:
    """The findings on the order of launches; connections as recorded, 0 for no record."""
    for rank in (0, 1) if connections != 0 else ():
        record = RankRecord("run", RankInfo(rank, rank, "host0", 1, "cuda:0"), 2, "nccl")
        write_record(folder, replace(record, max_connections=connections))
    return [one for one in analyze(folder).findings if one.code == "launch_order"]


def write_sharded(folder: Path, held: bool, waits: bool = True) -> None:
    """Two FSDP ranks: a reduce_scatter of 60 us after the first gemm, which the second one does
    not need, and only the optimizer waits for. held: the second gemm starts when it ends."""
    for rank in (0, 1):
        trace = GpuTrace(rank, 2, groups=[("0", "mesh_fsdp", [0, 1])])
        for step in STEPS:
            at = 300 * step
            second = at + (114 if held else 55)
            trace.step(step, at, at + 300)
            trace.kernel("gemm", at, at + 50)
            needed = trace.record_event(at + 1)
            if waits:
                trace.wait_for_event(at + 2, needed, stream=COMM_STREAM, on_stream=COMPUTE_STREAM)
            trace.collective(
                "ReduceScatter", "_reduce_scatter_base", at + 52, at + 112, launched=at + 3
            )
            ended = trace.record_event(at + 4)
            trace.kernel("gemm", second, second + 100, launched=at + 5)
            if waits:
                trace.wait_for_event(at + 6, ended, on_stream=COMM_STREAM)
            trace.kernel("adam", second + 101, at + 300, launched=at + 7)
        trace.write(folder)


def test_compute_that_starts_only_when_a_collective_ends_is_lost_overlap(tmp_path: Path) -> None:
    """The gap of 64 us holds no need; 60 of them are the collective's."""
    write_sharded(tmp_path, held=True)

    (found,) = find_lost_overlap(tmp_path, connections=1)

    assert (found.bucket, found.measured_ns, found.gain_ns) == ("idle", 64_000, 64_000)
    assert found.message == (
        "lost overlap: compute that is launched, and waits for no event, starts only when a"
        " collective on dp_shard ends, 0.06 ms per step; CUDA_DEVICE_MAX_CONNECTIONS is 1: leave it"
        " unset, or set it to the number of streams, up to 32"
    )


@pytest.mark.parametrize(
    ("connections", "hint"),
    [
        (0, "; CUDA_DEVICE_MAX_CONNECTIONS=1 does this (not recorded here): leave it unset, or set"
            " it to the number of streams, up to 32"),
        (8, ""),
        (None, ""),
    ],
)  # fmt: skip
def test_the_setting_is_named_only_if_it_explains_held_compute(
    tmp_path: Path, connections: int | None, hint: str
) -> None:
    write_sharded(tmp_path, held=True)

    (found,) = find_lost_overlap(tmp_path, connections)

    assert found.message.endswith("ends, 0.06 ms per step" + hint)


def test_overlapped_or_awaited_collectives_hold_up_no_compute(tmp_path: Path) -> None:
    """Without recorded waits, compute that starts when a collective ends may well need it."""
    for name, held, waits in (("overlapped", False, True), ("unknown", True, False)):
        (tmp_path / name).mkdir()
        write_sharded(tmp_path / name, held, waits)
        assert find_lost_overlap(tmp_path / name, connections=1) == []


def test_the_saving_of_more_queues_is_that_of_a_job_simulated_with_them(tmp_path: Path) -> None:
    """A job of a simulator that knows queues and streams, and nothing of the replay."""
    job = replace(LAYOUTS["fsdp8"], layers=8, steps=2, warmup=1)
    queued, free = simulate(replace(job, one_queue=True)), simulate(job)
    for name, simulation in (("queued", queued), ("free", free)):
        (tmp_path / name).mkdir()
        simulation.write(tmp_path / name, TraceStyle(events="cuda_sync"))

    (found,) = find_lost_overlap(tmp_path / "queued")

    assert found.gain_ns == pytest.approx(queued.step_ns - free.step_ns, rel=0.15)
    assert find_lost_overlap(tmp_path / "free") == []


def write_tensor_parallel(folder: Path, late: bool, launched_first: bool = True) -> None:
    """Two tensor parallel ranks: an all_reduce of 40 us is launched before the gemm of 100 us that
    is to hide it. late: it starts when that ends."""
    for rank in (0, 1):
        trace = GpuTrace(rank, 2, groups=[("0", "TENSOR_MODEL_PARALLEL_GROUP", [0, 1])])
        for step in STEPS:
            at = 400 * step
            begin = at + (157 if late else 57)
            after = max(begin + 40, at + 155) + 5
            trace.step(step, at, at + 400)
            trace.kernel("dgrad", at, at + 50)
            trace.all_reduce(begin, begin + 40, launched=at + (5 if launched_first else 15))
            trace.kernel("wgrad", at + 55, at + 155, launched=at + 10)
            trace.kernel("gelu", after, after + 90, launched=at + 20)
            trace.kernel("adam", after + 91, at + 400, launched=at + 30)
        trace.write(folder)


def test_a_collective_that_starts_after_the_compute_launched_later_is_lost_overlap(
    tmp_path: Path,
) -> None:
    """Begun at 50 and not at 157, it ends before wgrad does at 155, instead of at 197."""
    write_tensor_parallel(tmp_path, late=True)

    (found,) = find_lost_overlap(tmp_path, connections=None)

    assert found.bucket == "collective"
    assert found.gain_ns == pytest.approx(42_000, rel=0.15)
    assert found.message == (
        "lost overlap: 1 collectives per step on tp are launched before a compute kernel, and start"
        " only when it ends; CUDA_DEVICE_MAX_CONNECTIONS is not set: before Blackwell, 1 makes"
        " kernels start in the order of their launches"
    )


@pytest.mark.parametrize(
    ("connections", "hint"),
    [(0, "; CUDA_DEVICE_MAX_CONNECTIONS is not recorded here: before Blackwell, 1 makes kernels"
         " start in the order of their launches"),
     (8, "; CUDA_DEVICE_MAX_CONNECTIONS is 8: before Blackwell, 1 makes kernels start in the order"
         " of their launches"),
     (1, "")],
)  # fmt: skip
def test_the_setting_is_named_only_if_it_explains_late_collectives(
    tmp_path: Path, connections: int, hint: str
) -> None:
    write_tensor_parallel(tmp_path, late=True)

    (found,) = find_lost_overlap(tmp_path, connections)

    assert found.message.endswith("start only when it ends" + hint)


def test_collectives_in_time_or_launched_later_lose_no_overlap(tmp_path: Path) -> None:
    for name, late, first in (("in time", False, True), ("launched later", True, False)):
        (tmp_path / name).mkdir()
        write_tensor_parallel(tmp_path / name, late, first)
        assert find_lost_overlap(tmp_path / name) == []
