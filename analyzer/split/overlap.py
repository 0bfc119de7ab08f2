"""Overlapped and exposed communication by axis and operation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import Struct

from stepsplit.analyzer.arrays import (
    Intervals,
    group_ids,
    intersect,
    list_distinct,
    make_empty_intervals,
    overlap_ns,
    select_rows,
    union,
)
from stepsplit.analyzer.buckets import TRANSFERS
from stepsplit.analyzer.split.gaps import HeldGaps
from stepsplit.analyzer.split.steps import StepWindow
from stepsplit.analyzer.split.transfers import Pieces
from stepsplit.analyzer.trace import OPS, Calls, Int64


class Overlap(Struct, frozen=True):
    """Overlap of one kind of communication with compute.

    Time that is neither hidden nor exposed falls into a gap of compute that something else caused.
    Kinds can transfer data concurrently, so their times do not add up.

    Attributes:
        rank: Global rank; None for the sum over all ranks.
        axis: Mesh axis of the groups, or their name as in GroupRow; None if unknown.
        op: Operation, such as "all_gather".
        moved_ns: Time in which data was transferred, in ns.
        hidden_ns: Part of moved_ns overlapped by compute, in ns.
        exposed_ns: Part of moved_ns that blocked the rank, in ns.

    Examples:
        >>> report = analyze("sample_traces/tp2_pp2")
        >>> [(row.axis, row.op, round(row.efficiency, 3)) for row in report.overlap][:2]
        [('pp', 'send', 0.0), ('pp', 'recv', 0.0)]
    """

    rank: int | None
    axis: str | None
    op: str
    moved_ns: int
    hidden_ns: int
    exposed_ns: int

    @property
    def efficiency(self) -> float:
        """Overlapped fraction of the transfer time: hidden_ns / moved_ns, 0..1."""
        return self.hidden_ns / self.moved_ns


def compute_overlaps(
    rank: int,
    calls: Calls,
    axes: Sequence[str | None],
    windows: Sequence[StepWindow],
    pieces: Pieces,
    held: HeldGaps,
    compute: Intervals,
) -> tuple[Overlap, ...]:
    """The rows of one rank, by axis and op, for transfers inside the windows.

    axes has the name of each group of the rank; waits are excluded. The windows are in order.
    """
    moving = select_rows(pieces, np.isin(pieces.bucket, TRANSFERS))
    blocking = held.select_blocking(moving)
    inside = union(
        np.array([window.start_ns for window in windows], dtype=np.int64),
        np.array([window.end_ns for window in windows], dtype=np.int64),
    )
    names = tuple(dict.fromkeys((*axes, None)))
    axis = np.array([names.index(name) for name in (*axes, None)])[calls.group_id]
    kind = group_ids(axis, calls.op)
    exposed_by_kind = dict(_split_by_kind(kind, blocking, inside))
    rows = []
    for number, moved in _split_by_kind(kind, moving, inside):
        call = int(np.flatnonzero(kind == number)[0])
        hidden = overlap_ns(moved, compute)
        exposed = exposed_by_kind.get(number, make_empty_intervals())
        exposed_ns = exposed.total_ns - overlap_ns(exposed, compute)
        name = names[int(axis[call])]
        rows.append(Overlap(rank, name, OPS[calls.op[call]], moved.total_ns, hidden, exposed_ns))
    return tuple(rows)


def sum_overlaps(rows: Sequence[Overlap]) -> tuple[Overlap, ...]:
    """The sums over all ranks, by decreasing exposed time."""
    kinds = dict.fromkeys((row.axis, row.op) for row in rows)
    summed = []
    for axis, op in kinds:
        same = [row for row in rows if (row.axis, row.op) == (axis, op)]
        summed.append(
            Overlap(
                None, axis, op, sum(row.moved_ns for row in same),
                sum(row.hidden_ns for row in same), sum(row.exposed_ns for row in same),
            )
        )  # fmt: skip
    return tuple(sorted(summed, key=lambda row: (-row.exposed_ns, -row.moved_ns)))


def _split_by_kind(
    kind: Int64, pieces: Pieces, inside: Intervals
) -> Iterator[tuple[int, Intervals]]:
    """(kind, intervals of its pieces inside the given intervals), for kinds with any."""
    of_piece = kind[pieces.call]
    for number in list_distinct(of_piece).tolist():
        rows = of_piece == number
        both = intersect(union(pieces.start_ns[rows], pieces.end_ns[rows]), inside)
        if len(both.start_ns):
            yield number, Intervals(both.start_ns, both.end_ns)
