"""Which host event launched a device event, and which op surrounded the launch."""

from __future__ import annotations

import numpy as np

from stepsplit.analyzer.trace import Category, Events, Int64


def launches_of(events: Events, rows: Int64) -> Int64:
    """The row of the runtime call that launched each of these device rows; -1 where none did."""
    wanted = events.correlation[rows]
    calls = np.flatnonzero(events.of(Category.RUNTIME) & (events.correlation >= 0))
    calls = calls[np.isin(events.correlation[calls], wanted)]
    return _matching(events.correlation[calls], calls, wanted)


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


def _matching(keys: Int64, values: Int64, wanted: Int64) -> Int64:
    """The first value of each wanted key, -1 where there is none."""
    order = np.argsort(keys, kind="stable")
    if not len(order):
        return np.full(len(wanted), -1, dtype=np.int64)
    at = np.minimum(np.searchsorted(keys[order], wanted), len(order) - 1)
    return np.where(keys[order[at]] == wanted, values[order[at]], -1)
