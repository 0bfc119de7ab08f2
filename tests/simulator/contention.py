"""How much longer a kernel takes to compute while data moves on its rank."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict

from simulator.transfers import Kernel

Span = tuple[int, int]


class Contention:
    """When data moves on each rank; computing then takes (1 + slow) times as long."""

    def __init__(self, slow: float) -> None:
        self._slow = slow
        self._moving: dict[int, list[Span]] = defaultdict(list)

    def note(self, rank: int, start_ns: int, end_ns: int) -> None:
        """Data moves on the rank from then to then."""
        spans = self._moving[rank]
        first = bisect_left(spans, start_ns, key=_end)
        after = bisect_right(spans, end_ns, key=_start)
        joined = [(start_ns, end_ns), *spans[first:after]]
        spans[first:after] = [(min(map(_start, joined)), max(map(_end, joined)))]

    def end_ns(self, kernel: Kernel, dur_ns: int) -> int:
        """When a kernel of dur_ns ends, by the transfers that are known."""
        spans = self._moving[kernel.rank]
        at_ns, left_ns = kernel.start_ns, dur_ns
        for start_ns, end_ns in spans[bisect_right(spans, at_ns, key=_end) :]:
            free_ns = max(0, start_ns - at_ns)
            if left_ns <= free_ns:
                break
            at_ns, left_ns = at_ns + free_ns, left_ns - free_ns
            slowed_ns = round(left_ns * (1 + self._slow))
            if slowed_ns <= end_ns - at_ns:
                return at_ns + slowed_ns
            left_ns -= round((end_ns - at_ns) / (1 + self._slow))
            at_ns = end_ns
        return at_ns + left_ns


def _start(span: Span) -> int:
    return span[0]


def _end(span: Span) -> int:
    return span[1]
