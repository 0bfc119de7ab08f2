"""The compute of a rank by what it computes: each kernel, with its shapes, and how long it took."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from stepsplit.analyzer.split.kernels import (
    ComputeEvents,
    KernelWork,
    collect_compute,
    find_kernel_work,
)
from stepsplit.analyzer.split.run import RankSplit
from stepsplit.analyzer.trace import Int64


class KernelSums(Struct, frozen=True):
    """The compute of a rank in its full steps (all steps if none is full), by kind of work.

    Attributes:
        compute: The compute events.
        work: The kinds of work, with the shapes or launch grid of each.
        work_id: The index of its kind for each event.
        count: The number of events of each kind.
        total_ns: Their time together.
    """

    compute: ComputeEvents
    work: tuple[KernelWork, ...]
    work_id: Int64
    count: list[int]
    total_ns: list[int]

    @classmethod
    def collect(cls, rank: RankSplit) -> KernelSums:
        """Sums the compute events of a rank."""
        compute = collect_compute(rank.trace, rank.windows)
        work, work_id = find_kernel_work(rank.trace, compute.row)
        count = np.bincount(work_id, minlength=len(work)).tolist()
        total = np.bincount(work_id, compute.took_ns, minlength=len(work)).astype(np.int64)
        return cls(compute, work, work_id, count, total.tolist())
