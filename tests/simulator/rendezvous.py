"""When the data of collectives and messages moves, once those whom it needs have arrived."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from simulator.program import Collective, Messages, ProcessGroup
from simulator.ran import DeviceWork, Moved

EAGER_BYTES = 16 << 10
"""A send of at most so many bytes fits into the receiver's buffer and ends without it."""
_FROM_ROOT, _TO_ROOT = ("broadcast", "scatter"), ("reduce", "gather")


@dataclass(slots=True)
class Kernel:
    """A device event on its way: start_ns and end_ns are -1 until they are known.

    places has the place of each collective or message in the order of its kind; moves is None
    where the data has not yet moved.
    """

    rank: int
    work: DeviceWork
    launch: int
    queued_ns: int
    start_ns: int = -1
    end_ns: int = -1
    places: tuple[int, ...] = ()
    moves: list[Moved | None] = field(default_factory=list)

    def settle(self, part: int, moved: Moved) -> None:
        """Notes when one part moved; the kernel ends with the last of them."""
        self.moves[part] = moved
        if None not in self.moves:
            self.end_ns = max(m.end_ns for m in self.moves if m is not None)


_Channel = tuple[str, int, int]


class Rendezvous:
    """The collectives and messages of a job that are open."""

    def __init__(self, groups: Sequence[ProcessGroup]) -> None:
        self._groups = {group.name: group for group in groups}
        self._calls: Counter[tuple[str, int]] = Counter()
        self._posts: Counter[tuple[_Channel, str]] = Counter()
        self._members: dict[tuple[str, int], dict[int, Kernel]] = defaultdict(dict)
        self._ends: dict[tuple[_Channel, int], dict[str, tuple[Kernel, int]]] = defaultdict(dict)

    def number(self, kernel: Kernel) -> None:
        """Gives a launched kernel its places. Raises ValueError for a rank outside of the group."""
        work, rank = kernel.work, kernel.rank
        if isinstance(work, Collective):
            self._member(work.group, rank)
            kernel.places = (self._calls[work.group, rank],)
            self._calls[work.group, rank] += 1
        elif isinstance(work, Messages):
            kernel.places = tuple(self._post(kernel, part) for part in range(len(work.messages)))
        kernel.moves = [None] * len(kernel.places)

    def arrive(self, kernel: Kernel) -> set[int]:
        """The started kernel meets its counterparts; the ranks whose kernels now move data."""
        if isinstance(kernel.work, Collective):
            return self._arrive_at_collective(kernel, kernel.work)
        parts = range(len(kernel.places))
        if not parts:
            kernel.end_ns = kernel.start_ns
        return {rank for part in parts for rank in self._arrive_at_message(kernel, part)}

    def lacking(self, kernel: Kernel) -> list[int]:
        """The ranks for which a started kernel waits, for people."""
        if isinstance(kernel.work, Collective):
            there = self._members[kernel.work.group, kernel.places[0]]
            return sorted(_needed(kernel, kernel.work, self._groups) - there.keys())
        assert isinstance(kernel.work, Messages)
        open_parts = [part for part, moved in enumerate(kernel.moves) if moved is None]
        return sorted({kernel.work.messages[part].peer for part in open_parts})

    def _member(self, group: str, rank: int) -> None:
        if group not in self._groups or rank not in self._groups[group].ranks:
            raise ValueError(f"rank {rank} is no member of group {group!r}")

    def _post(self, kernel: Kernel, part: int) -> int:
        channel, op = _channel(kernel, part)
        for rank in channel[1:]:
            self._member(channel[0], rank)
        self._posts[channel, op] += 1
        return self._posts[channel, op] - 1

    def _arrive_at_collective(self, kernel: Kernel, work: Collective) -> set[int]:
        there = self._members[work.group, kernel.places[0]]
        there[kernel.rank] = kernel
        if len({k.work.op for k in there.values() if isinstance(k.work, Collective)}) > 1:
            raise ValueError(f"call {kernel.places[0]} of group {work.group!r} is of several ops")
        if work.op not in _FROM_ROOT + _TO_ROOT and len(there) < len(
            self._groups[work.group].ranks
        ):
            return set()
        moving = [k for k in there.values() if k.end_ns < 0]
        return {k.rank for k in moving if _move(k, there, self._groups)}

    def _arrive_at_message(self, kernel: Kernel, part: int) -> set[int]:
        channel, op = _channel(kernel, part)
        there = self._ends[channel, kernel.places[part]]
        there[op] = (kernel, part)
        if op == "send" and _is_eager(kernel, part):
            kernel.settle(part, _moved(kernel, part, kernel, part))
        if len(there) < 2:
            return set()
        (sender, sent), (receiver, received) = there["send"], there["recv"]
        if sender.moves[sent] is None:
            sender.settle(sent, _moved(sender, sent, receiver, received))
        receiver.settle(received, _moved(receiver, received, sender, sent))
        return {sender.rank, receiver.rank}


def _channel(kernel: Kernel, part: int) -> tuple[_Channel, str]:
    assert isinstance(kernel.work, Messages)
    message = kernel.work.messages[part]
    ends = (kernel.rank, message.peer)
    return (kernel.work.group, *(ends if message.op == "send" else ends[::-1])), message.op


def _is_eager(kernel: Kernel, part: int) -> bool:
    assert isinstance(kernel.work, Messages)
    return kernel.work.messages[part].message_bytes <= EAGER_BYTES


def _moved(kernel: Kernel, part: int, other: Kernel, other_part: int) -> Moved:
    """A message moves from the later arrival on, for the longer of the times its ends state."""
    start = max(kernel.start_ns, other.start_ns)
    took = max(_message_ns(kernel, part), _message_ns(other, other_part))
    last = other.rank if other.start_ns > kernel.start_ns else kernel.rank
    return Moved(start, start + took, last)


def _message_ns(kernel: Kernel, part: int) -> int:
    assert isinstance(kernel.work, Messages)
    return kernel.work.messages[part].transfer_ns


def _needed(kernel: Kernel, work: Collective, groups: Mapping[str, ProcessGroup]) -> frozenset[int]:
    """Whose arrival the rank's part of a collective needs: of all, of the root, or of itself."""
    if work.op in _FROM_ROOT:
        return frozenset({kernel.rank, work.root})
    if work.op in _TO_ROOT and kernel.rank != work.root:
        return frozenset({kernel.rank})
    return frozenset(groups[work.group].ranks)


def _move(kernel: Kernel, there: Mapping[int, Kernel], groups: Mapping[str, ProcessGroup]) -> bool:
    """Ends the kernel if all whom it needs are there; says whether they are."""
    assert isinstance(kernel.work, Collective)
    needed = _needed(kernel, kernel.work, groups)
    if not needed <= there.keys():
        return False
    start = max(there[rank].start_ns for rank in needed)
    late = [rank for rank in sorted(needed) if there[rank].start_ns == start]
    took = max(_transfer_ns(there[rank]) for rank in needed)
    last = kernel.rank if kernel.rank in late else late[0]
    kernel.settle(0, Moved(start, start + took, last))
    return True


def _transfer_ns(kernel: Kernel) -> int:
    assert isinstance(kernel.work, Collective)
    return kernel.work.transfer_ns
