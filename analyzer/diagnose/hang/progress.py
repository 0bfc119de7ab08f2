"""The progress of each rank: its calls, their states, and its last sequence number by group."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from msgspec import Struct

from stepsplit.analyzer.diagnose.hang.job_groups import JobGroup, JobGroups
from stepsplit.analyzer.readers.flight_recorder import (
    FlightDump,
    FlightEntry,
    Frame,
    parse_entry_op,
)

MISSING, ENQUEUED, STARTED, COMPLETED = "missing", "enqueued", "started", "completed"
"""The state of a rank in a call."""


UNKNOWN = "unknown"


_JOINED_SUFFIX = "coalesced"


_OUTPUT_SIZED = ("all_gather", "scatter")


_SIZE_MAY_DIFFER = ("all_to_all", "unknown")


@dataclass(frozen=True, slots=True)
class Called:
    """One call of one rank and its state.

    peer is the other end of a message, -1 if unknown or a collective. agreed_bytes is the size on
    which all members must agree, -1 if they need not or it is unknown.
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


class Reach(Struct, frozen=True):
    """The last sequence numbers of a rank on a group; -1 for none."""

    enqueued: int
    completed: int


_NO_REACH = Reach(-1, -1)


class Progress(Struct, frozen=True):
    """The calls of one rank in order of creation; open are those that are not completed."""

    rank: int
    calls: tuple[Called, ...]
    open: tuple[Called, ...]
    _collectives: Mapping[tuple[JobGroup, int], Called]
    _reach: Mapping[JobGroup, Reach]
    _reported: Mapping[JobGroup, Reach]

    @property
    def collectives(self) -> Iterable[Called]:
        """The rank's collectives; of several coalesced ones, the last."""
        return self._collectives.values()

    def find_collective(self, group: JobGroup, seq: int) -> Called | None:
        """The rank's record of a collective; None if not (or no longer) in its ring buffer."""
        return self._collectives.get((group, seq))

    def find_reach(self, group: JobGroup) -> Reach:
        """The rank's progress in the collectives of the group."""
        return self._reach.get(group, _NO_REACH)

    def find_reported_reach(self, group: JobGroup) -> Reach:
        """The rank's progress in a group without collectives by the status in its dump: that has
        the number of the newest call, which messages and collectives count each on their own."""
        return self._reported.get(group, _NO_REACH)

    def infer_state(self, group: JobGroup, seq: int) -> str:
        """The state of a collective on the rank, also if its ring buffer has dropped it."""
        if (call := self.find_collective(group, seq)) is not None:
            return call.state
        reach = self.find_reach(group)
        if seq > reach.enqueued:
            return MISSING
        return COMPLETED if seq <= reach.completed else ENQUEUED


def collect_progress(
    dumps: Sequence[FlightDump], groups: JobGroups, failed: frozenset[int] = frozenset()
) -> tuple[Progress, ...]:
    """The progress of the rank of each dump, sorted by rank.

    failed: ranks whose last call raised an error; torch counts such a call as completed.
    """
    calls = {dump.rank: tuple(_read_calls(dump, groups)) for dump in dumps}
    calls |= {rank: _reopen_last(calls[rank]) for rank in failed if calls.get(rank)}
    # A status has the number of the newest call, be it a message or a collective.
    every = [call for found in calls.values() for call in found]
    kinds = _CallKinds(
        frozenset(call.group for call in every if call.is_message),
        frozenset(call.group for call in every if not call.is_message),
    )
    return tuple(
        _build_progress(dump, calls[dump.rank], groups, kinds)
        for dump in sorted(dumps, key=lambda dump: dump.rank)
    )


def _reopen_last(calls: tuple[Called, ...]) -> tuple[Called, ...]:
    return (*calls[:-1], replace(calls[-1], state=ENQUEUED))


class _CallKinds(NamedTuple):
    """The groups with messages, and those with collectives."""

    with_messages: frozenset[JobGroup]
    with_collectives: frozenset[JobGroup]


def _build_progress(
    dump: FlightDump, calls: tuple[Called, ...], groups: JobGroups, kinds: _CallKinds
) -> Progress:
    collectives = {(call.group, call.seq): call for call in calls if not call.is_message}
    stated = {
        group: Reach(status.last_enqueued, status.last_completed)
        for status in dump.statuses
        if (group := groups.find_group(dump.rank, status.group_name)) is not None
    }
    reach = {group: one for group, one in stated.items() if group not in kinds.with_messages}
    reported = {group: one for group, one in stated.items() if group not in kinds.with_collectives}
    for (group, seq), call in collectives.items():
        known = reach.get(group, _NO_REACH)
        completed = min(known.completed, seq - 1) if call.pending else max(known.completed, seq)
        reach[group] = Reach(max(known.enqueued, seq), completed)
    still_open = tuple(call for call in calls if call.pending)
    return Progress(dump.rank, calls, still_open, collectives, reach, reported)


def _read_calls(dump: FlightDump, groups: JobGroups) -> Iterator[Called]:
    """The calls in known groups. Of coalesced calls only the last entry has a state."""
    joins = {_identify_entry(one): one for one in dump.entries if one.name.endswith(_JOINED_SUFFIX)}
    joined = {_identify_entry(one) for one in dump.entries if not one.name.endswith(_JOINED_SUFFIX)}
    sizes, peers = dump.calls.calls.message_bytes.tolist(), dump.calls.calls.peer.tolist()
    for entry, size, peer in zip(dump.entries, sizes, peers, strict=True):
        group = groups.find_group(dump.rank, entry.group_name)
        if (
            group is None
            or entry.seq < 0
            or (entry.name.endswith(_JOINED_SUFFIX) and _identify_entry(entry) in joined)
        ):
            continue
        op = parse_entry_op(entry.name)
        yield Called(
            dump.rank,
            group,
            entry.seq,
            entry.name if op == "unknown" else op,
            entry.dtype,
            size,
            _select_agreed_bytes(op, entry),
            entry.is_p2p,
            _infer_peer(dump.rank, group, peer, entry),
            _classify_state(joins.get(_identify_entry(entry), entry)),
            entry.created_unix_ns,
            entry.stack,
        )


def _identify_entry(entry: FlightEntry) -> tuple[str, int, bool]:
    return entry.group_name, entry.seq, entry.is_p2p


def _infer_peer(rank: int, group: JobGroup, peer: int, entry: FlightEntry) -> int:
    if peer >= 0 or not entry.is_p2p or len(group.ranks) != 2:
        return peer
    return next((other for other in group.ranks if other != rank), -1)


def _select_agreed_bytes(op: str, entry: FlightEntry) -> int:
    if op in _SIZE_MAY_DIFFER or entry.is_p2p:
        return -1
    return entry.output_bytes if op in _OUTPUT_SIZED else entry.input_bytes


def _classify_state(entry: FlightEntry) -> str:
    """The state of an entry; gloo never updates the state, so retired counts as completed."""
    if entry.state == COMPLETED or (entry.retired and entry.state != STARTED):
        return COMPLETED
    return STARTED if entry.state == STARTED else ENQUEUED
