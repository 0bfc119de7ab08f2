"""What is under way, and which of it ends next.

Once no rank can go on by itself, all that is still unknown comes later than what is ready first:
whatever a rank does next, some end must let it. So links are given out in the order in which they
were wanted, and a kernel's end is final once nothing can slow it down any more.
"""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heappop, heappush

from simulator.contention import Contention
from simulator.noise import Noise
from simulator.program import Compute, Copy, Job
from simulator.rendezvous import Rendezvous
from simulator.transfers import Kernel, Transfer

_Order = tuple[int, bool, int, int, int]


class Agenda:
    """The kernels that run on all ranks and the transfers between them.

    slow: by which part computing takes longer while data moves on its rank.
    """

    def __init__(self, job: Job, noise: Noise, slow: float) -> None:
        self.rendezvous = Rendezvous(job, noise)
        self._contention = Contention(slow) if slow else None
        self._free_ns: dict[Hashable, int] = {}
        self._open: list[tuple[_Order, int, Kernel | Transfer]] = []
        self._pushed = 0

    def begin(self, kernel: Kernel) -> None:
        """The kernel has started; its end is known at once if nothing can hold it up."""
        if not isinstance(kernel.work, Compute | Copy):
            for transfer in self.rendezvous.arrive(kernel):
                self._push(transfer.order, transfer)
            return
        kernel.end_ns = kernel.start_ns + kernel.work.dur_ns
        if self._contention is not None and isinstance(kernel.work, Compute):
            self._postpone(kernel, kernel.end_ns)

    def settle(self) -> set[int]:
        """Lets what comes next move or end; the ranks that may now go on, none when all is over."""
        while self._open:
            (at_ns, *_), _, item = heappop(self._open)
            if isinstance(item, Transfer):
                self._move(item)
                return item.ranks
            if self._computes_until(item) <= at_ns:
                item.end_ns = at_ns
                return {item.rank}
            self._postpone(item, self._computes_until(item))
        return set()

    def _move(self, transfer: Transfer) -> None:
        free_ns = [self._free_ns.get(link, 0) for link in transfer.links]
        transfer.move(max([transfer.ready_ns, *free_ns]))
        self._free_ns |= dict.fromkeys(transfer.links, transfer.end_ns)
        if self._contention is not None:
            for rank in transfer.ranks:
                self._contention.note(rank, transfer.start_ns, transfer.end_ns)

    def _computes_until(self, kernel: Kernel) -> int:
        assert self._contention is not None and isinstance(kernel.work, Compute)
        return self._contention.end_ns(kernel, kernel.work.dur_ns)

    def _postpone(self, kernel: Kernel, end_ns: int) -> None:
        kernel.end_ns = -1
        self._push((end_ns, False, kernel.rank, kernel.launch, 0), kernel)

    def _push(self, order: _Order, item: Kernel | Transfer) -> None:
        self._pushed += 1
        heappush(self._open, (order, self._pushed, item))
