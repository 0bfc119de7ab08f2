"""The culprits: the ranks at the end of the chains of waits, and the cause."""

from __future__ import annotations

from collections.abc import Sequence

from stepsplit.analyzer.diagnose.hang.inputs import HangInputs
from stepsplit.analyzer.diagnose.hang.result import Culprit
from stepsplit.analyzer.diagnose.hang.sentences import (
    MAX_MESSAGES,
    describe_blocking,
    format_call,
    format_lone_ranks,
    format_mismatch,
    format_no_dump,
    format_not_called,
    format_order,
    format_ranks,
    format_unfinished,
    format_unknown_members,
)
from stepsplit.analyzer.diagnose.hang.wait_chains import ChainEnd, find_chain_ends


def find_culprits(inputs: HangInputs) -> tuple[Culprit, ...]:
    """The ranks at which the chains of waits end, merged by cause and call."""
    ends = find_chain_ends(inputs.stuck)
    if not ends:
        # The ranks with open calls, if no rank is missing from any call.
        ranks = tuple(sorted({rank for call in inputs.stuck for rank in call.waiting}))
        if not ranks:
            return ()
        return (Culprit(ranks, "unfinished", (), format_lone_ranks(ranks, inputs)),)
    same: dict[tuple[str, int], list[ChainEnd]] = {}
    for end in ends:
        kind = _classify_cause(end, inputs), _find_awaited_call(end, inputs)
        same.setdefault(kind, []).append(end)
    return tuple(
        _build_culprit(cause, at, group_ends, inputs) for (cause, at), group_ends in same.items()
    )


def _classify_cause(end: ChainEnd, inputs: HangInputs) -> str:
    calls = [inputs.stuck[place] for place in end.calls]
    if any(inputs.find_mismatch(call) for call in calls):
        return "mismatch"
    if any(call.missing for call in calls):
        return "order" if inputs.find_order_breaks(end.ranks) else "deadlock"
    if calls:
        guessed = all(call.group.name in inputs.guessed for call in calls)
        return "members_unknown" if guessed else "not_ending"
    if not inputs.has_dump(end.ranks[0]):
        return "no_dump"
    return "not_called" if inputs.find_oldest_open(end.ranks[0]) is None else "unfinished"


def _find_awaited_call(end: ChainEnd, inputs: HangInputs) -> int:
    """The index of the oldest call of the chain end, else of the call that its ranks are to make.

    The latter is the one with most ranks waiting; of several, one that misses no other rank, and
    the next in their usual order of calls.
    """
    stuck = inputs.stuck
    if end.calls:
        return min(end.calls, key=lambda at: int(stuck[at].called_unix_ns))
    due = {inputs.find_next_group(rank) for rank in end.ranks}
    places = [at for at, call in enumerate(stuck) if set(end.ranks) & set(call.waits_for)]
    return max(
        places,
        key=lambda at: (
            len(stuck[at].waiting),
            {one.rank for one in stuck[at].missing} <= set(end.ranks),
            stuck[at].group in due,
            -int(stuck[at].called_unix_ns),
        ),
    )


def _build_culprit(cause: str, at: int, ends: Sequence[ChainEnd], inputs: HangInputs) -> Culprit:
    ranks = tuple(sorted({rank for end in ends for rank in end.ranks}))
    blocked = tuple(sorted({rank for end in ends for rank in end.blocked} - set(ranks)))
    call = inputs.stuck[at]
    hold = describe_blocking(ranks, blocked, inputs)
    match cause:
        case "mismatch":
            # The ranks that differ from the majority are to blame; those that wait with them are
            # blocked like all others.
            calls = [inputs.stuck[i] for i in ends[0].calls]
            mismatch = next(one for call in calls if (one := inputs.find_mismatch(call)))
            odd = tuple(rank for rank in ranks if rank in mismatch.odd) or ranks
            blocked = tuple(sorted({*blocked, *ranks} - set(odd)))
            message = f"{describe_blocking(odd, blocked, inputs)}: {format_mismatch(mismatch)}"
            return Culprit(odd, cause, blocked, message)
        case "deadlock":
            among = sorted({place for end in ends for place in end.calls})
            # The ranks wait for each other in different calls.
            calls = [inputs.stuck[place] for place in among]
            waits = [
                f"{format_ranks(call.waiting)} in {format_call(call)} waiting for "
                f"{format_ranks(call.waits_for)}"
                for call in calls
                if call.missing
            ]
            message = f"deadlock of {format_ranks(ranks)}: {'; '.join(waits[:MAX_MESSAGES])}"
        case "order":
            # Of ranks that wait for each other, those that left their usual order are to blame.
            breaks = inputs.find_order_breaks(ranks)
            odd = tuple(sorted(breaks))
            blocked = tuple(sorted({*blocked, *ranks} - set(odd)))
            among = sorted({place for end in ends for place in end.calls})
            calls = [inputs.stuck[place] for place in among]
            return Culprit(odd, cause, blocked, format_order(odd, blocked, calls, breaks, inputs))
        case "not_ending":
            # All members have called it, and it does not end.
            there = f"all members have called {format_call(call)} but none has completed it"
            message = f"{there}: check the devices and the network of {format_ranks(ranks)}"
        case "members_unknown":
            message = format_unknown_members(ranks, call)
        case "no_dump":
            message = f"{hold}{format_no_dump(ranks, call)}"
        case "unfinished":
            message = f"{hold}: {format_unfinished(ranks, call, inputs)}"
        case _:
            message = f"{hold}: {format_not_called(ranks, call)}"
    return Culprit(ranks, cause, blocked, message)
