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
    missing = []
    if state == MISSING:
        # In a group of more than two ranks a status is of several links: it says nothing of one.
        stated = present[peer].find_reported_reach(call.group)
        is_stated = len(call.group.ranks) == 2 and stated.enqueued >= 0
        completed = stated.completed if is_stated and stated.completed >= 0 else None
        missing.append(Missing(peer, stated.enqueued if is_stated else None, completed))
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
        missing=tuple(missing),
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
    group, link = calls[0].group, identify_link(calls[0])
    messages = [call for call in peer.calls if call.is_message]
    ends = [one for one in messages if one.op != calls[0].op and identify_link(one) == link]
    pending = sum(end.pending for end in ends)
    # How far the peer came: by its own messages of the group, else by the status in its dump.
    last = max((end.seq for end in ends), default=-1)
    if not ends and not any(one.group is group for one in messages):
        last = peer.find_reported_reach(group).enqueued
    for i, call in enumerate(calls):
        same = next((end.state for end in ends if end.seq == call.seq), None)
        if same:
            yield call, same
        elif len(group.ranks) != 2:
            # Each rank counts its own messages here: only their number can be compared.
            yield call, UNKNOWN if i < pending else MISSING
        else:
            yield call, COMPLETED if call.seq <= last else MISSING
