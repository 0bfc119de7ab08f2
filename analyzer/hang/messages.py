"""Which messages between two ranks do not end, and whose other end is not there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from stepsplit.analyzer.hang.collectives import named
from stepsplit.analyzer.hang.groups import JobGroup
from stepsplit.analyzer.hang.hang import Missing, Stuck
from stepsplit.analyzer.hang.progress import COMPLETED, ENQUEUED, MISSING, STARTED, Called, Progress

_UNKNOWN = "unknown"
_Ends = tuple[JobGroup, int, int]


def stuck_messages(ranks: Sequence[Progress]) -> tuple[Stuck, ...]:
    """For each rank and each link of its, the first message of which the other end tells something.

    A message is matched by its number where both ends count alike; else, on a group of more than
    two ranks, by how many are open at both ends, for each rank counts its own messages.
    """
    present = {rank.rank: rank for rank in ranks}
    found: dict[tuple[_Ends, int], Stuck] = {}
    for rank in ranks:
        for calls in _open(rank):
            stuck = _first(calls, present)
            found.setdefault((_ends(calls[0]), stuck.seq), stuck)
    return tuple(found.values())


def _open(rank: Progress) -> list[list[Called]]:
    """The rank's open messages, a list for each direction of each link, the oldest first."""
    links: dict[_Ends, list[Called]] = defaultdict(list)
    for call in rank.open:
        if call.is_message:
            links[_ends(call)].append(call)
    return list(links.values())


def _ends(call: Called) -> _Ends:
    """The message's group, sender and receiver."""
    ends = (call.rank, call.peer) if call.op == "send" else (call.peer, call.rank)
    return call.group, *ends


def _first(calls: Sequence[Called], present: Mapping[int, Progress]) -> Stuck:
    told = [(call, state) for call, state in _states(calls, present) if state != _UNKNOWN]
    # An end that is done already has left nobody waiting.
    waits = [one for one in told if one[1] != COMPLETED]
    call, state = (waits or told or [(calls[0], _UNKNOWN)])[0]
    return _stuck(call, state, len(calls) - calls.index(call) - 1, present)


def _states(
    calls: Sequence[Called], present: Mapping[int, Progress]
) -> Iterator[tuple[Called, str]]:
    """How far the other end of each message came."""
    peer = present.get(calls[0].peer)
    if peer is None:
        yield from ((call, _UNKNOWN) for call in calls)
        return
    ends = [call for call in peer.calls if call.is_message and _meets(call, calls[0])]
    pending = sum(end.pending for end in ends)
    for i, call in enumerate(calls):
        same = next((end.state for end in ends if end.seq == call.seq), None)
        yield call, same or _by_count(call, peer, ends, i < pending)


def _by_count(call: Called, peer: Progress, ends: Sequence[Called], enough: bool) -> str:
    if len(call.group.ranks) != 2:
        return _UNKNOWN if enough else MISSING
    stated = peer.stated(call.group)
    last = max((end.seq for end in ends), default=stated.enqueued)
    return COMPLETED if call.seq <= max(last, stated.enqueued) else MISSING


def _meets(end: Called, call: Called) -> bool:
    return end.op != call.op and _ends(end) == _ends(call)


def _stuck(call: Called, state: str, queued: int, present: Mapping[int, Progress]) -> Stuck:
    """The message as its one end sees it; state is the other's."""
    peer, here = call.peer, (call.rank,)
    lost = peer >= 0 and peer not in present
    both = state in (ENQUEUED, STARTED)
    waiting = tuple(sorted((call.rank, peer))) if both else here
    started = call.state == STARTED
    return Stuck(
        group=named(call.group),
        op=call.op,
        seq=call.seq,
        dtype=call.dtype or None,
        message_bytes=call.message_bytes if call.message_bytes >= 0 else None,
        called_unix_ns=str(call.created_unix_ns),
        enqueued=() if started else waiting,
        started=waiting if started else (),
        completed=(peer,) if state == COMPLETED else (),
        missing=(_missing(present[peer], call.group),) if state == MISSING else (),
        no_dump=(peer,) if lost else (),
        waits_for=(peer,) if lost or state == MISSING else waiting if both else (),
        queued=queued,
    )


def _missing(peer: Progress, group: JobGroup) -> Missing:
    """How far the other end came; on a larger group its numbers are of other links as well."""
    stated = peer.stated(group)
    if len(group.ranks) != 2 or stated.enqueued < 0:
        return Missing(peer.rank, None, None)
    return Missing(peer.rank, stated.enqueued, stated.completed if stated.completed >= 0 else None)
