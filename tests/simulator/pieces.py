"""What a communication kernel did while it was open: moved data, or waited, and for whom."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from simulator.program import Collective, Messages
from simulator.ran import Moved, Ran

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of one kernel in which it did one thing; owner is the rank it waited for, -1 for none.

    began_ns is the start of the whole kernel.
    """

    group: str
    is_message: bool
    owner: int
    start_ns: int
    end_ns: int
    began_ns: int


def pieces_of(ran: Ran) -> tuple[Piece, ...]:
    """The pieces of a kernel that communicates, none of one that does not; they fill its life."""
    if not isinstance(ran.work, Collective | Messages):
        return ()
    edges = {ran.start_ns, ran.end_ns}
    edges |= {ns for moved in ran.moves for ns in (moved.start_ns, moved.end_ns)}
    return tuple(
        Piece(
            group=ran.work.group,
            is_message=isinstance(ran.work, Messages),
            owner=_owner(ran.moves, start_ns),
            start_ns=start_ns,
            end_ns=end_ns,
            began_ns=ran.start_ns,
        )
        for start_ns, end_ns in pairwise(sorted(edges))
    )


def _owner(moves: Sequence[Moved], at_ns: int) -> int:
    """-1 while data moves; else, of those that have yet to come, the one that comes last."""
    if any(moved.start_ns <= at_ns < moved.end_ns for moved in moves):
        return -1
    to_come = [moved for moved in moves if moved.start_ns > at_ns]
    return max(to_come, key=lambda moved: moved.start_ns).last


def joined(spans: Iterable[Span]) -> list[Span]:
    """The instants of all spans, as sorted spans that do not touch."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        elif end > start:
            found.append((start, end))
    return found


def holding_up(ran: Ran, compute: Sequence[Span]) -> list[Piece]:
    """The gap rule: what lies in the gap of compute in which the kernel ends, none under compute.

    compute is joined.
    """
    after = bisect_left(compute, (ran.end_ns, ran.end_ns))
    resumed_ns = compute[after - 1][1] if after else 0
    if ran.end_ns < resumed_ns:
        return []
    cut = [replace(p, start_ns=max(p.start_ns, resumed_ns)) for p in pieces_of(ran)]
    return [piece for piece in cut if piece.end_ns > piece.start_ns]
