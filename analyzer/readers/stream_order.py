"""Kernels whose recorded end is too late: a stream runs in order, so they ended before the next."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from stepsplit.analyzer import units
from stepsplit.analyzer.arrays import group_ids, group_median
from stepsplit.analyzer.trace import DEVICE_CATEGORIES, Events, Int64, Note, Shapes

OVERRUN_NS = 10_000
"""Longer overlaps on a stream are recorded wrongly. Programmatic dependent launch starts a kernel
some microseconds before the one ahead of it ends; public traces of A100, H100, MI300 and V100 have
no overlap at all, and the late ends of MI355 (TraceLens issue 669) reach seconds. At half and at
twice of it the same kernels are found in both."""

_MOST_OVERRUNS = 0.5
"""With a larger share of them, the events of one stream number are not of one stream: two processes
are in one file, or a queue runs out of order."""

_NO_END = np.iinfo(np.int64).max


def clip_overruns(
    events: Events, shapes: Shapes, communication: Int64
) -> tuple[Events, tuple[Note, ...]]:
    """The events with possible ends of the kernels and copies, and notes with their number.

    A device event that overlaps what its stream ran after it by more than OVERRUN_NS ends at the
    next one's start, or before it after the median time of the same work: of the other events of
    its name and shapes. Events of one launch (the branches of a graph) may overlap.

    communication has the rows whose time depends on other ranks: they end at the next start.
    """
    has_stream = np.array([lane.stream >= 0 for lane in events.lanes], dtype=np.bool_)
    rows = np.flatnonzero(events.is_category(*DEVICE_CATEGORIES) & has_stream[events.lane])
    rows = rows[np.argsort(events.lane[rows], kind="stable")]
    lane, start, end = events.lane[rows], events.start_ns[rows], events.ends_of(rows)
    if not ((end[:-1] > start[1:] + OVERRUN_NS) & (lane[:-1] == lane[1:])).any():
        return events, ()
    own = events.correlation[rows]
    is_new = np.ones(len(rows), dtype=np.bool_)
    is_new[1:] = (lane[1:] != lane[:-1]) | (own[1:] != own[:-1]) | (own[1:] <= 0)
    # The next start on the same stream of what another launch started.
    first = np.append(np.flatnonzero(is_new), len(rows))
    after = first[np.cumsum(is_new)]
    known = np.minimum(after, len(rows) - 1)
    is_followed = (after < len(rows)) & (lane[known] == lane)
    limit = np.where(is_followed, start[known], _NO_END)
    overruns = is_followed & (end - OVERRUN_NS > limit)
    count = np.bincount(lane[overruns], minlength=len(events.lanes))
    is_mixed = count > _MOST_OVERRUNS * np.bincount(lane, minlength=len(events.lanes))
    notes = [
        Note(
            "stream_unordered",
            f"{count[number]:,} kernels and copies of stream {events.lanes[number].stream} run over"
            " later ones of it, most of all: they stay as recorded, as two processes in one file or"
            " a queue without order would do that",
        )
        for number in np.flatnonzero(is_mixed).tolist()
    ]
    late = np.flatnonzero(overruns & ~is_mixed[lane])
    if not len(late):
        return events, tuple(notes)
    # What waits for other ranks has no usual time, and some work has no other event.
    work = group_ids(events.name_id[rows], shapes.find_ids(rows))
    waits = np.isin(rows, communication)
    examples = np.flatnonzero(~overruns & ~waits)
    known_work, example = np.unique(work[examples], return_inverse=True)
    median_ns = group_median(example, (end - start)[examples]) if len(examples) else np.empty(0)
    usual_ns = dict(zip(known_work.tolist(), median_ns.tolist(), strict=True))
    shorter = [
        _NO_END if waits[i] or work[i] not in usual_ns else int(start[i] + usual_ns[work[i]])
        for i in late.tolist()
    ]
    new_end = np.minimum(limit[late], np.array(shorter, dtype=np.int64))
    removed_ns = int((end[late] - new_end).sum())
    dur_ns = events.dur_ns.copy()
    dur_ns[rows[late]] = new_end - start[late]
    text = (
        f"{len(late):,} of {len(rows):,} kernels and copies run over later ones of their stream,"
        " which runs in order: their ends were recorded late, and they are taken to end as others"
        " of their name, or where the next begins; this removes"
        f" {units.format_milliseconds(removed_ns)} of recorded time"
    )
    return replace(events, dur_ns=dur_ns), (*notes, Note("kernels_overlap", text))
