"""The text of a finding: one sentence per cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stepsplit.analyzer.diagnose.hang.call_order import OrderBreak
from stepsplit.analyzer.diagnose.hang.inputs import HangInputs
from stepsplit.analyzer.diagnose.hang.job_groups import describe_group
from stepsplit.analyzer.diagnose.hang.result import Mismatch, Stuck, StuckGroup

NO_STEP_NO_CALL = (
    "no step has ended and no collective is open: every rank is in its own code, see the stacks"
)


NOTHING_STUCK = "nothing is stuck: every call in the dumps has completed"


_MAX_RANKS, MAX_MESSAGES = 8, 3


def format_verdict(messages: Sequence[str]) -> tuple[str, ...]:
    """The sentences of the first culprits, and the number of further ones."""
    more = len(messages) - MAX_MESSAGES
    rest = (f"and {more} more",) if more > 0 else ()
    return (*messages[:MAX_MESSAGES], *rest)


def describe_blocking(ranks: tuple[int, ...], blocked: tuple[int, ...], inputs: HangInputs) -> str:
    """Which ranks block how many others."""
    others = {one.rank for one in inputs.ranks} - set(ranks)
    whom = f"{len(blocked)} of {len(others)} other ranks"
    if others <= set(blocked):
        whom = "all other ranks"
    if not blocked:
        return f"{format_ranks(ranks)} {choose_verb(ranks, 'hangs', 'hang')}"
    return f"{format_ranks(ranks)} {choose_verb(ranks, 'blocks', 'block')} {whom}"


def format_not_called(ranks: tuple[int, ...], call: Stuck) -> str:
    """The ranks have not made a call."""
    inferred = "" if set(ranks) <= set(call.group.ranks) else " (inferred: no list of its members)"
    away = choose_verb(ranks, "it has", "they have")
    owed = {"recv": "the send of ", "send": "the recv of "}.get(call.op, "")
    return f"{away} not called {owed}{format_call(call)}{inferred}"


def format_unfinished(ranks: tuple[int, ...], call: Stuck, inputs: HangInputs) -> str:
    """The ranks have not made a call because they are stuck in an older one."""
    stuck = f"{choose_verb(ranks, 'is', 'are')} stuck in {_format_open_call(ranks, inputs)}"
    return f"{format_not_called(ranks, call)} and {stuck}"


def format_no_dump(ranks: tuple[int, ...], call: Stuck) -> str:
    """Only these ranks can be missing, since they left no dump."""
    left = (
        f"no dump of {choose_verb(ranks, 'it', 'them')}, and all others have called "
        f"{format_call(call)}"
    )
    return f" (inferred): {left}"


def format_mismatch(mismatch: Mismatch) -> str:
    """What the members of a call disagree on."""
    sides = "; ".join(f"{side.value} on {format_ranks(side.ranks)}" for side in mismatch.sides)
    call = f"{'message' if mismatch.is_message else 'call'} {mismatch.seq}"
    return f"{call} of {mismatch.group.in_words} differs in {mismatch.what}: {sides}"


def format_order(
    ranks: tuple[int, ...],
    blocked: tuple[int, ...],
    calls: Sequence[Stuck],
    breaks: Mapping[int, OrderBreak],
    inputs: HangInputs,
) -> str:
    """The ranks left their usual order of calls, so that others wait for them in an older call."""
    missed = [call for call in calls if set(ranks) & {one.rank for one in call.missing}]
    away = [format_not_called(ranks, call) for call in missed[:1]]
    for found in (breaks[rank] for rank in ranks[:MAX_MESSAGES]):
        call, before = (
            _format_call_name(one.op, one.seq, describe_group(one.group))
            for one in (found.call, found.before)
        )
        usual = describe_group(found.usual[0]).in_words
        away.append(
            f"rank {found.call.rank} called {call} right after {before},"
            f" where {found.usual[1]} of {usual} had always followed"
        )
    return f"{describe_blocking(ranks, blocked, inputs)}: {'; '.join(away)}"


def format_unknown_members(ranks: tuple[int, ...], call: Stuck) -> str:
    """Who else is in the group is unknown, so that a rank may be missing."""
    return (
        f"{format_ranks(ranks)} {choose_verb(ranks, 'waits', 'wait')} in {format_call(call)};"
        " the dumps do not list its members: one that never called on it may be missing"
    )


def format_lone_ranks(ranks: tuple[int, ...], inputs: HangInputs) -> str:
    """The ranks are stuck in a call from which no member is missing."""
    verb = choose_verb(ranks, "is", "are")
    call = _format_open_call(ranks, inputs)
    return f"{format_ranks(ranks)} {verb} stuck in {call}: no rank is missing"


def format_call(call: Stuck) -> str:
    return _format_call_name(call.op, call.seq, call.group)


def _format_call_name(op: str, seq: int, group: StuckGroup) -> str:
    return f"{op} {seq} of {group.in_words}"


def format_ranks(ranks: Sequence[int]) -> str:
    """Such as "rank 3", "ranks 3 and 7", "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 9 more"."""
    names = [str(rank) for rank in ranks[:_MAX_RANKS]]
    if len(ranks) == 1:
        return f"rank {names[0]}"
    more = len(ranks) - len(names)
    last = f"{more} more" if more else names.pop()
    return f"ranks {', '.join(names)} and {last}"


def choose_verb(ranks: Sequence[int], one: str, several: str) -> str:
    return one if len(ranks) == 1 else several


def _format_open_call(ranks: tuple[int, ...], inputs: HangInputs) -> str:
    """The oldest call in which all the ranks wait, else the oldest open call of the first rank."""
    shared = [call for call in inputs.stuck if set(ranks) <= set(call.waiting)]
    if shared:
        call = min(shared, key=lambda one: (bool(one.waits_for), int(one.called_unix_ns)))
        return format_call(call) + (
            ", which its other members have completed" if call.completed else ""
        )  # fmt: skip
    first = inputs.find_oldest_open(ranks[0])
    assert first is not None, "an unfinished rank has an open call"
    return _format_call_name(first.op, first.seq, describe_group(first.group))
