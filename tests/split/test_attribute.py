"""Every instant of a step in exactly one bucket."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stepsplit.analyzer import BUCKETS, Split
from stepsplit.analyzer.arrays import Intervals, union
from stepsplit.analyzer.split.attribute import attribute
from stepsplit.analyzer.split.classify import Work
from stepsplit.analyzer.split.steps import StepWindow
from stepsplit.analyzer.split.transfers import BUBBLE, COLLECTIVE, P2P, SKEW, Pieces

Span = tuple[int, int]
Piece = tuple[int, int, int, int]
"""(bucket, start, end, end of the whole call)"""


def spans(*raw: Span) -> Intervals:
    pairs = np.array(raw, dtype=np.int64).reshape(len(raw), 2)
    return union(pairs[:, 0], pairs[:, 1])


def work(compute: list[Span], copy: list[Span] = [], fused: list[Span] = []) -> Work:  # noqa: B006
    return Work(spans(*compute), spans(*copy), spans(*fused))


def pieces(*raw: Piece) -> Pieces:
    columns = np.array(raw, dtype=np.int64).reshape(len(raw), 4)
    count = np.arange(len(raw), dtype=np.int32)
    nobody = np.full(len(raw), -1, dtype=np.int32)
    return Pieces(count, columns[:, 0].astype(np.uint8), columns[:, 1], columns[:, 2],
                  columns[:, 3], nobody)  # fmt: skip


def split(compute: list[Span], *calls: Piece, copy: list[Span] = []) -> Split:  # noqa: B006
    window = StepWindow(0, "full", 0, 100)
    return attribute([window], work(compute, copy), pieces(*calls)).splits[0]


def test_a_transfer_between_two_kernels_is_exposed() -> None:
    assert split([(0, 40), (60, 100)], (COLLECTIVE, 40, 55, 55)) == Split(
        compute_ns=80, collective_ns=15, idle_ns=5
    )


def test_a_transfer_under_a_kernel_is_hidden_and_costs_nothing() -> None:
    assert split([(0, 100)], (COLLECTIVE, 20, 50, 50)) == Split(compute_ns=100, overlapped_ns=30)


def test_communication_still_open_when_compute_resumes_blocked_nothing() -> None:
    found = split([(0, 40), (60, 100)], (COLLECTIVE, 30, 80, 80))
    assert found == Split(compute_ns=80, idle_ns=20, overlapped_ns=30)


def test_only_the_gap_in_which_a_call_ends_was_held_up_by_it() -> None:
    found = split([(0, 10), (20, 30), (50, 100)], (SKEW, 5, 45, 45))
    assert found == Split(compute_ns=70, skew_ns=15, idle_ns=15)


def test_a_call_that_ends_as_compute_resumes_held_it_up() -> None:
    assert split([(0, 40), (60, 100)], (P2P, 40, 60, 60)) == Split(compute_ns=80, p2p_ns=20)


def test_waiting_comes_after_moving_and_before_copies() -> None:
    found = split(
        [(0, 10), (90, 100)],
        (COLLECTIVE, 10, 30, 30), (SKEW, 20, 50, 50), (BUBBLE, 40, 70, 70), copy=[(60, 80)],
    )  # fmt: skip
    assert found == Split(
        compute_ns=20, collective_ns=20, skew_ns=20, bubble_ns=20, copy_ns=10, idle_ns=10
    )


def test_windows_cut_what_crosses_them() -> None:
    windows = [StepWindow(1, "full", 0, 50), StepWindow(2, "full", 50, 100)]
    found = attribute(windows, work([(0, 20), (80, 100)]), pieces((SKEW, 30, 70, 70)))
    assert found.splits == (
        Split(compute_ns=20, skew_ns=20, idle_ns=10),
        Split(compute_ns=20, skew_ns=20, idle_ns=10),
    )


def test_of_two_open_calls_the_one_that_began_first_owns_the_instant() -> None:
    window = StepWindow(0, "full", 0, 100)
    found = attribute([window], work([]), pieces((SKEW, 20, 60, 60), (SKEW, 10, 40, 40)))
    owned = found.exposed
    rows = zip(owned.call.tolist(), owned.start_ns.tolist(), owned.end_ns.tolist(), strict=True)
    assert list(rows) == [
        (1, 10, 40), (0, 40, 60),
    ]  # fmt: skip


span = st.tuples(st.integers(0, 99), st.integers(1, 40)).map(lambda s: (s[0], s[0] + s[1]))
call = st.tuples(st.integers(COLLECTIVE, BUBBLE), span, st.integers(0, 10)).map(
    lambda c: (c[0], *c[1], c[1][1] + c[2])
)


@given(st.lists(span, max_size=6), st.lists(call, max_size=6), st.lists(span, max_size=3))
def test_every_instant_is_in_the_first_bucket_that_applies(
    compute: list[Span], calls: list[Piece], copy: list[Span]
) -> None:
    found = split(compute, *calls, copy=copy)
    expected = [0] * len(BUCKETS)
    for instant in range(100):
        expected[_bucket(instant, compute, calls, copy)] += 1
    assert list(found.buckets_ns) == expected
    assert found.step_ns == 100


def _bucket(instant: int, compute: list[Span], calls: list[Piece], copy: list[Span]) -> int:
    """The definition, read aloud."""
    if any(start <= instant < end for start, end in compute):
        return 0
    resumes = [start for start, _ in compute if start > instant]
    for bucket in range(COLLECTIVE, BUBBLE + 1):
        for kind, start, end, life_end in calls:
            if (
                kind == bucket
                and start <= instant < end
                and life_end <= min(resumes, default=10**9)
            ):
                return bucket
    return 5 if any(start <= instant < end for start, end in copy) else 6
