"""A rank's steps cut into instants in which nothing changes, each in one bucket."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from simulator.pieces import Piece, holding_up, joined, pieces_of
from simulator.program import Compute, Copy
from simulator.ran import Ran, RankRun
from simulator.windows import Window

BUCKETS = ("compute", "collective", "p2p", "skew", "bubble", "copy", "idle")
"""The first that holds is the instant's."""


@dataclass(frozen=True, slots=True)
class Instant:
    """A piece of a step; wait is what an instant of skew or bubble belongs to.

    overlapped: data moves under compute.
    """

    step: int
    bucket: str
    overlapped: bool
    wait: Piece | None
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class _Doing:
    """What a rank does for a while; piece is of what is a wait."""

    what: str
    start_ns: int
    end_ns: int
    piece: Piece | None = None


def instants_of(
    number: int, rank: RankRun, stage_of: Sequence[int], windows: Sequence[Window]
) -> list[Instant]:
    """All instants of the windows of the rank of that number, in order; they fill the windows."""
    doings = [d for d in _doings(number, rank, stage_of) if d.end_ns > d.start_ns]
    begin = sorted(doings, key=lambda doing: doing.start_ns, reverse=True)
    times = {ns for doing in doings for ns in (doing.start_ns, doing.end_ns)}
    times |= {ns for window in windows for ns in (window.start_ns, window.end_ns)}
    now: list[_Doing] = []
    found = []
    for start_ns, end_ns in pairwise(sorted(times)):
        now = [doing for doing in now if doing.end_ns > start_ns]
        while begin and begin[-1].start_ns <= start_ns:
            now.append(begin.pop())
        inside = [w for w in windows if w.start_ns <= start_ns < w.end_ns]
        found += [_instant(window.step, now, start_ns, end_ns) for window in inside]
    return found


def total_ns(instants: Iterable[Instant]) -> Counter[str]:
    """How long each bucket lasts."""
    total: Counter[str] = Counter()
    for instant in instants:
        total[instant.bucket] += instant.end_ns - instant.start_ns
    return total


def _instant(step: int, now: Sequence[_Doing], start_ns: int, end_ns: int) -> Instant:
    done = {doing.what for doing in now}
    bucket = next((bucket for bucket in BUCKETS if bucket in done), "idle")
    waits = [
        d.piece for d in now if d.what == bucket and d.piece is not None and d.piece.owner >= 0
    ]
    wait = min(waits, key=lambda piece: piece.began_ns, default=None)
    overlapped = bucket == "compute" and "moving" in done
    return Instant(step, bucket, overlapped, wait, start_ns, end_ns)


def _doings(number: int, rank: RankRun, stage_of: Sequence[int]) -> list[_Doing]:
    compute = _of("compute", (ran for ran in rank.device if isinstance(ran.work, Compute)))
    copy = _of("copy", (ran for ran in rank.device if isinstance(ran.work, Copy)))
    computed = joined((doing.start_ns, doing.end_ns) for doing in compute)
    moving = [
        _Doing("moving", piece.start_ns, piece.end_ns)
        for ran in rank.device
        for piece in pieces_of(ran)
        if piece.owner < 0
    ]
    held_up = [
        _Doing(_bucket(number, stage_of, piece), piece.start_ns, piece.end_ns, piece)
        for ran in rank.device
        for piece in holding_up(ran, computed)
    ]
    return compute + copy + moving + held_up


def _of(what: str, rans: Iterable[Ran]) -> list[_Doing]:
    return [_Doing(what, ran.start_ns, ran.end_ns) for ran in rans]


def _bucket(number: int, stage_of: Sequence[int], piece: Piece) -> str:
    """A wait for one's own pp coordinate is skew, for another bubble."""
    if piece.owner < 0:
        return "p2p" if piece.is_message else "collective"
    return "skew" if stage_of[piece.owner] == stage_of[number] else "bubble"
