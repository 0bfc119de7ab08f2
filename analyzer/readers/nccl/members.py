"""The communicators of a log, each as one process knows it, as its lines tell them."""

from __future__ import annotations

from dataclasses import dataclass, field

from stepsplit.analyzer.readers.nccl.lines import Speaker
from stepsplit.analyzer.readers.nccl.messages import Channels, Init, InitTime, Topology

Owner = tuple[str, int, int]
"""Host, pid and device: what holds one rank."""


@dataclass(slots=True)
class Handle:
    """One communicator as one process knows it; filled as the log goes on."""

    host: str
    pid: int
    pointer: str
    dev: int
    nranks: int
    rank: int = -1
    comm_id: str = ""
    nvml_dev: int = -1
    bus_id: str = ""
    parent: int = -1
    split: int = -1
    color: int | None = None
    key: int | None = None
    nodes: int = -1
    local_ranks: int = -1
    coll_channels: int = -1
    p2p_channels: int = -1
    init_ns: int = -1
    complete: bool = False

    @property
    def owner(self) -> Owner:
        return self.host, self.pid, self.dev


@dataclass(slots=True)
class Handles:
    """The handles of a log, in the order in which they are first named.

    A record that names no communicator belongs to the one that its thread is setting up: it keeps
    the number of a slot, which learns later whose it is.
    """

    all: list[Handle] = field(default_factory=list)
    _by_pointer: dict[tuple[str, int, str], int] = field(default_factory=dict)
    _slots: list[int] = field(default_factory=list)
    _processes: list[tuple[str, int]] = field(default_factory=list)
    _slot_of: dict[tuple[str, int, int], int] = field(default_factory=dict)
    _done: set[int] = field(default_factory=set)
    _channels: dict[int, Channels] = field(default_factory=dict)

    def see_init(self, by: Speaker, said: Init) -> None:
        """Takes over an "Init START" or "Init COMPLETE"."""
        index = self._at(by, said.pointer, said.rank, said.nranks, said.comm_id)
        handle = self.all[index]
        handle.complete = said.complete
        handle.comm_id = said.comm_id or handle.comm_id
        handle.dev = said.cuda_dev if said.cuda_dev >= 0 else handle.dev
        handle.nvml_dev = max(said.nvml_dev, handle.nvml_dev)
        handle.bus_id = said.bus_id or handle.bus_id
        handle.split = max(said.split, handle.split)
        if said.color is not None:
            handle.color, handle.key = said.color, said.key
            parent = self._by_pointer.get((by.host, by.pid, said.parent), -1)
            handle.parent = handle.parent if parent == index else parent
        if not said.complete:
            self._slot_of[by[:3]] = self._new_slot(by, index)
        slot = self._bound(by, index)
        if said.complete:
            self._done.add(slot)

    def see_topology(self, by: Speaker, said: Topology) -> None:
        """Takes over how many nodes a communicator spans."""
        index = self._at(by, said.pointer, said.rank, said.nranks, "")
        self.all[index].nodes, self.all[index].local_ranks = said.nodes, said.local_ranks
        self._bound(by, index)

    def see_init_time(self, by: Speaker, said: InitTime) -> None:
        """Takes over how long a setup took: that of the communicator that the thread completed."""
        slot = self._slot_of.get(by[:3], -1)
        index, ranks = self._slots[slot] if slot >= 0 else -1, (said.rank, said.nranks)
        if index < 0 or (self.all[index].rank, self.all[index].nranks) != ranks:
            index = self._new(by, "", said.nranks)
            self.all[index].rank = said.rank
        self.all[index].init_ns = said.init_ns

    def called(self, by: Speaker, pointer: str, nranks: int) -> int:
        """The index of the handle that a call names."""
        index = self._by_pointer.get((by.host, by.pid, pointer))
        return self._new(by, pointer, nranks) if index is None else index

    def slot(self, by: Speaker, pointer: str = "") -> int:
        """The slot of a record: that of the pointer, where the record ends with one."""
        index = self._by_pointer.get((by.host, by.pid, pointer), -1) if pointer else -1
        if index >= 0:
            return self._new_slot(by, index)
        slot = self._slot_of.get(by[:3], -1)
        if slot < 0 or slot in self._done:
            slot = self._slot_of[by[:3]] = self._new_slot(by, -1)
        return slot

    def see_channels(self, by: Speaker, said: Channels) -> None:
        """Takes over the numbers of channels, which precede the end of the setup."""
        slot = self.slot(by)
        self._channels[slot] = said
        if self._slots[slot] >= 0:
            self._bound(by, self._slots[slot])

    def in_slots(self) -> tuple[int, ...]:
        """The handle of each slot: as said, else the only one of its process, else -1."""
        only: dict[tuple[str, int], int] = {}
        for index, handle in enumerate(self.all):
            process = (handle.host, handle.pid)
            only[process] = -1 if process in only else index
        return tuple(
            index if index >= 0 else only.get(process, -1)
            for index, process in zip(self._slots, self._processes, strict=True)
        )

    def _at(self, by: Speaker, pointer: str, rank: int, nranks: int, comm_id: str) -> int:
        index = self._by_pointer.get((by.host, by.pid, pointer), -1)
        if index < 0 or self._is_other(self.all[index], rank, nranks, comm_id):
            index = self._new(by, pointer, nranks)
        self.all[index].rank, self.all[index].nranks = rank, nranks
        return index

    @staticmethod
    def _is_other(handle: Handle, rank: int, nranks: int, comm_id: str) -> bool:
        """Whether the pointer was freed and means another communicator now."""
        if handle.rank < 0:
            return False
        same = (handle.rank, handle.nranks) == (rank, nranks)
        ids = {comm_id, handle.comm_id} - {""}
        return handle.complete or not same or len(ids) > 1

    def _new(self, by: Speaker, pointer: str, nranks: int) -> int:
        self.all.append(Handle(by.host, by.pid, pointer, by.dev, nranks))
        if pointer:
            self._by_pointer[by.host, by.pid, pointer] = len(self.all) - 1
        return len(self.all) - 1

    def _bound(self, by: Speaker, index: int) -> int:
        slot = self.slot(by)
        if self._slots[slot] not in (-1, index):
            slot = self._slot_of[by[:3]] = self._new_slot(by, index)
        self._slots[slot] = index
        if slot in self._channels:
            channels = self._channels.pop(slot)
            self.all[index].coll_channels = channels.coll
            self.all[index].p2p_channels = channels.p2p
        return slot

    def _new_slot(self, by: Speaker, index: int) -> int:
        self._slots.append(index)
        self._processes.append((by.host, by.pid))
        return len(self._slots) - 1
