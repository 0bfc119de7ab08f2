"""Critical path of a step, in traces and timelines of a few events."""

from __future__ import annotations

from pathlib import Path

from support.builders import COMM_STREAM, GpuTrace

from stepsplit.analyzer import PathKernel, PathPart, PathStep, analyze

CHAIN = [("a", "mesh_tp", [0, 1]), ("b", "mesh_dp", [1, 2])]
PAIR = [("0", "mesh_tp", [0, 1])]


def test_the_path_continues_on_each_awaited_rank(tmp_path: Path) -> None:
    """Rank 2 waits for rank 1, which waits for rank 0, which computes."""
    slow = GpuTrace(0, 3, groups=CHAIN).step(1, 0, 95)
    slow.kernel("gemm", 0, 50).all_reduce(50, 60, group="a").kernel("gemm", 60, 95)
    middle = GpuTrace(1, 3, groups=CHAIN).step(1, 0, 97)
    middle.kernel("gemm", 0, 10).all_reduce(10, 60, group="a").all_reduce(60, 70, group="b")
    middle.kernel("gemm", 70, 97)
    last = GpuTrace(2, 3, groups=CHAIN).step(1, 0, 100)
    last.kernel("gemm", 0, 20).all_reduce(20, 70, group="b").kernel("gemm", 70, 100)
    found = analyze(*(trace.write(tmp_path) for trace in (slow, middle, last)))
    assert found.path_steps == (PathStep(1, 0, 100_000, last_rank=2, jumps=2),)
    assert found.critical_path == (
        PathPart(1, 0, "compute", None, 50_000),
        PathPart(1, 1, "collective", "tp", 10_000),
        PathPart(1, 2, "compute", None, 30_000),
        PathPart(1, 2, "collective", "dp_replicate", 10_000),
    )


def test_overlapped_communication_is_not_on_the_path(tmp_path: Path) -> None:
    """Rank 0 waits under a kernel: the path has only its own compute and idle time."""
    first = GpuTrace(0, 2, groups=PAIR).step(1, 0, 100)
    first.kernel("gemm", 0, 60).all_reduce(10, 50).memcpy(60, 65).kernel("gemm", 70, 100)
    other = GpuTrace(1, 2, groups=PAIR).step(1, 0, 90)
    other.kernel("gemm", 0, 40).all_reduce(40, 50).kernel("gemm", 50, 90)
    found = analyze(*(trace.write(tmp_path) for trace in (first, other)))
    assert found.critical_path == (
        PathPart(1, 0, "compute", None, 90_000),
        PathPart(1, 0, "copy", None, 5_000),
        PathPart(1, 0, "idle", None, 5_000),
    )
    assert found.path_steps == (PathStep(1, 0, 100_000, last_rank=0, jumps=0),)


def test_a_wait_for_an_unrecorded_rank_stays_on_the_path(tmp_path: Path) -> None:
    trace = GpuTrace(0, 2, groups=PAIR).step(1, 0, 100)
    trace.all_reduce(0, 30).kernel("gemm", 30, 40).all_reduce(40, 50).kernel("gemm", 50, 100)
    assert analyze(trace.write(tmp_path)).critical_path == (
        PathPart(1, 0, "compute", None, 60_000),
        PathPart(1, 0, "collective", "tp", 20_000),
        PathPart(1, 0, "skew", "tp", 20_000),
    )


def test_each_step_has_a_path_of_its_own_from_the_end_of_the_one_before(tmp_path: Path) -> None:
    """Rank 1 is ahead by 10 in step 2, while rank 0 still computes step 1: no instant is on two
    paths."""
    late = GpuTrace(0, 2).step(1, 0, 100).step(2, 100, 200)
    late.kernel("gemm", 0, 100).kernel("gemm", 100, 200)
    early = GpuTrace(1, 2).step(1, 0, 90).step(2, 90, 190)
    early.kernel("gemm", 0, 90).kernel("gemm", 90, 190)
    found = analyze(late.write(tmp_path), early.write(tmp_path))
    assert found.path_steps == (PathStep(1, 0, 100_000, 0, 0), PathStep(2, 100_000, 200_000, 0, 0))
    assert found.critical_path == (
        PathPart(1, 0, "compute", None, 100_000),
        PathPart(2, 0, "compute", None, 100_000),
    )


def test_time_before_a_rank_was_recorded_is_idle(tmp_path: Path) -> None:
    late = GpuTrace(0, 2).step(1, 30, 100).kernel("gemm", 30, 100)
    early = GpuTrace(1, 2).step(1, 0, 90).kernel("gemm", 0, 90)
    assert analyze(late.write(tmp_path), early.write(tmp_path)).critical_path == (
        PathPart(1, 0, "compute", None, 70_000),
        PathPart(1, 0, "idle", None, 30_000),
    )


def test_the_kernels_on_the_path_are_named_with_their_stream(tmp_path: Path) -> None:
    """Rank 0 computes on two streams at once, 20 of it under the gemm; rank 1 waits for it."""
    slow = GpuTrace(0, 2, groups=PAIR).step(1, 0, 90)
    slow.kernel("gemm", 0, 40).kernel("attention", 20, 60, stream=9).kernel("gemm", 60, 70)
    slow.all_reduce(70, 80).kernel("adam", 80, 90)
    last = GpuTrace(1, 2, groups=PAIR).step(1, 0, 100)
    last.kernel("gemm", 0, 10).all_reduce(10, 80).memcpy(80, 85).kernel("adam", 85, 100)
    found = analyze(*(trace.write(tmp_path) for trace in (slow, last)))
    assert found.path_kernels == (
        PathKernel(0, "gemm", 7, "compute", 50_000, 2, 0, 40_000),
        PathKernel(0, "attention", 9, "compute", 20_000, 1, 20_000, 40_000),
        PathKernel(1, "adam", 7, "compute", 15_000, 1, 85_000, 15_000),
        PathKernel(
            1, "ncclDevKernel_AllReduce", COMM_STREAM, "collective", 10_000, 1, 10_000, 70_000
        ),
        PathKernel(1, "Memcpy HtoD", 9, "copy", 5_000, 1, 80_000, 5_000),
    )
    assert sum(one.ns for one in found.path_kernels) == 100_000
