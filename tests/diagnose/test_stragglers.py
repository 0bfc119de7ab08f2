"""Late arrivals at collectives, in constructed traces; times in microseconds."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from pathlib import Path

import pytest
from support.builders import GpuTrace

from stepsplit.analyzer import Lateness, analyze
from stepsplit.analyzer.significance import compute_last_p_value

PAIR = [("0", "mesh_tp", [0, 1])]
Groups = list[tuple[str, str, list[int]]]


def lateness(folder: Path, *traces: GpuTrace) -> tuple[Lateness, ...]:
    """The report's rows of the traces."""
    return analyze(*(trace.write(folder) for trace in traces)).lateness


def rank(number: int, late: Sequence[float], step_of: Sequence[int], size: int = 2) -> GpuTrace:
    """A rank that computes 500, and then so much longer, before each of its all-reduces."""
    trace = GpuTrace(number, size, groups=[("0", "mesh_tp", list(range(size)))])
    for step in sorted(set(step_of)):
        calls = [i for i, one in enumerate(step_of) if one == step]
        trace.step(step, 1000 * calls[0], 1000 * calls[-1] + 1000)
    for i, delay in enumerate(late):
        begin = 1000 * i
        trace.kernel("gemm", begin, begin + 500 + delay)
        trace.all_reduce(begin + 500 + delay, begin + 800).kernel("gemm", begin + 800, begin + 999)
    return trace


def test_a_rank_that_always_comes_last_is_a_straggler(tmp_path: Path) -> None:
    steps = [1] * 10 + [2] * 10
    found = lateness(tmp_path, rank(0, [0] * 20, steps), rank(1, [100] * 20, steps))
    assert found == (
        Lateness(0, "tp", False, 2, 20, 0, 0, 0, 1.0, False),
        Lateness(1, "tp", False, 2, 20, 20, 100_000, 2_000_000, pytest.approx(0.5**20), True),
    )
    assert [row.last_fraction for row in found] == [0.0, 1.0]


def test_ranks_that_are_late_in_turn_are_not_stragglers(tmp_path: Path) -> None:
    steps = [1] * 20 + [2] * 20
    found = lateness(tmp_path, rank(0, [0, 100] * 20, steps), rank(1, [50] * 40, steps))
    assert [(row.last, row.late_ns_total, row.straggler) for row in found] == [
        (20, 20 * 50_000, False),
        (20, 20 * 50_000, False),
    ]


def test_a_rank_that_is_last_by_little_is_not_a_straggler(tmp_path: Path) -> None:
    steps = [1] * 20
    found = lateness(tmp_path, rank(0, [0] * 20, steps), rank(1, [15] * 20, steps))
    assert [(row.last, row.late_ns_median, row.straggler) for row in found] == [
        (0, 0, False),
        (20, 15_000, False),
    ]


def test_one_slow_step_of_many_calls_makes_no_straggler(tmp_path: Path) -> None:
    steps = [1] * 30 + [2, 3]
    found = lateness(tmp_path, rank(0, [0] * 30 + [100, 100], steps), rank(1, [50] * 32, steps))
    slow = found[1]
    assert (slow.last, slow.calls, slow.straggler) == (30, 32, False)
    assert slow.p_value is not None and slow.p_value < 1e-6


def test_how_late_is_counted_from_the_median_member(tmp_path: Path) -> None:
    """The last of four at 90 is 70 later than the second, at 20; ties do not count."""
    late = ([0, 10], [20, 10], [40, 10], [90, 10])
    found = lateness(tmp_path, *(rank(i, own, [1, 1], 4) for i, own in enumerate(late)))
    assert [(row.rank, row.calls, row.last, row.late_ns_total) for row in found] == [
        (0, 2, 0, 0),
        (1, 2, 0, 0),
        (2, 2, 0, 0),
        (3, 2, 1, 70_000),
    ]


def test_the_share_is_of_the_calls_that_the_rank_is_in(tmp_path: Path) -> None:
    """Rank 0 is in one call of three, and last in it."""
    groups: Groups = [("a", "mesh_tp", [0, 1]), ("b", "mesh_dp", [1, 2])]
    first = GpuTrace(0, 3, groups=groups).step(1, 0, 200).kernel("gemm", 0, 60)
    first.all_reduce(60, 80, group="a").kernel("gemm", 80, 200)
    second = GpuTrace(1, 3, groups=groups).step(1, 0, 200).kernel("gemm", 0, 30)
    second.all_reduce(30, 80, group="a").all_reduce(100, 120, group="b")
    second.all_reduce(130, 150, group="b").kernel("gemm", 150, 200)
    third = GpuTrace(2, 3, groups=groups).step(1, 0, 200).kernel("gemm", 0, 90)
    third.all_reduce(90, 120, group="b").all_reduce(140, 150, group="b").kernel("gemm", 150, 200)
    found = lateness(tmp_path, first, second, third)
    assert [(row.rank, row.axis, row.last, row.calls, row.last_fraction) for row in found] == [
        (0, "tp", 1, 1, 1.0),
        (1, "tp", 0, 1, 0.0),
        (1, "dp_replicate", 1, 2, 0.5),
        (2, "dp_replicate", 1, 2, 0.5),
    ]


def test_of_messages_the_schedule_decides_who_is_last(tmp_path: Path) -> None:
    groups: Groups = [("0", "mesh_pp", [0, 1])]
    first, second = (GpuTrace(i, 2, groups=groups).step(1, 0, 20_000) for i in (0, 1))
    for begin in range(0, 20_000, 1000):
        first.kernel("gemm", begin, begin + 900).message("send", 1, begin + 900, begin + 950)
        second.message("recv", 0, begin, begin + 950).kernel("gemm", begin + 950, begin + 1000)
    assert lateness(tmp_path, first, second) == (
        Lateness(0, "pp", True, 2, 20, 20, 900_000, 18_000_000, None, False),
        Lateness(1, "pp", True, 2, 20, 0, 0, 0, None, False),
    )


def test_no_rank_is_last_if_the_root_has_left_already(tmp_path: Path) -> None:
    """No rank waits for those who receive a broadcast late."""
    root = GpuTrace(0, 2, groups=PAIR).step(1, 0, 100).kernel("gemm", 0, 10)
    root.collective("Broadcast", "broadcast", 10, 20).kernel("gemm", 20, 100)
    late = GpuTrace(1, 2, groups=PAIR).step(1, 0, 100).kernel("gemm", 0, 50)
    late.collective("Broadcast", "broadcast", 50, 60).kernel("gemm", 60, 100)
    found = lateness(tmp_path, root, late)
    assert [(row.rank, row.calls, row.last) for row in found] == [(0, 1, 0), (1, 1, 0)]


def test_calls_with_a_missing_member_do_not_count(tmp_path: Path) -> None:
    assert lateness(tmp_path, rank(0, [0] * 20, [1] * 20)) == ()


@pytest.mark.parametrize(("last", "calls", "members"), [(5, 6, 2), (9, 20, 4), (20, 20, 8)])
def test_the_chance_is_the_upper_tail_of_the_binomial(last: int, calls: int, members: int) -> None:
    ways = sum(comb(calls, k) * (members - 1) ** (calls - k) for k in range(last, calls + 1))
    assert compute_last_p_value(last, calls, members) == pytest.approx(ways / members**calls)


def test_the_chance_of_many_calls_has_the_tail_of_the_normal_distribution() -> None:
    """Four standard deviations above the mean of a million calls on two members: 500 each."""
    assert compute_last_p_value(502_000, 1_000_000, 2) == pytest.approx(3.18e-5, rel=0.01)
    assert compute_last_p_value(500_000, 1_000_000, 2) == 1.0
