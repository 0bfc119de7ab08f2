"""One line of a timeline at any scale: its slices as they are, or what fills most of each slot."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
import numpy.typing as npt

from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.trace import Int64, UInt8

Float64 = npt.NDArray[np.float64]
_FULL = 255
_NOISE = 1e-6
"""What rounding may leave of a slot that is drawn whole."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """What to draw of a track; columns of one length. Those that stand for many slices come first.

    bucket indexes buckets.BUCKETS; cover is how much of it is filled, of 255. row indexes the
    track, -1 where one shape stands for many slices.
    """

    start_ns: Int64
    dur_ns: Int64
    bucket: UInt8
    cover: UInt8
    row: Int64


@dataclass(frozen=True)
class Track:
    """Slices that do not overlap, by start; columns of one length, bucket indexes BUCKETS."""

    start_ns: Int64
    dur_ns: Int64
    bucket: UInt8

    def drawn(self, from_ns: int, to_ns: int, slots: int) -> Drawn:
        """The slices within the window. Where they are more than slots, those that are shorter
        than a slot are drawn together."""
        low = int(np.searchsorted(self._end_ns, from_ns, side="right"))
        high = int(np.searchsorted(self.start_ns, to_ns, side="left"))
        if high - low <= slots:
            return self._exactly(np.arange(low, high))
        edges = np.linspace(from_ns, to_ns, slots + 1).astype(np.int64)
        long = self.dur_ns[low:high] * slots >= to_ns - from_ns
        exact = self._exactly(low + np.flatnonzero(long))
        return _joined(self._together(edges, exact), exact)

    def _exactly(self, rows: Int64) -> Drawn:
        whole = np.full(len(rows), _FULL, dtype=np.uint8)
        columns = (self.start_ns[rows], self.dur_ns[rows], self.bucket[rows])
        return Drawn(*columns, whole, rows)

    def _together(self, edges: Int64, drawn: Drawn) -> Drawn:
        """For each slot the bucket with most time of the slices that are not drawn yet; neighbours
        of one bucket and cover are one shape."""
        apart = Track(drawn.start_ns, drawn.dur_ns, drawn.bucket)
        busy = self._busy(edges) - apart._busy(edges)
        cover = np.ceil(np.clip(busy.sum(axis=0) / np.diff(edges), 0, 1) * 4 - _NOISE) / 4
        winner = busy.argmax(axis=0).astype(np.uint8)
        key = np.where(cover > 0, winner + cover, -1)
        first = np.flatnonzero(np.diff(key, prepend=-2.0))
        last = np.append(first[1:], len(key))
        shown = key[first] >= 0
        first, last = first[shown], last[shown]
        return Drawn(
            start_ns=edges[first],
            dur_ns=edges[last] - edges[first],
            bucket=winner[first],
            cover=(cover[first] * _FULL).astype(np.uint8),
            row=np.full(len(first), -1, dtype=np.int64),
        )

    def _busy(self, edges: Int64) -> Float64:
        """ns of each bucket (a row each) in each slot between the edges."""
        busy = np.zeros((len(BUCKETS), len(edges) - 1))
        for bucket, (times, so_far) in self._sums:
            busy[bucket] = np.diff(np.interp(edges, times, so_far))
        return busy

    @cached_property
    def _end_ns(self) -> Int64:
        return self.start_ns + self.dur_ns

    @cached_property
    def _sums(self) -> list[tuple[int, tuple[Float64, Float64]]]:
        """For each bucket of the track its time so far, as a line through points in time."""
        return [(int(bucket), self._sum(bucket)) for bucket in np.unique(self.bucket)]

    def _sum(self, bucket: int) -> tuple[Float64, Float64]:
        own = np.flatnonzero(self.bucket == bucket)
        so_far = np.concatenate(([0.0], np.cumsum(self.dur_ns[own], dtype=np.float64)))
        times = np.column_stack((self.start_ns[own], self._end_ns[own])).astype(np.float64)
        return times.ravel(), np.column_stack((so_far[:-1], so_far[1:])).ravel()


def _joined(one: Drawn, other: Drawn) -> Drawn:
    both = ((getattr(one, each.name), getattr(other, each.name)) for each in fields(Drawn))
    return Drawn(*(np.concatenate(pair) for pair in both))
