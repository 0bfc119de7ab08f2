"""What blame knows of a rank: what it did, what it waited for, when it was level with others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stepsplit.analyzer.arrays import labels_of
from stepsplit.analyzer.split.attribute import Attribution
from stepsplit.analyzer.split.blame.activity import Activity
from stepsplit.analyzer.split.blame.workload import Workload
from stepsplit.analyzer.split.calls.arrivals import Arrivals
from stepsplit.analyzer.split.calls.waits import BUBBLE, SKEW
from stepsplit.analyzer.split.clocks.clock import Clock
from stepsplit.analyzer.trace import Int32, Int64, RankTrace, UInt8


@dataclass(frozen=True, slots=True)
class RankTime:
    """One rank on the common clock; the columns of its exposed waits have one length.

    window indexes step and the workload; owner is the rank that was waited for, -1 unknown, and
    axis where. came_ns is when this rank arrived at the call, late_ns when the owner did, and
    level_ns when, before that, this rank last waited for a call of the same ranks.
    """

    rank: int
    step: Int64
    activity: Activity
    workload: Workload
    window: Int32
    bucket: UInt8
    owner: Int32
    axis: tuple[str | None, ...]
    length_ns: Int64
    end_ns: Int64
    came_ns: Int64
    late_ns: Int64
    level_ns: Int64


def rank_time(
    trace: RankTrace,
    rows: slice,
    found: Attribution,
    steps: Sequence[int],
    axis: Sequence[str | None],
    clock: Clock,
    arrivals: Arrivals,
    workload: Workload,
) -> RankTime:
    """The rank's time; axis has one entry an exposed row, rows are the rank's in arrivals."""
    band, exposed = found.band, found.exposed
    waits = np.flatnonzero(np.isin(exposed.bucket, (SKEW, BUBBLE)))
    call = exposed.call[waits]
    level = _level_ns(trace, rows, found, arrivals)
    end = clock.common_ns(exposed.end_ns[waits])
    return RankTime(
        rank=trace.rank,
        step=np.array(steps, dtype=np.int64),
        activity=Activity.of(
            clock.common_ns(band.start_ns), clock.common_ns(band.end_ns), band.bucket
        ),
        workload=workload,
        window=exposed.window[waits],
        bucket=exposed.bucket[waits],
        owner=exposed.owner[waits],
        axis=tuple(axis[i] for i in waits.tolist()),
        length_ns=(exposed.end_ns - exposed.start_ns)[waits],
        end_ns=end,
        came_ns=arrivals.start_ns[rows][call],
        late_ns=np.minimum(np.maximum(arrivals.moves_ns[rows][call], level[call]), end),
        level_ns=level[call],
    )


def _level_ns(trace: RankTrace, rows: slice, found: Attribution, arrivals: Arrivals) -> Int64:
    """For each call when the last of the same ranks was over that held this rank up before.

    Calls of one gap of compute held it up together: of these only an earlier gap's count. The
    smallest int64 where there is none.
    """
    calls = trace.calls
    start, end = arrivals.start_ns[rows], arrivals.end_ns[rows]
    peer = np.where(calls.is_message, calls.peer, -1)
    same = labels_of(np.where(calls.is_message, -1, calls.group_id), peer)
    level = np.full(len(start), np.iinfo(np.int64).min)
    held = np.flatnonzero(found.gap >= 0)
    order = held[np.lexsort((found.gap[held], same[held]))]
    for part in np.split(order, np.flatnonzero(np.diff(same[order])) + 1):
        over = np.maximum.accumulate(end[part])
        before = np.searchsorted(found.gap[part], found.gap[part], side="left") - 1
        level[part] = np.where(before >= 0, over[before], level[part])
    before_call: Int64 = np.minimum(level, start)
    return before_call
