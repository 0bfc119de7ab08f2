"""The split as a value."""

from __future__ import annotations

from stepsplit.analyzer import Split


def test_a_step_is_the_sum_of_its_buckets_and_memos_cost_nothing() -> None:
    split = Split(compute_ns=50, collective_ns=20, p2p_ns=5, skew_ns=4, bubble_ns=10, copy_ns=1,
                  idle_ns=10, overlapped_ns=30, bubble_covered_ns=2, fused_ns=8)  # fmt: skip
    assert split.step_ns == 100
    assert split.exposed_comm_ns == 29


def test_a_comparison_is_a_subtraction() -> None:
    measured = Split(compute_ns=50, skew_ns=10)
    predicted = Split(compute_ns=60)
    assert measured - predicted == Split(compute_ns=-10, skew_ns=10)
    assert (measured - predicted).step_ns == 0
