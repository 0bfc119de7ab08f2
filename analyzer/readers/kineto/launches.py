"""Which op surrounded the launch of a device event."""

from __future__ import annotations

import numpy as np

from stepsplit.analyzer.trace import Events, Int64


def ops_around(events: Events, ops: Int64, rows: Int64) -> Int64:
    """Of these ops, the one on the same lane within which each of the rows starts; -1 for none.

    ops ascend and do not surround one another; a row of -1 is in none of them.
    """
    found = np.full(len(rows), -1, dtype=np.int64)
    known = np.flatnonzero(rows >= 0)
    for lane in np.unique(events.lane[rows[known]]).tolist():
        here = ops[events.lane[ops] == lane]
        if not len(here):
            continue
        asking = known[events.lane[rows[known]] == lane]
        starts = events.start_ns[rows[asking]]
        ends = events.start_ns[here] + events.dur_ns[here]
        at = np.searchsorted(events.start_ns[here], starts, side="right") - 1
        inside = (at >= 0) & (starts <= ends[at])
        found[asking[inside]] = here[at[inside]]
    return found
