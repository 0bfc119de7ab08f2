"""When the gradients of a rank's step are made."""

from __future__ import annotations

from dataclasses import dataclass

from stepsplit.analyzer.arrays import inside, union
from stepsplit.analyzer.split.run import RankSplit
from stepsplit.analyzer.trace import Category, Int64

_FORWARD = 1 / 3
"""Of forward and backward, where nothing marks them: a backward takes twice a forward."""


@dataclass(frozen=True, slots=True)
class Backwards:
    """The backwards of a rank: when each kernel of autograd began (on a CPU each op), on the common
    clock, and how many passes a step has outside of a pipeline."""

    rank: RankSplit
    autograd_ns: Int64
    passes: int

    @classmethod
    def of(cls, rank: RankSplit, passes: int) -> Backwards:
        """The backwards of the rank."""
        events = rank.trace.events
        spans = events.of(Category.OP) & events.named("autograd::engine")
        marked = union(events.start_ns[spans], events.end_ns[spans])
        launched = events.launch_ns() if rank.trace.on_device else events.start_ns
        works = events.of(Category.KERNEL) if rank.trace.on_device else spans
        begun = events.start_ns[works & inside(marked, launched)]
        return cls(rank, rank.clock.common_ns(begun), passes)

    def before(self, window: int, until: int) -> tuple[int, int]:
        """(begin, end) of the last backward of a step before an instant, on the common clock: as
        its pipeline's boxes or autograd mark it, else the latter part of what came before."""
        boxes = self.rank.grids[window].boxes
        last = [box for box in boxes if box.phase != "forward" and box.end_ns <= until]
        if last:
            return max((box.start_ns, box.end_ns) for box in last)
        start = self.rank.clock.common_at(self.rank.windows.windows[window].start_ns)
        begun = self.autograd_ns[(self.autograd_ns >= start) & (self.autograd_ns < until)]
        begin = int(begun.min()) if len(begun) else start + round((until - start) * _FORWARD)
        return until - (until - begin) // self.passes, until
