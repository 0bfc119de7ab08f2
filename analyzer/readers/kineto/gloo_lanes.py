"""Which process group each of gloo's worker threads serves.

A gloo range in a trace names no group; the Flight Recorder does, but knows no end. A group has two
workers that take its calls in order, so under the right assignment each range starts when its call
was made and a worker was free. Worker threads are numbered as groups are created, which leaves few
assignments to try: each group takes a run of neighboring threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

WORKERS = 2
EARLY_NS = 1_000_000
"""A range may seem to start this much before its call: two clocks are read one after the other."""


@dataclass(frozen=True, slots=True)
class Range:
    """A collective at work on a thread: its event, name, and start and end in ns."""

    event: int
    name: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Request:
    """A call on a group: what to call back to, the range's name that it must have, and when."""

    index: int
    name: str
    created_ns: int


def assign(
    lanes: Sequence[Sequence[Range]], groups: Sequence[Sequence[Request]]
) -> Mapping[int, int] | None:
    """{event of a range: index of its request}; None where no assignment explains the ranges.

    lanes are the threads' ranges in order of thread number, groups the requests of each group in
    order of creation. The oldest ranges of a group may lack their requests: a recorder that keeps
    the latest alone has dropped them.
    """
    cost = _cost_of(lanes, groups)

    @cache
    def best(lane: int, group: int) -> tuple[float, tuple[int, ...]]:
        if group == len(groups):
            return (0.0 if lane == len(lanes) else math.inf), ()
        options = []
        for taken in range(min(WORKERS, len(lanes) - lane) + 1):
            rest, choice = best(lane + taken, group + 1)
            options.append((cost(lane, taken, group) + rest, (taken, *choice)))
        return min(options)

    total, taken = best(0, 0)
    return None if math.isinf(total) else _pairs(lanes, groups, taken)


def _cost_of(
    lanes: Sequence[Sequence[Range]], groups: Sequence[Sequence[Request]]
) -> Callable[[int, int, int], float]:
    def cost(lane: int, taken: int, group: int) -> float:
        return _misfit_ns(_merged(lanes[lane : lane + taken]), groups[group])

    return cost


def _merged(lanes: Sequence[Sequence[Range]]) -> list[Range]:
    return sorted((r for lane in lanes for r in lane), key=lambda r: r.start_ns)


def _misfit_ns(ranges: Sequence[Range], requests: Sequence[Request]) -> float:
    """By how much the ranges start at other times than two workers would have started them."""
    if len(ranges) < len(requests) or (ranges and not requests):
        return math.inf
    ranges = ranges[len(ranges) - len(requests) :]
    last_end = earlier_end = -math.inf
    misfit = 0.0
    for found, request in zip(ranges, requests, strict=True):
        if found.name != request.name or found.start_ns < request.created_ns - EARLY_NS:
            return math.inf
        misfit += abs(found.start_ns - max(request.created_ns, earlier_end))
        earlier_end, last_end = sorted((*(earlier_end, last_end), found.end_ns))[1:]
    return misfit


def _pairs(
    lanes: Sequence[Sequence[Range]], groups: Sequence[Sequence[Request]], taken: Sequence[int]
) -> dict[int, int]:
    pairs: dict[int, int] = {}
    lane = 0
    for count, requests in zip(taken, groups, strict=True):
        ranges = _merged(lanes[lane : lane + count])
        recorded = ranges[len(ranges) - len(requests) :]
        pairs |= {r.event: q.index for r, q in zip(recorded, requests, strict=True)}
        lane += count
    return pairs
