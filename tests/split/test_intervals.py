"""Sets of instants: the algebra under every bucket."""

from __future__ import annotations

import numpy as np
from hypothesis import given, strategies as st

from stepsplit.analyzer.arrays import (
    Intervals,
    intersect,
    overlap_ns,
    subtract,
    trim_overlaps,
    union,
)

pairs = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=12)


def intervals(raw: list[tuple[int, int]]) -> Intervals:
    start = np.array([s for s, _ in raw], dtype=np.int64)
    return Intervals(start, start + np.array([d for _, d in raw], dtype=np.int64))


def united(raw: list[tuple[int, int]]) -> Intervals:
    loose = intervals(raw)
    return union(loose.start_ns, loose.end_ns)


def instants(one: Intervals) -> list[int]:
    """Every instant, as often as an interval holds it."""
    spans = zip(one.start_ns.tolist(), one.end_ns.tolist(), strict=True)
    return sorted(t for start, end in spans for t in range(start, end))


def test_a_union_joins_what_touches_and_keeps_gaps() -> None:
    found = united([(10, 5), (0, 3), (3, 2), (12, 1), (20, 0)])
    assert found.start_ns.tolist() == [0, 10]
    assert found.end_ns.tolist() == [5, 15]
    assert found.total_ns == 10


def test_each_interval_owns_what_no_earlier_one_covers() -> None:
    raw = intervals([(0, 10), (2, 3), (8, 6), (20, 1)])
    found = trim_overlaps(raw.start_ns, raw.end_ns)
    assert list(zip(found.start_ns.tolist(), found.end_ns.tolist(), strict=True)) == [
        (0, 10), (10, 10), (10, 14), (20, 21),
    ]  # fmt: skip


@given(pairs)
def test_a_union_holds_each_instant_once(raw: list[tuple[int, int]]) -> None:
    assert instants(united(raw)) == sorted(set(instants(intervals(raw))))


@given(pairs, pairs)
def test_meeting_and_leaving_out_part_a_set_in_two(
    one: list[tuple[int, int]], other: list[tuple[int, int]]
) -> None:
    left, right = united(one), united(other)
    both, rest = intersect(left, right), subtract(left, right)
    common = sorted(set(instants(left)) & set(instants(right)))
    assert instants(Intervals(both.start_ns, both.end_ns)) == common
    assert instants(rest) == sorted(set(instants(left)) - set(instants(right)))
    assert overlap_ns(left, right) + rest.total_ns == left.total_ns
