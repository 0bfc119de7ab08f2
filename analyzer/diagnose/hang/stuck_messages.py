"""Messages between two ranks that do not end, and those whose peer is missing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from stepsplit.analyzer.diagnose.hang.job_groups import JobGroup, describe_group
from stepsplit.analyzer.diagnose.hang.progress import (
    COMPLETED,
    ENQUEUED,
    MISSING,
    STARTED,
    UNKNOWN,
    Called,
    Progress,
)
from stepsplit.analyzer.diagnose.hang.result import Missing, Stuck

Ends = tuple[JobGroup, int, int]


def find_stuck_messages(ranks: Sequence[Progress]) -> tuple[Stuck, ...]:
    """The first stuck message of each rank and link whose peer has a known state.

    Messages are matched by sequence number if both ends count alike. In a group of more than two
    ranks each rank counts its own messages; there they are matched by the number of open messages.
    """
    present = {rank.rank: rank for rank in ranks}
    messages: dict[tuple[Ends, int], Stuck] = {}
    for rank in ranks:
        # The rank's open messages by link and direction, oldest first.
        links: dict[Ends, list[Called]] = defaultdict(list)
        for call in rank.open:
            if call.is_message:
                links[identify_link(call)].append(call)
        for calls in links.values():
            stuck = _find_first_stuck(calls, present)
            messages.setdefault((identify_link(calls[0]), stuck.seq), stuck)
    return tuple(messages.values())


def identify_link(call: Called) -> Ends:
    """The message's group, sender and receiver."""
    ends = (call.rank, call.peer) if call.op == "send" else (call.peer, call.rank)
    return call.group, *ends


def _find_first_stuck(calls: Sequence[Called], present: Mapping[int, Progress]) -> Stuck:
    known = [
        (call, state) for call, state in _infer_peer_states(calls, present) if state != UNKNOWN
    ]
    # A peer that has completed its end is not waiting.
    waits = [one for one in known if one[1] != COMPLETED]
    call, state = (waits or known or [(calls[0], UNKNOWN)])[0]
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
        yield from ((call, UNKNOWN) for call in calls)
        return
    ends = [call for call in peer.calls if call.is_message and _is_counterpart(call, calls[0])]
    pending = sum(end.pending for end in ends)
    for i, call in enumerate(calls):
        same = next((end.state for end in ends if end.seq == call.seq), None)
        yield call, same or _infer_by_count(call, peer, ends, i < pending)


def _infer_by_count(call: Called, peer: Progress, ends: Sequence[Called], enough: bool) -> str:
    if len(call.group.ranks) != 2:
        return UNKNOWN if enough else MISSING
    if ends or any(one.is_message and one.group is call.group for one in peer.calls):
        last = max((end.seq for end in ends), default=-1)
    else:
        last = peer.find_reported_reach(call.group).enqueued
    return COMPLETED if call.seq <= last else MISSING


def _is_counterpart(end: Called, call: Called) -> bool:
    return end.op != call.op and identify_link(end) == identify_link(call)


def _describe_missing_peer(peer: Progress, group: JobGroup) -> Missing:
    """The progress of the peer, unknown in groups of more than two ranks (several links)."""
    stated = peer.find_reported_reach(group)
    if len(group.ranks) != 2 or stated.enqueued < 0:
        return Missing(peer.rank, None, None)
    return Missing(peer.rank, stated.enqueued, stated.completed if stated.completed >= 0 else None)
