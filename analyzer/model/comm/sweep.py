"""Times between the points of a measured sweep."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.formula import Formula

if TYPE_CHECKING:
    from stepsplit.analyzer.readers.nccl import nccl_tests

SWEEP = Formula(
    "comm.sweep",
    "log t is linear in log S between two measured sizes; constant below the first,"
    " t_last S / S_last beyond the last",
    "arithmetic; leave one out on the sweeps of one node: 2 to 8 % (A100, B200, Alps GH200)",
)
_OPS = {"send_recv": "send"}


@dataclass(frozen=True, slots=True)
class Sweep:
    """One op on one set of ranks: its time in ns at each size, sizes rising.

    swept: sizes were swept from the least to the largest; else they are those of recorded runs,
    beyond which the closed form goes on from the nearest. Raises UsageError where sizes and times
    are no sweep.
    """

    op: str
    ranks: int
    ranks_per_node: int
    sizes_bytes: tuple[int, ...]
    times_ns: tuple[float, ...]
    swept: bool = True

    def __post_init__(self) -> None:
        sizes, times = self.sizes_bytes, self.times_ns
        if len(sizes) != len(times) or not sizes:
            raise UsageError(
                f"a sweep of {self.op} has {len(sizes)} sizes and {len(times)} times;"
                " give each size its time"
            )
        rising = all(one < following for one, following in pairwise(sizes))
        if not rising or sizes[0] <= 0 or min(times) <= 0:
            raise UsageError(
                f"a sweep of {self.op} needs rising sizes and times above 0; leave other rows out"
            )

    def time_of(self, message_bytes: float) -> float:
        """The time of a message of that size in ns (SWEEP)."""
        sizes, times = self.sizes_bytes, self.times_ns
        after = bisect_right(sizes, message_bytes)
        if after == 0:
            return times[0]
        if after == len(sizes):
            return times[-1] * message_bytes / sizes[-1]
        before = after - 1
        part = math.log(message_bytes / sizes[before]) / math.log(sizes[after] / sizes[before])
        return times[before] * math.exp(part * math.log(times[after] / times[before]))


def sweeps_of(
    read: Sequence[nccl_tests.Sweep], ranks_per_node: int | None = None
) -> tuple[Sweep, ...]:
    """The tables of nccl-tests as sweeps; without ranks_per_node all ranks share a node.

    A table without op, or of fewer than two known ranks, is left out; so are rows with wrong
    results. Out of place counts where both are there, and of one size its first row.
    """
    found = []
    for table in read:
        points = _points(table)
        if table.op and table.nranks > 1 and points:
            here = min(table.nranks, ranks_per_node or table.nranks)
            sizes, times = zip(*sorted(points.items()), strict=True)
            found.append(Sweep(_OPS.get(table.op, table.op), table.nranks, here, sizes, times))
    return tuple(found)


def _points(table: nccl_tests.Sweep) -> dict[int, float]:
    points: dict[int, float] = {}
    for row in table.rows:
        timing = row.out_of_place or row.in_place
        if timing and timing.wrong <= 0 and timing.time_ns > 0 and row.message_bytes > 0:
            points.setdefault(row.message_bytes, float(timing.time_ns))
    return points
