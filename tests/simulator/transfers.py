"""Kernels on their way, and the data that they move."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from simulator.noise import Place
from simulator.ran import DeviceWork, Moved


@dataclass(slots=True)
class Kernel:
    """A device event on its way: start_ns and end_ns are -1 until they are known.

    It starts at queued_ns at the earliest, and gap_ns after what its stream did last. place is
    where it was launched. calls has the place of each collective or message in the order of its
    kind; moves is None where the data has not yet moved.
    """

    rank: int
    work: DeviceWork
    launch: int
    place: Place
    queued_ns: int
    gap_ns: int = 0
    start_ns: int = -1
    end_ns: int = -1
    calls: tuple[int, ...] = ()
    moves: list[Moved | None] = field(default_factory=list)

    def settle(self, part: int, moved: Moved) -> None:
        """Notes when one part moved; the kernel ends with the last of them."""
        self.moves[part] = moved
        if None not in self.moves:
            self.end_ns = max(m.end_ns for m in self.moves if m is not None)


@dataclass(frozen=True, slots=True)
class Part:
    """One kernel's part in a transfer: last is the rank that it waited for.

    tail_ns is how much longer than the data the kernel takes.
    """

    kernel: Kernel
    part: int
    last: int
    tail_ns: int


@dataclass(slots=True)
class Transfer:
    """Data that may move from ready_ns on, for took_ns once its links are free.

    after is the transfer that brought what this one reads. start_ns and end_ns are -1 until they
    are known.
    """

    ready_ns: int
    took_ns: int
    links: tuple[Hashable, ...]
    parts: tuple[Part, ...]
    after: Transfer | None = None
    start_ns: int = -1
    end_ns: int = -1

    @property
    def ranks(self) -> set[int]:
        return {part.kernel.rank for part in self.parts}

    @property
    def order(self) -> tuple[int, bool, int, int, int]:
        """Whose turn it is where several want a link: the first to be ready, else the lower rank.

        What a transfer reads comes before it.
        """
        first = self.parts[0]
        launched = (first.kernel.rank, first.kernel.launch, first.part)
        return (self.ready_ns, self.after is not None, *launched)

    def move(self, from_ns: int) -> None:
        """Moves the data at that time; waiting for a link counts as moving for the kernels."""
        self.start_ns = from_ns
        read_ns = self.after.end_ns if self.after else 0
        self.end_ns = max(from_ns + self.took_ns, read_ns)
        for part in self.parts:
            moved = Moved(self.ready_ns, self.end_ns + part.tail_ns, part.last)
            part.kernel.settle(part.part, moved)
