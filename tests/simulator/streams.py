"""A stream of a device: work in the order in which it was queued."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from simulator.agenda import Agenda
from simulator.transfers import Kernel


@dataclass(slots=True)
class Event:
    """What Record marks; -1 until its stream has come there."""

    reached_ns: int = -1


@dataclass(frozen=True, slots=True)
class Recorded:
    """The place of a stream that an event marks."""

    event: Event


@dataclass(frozen=True, slots=True)
class Waited:
    """The place of a stream behind which all waits for an event."""

    event: Event


@dataclass(slots=True)
class Stream:
    """What is queued, and until when the stream is busy with what was.

    slots are the kernels that took a place of the queue, one a launch.
    """

    free_ns: int = 0
    queue: deque[Kernel | Recorded | Waited] = field(default_factory=deque)
    slots: list[Kernel] = field(default_factory=list)

    def push(self, kernel: Kernel) -> None:
        """Queues the kernel; the kernels of one graph take one place."""
        self.queue.append(kernel)
        if not self.slots or self.slots[-1].launch != kernel.launch:
            self.slots.append(kernel)

    def place_ns(self, depth: int) -> int:
        """When the queue has a place: once the kernel that is depth places ahead starts.

        0 where it always had one, -1 while unknown.
        """
        return self.slots[-depth].start_ns if len(self.slots) >= depth else 0

    def advance(self, agenda: Agenda) -> None:
        """Works off what can be."""
        while self.queue:
            item = self.queue[0]
            if isinstance(item, Kernel):
                self._start(item, agenda)
                reached_ns = item.end_ns
            elif isinstance(item, Waited):
                reached_ns = item.event.reached_ns
            else:
                reached_ns = item.event.reached_ns = self.free_ns
            if reached_ns < 0:
                break
            self.free_ns = max(self.free_ns, reached_ns)
            self.queue.popleft()

    def _start(self, kernel: Kernel, agenda: Agenda) -> None:
        if kernel.start_ns < 0:
            kernel.start_ns = max(self.free_ns + kernel.gap_ns, kernel.queued_ns)
            agenda.begin(kernel)
