"""The progress of each rank: its calls, their states, and its last sequence number by group."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

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
    for rank in failed:
        if calls.get(rank):
            *before, last = calls[rank]
            calls[rank] = (*before, replace(last, state=ENQUEUED))
    # A status has the number of the newest call, be it a message or a collective, which count
    # each on their own: it says how far a rank came in a group that has only one of the two.
    every = [call for found in calls.values() for call in found]
    with_messages = {call.group for call in every if call.is_message}
    with_collectives = {call.group for call in every if not call.is_message}
    ranks = []
    for dump in sorted(dumps, key=lambda dump: dump.rank):
        own = calls[dump.rank]
        stated = {
            group: Reach(status.last_enqueued, status.last_completed)
            for status in dump.statuses
            if (group := groups.find_group(dump.rank, status.group_name)) is not None
        }
        reach = {group: one for group, one in stated.items() if group not in with_messages}
        reported = {group: one for group, one in stated.items() if group not in with_collectives}
        collectives = {(call.group, call.seq): call for call in own if not call.is_message}
        for (group, seq), call in collectives.items():
            known = reach.get(group, _NO_REACH)
            completed = min(known.completed, seq - 1) if call.pending else max(known.completed, seq)
            reach[group] = Reach(max(known.enqueued, seq), completed)
        still_open = tuple(call for call in own if call.pending)
        ranks.append(Progress(dump.rank, own, still_open, collectives, reach, reported))
    return tuple(ranks)


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
        if peer < 0 and entry.is_p2p and len(group.ranks) == 2:
            peer = next((other for other in group.ranks if other != dump.rank), -1)
        # Only the root of a scatter has an input, and inputs of an all_gather may be uneven: their
        # outputs are of one size on all ranks.
        agreed = entry.output_bytes if op in _OUTPUT_SIZED else entry.input_bytes
        if op in _SIZE_MAY_DIFFER or entry.is_p2p:
            agreed = -1
        last = joins.get(_identify_entry(entry), entry)
        # gloo never updates the state: there, a retired call is completed.
        if last.state == COMPLETED or (last.retired and last.state != STARTED):
            state = COMPLETED
        else:
            state = STARTED if last.state == STARTED else ENQUEUED
        yield Called(
            dump.rank,
            group,
            entry.seq,
            entry.name if op == "unknown" else op,
            entry.dtype,
            size,
            agreed,
            entry.is_p2p,
            peer,
            state,
            entry.created_unix_ns,
            entry.stack,
        )


def _identify_entry(entry: FlightEntry) -> tuple[str, int, bool]:
    return entry.group_name, entry.seq, entry.is_p2p
