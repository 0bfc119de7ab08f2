"""What HTA and TraceLens would say of ranks whose truth is known."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from support.builders import BASE_NS, GpuTrace
from support.required import absent

from benchmarks.peers import PeerSplit, hta_split, tracelens_split
from stepsplit.analyzer.readers.recording import read_recording
from stepsplit.analyzer.trace import RankTrace

WORLD = ("0", "default_pg", [0, 1])


def early_and_late(folder: Path, *, late_clock_ns: int = 0) -> tuple[RankTrace, ...]:
    """Rank 0 waits 20 for rank 1, then data moves for 10; each has a copy, and a memset."""
    for rank, arrival in enumerate((20, 40)):
        trace = GpuTrace(rank, 2, groups=[WORLD], base_ns=BASE_NS + rank * late_clock_ns)
        trace.kernel("gemm", 0, arrival).all_reduce(arrival, 50).memcpy(55, 65)
        trace.kernel("Memset (Device)", 65, 70, category="gpu_memset").write(folder)
    return read_recording([folder]).traces


@pytest.mark.filterwarnings("ignore:The inplace keyword")  # HTA's own, for pandas 3
def test_hta_calls_waiting_communication(tmp_path: Path) -> None:
    if find_spec("hta") is None:
        absent("hta", "HolisticTraceAnalysis is not installed")
    assert hta_split(early_and_late(tmp_path)) == (
        PeerSplit(0, compute_ns=20_000, communication_ns=30_000, wait_ns=None, idle_ns=5_000),
        PeerSplit(1, compute_ns=40_000, communication_ns=10_000, wait_ns=None, idle_ns=5_000),
    )


def test_tracelens_tells_waiting_apart_and_counts_memset_as_compute(tmp_path: Path) -> None:
    assert tracelens_split(early_and_late(tmp_path)) == (
        PeerSplit(0, compute_ns=25_000, communication_ns=10_000, wait_ns=20_000, idle_ns=5_000),
        PeerSplit(1, compute_ns=45_000, communication_ns=10_000, wait_ns=0, idle_ns=5_000),
    )


def test_a_clock_that_is_ahead_goes_into_tracelenss_waits(tmp_path: Path) -> None:
    split = tracelens_split(early_and_late(tmp_path, late_clock_ns=7_000))
    assert [row.wait_ns for row in split] == [27_000, 0]


def test_a_call_that_one_rank_lacks_shifts_all_later_ones_of_tracelens(tmp_path: Path) -> None:
    """Its second call is matched with the first of the rank whose trace began later."""
    GpuTrace(0, 2, groups=[WORLD]).all_reduce(10, 20).all_reduce(110, 120).write(tmp_path)
    GpuTrace(1, 2, groups=[WORLD]).all_reduce(110, 120).write(tmp_path)
    waits = [row.wait_ns for row in tracelens_split(read_recording([tmp_path]).traces)]
    assert waits == [100_000, 0]


def test_messages_and_rooted_collectives_are_nothing_to_tracelens(tmp_path: Path) -> None:
    GpuTrace(0, 2, groups=[WORLD]).kernel("gemm", 0, 10).message("send", 1, 10, 30).write(tmp_path)
    GpuTrace(1, 2, groups=[WORLD]).kernel("gemm", 0, 10).collective(
        "Broadcast", "broadcast", 10, 30
    ).write(tmp_path)
    assert tracelens_split(read_recording([tmp_path]).traces) == (
        PeerSplit(0, compute_ns=10_000, communication_ns=0, wait_ns=None, idle_ns=0),
        PeerSplit(1, compute_ns=10_000, communication_ns=0, wait_ns=None, idle_ns=0),
    )


def test_without_groups_tracelens_takes_all_calls_in_their_order(tmp_path: Path) -> None:
    for rank, arrival in enumerate((20, 40)):
        trace = GpuTrace(rank, 2).kernel("gemm", 0, 10)
        trace.kernel("ncclDevKernel_AllReduce", arrival, 50).write(tmp_path)
    waits = [row.wait_ns for row in tracelens_split(read_recording([tmp_path]).traces)]
    assert waits == [20_000, 0]


def test_tracelens_leaves_out_kernels_that_were_launched_before_the_trace(tmp_path: Path) -> None:
    trace = GpuTrace().kernel("backlog", 0, 10).kernel("gemm", 15, 20)
    del trace.events[0]
    trace.write(tmp_path)
    (row,) = tracelens_split(read_recording([tmp_path]).traces)
    assert row == PeerSplit(0, compute_ns=5_000, communication_ns=0, wait_ns=None, idle_ns=0)
