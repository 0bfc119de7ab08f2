"""How much of the moving of data compute hides, on pieces by hand; times in nanoseconds."""

from __future__ import annotations

import numpy as np

from stepsplit.analyzer import Calls, Overlap
from stepsplit.analyzer.arrays import Intervals
from stepsplit.analyzer.split.attribute import overlaps_of, overlaps_together
from stepsplit.analyzer.split.steps import StepWindow
from stepsplit.analyzer.split.transfers import COLLECTIVE, P2P, SKEW, Pieces
from stepsplit.analyzer.trace import OP_CODE

AXES = ("tp", "dp_shard")
WINDOW = StepWindow(1, "full", 0, 100)
Call = tuple[str, int]
"""(op, place of its axis)"""
Piece = tuple[int, int, int, int]
"""(call, bucket, start, end)"""


def calls_of(*made: Call) -> Calls:
    none = np.full(len(made), -1, dtype=np.int64)
    return Calls(
        event=none,
        issued_ns=none,
        group_id=np.array([axis for _, axis in made], dtype=np.int32),
        seq=none,
        op=np.array([OP_CODE[op] for op, _ in made], dtype=np.uint8),
        dtype=none.astype(np.int32),
        peer=none.astype(np.int32),
        input_bytes=none,
        message_bytes=none,
        dtypes=(),
    )


def pieces_of(*rows: Piece) -> Pieces:
    """Pieces that are all of their call."""
    call, bucket, start, end = np.array(rows, dtype=np.int64).T
    nobody = np.full(len(rows), -1, dtype=np.int32)
    return Pieces(call.astype(np.int32), bucket.astype(np.uint8), start, end, end, nobody)


def spans(*pairs: tuple[int, int]) -> Intervals:
    start, end = np.array(pairs, dtype=np.int64).T
    return Intervals(start, end)


def overlaps(
    made: list[Call], pieces: list[Piece], *compute: tuple[int, int]
) -> tuple[Overlap, ...]:
    """The rows of rank 0 in its one window."""
    return overlaps_of(0, calls_of(*made), AXES, [WINDOW], pieces_of(*pieces), spans(*compute))


def test_what_moves_under_compute_is_hidden_and_the_rest_exposed() -> None:
    found = overlaps(
        [("all_reduce", 0), ("all_gather", 1)],
        [(0, COLLECTIVE, 30, 60), (1, COLLECTIVE, 70, 80)],
        (0, 40), (60, 100),
    )  # fmt: skip
    assert found == (
        Overlap(0, "tp", "all_reduce", moved_ns=30, hidden_ns=10, exposed_ns=20),
        Overlap(0, "dp_shard", "all_gather", moved_ns=10, hidden_ns=10, exposed_ns=0),
    )
    assert [round(row.efficiency, 3) for row in found] == [0.333, 1.0]


def test_waiting_moves_nothing() -> None:
    assert overlaps([("all_reduce", 0)], [(0, SKEW, 40, 60)], (0, 40), (60, 100)) == ()


def test_communication_still_open_when_compute_resumes_was_not_exposed() -> None:
    found = overlaps([("all_reduce", 0)], [(0, COLLECTIVE, 30, 70)], (0, 40), (60, 100))
    assert found == (Overlap(0, "tp", "all_reduce", moved_ns=40, hidden_ns=20, exposed_ns=0),)


def test_calls_that_move_at_once_are_counted_once() -> None:
    found = overlaps(
        [("send", 0), ("send", 0)], [(0, P2P, 40, 55), (1, P2P, 45, 60)], (0, 40), (60, 100)
    )
    assert found == (Overlap(0, "tp", "send", moved_ns=20, hidden_ns=0, exposed_ns=20),)


def test_what_moves_outside_of_the_windows_is_left_out() -> None:
    found = overlaps([("all_reduce", 0)], [(0, COLLECTIVE, 90, 120)], (0, 80))
    assert found == (Overlap(0, "tp", "all_reduce", moved_ns=10, hidden_ns=0, exposed_ns=10),)


def test_a_call_of_no_known_group_has_no_axis() -> None:
    found = overlaps([("all_reduce", -1)], [(0, COLLECTIVE, 40, 60)], (0, 100))
    assert found == (Overlap(0, None, "all_reduce", moved_ns=20, hidden_ns=20, exposed_ns=0),)


def test_the_sums_of_all_ranks_begin_with_what_held_them_up_longest() -> None:
    rows = [
        Overlap(0, "tp", "all_reduce", 30, 20, 10),
        Overlap(0, "dp_shard", "all_gather", 50, 10, 40),
        Overlap(1, "tp", "all_reduce", 30, 30, 0),
    ]
    assert overlaps_together(rows) == (
        Overlap(None, "dp_shard", "all_gather", 50, 10, 40),
        Overlap(None, "tp", "all_reduce", 60, 50, 10),
    )
