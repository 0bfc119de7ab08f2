"""Attribution of time: each instant of a step belongs to exactly one bucket."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from stepsplit.analyzer.arrays import (
    Intervals,
    collect_intervals,
    find_interval,
    intersect,
    trim_overlaps,
    union,
)
from stepsplit.analyzer.buckets import BUCKETS, COMMUNICATION, MEMOS, TRANSFERS, Bucket, Split
from stepsplit.analyzer.split.gaps import HeldGaps
from stepsplit.analyzer.split.steps import StepWindow
from stepsplit.analyzer.split.transfers import Pieces
from stepsplit.analyzer.split.work import Work
from stepsplit.analyzer.trace import Int32, Int64, UInt8

_MOVING, _FUSED, _AMBIGUOUS = 6, 7, 8
"""Bits of the sets that only memos count, after those of the buckets; idle has no set."""

_BY_RANK = [bucket for bucket in Bucket if bucket != Bucket.IDLE]

_MASK_TO_BUCKET = np.array(
    [next((b for b in _BY_RANK if mask >> b & 1), Bucket.IDLE) for mask in range(1 << 9)],
    dtype=np.uint8,
)


class BucketBands(Struct, frozen=True):
    """The windows of a rank, cut where the bucket changes; columns of one length.

    window indexes the rank's steps, bucket indexes BUCKETS. Sorted; the bands of a window fill it.
    """

    window: Int32
    bucket: UInt8
    start_ns: Int64
    end_ns: Int64


class Exposed(Struct, frozen=True):
    """The exposed part of a rank's pieces, each instant once; columns of one length.

    Per communication bucket they add up to the bucket. call and owner: as in Pieces.
    """

    window: Int32
    bucket: UInt8
    call: Int32
    owner: Int32
    start_ns: Int64
    end_ns: Int64


class Attribution(Struct, frozen=True):
    """Attribution of one rank: a Split per window, and the intervals that it sums.

    gap is the gap of compute that each of the rank's calls held up, -1 for none: the index of the
    compute interval that ended it.
    """

    splits: tuple[Split, ...]
    band: BucketBands
    exposed: Exposed
    gap: Int64


def attribute(
    windows: Sequence[StepWindow], work: Work, pieces: Pieces, held: HeldGaps
) -> Attribution:
    """Splits the windows of a rank into buckets, to the nanosecond."""
    blocking = held.select_blocking(pieces)
    of_bucket = [blocking.bucket == bucket for bucket in COMMUNICATION]
    moving = np.isin(pieces.bucket, TRANSFERS)
    # In the order of Bucket, then of the bits that only memos count.
    sets = [
        work.compute,
        *(union(blocking.start_ns[rows], blocking.end_ns[rows]) for rows in of_bucket),
        work.copy,
        union(pieces.start_ns[moving], pieces.end_ns[moving]),
        work.fused,
        held.ambiguous,
    ]
    band, mask = _sweep_windows(windows, sets)
    length = band.end_ns - band.start_ns
    totals = np.zeros((len(windows), len(BUCKETS)), dtype=np.int64)
    np.add.at(totals, (band.window, band.bucket), length)
    # bubble_covered_ns needs the grid of the pipeline: it is added with it.
    memos = np.zeros((len(windows), len(MEMOS)), dtype=np.int64)
    np.add.at(memos[:, 0], band.window, length * (mask >> Bucket.COMPUTE & mask >> _MOVING & 1))
    np.add.at(memos[:, 2], band.window, length * (mask >> _FUSED & 1))
    np.add.at(memos[:, 3], band.window, length * (mask >> _AMBIGUOUS & 1))
    splits = tuple(Split(*row) for row in np.hstack((totals, memos)).tolist())
    for window, split in zip(windows, splits, strict=True):
        assert split.step_ns == window.end_ns - window.start_ns, f"buckets do not fill {window}"
    # Sets open and close within a bucket: adjacent bands of one bucket become one.
    apart = (band.bucket[1:] != band.bucket[:-1]) | (band.window[1:] != band.window[:-1])
    apart |= band.start_ns[1:] != band.end_ns[:-1]
    some = [True] if len(length) else []
    first, last = np.concatenate((some, apart)), np.concatenate((apart, some))
    first, last = first.astype(np.bool_), last.astype(np.bool_)
    band = BucketBands(
        band.window[first], band.bucket[first], band.start_ns[first], band.end_ns[last]
    )
    exposed = _build_exposed(blocking, band)
    _check(splits, exposed)
    gap = np.full(len(held.gap), -1, dtype=np.int64)
    gap[blocking.call] = held.gap[blocking.call]
    return Attribution(splits, band, exposed, gap)


def _sweep_windows(
    windows: Sequence[StepWindow], sets: Sequence[Intervals]
) -> tuple[BucketBands, Int64]:
    """Sorts the edges of all sets once; mask gives the sets that are open between two edges."""
    spans = collect_intervals(windows)
    at = np.concatenate([edges for one in (spans, *sets) for edges in (one.start_ns, one.end_ns)])
    bits = [np.zeros(2 * len(windows), dtype=np.int64)]
    bits += [np.full(len(s), sign << c) for c, s in enumerate(sets) for sign in (1, -1)]
    order = np.argsort(at, kind="stable")
    at, mask = at[order], np.cumsum(np.concatenate(bits)[order])
    start, end, mask = at[:-1], at[1:], mask[:-1]
    window = find_interval(spans, start)
    inside = (end > start) & (window >= 0)
    start, end, mask, window = start[inside], end[inside], mask[inside], window[inside]
    return BucketBands(window.astype(np.int32), _MASK_TO_BUCKET[mask], start, end), mask


def _build_exposed(blocking: Pieces, band: BucketBands) -> Exposed:
    """Each exposed instant, assigned to the call of its bucket that started first."""
    parts = []
    for bucket in COMMUNICATION:
        rows = np.flatnonzero(blocking.bucket == bucket)
        rows = rows[np.argsort(blocking.start_ns[rows], kind="stable")]
        owned = trim_overlaps(blocking.start_ns[rows], blocking.end_ns[rows])
        left = owned.end_ns > owned.start_ns
        rows, owned = rows[left], Intervals(owned.start_ns[left], owned.end_ns[left])
        # Another bucket may outrank this one for part of a call: only what the band left it.
        here = np.flatnonzero(band.bucket == bucket)
        both = intersect(owned, Intervals(band.start_ns[here], band.end_ns[here]))
        parts.append((
            band.window[here[both.right]],
            np.full(len(both.left), bucket, dtype=np.uint8),
            blocking.call[rows[both.left]],
            blocking.owner[rows[both.left]],
            both.start_ns,
            both.end_ns,
        ))  # fmt: skip
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    order = np.argsort(columns[-2], kind="stable")
    return Exposed(*(column[order] for column in columns))


def _check(splits: Sequence[Split], exposed: Exposed) -> None:
    """Asserts that the exposed time of the calls equals the communication buckets."""
    for bucket in COMMUNICATION:
        rows = exposed.bucket == bucket
        owned = int((exposed.end_ns - exposed.start_ns)[rows].sum())
        bucket_ns = sum(split.buckets_ns[bucket] for split in splits)
        assert owned == bucket_ns, (
            f"{bucket.label}: {owned} of {bucket_ns} ns are assigned to calls"
        )
