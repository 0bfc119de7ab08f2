"""When the gradients of a step are ready: the backward passes of a rank."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from stepsplit.analyzer.arrays import is_inside, union
from stepsplit.analyzer.diagnose.graph.dependency_graph import CLOSE_NS
from stepsplit.analyzer.split.run import RankSplit
from stepsplit.analyzer.split.work import PRODUCT_FAMILIES, mask_families
from stepsplit.analyzer.trace import Category, Float, Int64

_FORWARD_SHARE = 1 / 3
"""Forward share of forward + backward if they are not marked: a backward takes twice as long."""

_KINDS = 3
"""A sequence that repeats, of fewer names of kernels, may be that of layers alone."""


class BackwardPasses(Struct, frozen=True):
    """The backward passes of a rank.

    begun_ns: start of each autograd kernel (CPU runs: op) on the common clock; launched_ns: when
    the host launched it. is_marked: whether the trace says which kernels are autograd's; else they
    are all compute. product: of each, which GEMM or attention kernel it is, -1 of others. passes:
    number of backward passes per step if the run has no pipeline, 0 if that is not known.
    """

    rank: RankSplit
    begun_ns: Int64
    launched_ns: Int64
    product: Int64
    is_marked: bool
    passes: int

    @classmethod
    def find(cls, rank: RankSplit, passes: int) -> BackwardPasses:
        """Find the backward passes of a rank."""
        events, on_device = rank.trace.events, rank.trace.on_device
        spans = events.is_category(Category.OP) & events.match_prefix("autograd::engine")
        if not spans.any():
            works = np.flatnonzero(rank.trace.kinds.computes)
        else:
            works = np.flatnonzero(events.is_category(Category.KERNEL) if on_device else spans)
        launched = events.find_launch_ns(works) if on_device else events.start_ns[works]
        if spans.any():
            own = is_inside(union(events.start_ns[spans], events.ends_of(spans)), launched)
            works, launched = works[own], launched[own]
        begun = rank.clock.map_to_common_ns(events.start_ns[works])
        is_product = mask_families(rank.trace, PRODUCT_FAMILIES)[works]
        product = np.where(is_product, events.name_id[works].astype(np.int64), -1)
        order = np.argsort(begun, kind="stable")
        begun, launched, product = begun[order], launched[order], product[order]
        return cls(rank, begun, launched, product, bool(spans.any()), passes)

    def find_before(self, window: int, until: int) -> tuple[int, int]:
        """(begin, end) of the last backward of a step before `until`, on the common clock.

        Taken from the pipeline's boxes or from autograd; otherwise estimated as the last part of
        the time since the start of the step.
        """
        boxes = self.rank.grids[window].slots
        # The communication at its end is recorded to end late.
        latest = until + CLOSE_NS
        last = [box for box in boxes if box.phase != "forward" and box.end_ns <= latest]
        if last:
            begin, end = max((box.start_ns, box.end_ns) for box in last)
            return begin, min(end, until)
        start, _ = self._find_edges_ns(window)
        begun = self.begun_ns[(self.begun_ns >= start) & (self.begun_ns < until)]
        is_known = self.is_marked and len(begun)
        begin = int(begun.min()) if is_known else start + round((until - start) * _FORWARD_SHARE)
        return until - (until - begin) // self._count_passes(start, until), until

    def _count_passes(self, start: int, until: int) -> int:
        """The backward passes between two moments: known, else so many times as the GEMM and
        attention kernels there are the same sequence. Of kernels of one name that says nothing."""
        product = self.product[(self.begun_ns >= start) & (self.begun_ns < until)]
        product = product[product >= 0]
        total, kinds = len(product), len(np.unique(product))
        if self.passes or self.is_marked or kinds < _KINDS:
            return max(1, self.passes)
        for each in range(kinds, total // 2 + 1):
            if total % each == 0 and (product[each:] == product[:-each]).all():
                return total // each
        return 1

    def measure_left(self, window: int, issued_ns: Int64) -> Float:
        """Of the last backward of a step, the share of the kernels that the host launched after
        each of these times.

        If it is not known which are the backward's, those after the last of these times are left
        out: they may be the optimizer's.
        """
        start, end = self._find_edges_ns(window)
        own = (self.begun_ns >= start) & (self.begun_ns < end)
        launched, share = np.sort(self.launched_ns[own]), 1.0
        last_ns = int(issued_ns.max(initial=0))
        if not self.is_marked:
            launched, share = launched[launched <= last_ns], 1 - _FORWARD_SHARE
        after = len(launched) - np.searchsorted(launched, issued_ns, side="right")
        of_step = self.begun_ns[own][self.launched_ns[own] <= last_ns]
        passes = self._count_passes(start, int(of_step.max(initial=start)) + 1)
        return np.asarray(after * passes / max(1.0, len(launched) * share))

    def _find_edges_ns(self, window: int) -> tuple[int, int]:
        """Start and end of a step on the common clock."""
        own, clock = self.rank.windows.windows[window], self.rank.clock
        start, end = (clock.map_instant_to_common_ns(at) for at in (own.start_ns, own.end_ns))
        return start, end
