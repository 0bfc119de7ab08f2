"""How much of a band can be drawn: a few thousand shapes, whatever the trace holds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.trace import Int64


@dataclass(frozen=True, slots=True)
class Band:
    """Segments of one rank that touch: bucket indexes BUCKETS. Columns have one length."""

    bucket: Int64
    start_ns: Int64
    dur_ns: Int64


def coarse(band: Band, limit: int) -> Band:
    """The band in at most limit segments.

    A longer one is cut into equal slots; each shows the bucket that fills most of it.
    """
    if len(band.start_ns) <= limit:
        return band
    first, last = int(band.start_ns[0]), int(band.start_ns[-1] + band.dur_ns[-1])
    edges = np.linspace(first, last, max(limit, 1) + 1).astype(np.int64)
    winner = np.argmax([_time_in(band, index, edges) for index in range(len(BUCKETS))], axis=0)
    keep = np.flatnonzero(np.diff(winner, prepend=-1))
    starts = edges[keep]
    return Band(winner[keep], starts, np.diff(np.append(starts, last)))


def _time_in(band: Band, bucket: int, edges: Int64) -> npt.NDArray[np.float64]:
    """ns of the bucket in each slot between the edges."""
    own = np.where(band.bucket == bucket, band.dur_ns, 0)
    times = np.append(band.start_ns, band.start_ns[-1] + band.dur_ns[-1])
    so_far = np.concatenate([[0], np.cumsum(own)])
    return np.diff(np.interp(edges, times, so_far))
