"""Pairing of two recordings of one call sequence without sequence numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import Struct

from stepsplit.analyzer.trace import Bool, Float, Int64

# Pairing of two recordings of one call sequence without sequence numbers.
#
# Recordings of two ranks may start and end on different calls, and some calls may be missing.
# Op and size rule out most pairings. Time decides between the rest: the members of a call end
# simultaneously, so under the right pairing the ends differ by a constant, the clock offset.

MAX_SHIFT = 64
"""Maximum number of calls by which recordings without sequence numbers may be shifted."""

_MIN_AGREEING = 8
"""Number of calls that must agree again after a missing one."""

_MAX_SCATTER_NS = 50_000
"""Maximum scatter of the ends of calls whose members end simultaneously; on gloo they do not."""

_PLAIN, _NOISE_NS, _TELLING = 3.0, 10_000, 4
"""A pairing is clearly better if its ends scatter less by this factor beyond this noise, with at
least this many paired calls."""

_MOST_COMPARED = 1 << 18
"""Number of pairs of calls that are compared at once."""

_SHORT = 500
"""Up to this many calls all shifts at once take 0.1 to 0.9 of the time that they take one by one,
from 700 calls on up to twice as long: sorting takes longer than numpy's calls for each shift.
Measured with 20 to 4,000 calls of 1, 2 and 8 sizes, of which all end with their pair."""

_EXACT = 1 << 53
"""Whole numbers up to this one are exact as float64, too."""

_NEVER = np.iinfo(np.int64).max


class Pairing(Struct, frozen=True):
    """The n-th call of the first sequence pairs with the place[n]-th of the second; -1 if unpaired.

    ambiguous: another pairing fits equally well, and only the wall clocks decided.
    """

    place: Int64
    ambiguous: bool


class CallSequence(Struct, frozen=True):
    """Calls in order: kind of shape (n, k), -1 for unknown columns, and their end times."""

    kind: Int64
    end_ns: Int64

    def __len__(self) -> int:
        return len(self.end_ns)


def pair_sequences(
    first: CallSequence, second: CallSequence, *, one_clock: bool, likely: int | None = None
) -> Pairing:
    """Finds the best pairing of two sequences, whose end times are on wall clocks.

    Among equally good pairings, the likely one is used; else, on one clock, the one clearly closest
    in time; else the one that pairs the most calls with the smallest shift.
    """
    if one_clock and likely is None and len(first) == len(second):
        # If as many calls end within noise of each other, no other pairing is clearly closer.
        likely = 0 if _measure_distance_ns(first, second, 0) <= _NOISE_NS else None
    if likely is not None and _fits_closely(first, second, likely):
        return Pairing(_apply_shift(first, second, likely), False)
    shifts = _find_consistent(
        first, second, np.array(sorted(range(-MAX_SHIFT, MAX_SHIFT + 1), key=abs))
    )
    if not len(shifts):
        return _pair_with_gaps(first, second)
    fitting = _select_fitting(first, second, shifts).tolist()
    if likely is not None and likely in fitting:
        return Pairing(_apply_shift(first, second, likely), False)
    best = _choose_closest(first, second, fitting) if one_clock else fitting[0]
    return Pairing(_apply_shift(first, second, best), len(fitting) > 1)


def subtract_paired_ends(first: CallSequence, second: CallSequence) -> Int64:
    """By how much the calls of the first sequence end after those of the second, with the shift
    under which these differences scatter least; empty if too few pair, or not the same kinds."""
    shifts = np.arange(-MAX_SHIFT, MAX_SHIFT + 1)
    shifts = shifts[_count_paired(first, second, shifts) >= _TELLING]
    shifts = _find_consistent(first, second, shifts) if len(shifts) else shifts
    if not len(shifts):
        return first.end_ns[:0]
    every_ns = np.concatenate([first.end_ns, second.end_ns])
    # Twice the distances from the median, of all calls, add up to no more than this.
    most_ns = 4 * (int(every_ns.max()) - int(every_ns.min())) * len(first)
    if len(first) > _SHORT or most_ns > _EXACT:
        # Ends of a damaged recording may be fifty years apart: as float64 nothing overflows.
        apart = [_subtract_ends(first, second, shift) for shift in shifts.tolist()]
        return min(apart, key=lambda one: measure_mean_scatter_ns([one]))
    scatter_ns = []
    for part, there, paired in _pair_by_shift(first, second, shifts):
        # All shifts at once: differences of ends in order of size, those of no pair behind them.
        apart_ns = first.end_ns - second.end_ns[there]
        apart_ns = np.sort(np.where(paired, apart_ns, _NEVER), axis=1)
        count = _count_paired(first, second, part)
        middle = [(count - 1) // 2, count // 2]
        # Twice the median and the distances, which are whole numbers.
        twice_ns = np.take_along_axis(apart_ns, np.stack(middle, axis=1), axis=1).sum(axis=1)
        is_pair = np.arange(len(first)) < count[:, np.newaxis]
        distance_ns = np.where(is_pair, 2 * apart_ns - twice_ns[:, np.newaxis], 0)
        scatter_ns.append(np.abs(distance_ns).sum(axis=1) / (2 * count))
    return _subtract_ends(first, second, int(shifts[np.concatenate(scatter_ns).argmin()]))


def measure_mean_scatter_ns(apart_ns: Sequence[Int64]) -> float:
    """How far differences of ends lie from one offset on average, in ns: infinite if any of the
    parts is empty."""
    if not all(len(one) for one in apart_ns):
        return np.inf
    every = np.concatenate(apart_ns)
    return float(np.abs(every - np.median(every)).mean())


def is_clearly_closer(scatter_ns: float, than_ns: float) -> bool:
    """Whether ends that scatter so little tell a pairing from one with the other scatter; of 0 ns,
    whether any could."""
    return scatter_ns <= _MAX_SCATTER_NS and _PLAIN * scatter_ns + _NOISE_NS < than_ns


def _choose_closest(first: CallSequence, second: CallSequence, fitting: list[int]) -> int:
    """The pairing closest in time if it is clearly closer than the one that pairs most calls.

    On a busy machine, gloo may end a call on one rank about when it ends the next one on another.
    """
    best = min(fitting, key=lambda shift: _measure_distance_ns(first, second, shift))
    usual = fitting[int(_count_paired(first, second, np.array(fitting)).argmax())]
    limit = _PLAIN * _measure_distance_ns(first, second, best) + _NOISE_NS
    return usual if _measure_distance_ns(first, second, usual) <= limit else best


def _fits_closely(first: CallSequence, second: CallSequence, shift: int) -> bool:
    """Whether this pairing is certain to be among those with the least scatter."""
    one = np.array([shift])
    enough = _count_paired(first, second, one)[0] >= _TELLING
    if not enough or not len(_find_consistent(first, second, one)):
        return False
    return bool(_measure_scatter_ns(first, second, one)[0] <= _NOISE_NS)


def _select_fitting(first: CallSequence, second: CallSequence, shifts: Int64) -> Int64:
    """The pairings with the least scatter, and those that are not distinguishable from them."""
    paired_counts = _count_paired(first, second, shifts)
    if paired_counts.max() < _TELLING:
        return shifts
    comparable = shifts[paired_counts >= _TELLING]
    scatter_ns = _measure_scatter_ns(first, second, comparable)
    if scatter_ns.min() > _MAX_SCATTER_NS:
        return shifts
    fitting: Int64 = comparable[scatter_ns <= _PLAIN * scatter_ns.min() + _NOISE_NS]
    return fitting


def _count_paired(first: CallSequence, second: CallSequence, shifts: Int64) -> Int64:
    """The number of calls that each shift pairs."""
    low, high = np.maximum(shifts, 0), np.minimum(shifts + len(first), len(second))
    return np.asarray(np.maximum(high - low, 0))


def _find_consistent(first: CallSequence, second: CallSequence, shifts: Int64) -> Int64:
    """The shifts under which all paired calls are of one kind.

    At least half of the shorter sequence must be paired; otherwise any two calls of a kind would
    do.
    """
    count = _count_paired(first, second, shifts)
    enough = shifts[(count > 0) & (2 * count >= min(len(first), len(second)))]
    consistent = [
        part[(~paired | _match_kinds(first.kind, second.kind[there])).all(axis=1)]
        for part, there, paired in _pair_by_shift(first, second, enough)
    ]
    return np.concatenate([enough[:0], *consistent])


def _pair_by_shift(
    first: CallSequence, second: CallSequence, shifts: Int64
) -> Iterator[tuple[Int64, Int64, Bool]]:
    """Yields (some of the shifts, their counterparts in the second sequence, whether there is one),
    the last two of shape (shifts, calls)."""
    calls, most = np.arange(len(first)), max(1, _MOST_COMPARED // len(first))
    for at in range(0, len(shifts), most):
        there = calls + shifts[at : at + most, np.newaxis]
        paired = (there >= 0) & (there < len(second))
        yield shifts[at : at + most], np.where(paired, there, 0), paired


def _match_kinds(first: Int64, second: Int64) -> Bool:
    """Whether each pair of calls is of one kind; unknown columns match any."""
    alike = np.ones(np.broadcast_shapes(first.shape, second.shape)[:-1], dtype=np.bool_)
    for column in range(first.shape[-1]):
        mine, theirs = first[..., column], second[..., column]
        unknown = mine < 0
        if not unknown.all():
            alike &= unknown | (mine == theirs) | (theirs < 0)
    return alike


def _measure_scatter_ns(first: CallSequence, second: CallSequence, shifts: Int64) -> Float:
    """For each shift, which pairs some calls, the median distance of the differences of ends to
    their median."""
    return np.array([_compute_scatter(_subtract_ends(first, second, s)) for s in shifts.tolist()])


def _compute_scatter(apart_ns: Int64) -> float:
    low, high = (len(apart_ns) - 1) // 2, len(apart_ns) // 2
    distance = np.abs(apart_ns - np.partition(apart_ns, high)[high])
    middle = np.partition(distance, (low, high))
    return float(middle[low] + middle[high]) / 2


def _subtract_ends(first: CallSequence, second: CallSequence, shift: int) -> Int64:
    """By how much each paired call of the first sequence ends after that of the second."""
    mine = slice(max(-shift, 0), max(len(second) - shift, 0))
    return first.end_ns[mine] - second.end_ns[max(shift, 0) : max(shift + len(first), 0)]


def _measure_distance_ns(first: CallSequence, second: CallSequence, shift: int) -> int:
    return int(np.median(np.abs(_subtract_ends(first, second, shift))))


def _apply_shift(first: CallSequence, second: CallSequence, shift: int) -> Int64:
    place = np.arange(len(first)) + shift
    return np.where((place >= 0) & (place < len(second)), place, -1)


def _pair_with_gaps(first: CallSequence, second: CallSequence) -> Pairing:
    """The pairing with missing calls: after a mismatch it continues at the next agreement."""
    place = np.full(len(first), -1, dtype=np.int64)
    at, there = 0, 0
    while at < len(first) and there < len(second):
        count = min(len(first) - at, len(second) - there)
        alike = _match_kinds(first.kind[at : at + count], second.kind[there : there + count])
        good = int(alike.argmin()) if not alike.all() else count
        place[at : at + good] = np.arange(there, there + good)
        at, there = at + good, there + good
        if good < count:
            step = _find_next_agreement(first, second, at, there)
            if step is None:
                break
            at, there = at + step[0], there + step[1]
    return Pairing(place, True)


def _find_next_agreement(
    first: CallSequence, second: CallSequence, at: int, there: int
) -> tuple[int, int] | None:
    """The smallest number of calls to skip on either side until several agree again."""
    for skipped in range(1, MAX_SHIFT + 1):
        for mine in range(skipped + 1):
            left = first.kind[at + mine : at + mine + _MIN_AGREEING]
            right = second.kind[there + skipped - mine : there + skipped - mine + _MIN_AGREEING]
            if len(left) and len(left) == len(right) and _match_kinds(left, right).all():
                return mine, skipped - mine
    return None
