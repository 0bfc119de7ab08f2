"""How far each rank came: its calls and their states, and its last sequence number by group."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from stepsplit.analyzer.hang.groups import JobGroup, JobGroups
from stepsplit.analyzer.readers.flight_recorder import FlightDump, FlightEntry, Frame, op_of

MISSING, ENQUEUED, STARTED, COMPLETED = "missing", "enqueued", "started", "completed"
_JOINS = "coalesced"
_BY_OUTPUT = ("all_gather", "scatter")
_OF_ANY_SIZE = ("all_to_all", "unknown")


@dataclass(frozen=True, slots=True)
class Called:
    """One call of one rank, and how far it came.

    peer is the other end of a message, -1 where unknown and for a collective. agreed_bytes is the
    size that all members must hand in alike, -1 where they need not or it is unknown.
    """

    rank: int
    group: JobGroup
    seq: int
    op: str
    dtype: str
    message_bytes: int
    agreed_bytes: int
    is_message: bool
    peer: int
    state: str
    created_unix_ns: int
    stack: tuple[Frame, ...]

    @property
    def pending(self) -> bool:
        return self.state != COMPLETED


@dataclass(frozen=True, slots=True)
class Reach:
    """The last sequence numbers of a rank on a group; -1 for none."""

    enqueued: int
    completed: int


_NOWHERE = Reach(-1, -1)


@dataclass(frozen=True, slots=True)
class Progress:
    """What one rank had called, by creation; open are the calls that are not done."""

    rank: int
    calls: tuple[Called, ...]
    open: tuple[Called, ...]
    _collectives: Mapping[tuple[JobGroup, int], Called]
    _reach: Mapping[JobGroup, Reach]
    _stated: Mapping[JobGroup, Reach]

    @property
    def collectives(self) -> Iterable[Called]:
        """The rank's collectives; of several that were joined into one, the last."""
        return self._collectives.values()

    def collective(self, group: JobGroup, seq: int) -> Called | None:
        """The rank's own record of a collective; None where it has none (any more)."""
        return self._collectives.get((group, seq))

    def reach(self, group: JobGroup) -> Reach:
        """How far the rank came with the group's collectives."""
        return self._reach.get(group, _NOWHERE)

    def stated(self, group: JobGroup) -> Reach:
        """How far the rank came on the group as its dump states, messages counted as well."""
        return self._stated.get(group, _NOWHERE)

    def state(self, group: JobGroup, seq: int) -> str:
        """How far a collective of the group came on the rank, even where the ring lost it."""
        if (call := self.collective(group, seq)) is not None:
            return call.state
        reach = self.reach(group)
        if seq > reach.enqueued:
            return MISSING
        return COMPLETED if seq <= reach.completed else ENQUEUED


def progress_of(dumps: Sequence[FlightDump], groups: JobGroups) -> tuple[Progress, ...]:
    """The progress of each dump's rank, in the order of the ranks."""
    calls = {dump.rank: tuple(_called(dump, groups)) for dump in dumps}
    # A status counts collectives and messages alike: with messages it says nothing of collectives.
    mixed = {call.group for found in calls.values() for call in found if call.is_message}
    return tuple(
        _progress(dump, calls[dump.rank], groups, mixed)
        for dump in sorted(dumps, key=lambda dump: dump.rank)
    )


def _progress(
    dump: FlightDump, calls: tuple[Called, ...], groups: JobGroups, mixed: set[JobGroup]
) -> Progress:
    collectives = {(call.group, call.seq): call for call in calls if not call.is_message}
    stated = {
        group: Reach(status.last_enqueued, status.last_completed)
        for status in dump.statuses
        if (group := groups.of(dump.rank, status.group_name)) is not None
    }
    reach = {group: one for group, one in stated.items() if group not in mixed}
    for (group, seq), call in collectives.items():
        known = reach.get(group, _NOWHERE)
        completed = known.completed if call.pending else max(known.completed, seq)
        reach[group] = Reach(max(known.enqueued, seq), completed)
    still_open = tuple(call for call in calls if call.pending)
    return Progress(dump.rank, calls, still_open, collectives, reach, stated)


def _called(dump: FlightDump, groups: JobGroups) -> Iterator[Called]:
    """The calls on known groups. Of calls joined into one only the join has a state."""
    joins = {_place(one): one for one in dump.entries if one.name.endswith(_JOINS)}
    joined = {_place(one) for one in dump.entries if not one.name.endswith(_JOINS)}
    sizes, peers = dump.calls.calls.message_bytes.tolist(), dump.calls.calls.peer.tolist()
    for entry, size, peer in zip(dump.entries, sizes, peers, strict=True):
        group = groups.of(dump.rank, entry.group_name)
        if (
            group is None
            or entry.seq < 0
            or (entry.name.endswith(_JOINS) and _place(entry) in joined)
        ):
            continue
        op = op_of(entry.name)
        yield Called(
            dump.rank, group, entry.seq, entry.name if op == "unknown" else op, entry.dtype, size,
            _agreed_bytes(op, entry), entry.is_p2p, _peer(dump.rank, group, peer, entry),
            _state(joins.get(_place(entry), entry)), entry.created_unix_ns, entry.stack,
        )  # fmt: skip


def _place(entry: FlightEntry) -> tuple[str, int, bool]:
    return entry.group_name, entry.seq, entry.is_p2p


def _peer(rank: int, group: JobGroup, peer: int, entry: FlightEntry) -> int:
    if peer >= 0 or not entry.is_p2p or len(group.ranks) != 2:
        return peer
    return next((other for other in group.ranks if other != rank), -1)


def _agreed_bytes(op: str, entry: FlightEntry) -> int:
    if op in _OF_ANY_SIZE or entry.is_p2p:
        return -1
    return entry.output_bytes if op in _BY_OUTPUT else entry.input_bytes


def _state(entry: FlightEntry) -> str:
    """gloo leaves every state as it was at the call: there, retired is completed."""
    if entry.state == COMPLETED or (entry.retired and entry.state != STARTED):
        return COMPLETED
    return STARTED if entry.state == STARTED else ENQUEUED
