"""Critical path of a step, in traces and timelines of a few events."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from builders import GpuTrace

from stepsplit.analyzer import BUCKETS, OPS, PathPart, PathStep, analyze
from stepsplit.analyzer.split.critical_path import Timeline, find_critical_paths

CHAIN = [("a", "mesh_tp", [0, 1]), ("b", "mesh_dp", [1, 2])]
PAIR = [("0", "mesh_tp", [0, 1])]
ALL_REDUCE = OPS.index("all_reduce")
Part = tuple[int, int, str, int]
"""(start, end, bucket, owner) of a timeline, in nanoseconds"""


def timeline(rank: int, windows: Sequence[tuple[int, int, int]], *parts: Part) -> Timeline:
    """A rank whose windows are (step, start, end), all of its communication on tp."""
    start, end, bucket, owner = zip(*parts, strict=True)
    comm = [1 if 1 <= BUCKETS.index(name) <= 4 else 0 for name in bucket]
    step = np.array(windows, dtype=np.int64)
    return Timeline(
        rank=rank,
        step=step[:, 0],
        step_start_ns=step[:, 1],
        step_end_ns=step[:, 2],
        start_ns=np.array(start, dtype=np.int64),
        end_ns=np.array(end, dtype=np.int64),
        bucket=np.array([BUCKETS.index(name) for name in bucket], dtype=np.uint8),
        owner=np.array(owner, dtype=np.int32),
        op=np.array(comm, dtype=np.uint8) * ALL_REDUCE,
        axis=np.array(comm, dtype=np.int32),
        axes=(None, "tp"),
    )


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


def test_each_step_has_a_path_of_its_own_from_its_first_start_to_its_last_end(
    tmp_path: Path,
) -> None:
    """Rank 1 is ahead by 10: step 2 begins there, while rank 0 still computes step 1."""
    late = GpuTrace(0, 2).step(1, 0, 100).step(2, 100, 200)
    late.kernel("gemm", 0, 100).kernel("gemm", 100, 200)
    early = GpuTrace(1, 2).step(1, 0, 90).step(2, 90, 190)
    early.kernel("gemm", 0, 90).kernel("gemm", 90, 190)
    found = analyze(late.write(tmp_path), early.write(tmp_path))
    assert found.path_steps == (PathStep(1, 0, 100_000, 0, 0), PathStep(2, 90_000, 200_000, 0, 0))
    assert found.critical_path == (
        PathPart(1, 0, "compute", None, 100_000),
        PathPart(2, 0, "compute", None, 110_000),
    )


def test_time_before_a_rank_was_recorded_is_idle(tmp_path: Path) -> None:
    late = GpuTrace(0, 2).step(1, 30, 100).kernel("gemm", 30, 100)
    early = GpuTrace(1, 2).step(1, 0, 90).kernel("gemm", 0, 90)
    assert analyze(late.write(tmp_path), early.write(tmp_path)).critical_path == (
        PathPart(1, 0, "compute", None, 70_000),
        PathPart(1, 0, "idle", None, 30_000),
    )


def test_a_path_that_arrives_inside_a_wait_continues_at_once() -> None:
    """By a clock that is off, rank 1 still waits for rank 2 when rank 0's wait for it ends."""
    window = [(1, 0, 100)]
    first = timeline(0, window, (0, 50, "skew", 1), (50, 100, "compute", -1))
    second = timeline(1, window, (0, 60, "bubble", 2), (60, 95, "compute", -1))
    third = timeline(2, window, (0, 40, "compute", -1), (40, 90, "p2p", -1))
    found = find_critical_paths([first, second, third])
    assert found.parts == (
        PathPart(1, 0, "compute", None, 50),
        PathPart(1, 2, "compute", None, 40),
        PathPart(1, 2, "p2p", "tp", 10),
    )
    assert found.jumps.at_ns.tolist() == [50, 50]
    assert (found.jumps.from_rank.tolist(), found.jumps.to_rank.tolist()) == ([0, 1], [1, 2])
    assert (found.jumps.op.tolist(), found.jumps.axis) == ([ALL_REDUCE] * 2, ("tp", "tp"))


def test_ranks_that_wait_for_each_other_do_not_make_the_path_loop() -> None:
    """What both wait for stays on the path, on the rank that was asked last."""
    window = [(1, 0, 100)]
    first = timeline(0, window, (0, 30, "compute", -1), (30, 60, "skew", 1),
                     (60, 100, "compute", -1))  # fmt: skip
    second = timeline(1, window, (0, 20, "compute", -1), (20, 60, "skew", 0),
                      (60, 95, "compute", -1))  # fmt: skip
    found = find_critical_paths([first, second])
    assert found.parts == (
        PathPart(1, 0, "compute", None, 40),
        PathPart(1, 1, "compute", None, 20),
        PathPart(1, 1, "skew", "tp", 40),
    )
    assert found.jumps.at_ns.tolist() == [60]


def test_a_hundred_thousand_waits_are_followed_one_by_one() -> None:
    """Two ranks in turn compute for 10 ns, for which the other waits."""
    turns, ends = 100_000, 10 * np.arange(1, 100_001)
    spans = [(end - 10, end) for end in ends.tolist()]
    ranks = [
        timeline(
            rank,
            [(1, 0, 10 * turns)],
            *((*span, "compute", -1) if i % 2 == rank else (*span, "skew", 1 - rank)
              for i, span in enumerate(spans)),
        )
        for rank in (0, 1)
    ]  # fmt: skip
    found = find_critical_paths(ranks)
    assert found.steps == (PathStep(1, 0, 10 * turns, last_rank=0, jumps=turns),)
    assert found.parts == (
        PathPart(1, 0, "compute", None, 5 * turns),
        PathPart(1, 1, "compute", None, 5 * turns),
    )
