"""Two recordings of one sequence of calls, without sequence numbers: which call is which.

Windows of two ranks may begin and end on different calls, and a recording may have lost some. What
the calls are (op, size) rules most pairings out; of the rest the right one is told by time: the
members of a call end together, so that under the right pairing their ends are apart by one
constant, the offset of the clocks, whatever it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stepsplit.analyzer.trace import Bool, Int64

MAX_SHIFT = 64
"""By how many calls windows without sequence numbers may begin apart."""
_RESUME = 8
"""How many calls must agree again after one that a recording lost."""
_TOGETHER_NS = 50_000
"""How far the ends of a call may scatter where its members end together; on gloo they do not."""
_PLAIN, _NOISE_NS, _TELLING = 3.0, 10_000, 4
"""A pairing is plainly better than another if its ends scatter so many times less, noise aside, and
if so many calls meet that their scatter says anything."""


@dataclass(frozen=True, slots=True)
class Pairing:
    """The n-th call of the one is the place[n]-th of the other; -1 for a call that has no fellow.

    ambiguous: another pairing fits as well, and only the wall clocks chose.
    """

    place: Int64
    ambiguous: bool


@dataclass(frozen=True, slots=True)
class Sequence:
    """Calls in order: kind of shape (n, k), each column -1 where unknown, and when they ended."""

    kind: Int64
    end_ns: Int64

    def __len__(self) -> int:
        return len(self.end_ns)


def paired(
    one: Sequence, other: Sequence, *, one_clock: bool, likely: int | None = None
) -> Pairing:
    """The best pairing of two sequences, whose ends are by wall clocks.

    Of pairings that fit alike the likely one is taken, else on one clock the one plainly closest in
    time, else the one in which most calls meet and whose windows begin closest together.
    """
    shifts = [s for s in _by_size(MAX_SHIFT) if _agrees(one, other, s)]
    if not shifts:
        return _resumed(one, other)
    alike = _fitting(one, other, shifts)
    if likely in alike:
        return Pairing(_placed(one, other, likely), False)
    best = _closest(one, other, alike) if one_clock else alike[0]
    return Pairing(_placed(one, other, best), len(alike) > 1)


def _closest(one: Sequence, other: Sequence, alike: list[int]) -> int:
    """The pairing closest in time, where it is plainly closer than the one in which most meet: on a
    busy machine gloo ends a call on one rank about when it ends the next on another."""
    best = min(alike, key=lambda shift: _apart_ns(one, other, shift))
    usual = max(alike, key=lambda shift: _count(one, other, shift))
    limit = _PLAIN * _apart_ns(one, other, best) + _NOISE_NS
    return usual if _apart_ns(one, other, usual) <= limit else best


def _fitting(one: Sequence, other: Sequence, shifts: list[int]) -> list[int]:
    """The pairings whose ends scatter least, and those that cannot be told from them."""
    met = [_count(one, other, shift) for shift in shifts]
    if max(met) < _TELLING:
        return shifts
    told = [shift for shift, count in zip(shifts, met, strict=True) if count >= _TELLING]
    scatter = [_scatter_ns(one, other, shift) for shift in told]
    if min(scatter) > _TOGETHER_NS:
        return shifts
    limit = _PLAIN * min(scatter) + _NOISE_NS
    return [shift for shift, ns in zip(told, scatter, strict=True) if ns <= limit]


def _count(one: Sequence, other: Sequence, shift: int) -> int:
    mine, _ = _meeting(one, other, shift)
    return len(one.end_ns[mine])


def _by_size(around: int) -> list[int]:
    return sorted(range(-around, around + 1), key=abs)


def _meeting(one: Sequence, other: Sequence, shift: int) -> tuple[slice, slice]:
    """The calls of both that a shift brings together."""
    low, high = max(shift, 0), min(shift + len(one), len(other))
    high = max(high, low)
    return slice(low - shift, high - shift), slice(low, high)


def _agrees(one: Sequence, other: Sequence, shift: int) -> bool:
    """Whether all calls that meet are of one kind.

    At least half of the shorter must meet, or any two calls of a kind would do.
    """
    mine, theirs = _meeting(one, other, shift)
    count = _count(one, other, shift)
    enough = count > 0 and 2 * count >= min(len(one), len(other))
    return enough and bool(_alike(one.kind[mine], other.kind[theirs]).all())


def _alike(one: Int64, other: Int64) -> Bool:
    """Which calls are of one kind; what one of the two does not know fits any."""
    return np.asarray(((one == other) | (one < 0) | (other < 0)).all(axis=1))


def _scatter_ns(one: Sequence, other: Sequence, shift: int) -> float:
    mine, theirs = _meeting(one, other, shift)
    apart = one.end_ns[mine] - other.end_ns[theirs]
    return float(np.median(np.abs(apart - np.sort(apart)[len(apart) // 2])))


def _apart_ns(one: Sequence, other: Sequence, shift: int) -> int:
    mine, theirs = _meeting(one, other, shift)
    return int(np.median(np.abs(one.end_ns[mine] - other.end_ns[theirs])))


def _placed(one: Sequence, other: Sequence, shift: int) -> Int64:
    place = np.arange(len(one)) + shift
    return np.where((place >= 0) & (place < len(other)), place, -1)


def _resumed(one: Sequence, other: Sequence) -> Pairing:
    """The pairing where calls are missing: where kinds differ it resumes at the next agreement."""
    place = np.full(len(one), -1, dtype=np.int64)
    at, there = 0, 0
    while at < len(one) and there < len(other):
        count = min(len(one) - at, len(other) - there)
        alike = _alike(one.kind[at : at + count], other.kind[there : there + count])
        good = int(alike.argmin()) if not alike.all() else count
        place[at : at + good] = np.arange(there, there + good)
        at, there = at + good, there + good
        if good < count:
            step = _next_agreement(one, other, at, there)
            if step is None:
                break
            at, there = at + step[0], there + step[1]
    return Pairing(place, True)


def _next_agreement(one: Sequence, other: Sequence, at: int, there: int) -> tuple[int, int] | None:
    """How many calls to pass over on either side until several agree again, the fewest."""
    for skipped in range(1, MAX_SHIFT + 1):
        for mine in range(skipped + 1):
            left = one.kind[at + mine : at + mine + _RESUME]
            right = other.kind[there + skipped - mine : there + skipped - mine + _RESUME]
            if len(left) and len(left) == len(right) and _alike(left, right).all():
                return mine, skipped - mine
    return None
