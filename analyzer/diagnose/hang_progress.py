"""The progress of each rank in each group, the stuck calls, and which ranks wait for which."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec
from msgspec import Struct

from stepsplit.analyzer.diagnose.hang_result import (
    Mismatch,
    MismatchSide,
    Missing,
    Stuck,
    StuckGroup,
)
from stepsplit.analyzer.readers.flight_recorder import (
    FlightDump,
    FlightEntry,
    Frame,
    parse_entry_op,
)
from stepsplit.analyzer.readers.rank_traces import MAX_RANKS
from stepsplit.analyzer.trace import Group

# The wait-for graph: the ranks at which the chains of waits end.

_Edges = Mapping[int, Sequence[int]]


class ChainEnd(Struct, frozen=True):
    """Ranks that wait only for each other through calls (indices), and the ranks they block."""

    ranks: tuple[int, ...]
    calls: tuple[int, ...]
    blocked: tuple[int, ...]


def find_chain_ends(stuck: Sequence[Stuck]) -> tuple[ChainEnd, ...]:
    """The ends of the chains of waits. Nodes are ranks, and calls as ~index."""
    edges = _build_edges(stuck)
    back = _reverse_edges(edges)
    ends = []
    for part in _find_components(edges, back):
        if any(other not in part for node in part for other in edges[node]):
            continue
        # The nodes and all nodes reachable from them.
        reached, todo = set(part), list(part)
        while todo:
            new = set(back[todo.pop()]) - reached
            reached |= new
            todo += new
        above = reached - part
        ranks = tuple(sorted(node for node in part if node >= 0))
        calls = tuple(sorted(~node for node in part if node < 0))
        if ranks and (above or calls):
            ends.append(ChainEnd(ranks, calls, tuple(sorted(n for n in above if n >= 0))))
    return tuple(sorted(ends, key=lambda end: (-len(end.blocked), end.ranks)))


def _build_edges(stuck: Sequence[Stuck]) -> dict[int, list[int]]:
    edges: dict[int, list[int]] = {}
    for place, call in enumerate(stuck):
        if call.waits_for:
            edges[~place] = list(call.waits_for)
            for rank in call.waiting:
                edges.setdefault(rank, []).append(~place)
    for others in list(edges.values()):
        for other in others:
            edges.setdefault(other, [])
    return edges


def _reverse_edges(edges: _Edges) -> dict[int, list[int]]:
    back: dict[int, list[int]] = {node: [] for node in edges}
    for node, others in edges.items():
        for other in others:
            back[other].append(node)
    return back


def _find_components(edges: _Edges, back: _Edges) -> list[set[int]]:
    """The strongly connected components (Kosaraju)."""
    parts: list[set[int]] = []
    placed: set[int] = set()
    for node in reversed(_order_by_finish(edges)):
        if node in placed:
            continue
        part, todo = {node}, [node]
        placed.add(node)
        while todo:
            new = set(back[todo.pop()]) - placed
            part |= new
            placed |= new
            todo += new
        parts.append(part)
    return parts


def _order_by_finish(edges: _Edges) -> list[int]:
    """The nodes in the post-order of a depth-first search."""
    order: list[int] = []
    visited: set[int] = set()
    for root in edges:
        todo = [(root, False)]
        while todo:
            node, leaving = todo.pop()
            if leaving:
                order.append(node)
            elif node not in visited:
                visited.add(node)
                todo.append((node, True))
                todo += [(other, False) for other in edges[node] if other not in visited]
    return order


# Messages between two ranks that do not end, and those whose peer is missing.

_UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, eq=False)
class JobGroup:
    """A process group of the job; one object per group, compared by identity."""

    name: str
    ranks: tuple[int, ...]
    description: str


_Ends = tuple[JobGroup, int, int]


def find_stuck_messages(ranks: Sequence[Progress]) -> tuple[Stuck, ...]:
    """The first stuck message of each rank and link whose peer has a known state.

    Messages are matched by sequence number if both ends count alike. In a group of more than two
    ranks each rank counts its own messages; there they are matched by the number of open messages.
    """
    present = {rank.rank: rank for rank in ranks}
    messages: dict[tuple[_Ends, int], Stuck] = {}
    for rank in ranks:
        # The rank's open messages by link and direction, oldest first.
        links: dict[_Ends, list[Called]] = defaultdict(list)
        for call in rank.open:
            if call.is_message:
                links[_identify_link(call)].append(call)
        for calls in links.values():
            stuck = _find_first_stuck(calls, present)
            messages.setdefault((_identify_link(calls[0]), stuck.seq), stuck)
    return tuple(messages.values())


def _identify_link(call: Called) -> _Ends:
    """The message's group, sender and receiver."""
    ends = (call.rank, call.peer) if call.op == "send" else (call.peer, call.rank)
    return call.group, *ends


def _find_first_stuck(calls: Sequence[Called], present: Mapping[int, Progress]) -> Stuck:
    known = [
        (call, state) for call, state in _infer_peer_states(calls, present) if state != _UNKNOWN
    ]
    # A peer that has completed its end is not waiting.
    waits = [one for one in known if one[1] != COMPLETED]
    call, state = (waits or known or [(calls[0], _UNKNOWN)])[0]
    # The message from the view of one end; state is that of the other end.
    queued = len(calls) - calls.index(call) - 1
    peer, here = call.peer, (call.rank,)
    lost = peer >= 0 and peer not in present
    both = state in (ENQUEUED, STARTED)
    waiting = tuple(sorted((call.rank, peer))) if both else here
    started = call.state == STARTED
    return Stuck(
        group=describe_group(call.group),
        op=call.op,
        seq=call.seq,
        dtype=call.dtype or None,
        message_bytes=call.message_bytes if call.message_bytes >= 0 else None,
        called_unix_ns=str(call.created_unix_ns),
        enqueued=() if started else waiting,
        started=waiting if started else (),
        completed=(peer,) if state == COMPLETED else (),
        missing=(_describe_missing_peer(present[peer], call.group),) if state == MISSING else (),
        no_dump=(peer,) if lost else (),
        waits_for=(peer,) if lost or state == MISSING else waiting if both else (),
        queued=queued,
    )


def _infer_peer_states(
    calls: Sequence[Called], present: Mapping[int, Progress]
) -> Iterator[tuple[Called, str]]:
    """The state of the other end of each message."""
    peer = present.get(calls[0].peer)
    if peer is None:
        yield from ((call, _UNKNOWN) for call in calls)
        return
    ends = [call for call in peer.calls if call.is_message and _is_counterpart(call, calls[0])]
    pending = sum(end.pending for end in ends)
    for i, call in enumerate(calls):
        same = next((end.state for end in ends if end.seq == call.seq), None)
        yield call, same or _infer_by_count(call, peer, ends, i < pending)


def _infer_by_count(call: Called, peer: Progress, ends: Sequence[Called], enough: bool) -> str:
    if len(call.group.ranks) != 2:
        return _UNKNOWN if enough else MISSING
    if ends or any(one.is_message and one.group is call.group for one in peer.calls):
        last = max((end.seq for end in ends), default=-1)
    else:
        last = peer.find_reported_reach(call.group).enqueued
    return COMPLETED if call.seq <= last else MISSING


def _is_counterpart(end: Called, call: Called) -> bool:
    return end.op != call.op and _identify_link(end) == _identify_link(call)


def _describe_missing_peer(peer: Progress, group: JobGroup) -> Missing:
    """The progress of the peer, unknown in groups of more than two ranks (several links)."""
    stated = peer.find_reported_reach(group)
    if len(group.ranks) != 2 or stated.enqueued < 0:
        return Missing(peer.rank, None, None)
    return Missing(peer.rank, stated.enqueued, stated.completed if stated.completed >= 0 else None)


# Collectives that do not end, the state of each member, and mismatches between members.


def find_stuck_collectives(
    ranks: Sequence[Progress], mismatches: Sequence[Mismatch]
) -> tuple[Stuck, ...]:
    """The stuck collectives: the first open one of each rank in each group."""
    fronts = {(call.group, call.seq): call for rank in ranks for call in _find_first_open(rank)}
    present = {rank.rank: rank for rank in ranks}
    disagreed = {(one.group, one.seq): one.odd for one in mismatches if not one.is_message}
    return tuple(
        _build_stuck_collective(call, present, disagreed.get((describe_group(group), seq), ()))
        for (group, seq), call in fronts.items()
    )


def describe_group(group: JobGroup) -> StuckGroup:
    """The group as it is reported."""
    return StuckGroup(group.name, group.description, group.ranks)


def _find_first_open(rank: Progress) -> list[Called]:
    first: dict[JobGroup, Called] = {}
    for call in rank.open:
        known = first.get(call.group)
        if not call.is_message and (known is None or call.seq < known.seq):
            first[call.group] = call
    return list(first.values())


def _build_stuck_collective(
    call: Called, present: Mapping[int, Progress], odd: tuple[int, ...]
) -> Stuck:
    group, seq = call.group, call.seq
    at: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(group.ranks):
        at[present[rank].infer_state(group, seq) if rank in present else ""].append(rank)
    waiting = [present[rank] for rank in (*at[ENQUEUED], *at[STARTED])]
    calls = [one for rank in waiting if (one := rank.find_collective(group, seq)) is not None]
    sizes = {one.message_bytes for one in calls}
    return Stuck(
        group=describe_group(group),
        op=call.op,
        seq=seq,
        dtype=call.dtype or None,
        message_bytes=call.message_bytes if len(sizes) == 1 and call.message_bytes >= 0 else None,
        called_unix_ns=str(min(one.created_unix_ns for one in calls)),
        enqueued=tuple(at[ENQUEUED]),
        started=tuple(at[STARTED]),
        completed=tuple(at[COMPLETED]),
        missing=tuple(_describe_missing_member(present[rank], group) for rank in at[MISSING]),
        no_dump=tuple(at[""]),
        waits_for=_find_blockers(at, odd),
        queued=max(_count_queued(rank, group, seq) for rank in waiting),
    )


def _find_blockers(at: Mapping[str, list[int]], odd: tuple[int, ...]) -> tuple[int, ...]:
    """The ranks that block a call: missing or mismatched ranks, else all that are not done.

    If some ranks have completed the call, all have arrived and no rank blocks it. A rank without a
    dump is suspected only if no rank is known to be missing.
    """
    away = at.get(MISSING, []) or at.get("", [])
    if away or odd:
        return tuple(sorted({*away, *odd}))
    done = at.get(COMPLETED, [])
    return () if done else tuple(sorted(at.get(ENQUEUED, []) + at.get(STARTED, [])))


def _describe_missing_member(rank: Progress, group: JobGroup) -> Missing:
    reach = rank.find_reach(group)
    known = (one if one >= 0 else None for one in (reach.enqueued, reach.completed))
    return Missing(rank.rank, *known)


def _count_queued(rank: Progress, group: JobGroup, seq: int) -> int:
    return sum(call.group == group and call.seq > seq and not call.is_message for call in rank.open)


def find_mismatches(ranks: Sequence[Progress]) -> tuple[Mismatch, ...]:
    """The first mismatched call of each group; later mismatches follow from it."""
    same: dict[tuple[JobGroup, int], list[Called]] = defaultdict(list)
    for call in (call for rank in ranks for call in rank.collectives):
        same[call.group, call.seq].append(call)
    first: dict[JobGroup, Mismatch] = {}
    for (group, _), calls in same.items():
        mismatch = _find_mismatch(calls) if len(calls) > 1 else None
        if mismatch is not None and (group not in first or mismatch.seq < first[group].seq):
            first[group] = mismatch
    collectives = (_add_usual_value(group, first[group], ranks) for group in first)
    return (*collectives, *_find_mismatched_messages(ranks))


def _find_mismatched_messages(ranks: Sequence[Progress]) -> list[Mismatch]:
    """The open messages of which both ends differ in dtype or size, where both number them alike.

    Coalesced messages share a number; which of them belong together is not known.
    """
    ends: dict[tuple[_Ends, int], list[Called]] = defaultdict(list)
    for call in (call for rank in ranks for call in rank.open):
        if call.is_message and len(call.group.ranks) == 2:
            ends[_identify_link(call), call.seq].append(call)
    found = []
    for calls in ends.values():
        if sorted(call.op for call in calls) == ["recv", "send"]:
            mismatch = _find_mismatch(calls)
            found += (
                [] if mismatch is None else [msgspec.structs.replace(mismatch, is_message=True)]
            )
    return found


def _add_usual_value(group: JobGroup, mismatch: Mismatch, ranks: Sequence[Progress]) -> Mismatch:
    """The mismatch with the one of its values that earlier calls of the group had, if only one."""
    read = _PROPERTIES[mismatch.what]
    calls = [call for rank in ranks for call in rank.collectives if call.group is group]
    ops = {call.op for call in calls if call.seq == mismatch.seq}
    earlier = {read(call) for call in calls if call.seq < mismatch.seq and call.op in ops}
    known = [side.value for side in mismatch.sides if side.value in earlier]
    return msgspec.structs.replace(mismatch, usual=known[0] if len(known) == 1 else None)


def _read_agreed_size(call: Called) -> str:
    size = call.message_bytes if call.is_message else call.agreed_bytes
    return str(size) if size >= 0 else ""


_PROPERTIES: Mapping[str, Callable[[Called], str]] = {
    "op": lambda call: "" if call.is_message else call.op,
    "dtype": lambda call: call.dtype,
    "size": _read_agreed_size,
}


def _find_mismatch(calls: Sequence[Called]) -> Mismatch | None:
    """The first difference between members: op, then dtype, then size (where it must agree)."""
    for what, read in _PROPERTIES.items():
        sides: dict[str, list[int]] = defaultdict(list)
        for call in calls:
            if value := read(call):
                sides[value].append(call.rank)
        if len(sides) > 1:
            ordered = sorted(sides.items(), key=lambda side: (-len(side[1]), min(side[1])))
            value_sides = tuple(MismatchSide(value, tuple(sorted(at))) for value, at in ordered)
            return Mismatch(describe_group(calls[0].group), calls[0].seq, what, value_sides)
    return None


# The progress of each rank: its calls, their states, and its last sequence number by group.

MISSING, ENQUEUED, STARTED, COMPLETED = "missing", "enqueued", "started", "completed"

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


# The members of each group, which not all dumps list.

_DEFAULT = "default_pg"


class JobGroups(Struct, frozen=True):
    """The groups of a job. guessed: names of those whose members are the ranks that used them."""

    guessed: frozenset[str]
    _of_rank: Mapping[tuple[int, str], JobGroup]

    def find_group(self, rank: int, name: str) -> JobGroup | None:
        """The group with this name on the rank; None if the rank is in no such group."""
        return self._of_rank.get((rank, name))

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of all groups."""
        return tuple(sorted({rank for group in self._of_rank.values() for rank in group.ranks}))


def find_job_groups(dumps: Sequence[FlightDump], known: Iterable[Group] = ()) -> JobGroups:
    """The groups as listed in a member's dump, else inferred from the ranks that mention them.

    The default group has every rank up to the highest. gloo lists no groups; known are those that
    another file lists.
    """
    listed: dict[str, dict[tuple[int, ...], JobGroup]] = defaultdict(dict)
    for group in known:
        named = JobGroup(group.name, group.ranks, group.description)
        listed[group.name].setdefault(group.ranks, named)
    for group in (group for dump in dumps for group in dump.groups if group.ranks):
        whole = JobGroup(group.name, group.ranks, group.description)
        listed[group.name].setdefault(group.ranks, whole)
    mentioned = [(dump.rank, group) for dump in dumps for group in _list_groups(dump)]
    unlisted: dict[str, JobGroup] = {}
    of_rank: dict[tuple[int, str], JobGroup] = {}
    for rank, group in mentioned:
        own = group.ranks or next((ranks for ranks in listed[group.name] if rank in ranks), ())
        if own:
            of_rank[rank, group.name] = listed[group.name][own]
            continue
        if group.name not in unlisted:
            unlisted[group.name] = _infer_group(group.name, mentioned)
        of_rank[rank, group.name] = unlisted[group.name]
    guessed = frozenset(group.name for group in unlisted.values() if not _is_default(group))
    return JobGroups(guessed, of_rank)


def _list_groups(dump: FlightDump) -> list[Group]:
    """The groups of a dump, also those with only a status, which have no description."""
    known = {group.name for group in dump.groups}
    names = {status.group_name for status in dump.statuses if status.group_name}
    return [*dump.groups, *(Group(name, (), "") for name in sorted(names - known))]


def _infer_group(name: str, mentioned: Sequence[tuple[int, Group]]) -> JobGroup:
    same = [(rank, one) for rank, one in mentioned if one.name == name and not one.ranks]
    description = next((one.description for _, one in same if one.description), "")
    group = JobGroup(name, tuple(sorted({rank for rank, _ in same})), description)
    count = max(rank for rank, _ in mentioned) + 1
    if not _is_default(group) or count > MAX_RANKS:
        return group
    return replace(group, ranks=tuple(range(count)))


def _is_default(group: JobGroup) -> bool:
    return group.description == _DEFAULT or (group.name == "0" and not group.description)
