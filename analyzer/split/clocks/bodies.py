"""Ranks of one host whose clocks are known to each other: what one of them tells holds for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stepsplit.analyzer.split.clocks.ends import Ends, Known
from stepsplit.analyzer.split.clocks.fit import ClockFit
from stepsplit.analyzer.trace import Int64

EXACT = ClockFit(0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Body:
    """Some ranks of a host, and the clock of each against that of the first; never empty."""

    host: str
    traces: tuple[int, ...]
    clocks: tuple[ClockFit, ...]

    def ends_ns(self, ends: Ends) -> tuple[Int64, Int64]:
        """(the rows of all of its ranks, their ends on its first rank's wall clock)."""
        rows = [ends.of_trace(trace) for trace in self.traces]
        at = [c.common_ns(ends.end_ns[r]) for c, r in zip(self.clocks, rows, strict=True)]
        return np.concatenate(rows), np.concatenate(at)


def bodies_of(hosts: Sequence[str], ends: Ends) -> list[Body]:
    """The ranks in bodies: those of a host that calls join; hosts has one a trace."""
    found = []
    for host in dict.fromkeys(hosts):
        left = [trace for trace, its in enumerate(hosts) if its == host]
        while left:
            body = _grown(host, left, ends)
            found.append(body)
            left = [trace for trace in left if trace not in body.traces]
    return sorted(found, key=lambda body: body.traces[0])


def _grown(host: str, left: Sequence[int], ends: Ends) -> Body:
    """The first of these and all that calls join to it, those with most calls in common first."""
    known = Known(ends)
    rows = {trace: ends.of_trace(trace) for trace in left}
    clocks = {left[0]: EXACT}
    known.learn(rows[left[0]], ends.end_ns[rows[left[0]]], 0.0)
    while waiting := [trace for trace in left if trace not in clocks]:
        new = max(waiting, key=lambda trace: len(known.shared(rows[trace])))
        shared = known.shared(rows[new])
        if not len(shared):
            break
        clocks[new] = known.fit(shared, ends.end_ns[shared])
        known.learn(rows[new], clocks[new].common_ns(ends.end_ns[rows[new]]), clocks[new].sigma_ns)
    return Body(host, tuple(clocks), tuple(clocks.values()))
