"""Whose arrival the data of collectives and messages needs before it may move."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable

from simulator.noise import Noise
from simulator.program import Collective, Job, Messages
from simulator.transfers import Kernel, Part, Transfer

EAGER_BYTES = 16 << 10
"""A send of at most so many bytes fits into the receiver's buffer and ends without it."""
_FROM_ROOT, _TO_ROOT = ("broadcast", "scatter"), ("reduce", "gather")
_Channel = tuple[str, int, int]


class Rendezvous:
    """The collectives and messages of a job that are open.

    A message takes the link from its sender to its receiver; a collective that all move at once
    takes its group and, across hosts, their network. Calls with a root take no link.
    """

    def __init__(self, job: Job, noise: Noise) -> None:
        self._noise = noise
        self._groups = {group.name: group for group in job.groups}
        self._hosts = {g.name: frozenset(job.hosts[r] for r in g.ranks) for g in job.groups}
        self._calls: Counter[tuple[str, int]] = Counter()
        self._posts: Counter[tuple[_Channel, str]] = Counter()
        self._members: dict[tuple[str, int], dict[int, Kernel]] = defaultdict(dict)
        self._ends: dict[tuple[_Channel, int], dict[str, tuple[Kernel, int]]] = defaultdict(dict)
        self._eager: dict[tuple[_Channel, int], Transfer] = {}

    def number(self, kernel: Kernel) -> None:
        """Numbers a launched kernel's calls. Raises ValueError for a rank outside of the group."""
        work, rank = kernel.work, kernel.rank
        if isinstance(work, Collective):
            self._member(work.group, rank)
            kernel.calls = (self._calls[work.group, rank],)
            self._calls[work.group, rank] += 1
        elif isinstance(work, Messages):
            kernel.calls = tuple(self._post(kernel, part) for part in range(len(work.messages)))
        kernel.moves = [None] * len(kernel.calls)

    def arrive(self, kernel: Kernel) -> list[Transfer]:
        """The started kernel meets its counterparts; the transfers that are now ready."""
        if isinstance(kernel.work, Collective):
            return self._arrive_at_collective(kernel, kernel.work)
        parts = range(len(kernel.calls))
        if not parts:
            kernel.end_ns = kernel.start_ns
        return [ready for part in parts for ready in self._arrive_at_message(kernel, part)]

    def lacking(self, kernel: Kernel) -> list[int]:
        """The ranks for which a started kernel waits, for people."""
        if isinstance(kernel.work, Collective):
            there = self._members[kernel.work.group, kernel.calls[0]]
            return sorted(self._needed(kernel, kernel.work) - there.keys())
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

    def _arrive_at_collective(self, kernel: Kernel, work: Collective) -> list[Transfer]:
        there = self._members[work.group, kernel.calls[0]]
        there[kernel.rank] = kernel
        if len({k.work.op for k in there.values() if isinstance(k.work, Collective)}) > 1:
            raise ValueError(f"call {kernel.calls[0]} of group {work.group!r} is of several ops")
        if work.op not in _FROM_ROOT + _TO_ROOT:
            whole = len(there) == len(self._groups[work.group].ranks)
            return [self._together(work, kernel.calls[0], list(there.values()))] if whole else []
        return [
            self._together(work, kernel.calls[0], [k], [there[rank] for rank in sorted(needed)])
            for k in there.values()
            if kernel.rank in (needed := self._needed(k, work)) and needed <= there.keys()
        ]

    def _needed(self, kernel: Kernel, work: Collective) -> frozenset[int]:
        """Whose arrival a rank's part of a collective needs: all, the root's, or its own."""
        assert isinstance(kernel.work, Collective)
        if work.op in _FROM_ROOT:
            return frozenset({kernel.rank, kernel.work.root})
        if work.op in _TO_ROOT and kernel.rank != kernel.work.root:
            return frozenset({kernel.rank})
        return frozenset(self._groups[work.group].ranks)

    def _together(
        self, work: Collective, call: int, moving: list[Kernel], needed: list[Kernel] | None = None
    ) -> Transfer:
        """The transfer of these kernels once the needed ones are there: themselves by default."""
        several = len(moving) > 1
        needed = needed or sorted(moving, key=lambda kernel: kernel.rank)
        start_ns = max(kernel.start_ns for kernel in needed)
        late = [kernel.rank for kernel in needed if kernel.start_ns == start_ns]
        took_ns = max(k.work.transfer_ns for k in needed if isinstance(k.work, Collective))
        return Transfer(
            start_ns,
            self._noise.transferred_ns(took_ns, work.group, call),
            self._links(work.group) if several else (),
            tuple(self._part(kernel, call, late) for kernel in moving),
        )

    def _links(self, group: str) -> tuple[Hashable, ...]:
        hosts = self._hosts[group]
        return (group, hosts) if len(hosts) > 1 else (group,)

    def _part(self, kernel: Kernel, call: int, late: list[int]) -> Part:
        work, rank = kernel.work, kernel.rank
        assert isinstance(work, Collective)
        tail_ns = self._noise.tail_of(work.group, call, work.op, work.message_bytes, rank)
        return Part(kernel, 0, rank if rank in late else late[0], tail_ns)

    def _arrive_at_message(self, kernel: Kernel, part: int) -> list[Transfer]:
        channel, op = _channel(kernel, part)
        at = (channel, kernel.calls[part])
        there = self._ends[at]
        there[op] = (kernel, part)
        found = []
        if op == "send" and _is_eager(kernel, part):
            self._eager[at] = self._message(at, (channel[1:],), there["send"])
            found.append(self._eager[at])
        if len(there) == 2:
            sender, receiver = there["send"], there["recv"]
            if eager := self._eager.get(at):
                found.append(self._message(at, (), receiver, sender, after=eager, moving=1))
            else:
                found.append(self._message(at, (channel[1:],), sender, receiver))
        return found

    def _message(
        self,
        at: tuple[_Channel, int],
        links: tuple[Hashable, ...],
        *ends: tuple[Kernel, int],
        after: Transfer | None = None,
        moving: int = 2,
    ) -> Transfer:
        """A message moves from the later arrival on, for the longer of the times its ends state.

        Of its ends the first so many take part.
        """
        start_ns = max(kernel.start_ns for kernel, _ in ends)
        late = [kernel.rank for kernel, _ in ends if kernel.start_ns == start_ns]
        took_ns = self._noise.transferred_ns(max(_took_ns(*end) for end in ends), *at)
        parts = tuple(
            Part(
                kernel,
                part,
                kernel.rank if kernel.rank in late else late[0],
                self._noise.message_tail_of(kernel.rank, kernel.place),
            )
            for kernel, part in ends[:moving]
        )
        return Transfer(start_ns, took_ns, links, parts, after)


def _channel(kernel: Kernel, part: int) -> tuple[_Channel, str]:
    assert isinstance(kernel.work, Messages)
    message = kernel.work.messages[part]
    ends = (kernel.rank, message.peer)
    return (kernel.work.group, *(ends if message.op == "send" else ends[::-1])), message.op


def _is_eager(kernel: Kernel, part: int) -> bool:
    assert isinstance(kernel.work, Messages)
    return kernel.work.messages[part].message_bytes <= EAGER_BYTES


def _took_ns(kernel: Kernel, part: int) -> int:
    assert isinstance(kernel.work, Messages)
    return kernel.work.messages[part].transfer_ns
