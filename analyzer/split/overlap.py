"""How much of the moving of data compute hides, by axis and operation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from stepsplit.analyzer.arrays import Intervals, distinct, labels_of, meet, overlap_ns, union
from stepsplit.analyzer.split.attribute import held_up
from stepsplit.analyzer.split.calls.waits import COLLECTIVE, P2P, Pieces
from stepsplit.analyzer.split.steps import StepWindow
from stepsplit.analyzer.trace import OPS, Bool, Calls, Int64


@dataclass(frozen=True, slots=True)
class Overlap:
    """How long one kind of communication moved data; rank is None for all ranks together.

    moved_ns is the time in which it moved any; hidden_ns the part of it under compute, exposed_ns
    the part that held the rank up. What is left of it went on in a gap of compute, but was not
    what the gap waited for. Kinds may move data at once: their times do not add up.
    """

    rank: int | None
    axis: str | None
    op: str
    moved_ns: int
    hidden_ns: int
    exposed_ns: int

    @property
    def efficiency(self) -> float:
        """hidden / moved, 0..1."""
        return self.hidden_ns / self.moved_ns


def overlaps_of(
    rank: int,
    calls: Calls,
    axes: Sequence[str | None],
    windows: Sequence[StepWindow],
    pieces: Pieces,
    compute: Intervals,
) -> tuple[Overlap, ...]:
    """One rank's rows, by axis and op, for what moved inside the windows.

    axes has one entry a group of the rank; waits are left out. The windows are in order.
    """
    moving = _chosen(pieces, np.isin(pieces.bucket, (COLLECTIVE, P2P)))
    blocking = held_up(moving, compute)
    inside = union(
        np.array([window.start_ns for window in windows], dtype=np.int64),
        np.array([window.end_ns for window in windows], dtype=np.int64),
    )
    names = tuple(dict.fromkeys((*axes, None)))
    axis = np.array([names.index(name) for name in (*axes, None)])[calls.group_id]
    kind = labels_of(axis, calls.op)
    held = dict(_by_kind(kind, blocking, inside))
    found = []
    for number, moved in _by_kind(kind, moving, inside):
        call = int(np.flatnonzero(kind == number)[0])
        hidden = overlap_ns(moved, compute)
        exposed = held[number].total_ns if number in held else 0
        name = names[int(axis[call])]
        found.append(Overlap(rank, name, OPS[calls.op[call]], moved.total_ns, hidden, exposed))
    return tuple(found)


def overlaps_together(rows: Sequence[Overlap]) -> tuple[Overlap, ...]:
    """The sums over the ranks, the kind that held ranks up longest first."""
    kinds = dict.fromkeys((row.axis, row.op) for row in rows)
    together = []
    for axis, op in kinds:
        same = [row for row in rows if (row.axis, row.op) == (axis, op)]
        together.append(
            Overlap(
                None, axis, op, sum(row.moved_ns for row in same),
                sum(row.hidden_ns for row in same), sum(row.exposed_ns for row in same),
            )
        )  # fmt: skip
    return tuple(sorted(together, key=lambda row: (-row.exposed_ns, -row.moved_ns)))


def _by_kind(kind: Int64, pieces: Pieces, inside: Intervals) -> Iterator[tuple[int, Intervals]]:
    """(kind of call, when any of its pieces ran inside of these), for the kinds that have some."""
    of_piece = kind[pieces.call]
    for number in distinct(of_piece).tolist():
        rows = of_piece == number
        both = meet(union(pieces.start_ns[rows], pieces.end_ns[rows]), inside)
        if len(both.start_ns):
            yield number, Intervals(both.start_ns, both.end_ns)


def _chosen(pieces: Pieces, rows: Bool) -> Pieces:
    return Pieces(
        pieces.call[rows], pieces.bucket[rows], pieces.start_ns[rows],
        pieces.end_ns[rows], pieces.life_end_ns[rows], pieces.owner[rows],
    )  # fmt: skip
