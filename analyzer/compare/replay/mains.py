"""The ranks' own time lines, cut where something hangs on them or they hang on something."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.compare.replay.graph import WORK
from stepsplit.analyzer.compare.replay.rank_calls import RankCalls
from stepsplit.analyzer.split.attribute import IDLE
from stepsplit.analyzer.split.blame import Activity
from stepsplit.analyzer.split.run import RankSplit
from stepsplit.analyzer.split.transfers import BUBBLE, COLLECTIVE
from stepsplit.analyzer.trace import Int64, UInt8

_NO_MORE = np.iinfo(np.int64).max
_OWN = [BUCKETS.index(name) for name in WORK]


@dataclass(frozen=True, slots=True)
class Main:
    """One rank's time line on the common clock, a row each cut.

    work_ns, of shape (cuts, WORK), is what the rank did of its own since the cut before; window is
    the place of the step in which that was. begin and end are the cuts at which steps begin and
    end.
    """

    at_ns: Int64
    work_ns: Int64
    window: Int64
    begin: Int64
    end: Int64

    def cut_at(self, when_ns: Int64) -> Int64:
        """The cut at each instant or before it, -1 before the first."""
        return np.searchsorted(self.at_ns, when_ns, side="right") - 1

    def window_at(self, when_ns: Int64) -> Int64:
        """The place of the step in which each instant lies."""
        return self.window[np.clip(self.cut_at(when_ns) + 1, 0, len(self.window) - 1)]


def main_of(rank: RankSplit, made: RankCalls) -> Main:
    """The time line of a rank that has steps, cut by what it called."""
    clock, band = rank.clock, rank.attribution.band
    windows = rank.windows.windows
    edges = clock.common_ns(
        np.array([(w.start_ns, w.end_ns) for w in windows], dtype=np.int64).reshape(-1, 2)
    )
    wanted = np.concatenate(
        (edges.ravel(), _box_edges(rank), made.end_ns[made.held], made.hangs_ns)
    )
    at = np.unique(wanted[(wanted >= edges[0, 0]) & (wanted <= edges[-1, 1])])
    bucket = _with_idle(rank, made)
    activity = Activity.of(clock.common_ns(band.start_ns), clock.common_ns(band.end_ns), bucket)
    spent = activity.spent_ns(at)[:, _OWN]
    window = np.searchsorted(edges[:, 0], at, side="left") - 1
    return Main(
        at_ns=at,
        work_ns=np.diff(spent, axis=0, prepend=spent[:1]),
        window=np.clip(window, 0, len(windows) - 1),
        begin=np.searchsorted(at, edges[:, 0]),
        end=np.searchsorted(at, edges[:, 1]),
    )


def _box_edges(rank: RankSplit) -> Int64:
    """Where forwards and backwards of a pipeline begin and end."""
    boxes = [box for grid in rank.grids for box in grid.boxes]
    return np.array([at for box in boxes for at in (box.start_ns, box.end_ns)], dtype=np.int64)


def _with_idle(rank: RankSplit, made: RankCalls) -> UInt8:
    """The bucket of each part of the rank's band; what it did not wait for hid that it idled."""
    band, compute = rank.attribution.band, rank.work.compute
    over = np.append(np.sort(rank.clock.own_ns(made.end_ns[made.held])), _NO_MORE)
    resumes = np.append(compute.start_ns, _NO_MORE)
    waited = over[np.searchsorted(over, band.end_ns)]
    goes_on = resumes[np.searchsorted(resumes, band.end_ns)]
    alone = (band.bucket >= COLLECTIVE) & (band.bucket <= BUBBLE) & (waited > goes_on)
    return np.where(alone, IDLE, band.bucket).astype(np.uint8)
