"""Every instant of a step in exactly one bucket."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from hypothesis import given, strategies as st
from support.builders import CpuTrace, GpuTrace

from stepsplit.analyzer import BUCKETS, Report, Split, analyze, examine
from stepsplit.analyzer.arrays import Intervals, union
from stepsplit.analyzer.buckets import COMMUNICATION
from stepsplit.analyzer.readers.kernel_rules import BUILT_IN, EventClassifier
from stepsplit.analyzer.split.attribute import attribute
from stepsplit.analyzer.split.gaps import find_held_gaps
from stepsplit.analyzer.split.steps import StepWindow
from stepsplit.analyzer.split.transfers import Pieces, RankCallTimes
from stepsplit.analyzer.split.work import Work
from stepsplit.analyzer.trace import Call, Category, Events, Int64, Lane, RankTrace, build_calls

Span = tuple[int, int]
Does = Callable[[GpuTrace], object]
Piece = tuple[int, int, int, int]
"""(bucket, start, end, end of the whole call), in us"""
US = 1_000

OTHER_STREAM = 21


def spans(*raw: Span) -> Intervals:
    pairs = US * np.array(raw, dtype=np.int64).reshape(len(raw), 2)
    return union(pairs[:, 0], pairs[:, 1])


def split(compute: list[Span], *calls: Piece, copy: list[Span] = []) -> Split:  # noqa: B006
    """The split of a step of 100 us in which each piece is a call of its own."""
    columns = US * np.array(calls, dtype=np.int64).reshape(len(calls), 4)
    start, end, life_end = columns[:, 1], columns[:, 2], columns[:, 3]
    count = np.arange(len(calls), dtype=np.int32)
    pieces = Pieces(
        count, (columns[:, 0] // US).astype(np.uint8), start, end, life_end,
        np.full(len(calls), -1, dtype=np.int32),
    )  # fmt: skip
    times = RankCallTimes(start, start, end, life_end, np.ones(len(calls), dtype=np.bool_))
    work = Work(spans(*compute), spans(*copy), spans())
    held = find_held_gaps(ran(work.compute, start, life_end), times, work.compute)
    window = StepWindow(0, "full", 0, 100 * US)
    return attribute([window], work, held.end_calls(pieces), held).splits[0]


def ran(compute: Intervals, start: Int64, end: Int64) -> RankTrace:
    """The trace of a device that computed, and communicated on another stream."""
    starts = np.concatenate((compute.start_ns, start))
    order = np.argsort(starts, kind="stable")
    lane = np.repeat(np.array([0, 1], dtype=np.int32), (len(compute), len(start)))[order]
    events = Events(
        start_ns=starts[order],
        dur_ns=(np.concatenate((compute.end_ns, end)) - starts)[order],
        category=np.full(len(order), Category.KERNEL, dtype=np.uint8),
        name_id=lane,
        lane=lane,
        correlation=np.full(len(order), -1, dtype=np.int64),
        names=("gemm", "ncclDevKernel_AllReduce"),
        lanes=(Lane("1", "7", 0, 7), Lane("1", "20", 0, 20)),
    )
    rows = np.argsort(order, kind="stable")[len(compute) :]
    calls = build_calls([Call(row, "all_reduce") for row in rows.tolist()])
    kinds = EventClassifier(BUILT_IN).classify(events, calls)
    return RankTrace(Path("x"), 0, 2, "", "", "", 0, events, calls, (), kinds)


def report(folder: Path, *traces: GpuTrace | CpuTrace) -> Report:
    for trace in traces:
        trace.write(folder)
    return analyze(folder)


def split_of(folder: Path, own: Does, other: Does) -> Split:
    """The split of rank 0, which does its own, in a step of 100 us; rank 1 does the other's."""
    groups = [("tp", "mesh_tp", [0, 1])]
    one, two = (GpuTrace(rank, 2, groups=groups).step(1, 0, 100) for rank in (0, 1))
    own(one)
    other(two)
    return report(folder, one, two).steps[0].split


def both(folder: Path, compute: list[Span], start: int, end: int) -> Split:
    """The split of two ranks that do the same: kernels, and an all-reduce from start to end."""

    def does(trace: GpuTrace) -> None:
        for begin, done in compute:
            trace.kernel("gemm", begin, done)
        trace.all_reduce(start, end, group="tp", launched=0)

    return split_of(folder, does, does)


def us(**buckets: int) -> Split:
    return Split(**{f"{name}_ns": 1000 * took for name, took in buckets.items()})


def test_a_transfer_between_two_kernels_is_exposed(tmp_path: Path) -> None:
    found = both(tmp_path, [(0, 40), (60, 100)], 40, 55)
    assert found == us(compute=80, collective=15, idle=5)


def test_a_transfer_under_a_kernel_is_hidden_and_costs_nothing(tmp_path: Path) -> None:
    assert both(tmp_path, [(0, 100)], 20, 50) == us(compute=100, overlapped=30)


def test_communication_still_open_when_compute_resumes_blocked_nothing(tmp_path: Path) -> None:
    found = both(tmp_path, [(0, 40), (60, 100)], 30, 90)
    assert found == us(compute=80, idle=20, overlapped=40)


def test_a_call_blocks_only_the_gap_in_which_it_ends(tmp_path: Path) -> None:
    """Rank 0 waits from 5 until rank 1 comes at 45, in three gaps of compute."""

    def waits(trace: GpuTrace) -> None:
        trace.kernel("gemm", 0, 10).kernel("gemm", 20, 30).kernel("gemm", 50, 100)
        trace.all_reduce(5, 46, group="tp", launched=0)

    found = split_of(
        tmp_path, waits, lambda trace: trace.kernel("gemm", 0, 45).all_reduce(45, 46, group="tp")
    )
    assert found == us(compute=70, collective=1, skew=15, idle=14)


def test_a_call_that_ends_as_compute_resumes_blocked_it(tmp_path: Path) -> None:
    found = split_of(
        tmp_path,
        lambda trace: (
            trace.kernel("gemm", 0, 40)
            .message("send", 1, 40, 60, group="tp")
            .kernel("gemm", 60, 100)
        ),
        lambda trace: trace.kernel("gemm", 0, 40).message("recv", 0, 40, 60, group="tp"),
    )
    assert found == us(compute=80, p2p=20)


def test_waiting_comes_after_moving_and_before_copies(tmp_path: Path) -> None:
    """Rank 0 sums with rank 1 from 10 to 30, waits for it from 20 until 50, and from 40 until 70
    for a message of rank 2, of the other stage; a copy runs from 60 to 80."""
    groups = {
        0: [("a", "mesh_tp", [0, 1]), ("b", "more", [0, 1]), ("c", "mesh_pp", [0, 2])],
        1: [("a", "mesh_tp", [0, 1]), ("b", "more", [0, 1])],
        2: [("c", "mesh_pp", [0, 2])],
    }
    own, peer, before = (GpuTrace(r, 4, groups=groups[r]).step(1, 0, 100) for r in range(3))
    own.kernel("gemm", 0, 10).all_reduce(10, 30, group="a")
    own.all_reduce(20, 51, group="b", stream=OTHER_STREAM)
    own.message("recv", 2, 40, 71, group="c").memcpy(60, 80).kernel("gemm", 90, 100)
    peer.kernel("gemm", 0, 10).all_reduce(10, 30, group="a").all_reduce(50, 51, group="b")
    before.kernel("gemm", 0, 70).message("send", 0, 70, 71, group="c")
    assert report(tmp_path, own, peer, before).steps[0].split == us(
        compute=20, collective=21, skew=20, p2p=1, bubble=19, copy=9, idle=10
    )


def test_steps_cut_what_crosses_them(tmp_path: Path) -> None:
    """On gloo a step ends where the host says so: here in the middle of rank 0's wait."""
    for rank, came in ((0, 30), (1, 70)):
        trace = CpuTrace(rank, 2, [("0", "mesh_tp", [0, 1])]).step(1, 0, 50).step(2, 50, 100)
        trace.op("aten::mm", 0, 20).op("aten::mm", 80, 100)
        trace.all_reduce(came - 0.5, came, 71, group="0", seq=1, tid=300).write(tmp_path)
    first, second = (row.split for row in analyze(tmp_path).steps if row.rank == 0)
    assert first == us(compute=20, skew=20, idle=10)
    assert second == us(compute=20, skew=20, collective=1, idle=9)


def test_of_two_open_calls_the_one_that_began_first_owns_the_instant(tmp_path: Path) -> None:
    """Rank 0 waits for rank 1 from 10 to 40, and for rank 2 from 20 to 60."""
    one, two = ("a", "one", [0, 1]), ("b", "two", [0, 2])
    own = GpuTrace(0, 3, groups=[one, two]).step(1, 0, 100).kernel("gemm", 0, 10)
    own.all_reduce(10, 41, group="a").all_reduce(20, 61, group="b", stream=OTHER_STREAM)
    own.kernel("gemm", 61, 100)
    first = GpuTrace(1, 3, groups=[one]).step(1, 0, 100).kernel("gemm", 0, 40)
    last = GpuTrace(2, 3, groups=[two]).step(1, 0, 100).kernel("gemm", 0, 60)
    places = [
        own.write(tmp_path),
        first.all_reduce(40, 41, group="a").write(tmp_path),
        last.all_reduce(60, 61, group="b").write(tmp_path),
    ]
    waits = examine(places).tables.waits
    rows = zip(waits.owner.tolist(), waits.start_ns.tolist(), waits.dur_ns.tolist(), strict=True)
    assert list(rows) == [(1, 10_000, 30_000), (2, 41_000, 19_000)]


# The definition, on any intervals.


span = st.tuples(st.integers(0, 99), st.integers(1, 40)).map(lambda s: (s[0], s[0] + s[1]))
call = st.tuples(st.sampled_from(COMMUNICATION), span, st.integers(0, 10)).map(
    lambda c: (c[0], *c[1], c[1][1] + c[2])
)


@given(st.lists(span, max_size=6), st.lists(call, max_size=6), st.lists(span, max_size=3))
def test_every_instant_is_in_the_first_bucket_that_applies(
    compute: list[Span], calls: list[Piece], copy: list[Span]
) -> None:
    found = split(compute, *calls, copy=copy)
    expected = [0] * len(BUCKETS)
    for instant in range(100):
        expected[_bucket(instant, compute, calls, copy)] += US
    assert list(found.buckets_ns) == expected
    assert found.step_ns == 100 * US


def _bucket(instant: int, compute: list[Span], calls: list[Piece], copy: list[Span]) -> int:
    """The definition, written literally."""
    if any(start <= instant < end for start, end in compute):
        return 0
    for bucket in COMMUNICATION:
        for kind, start, end, life_end in calls:
            if kind == bucket and start <= instant < end:
                held = _held_since(compute, start, life_end)
                if held is not None and held <= instant:
                    return bucket
    return 5 if any(start <= instant < end for start, end in copy) else 6


def _held_since(compute: list[Span], start: int, end: int) -> int | None:
    """When the gap began that a call held up: the first that ends at most 10 us before the call,
    and in which the call was open."""
    busy = sorted({instant for low, high in compute for instant in range(low, high)})
    begins = [-1000, *(t + 1 for t in busy if t + 1 not in busy)]
    resumes = [*(t for t in busy if t - 1 not in busy), 10**9]
    for begin, resume in zip(begins, resumes, strict=True):
        if resume >= end - 10 and resume > start and begin < end:
            return begin
    return None
