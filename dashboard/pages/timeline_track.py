"""One row of the timeline at any zoom: exact slices, or the dominant bucket of each slot."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.trace import Int64, UInt8

Float64 = npt.NDArray[np.float64]

_FULL = 255

_NOISE = 1e-6
"""Tolerance for rounding when a slot is completely covered."""


@dataclass(frozen=True, slots=True)
class DrawnShapes:
    """Shapes to draw for a track, as columns of equal length; shapes of many slices come first.

    bucket indexes buckets.BUCKETS; cover is the filled fraction, 0 to 255; row indexes the track,
    -1 for a shape of many slices. edges are those of the slots, one more than slots.
    """

    start_ns: Int64
    dur_ns: Int64
    bucket: UInt8
    cover: UInt8
    row: Int64
    edges: Int64


def cut_into_slots(from_ns: int, to_ns: int, slots: int) -> Int64:
    """The edges in ns of so many equal slots of the window, of at least 1 ns each."""
    return np.linspace(from_ns, to_ns, min(slots, to_ns - from_ns) + 1).astype(np.int64)


@dataclass(frozen=True)
class TimelineTrack:
    """Non-overlapping slices ordered by start; columns of equal length, bucket indexes BUCKETS."""

    start_ns: Int64
    dur_ns: Int64
    bucket: UInt8

    def draw(self, edges: Int64, least_slots: int = 1) -> DrawnShapes:
        """Slices between the first and last of the slots' edges; if not all of them fit, those
        that are shorter than `least_slots` slots are merged into slots."""
        slots, wide_ns = len(edges) - 1, int(edges[-1] - edges[0])
        low = int(np.searchsorted(self._end_ns, edges[0], side="right"))
        high = int(np.searchsorted(self.start_ns, edges[-1], side="left"))
        if (high - low) * least_slots <= slots:
            return self._draw_exactly(np.arange(low, high), edges)
        long = self.dur_ns[low:high] * slots >= wide_ns * least_slots
        exact = self._draw_exactly(low + np.flatnonzero(long), edges)
        # The dominant bucket of each slot among slices that are not drawn exactly; neighboring
        # slots with equal bucket and cover become one shape.
        apart = TimelineTrack(exact.start_ns, exact.dur_ns, exact.bucket)
        busy = self._compute_busy_ns(edges) - apart._compute_busy_ns(edges)
        cover = np.ceil(np.clip(busy.sum(axis=0) / np.diff(edges), 0, 1) * 4 - _NOISE) / 4
        winner = busy.argmax(axis=0).astype(np.uint8)
        key = np.where(cover > 0, winner + cover, -1)
        first = np.flatnonzero(np.diff(key, prepend=-2.0))
        last = np.append(first[1:], len(key))
        shown = key[first] >= 0
        first, last = first[shown], last[shown]
        return _concatenate(
            DrawnShapes(
                start_ns=edges[first],
                dur_ns=edges[last] - edges[first],
                bucket=winner[first],
                cover=(cover[first] * _FULL).astype(np.uint8),
                row=np.full(len(first), -1, dtype=np.int64),
                edges=edges,
            ),
            exact,
        )

    def _draw_exactly(self, rows: Int64, edges: Int64) -> DrawnShapes:
        whole = np.full(len(rows), _FULL, dtype=np.uint8)
        columns = (self.start_ns[rows], self.dur_ns[rows], self.bucket[rows])
        return DrawnShapes(*columns, whole, rows, edges)

    def _compute_busy_ns(self, edges: Int64) -> Float64:
        """Time in ns per bucket (rows) and slot between the edges (columns)."""
        busy = np.zeros((len(BUCKETS), len(edges) - 1))
        for bucket, (times, so_far) in self._sums:
            busy[bucket] = np.diff(np.interp(edges, times, so_far))
        return busy

    @cached_property
    def _end_ns(self) -> Int64:
        return self.start_ns + self.dur_ns

    @cached_property
    def _sums(self) -> list[tuple[int, tuple[Float64, Float64]]]:
        """Cumulative time of each bucket as points (time, time so far)."""
        return [(int(bucket), self._sum(bucket)) for bucket in np.unique(self.bucket)]

    def _sum(self, bucket: int) -> tuple[Float64, Float64]:
        own = np.flatnonzero(self.bucket == bucket)
        so_far = np.concatenate(([0.0], np.cumsum(self.dur_ns[own], dtype=np.float64)))
        times = np.column_stack((self.start_ns[own], self._end_ns[own])).astype(np.float64)
        return times.ravel(), np.column_stack((so_far[:-1], so_far[1:])).ravel()


def _concatenate(first: DrawnShapes, second: DrawnShapes) -> DrawnShapes:
    return DrawnShapes(
        start_ns=np.concatenate((first.start_ns, second.start_ns)),
        dur_ns=np.concatenate((first.dur_ns, second.dur_ns)),
        bucket=np.concatenate((first.bucket, second.bucket)),
        cover=np.concatenate((first.cover, second.cover)),
        row=np.concatenate((first.row, second.row)),
        edges=first.edges,
    )
