"""Which messages a kernel without a description carries out: those posted since the last launch.

A batch of sends and receives (batch_isend_irecv, a coalescing block) posts its messages one by one,
each with its description, and launches one kernel for all of them at the end, in none of the posts.
"""

from __future__ import annotations

import numpy as np

from stepsplit.analyzer.trace import Events, Int64


def posted_before(events: Events, posts: Int64, launches: Int64) -> list[list[int]]:
    """For each launch (a row, -1 for none) the posts on its thread since the launch before it."""
    found: list[list[int]] = [[] for _ in range(len(launches))]
    known = np.flatnonzero(launches >= 0)
    for lane in np.unique(events.lane[launches[known]]).tolist():
        here = known[events.lane[launches[known]] == lane]
        here = here[np.argsort(events.start_ns[launches[here]], kind="stable")]
        mine = posts[events.lane[posts] == lane]
        at = events.start_ns[launches[here]]
        next_launch = np.searchsorted(at, events.start_ns[mine], side="left")
        for post, number in zip(mine.tolist(), next_launch.tolist(), strict=True):
            if number < len(here):
                found[int(here[number])].append(post)
    return found
