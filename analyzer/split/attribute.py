"""Every instant of a step in exactly one bucket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stepsplit.analyzer.arrays import Intervals, meet, own, union
from stepsplit.analyzer.buckets import BUCKETS, Split
from stepsplit.analyzer.split.calls.waits import BUBBLE, COLLECTIVE, P2P, Pieces
from stepsplit.analyzer.split.classify import Work
from stepsplit.analyzer.split.steps import StepWindow
from stepsplit.analyzer.trace import Int32, Int64, UInt8

COMPUTE, IDLE = 0, 6
_MOVING, _FUSED = 6, 7
_CLASSES = 8
_BUCKET_OF = np.array(
    [next((c for c in range(IDLE) if mask >> c & 1), IDLE) for mask in range(1 << _CLASSES)],
    dtype=np.uint8,
)


@dataclass(frozen=True, slots=True)
class Band:
    """The instants of all windows of a rank, cut where the bucket changes; columns of one length.

    window indexes the rank's steps, bucket buckets.BUCKETS. Sorted; fills each window.
    """

    window: Int32
    bucket: UInt8
    start_ns: Int64
    end_ns: Int64


@dataclass(frozen=True, slots=True)
class Exposed:
    """The part of a rank's pieces that held it up, each instant once; columns of one length.

    For each communication bucket these add up to the bucket. call, owner: as in Pieces.
    """

    window: Int32
    bucket: UInt8
    call: Int32
    owner: Int32
    start_ns: Int64
    end_ns: Int64


@dataclass(frozen=True, slots=True)
class Attribution:
    """One rank: a Split a window, and the intervals that they are the sums of.

    gap numbers the gap of compute in which each of the rank's calls held it up, -1 for none.
    """

    splits: tuple[Split, ...]
    band: Band
    exposed: Exposed
    gap: Int64


def attribute(windows: Sequence[StepWindow], work: Work, pieces: Pieces) -> Attribution:
    """The rank's windows split into buckets, to the nanosecond."""
    blocking = held_up(pieces, work.compute)
    sets = [
        work.compute,
        *(_of_bucket(blocking, b) for b in range(COLLECTIVE, BUBBLE + 1)),
        work.copy,
    ]
    moving = np.isin(pieces.bucket, (COLLECTIVE, P2P))
    sets += [union(pieces.start_ns[moving], pieces.end_ns[moving]), work.fused]
    band, mask = _sweep(windows, sets)
    splits = _splits(len(windows), band, mask)
    for window, split in zip(windows, splits, strict=True):
        assert split.step_ns == window.end_ns - window.start_ns, f"time is lost in {window}"
    band = _joined(band)
    exposed = _exposed(blocking, band)
    _check(splits, exposed)
    gap = np.full(int(pieces.call.max(initial=-1)) + 1, -1, dtype=np.int64)
    gap[blocking.call] = np.searchsorted(work.compute.start_ns, blocking.life_end_ns)
    return Attribution(splits, band, exposed, gap)


def held_up(pieces: Pieces, compute: Intervals) -> Pieces:
    """The gap rule: of each piece what lies in the gap of compute in which its call ends.

    Communication still open when compute resumes blocked nothing, so a call that ends under compute
    is dropped whole, and of the others only the last gap counts.
    """
    end = pieces.life_end_ns
    later = np.searchsorted(compute.start_ns, end, side="left")
    before = np.where(later > 0, compute.end_ns[later - 1], np.iinfo(np.int64).min) \
        if len(compute) else np.full(len(end), np.iinfo(np.int64).min)  # fmt: skip
    start = np.maximum(pieces.start_ns, before)
    kept = (before <= end) & (pieces.end_ns > start)
    return Pieces(
        pieces.call[kept], pieces.bucket[kept], start[kept],
        pieces.end_ns[kept], pieces.life_end_ns[kept], pieces.owner[kept],
    )  # fmt: skip


def _of_bucket(pieces: Pieces, bucket: int) -> Intervals:
    chosen = pieces.bucket == bucket
    return union(pieces.start_ns[chosen], pieces.end_ns[chosen])


def _sweep(windows: Sequence[StepWindow], sets: Sequence[Intervals]) -> tuple[Band, Int64]:
    """All edges of all sets in one sort: between two edges the same sets are open (the mask)."""
    window_start = np.array([w.start_ns for w in windows], dtype=np.int64)
    window_end = np.array([w.end_ns for w in windows], dtype=np.int64)
    at = np.concatenate(
        [window_start, window_end, *(e for s in sets for e in (s.start_ns, s.end_ns))]
    )
    bits = [np.zeros(2 * len(windows), dtype=np.int64)]
    bits += [np.full(len(s), sign << c) for c, s in enumerate(sets) for sign in (1, -1)]
    order = np.argsort(at, kind="stable")
    at, mask = at[order], np.cumsum(np.concatenate(bits)[order])
    start, end, mask = at[:-1], at[1:], mask[:-1]
    window = np.searchsorted(window_start, start, side="right") - 1
    inside = (end > start) & (window >= 0)
    inside[inside] &= start[inside] < window_end[window[inside]]
    start, end, mask, window = start[inside], end[inside], mask[inside], window[inside]
    return Band(window.astype(np.int32), _BUCKET_OF[mask], start, end), mask


def _splits(count: int, band: Band, mask: Int64) -> tuple[Split, ...]:
    length = band.end_ns - band.start_ns
    totals = np.zeros((count, len(BUCKETS)), dtype=np.int64)
    np.add.at(totals, (band.window, band.bucket), length)
    memos = np.zeros((count, 3), dtype=np.int64)
    np.add.at(memos[:, 0], band.window, length * (mask >> COMPUTE & mask >> _MOVING & 1))
    np.add.at(memos[:, 2], band.window, length * (mask >> _FUSED & 1))
    return tuple(Split(*row) for row in np.hstack((totals, memos)).tolist())


def _joined(band: Band) -> Band:
    """The band without edges at which the bucket stays the same."""
    if not len(band.start_ns):
        return band
    same = (band.bucket[1:] == band.bucket[:-1]) & (band.window[1:] == band.window[:-1])
    same &= band.start_ns[1:] == band.end_ns[:-1]
    first, last = np.concatenate(([True], ~same)), np.concatenate((~same, [True]))
    return Band(band.window[first], band.bucket[first], band.start_ns[first], band.end_ns[last])


def _exposed(blocking: Pieces, band: Band) -> Exposed:
    """Each exposed instant, given to the call of its bucket that began first."""
    parts = [_exposed_in(blocking, band, bucket) for bucket in range(COLLECTIVE, BUBBLE + 1)]
    order = np.argsort(np.concatenate([part.start_ns for part in parts]), kind="stable")
    columns = ("window", "bucket", "call", "owner", "start_ns", "end_ns")
    return Exposed(*(np.concatenate([getattr(p, name) for p in parts])[order] for name in columns))


def _exposed_in(blocking: Pieces, band: Band, bucket: int) -> Exposed:
    rows = np.flatnonzero(blocking.bucket == bucket)
    rows = rows[np.argsort(blocking.start_ns[rows], kind="stable")]
    owned = own(blocking.start_ns[rows], blocking.end_ns[rows])
    left = owned.end_ns > owned.start_ns
    rows, owned = rows[left], Intervals(owned.start_ns[left], owned.end_ns[left])
    here = np.flatnonzero(band.bucket == bucket)
    both = meet(owned, Intervals(band.start_ns[here], band.end_ns[here]))
    rows, cut = rows[both.left], here[both.right]
    return Exposed(
        window=band.window[cut],
        bucket=np.full(len(rows), bucket, dtype=np.uint8),
        call=blocking.call[rows],
        owner=blocking.owner[rows],
        start_ns=both.start_ns,
        end_ns=both.end_ns,
    )


def _check(splits: Sequence[Split], exposed: Exposed) -> None:
    """What the calls own is what the buckets hold."""
    for bucket in range(COLLECTIVE, BUBBLE + 1):
        rows = exposed.bucket == bucket
        owned = int((exposed.end_ns - exposed.start_ns)[rows].sum())
        held = sum(split.buckets_ns[bucket] for split in splits)
        assert owned == held, f"{BUCKETS[bucket]}: calls own {owned} ns of {held}"
