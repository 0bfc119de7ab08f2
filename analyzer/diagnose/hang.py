"""Hang analysis of Flight Recorder dumps: which rank is missing in which call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stepsplit.analyzer.diagnose.hang_progress import (
    Called,
    ChainEnd,
    Culprit,
    Hang,
    HangWarning,
    JobGroups,
    LastCall,
    Mismatch,
    Progress,
    StackFrame,
    Stuck,
    StuckGroup,
    collect_progress,
    describe_group,
    find_chain_ends,
    find_job_groups,
    find_mismatches,
    find_stuck_collectives,
    find_stuck_messages,
)
from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.readers.compression import list_files
from stepsplit.analyzer.readers.flight_recorder import FlightDump, read_dump
from stepsplit.analyzer.readers.registry import FLIGHT, find_kinds
from stepsplit.analyzer.readers.sources import Source

# The input of the search for the culprits of a hang.


@dataclass(frozen=True, slots=True)
class HangInputs:
    """The stuck calls, the mismatches between members, and the progress of each rank."""

    stuck: tuple[Stuck, ...]
    mismatches: tuple[Mismatch, ...]
    ranks: tuple[Progress, ...]

    def has_dump(self, rank: int) -> bool:
        """Whether there is a dump of the rank."""
        return any(one.rank == rank for one in self.ranks)

    def find_mismatch(self, call: Stuck) -> Mismatch | None:
        """The mismatch between the members of a call, if any."""
        at = call.group, call.seq
        return next((one for one in self.mismatches if (one.group, one.seq) == at), None)

    def find_oldest_open(self, rank: int) -> Called | None:
        """The rank's first call that is not completed; None if there is none, or no dump."""
        return next((call for one in self.ranks if one.rank == rank for call in one.open), None)


# Flight Recorder dumps -> Hang.

_GUESSED_TEXT = "the dumps do not list group members: inferred from the ranks that used each group"


def find_hang(*places: str | Path) -> Hang | None:
    """Find the cause of a hang from PyTorch Flight Recorder dumps.

    Args:
        places: files, folders, archives or URLs with the dumps of one job, one dump per rank.

    Returns:
        A `Hang` with the ranks to blame, the stuck calls and the last call of each suspect; None if
        every call in the dumps has completed.

    Raises:
        DataError: a place is missing, contains no dump, or contains two dumps of the same rank.

    Examples:
        >>> from stepsplit.analyzer import find_hang
        >>> hang = find_hang("/tmp/nccl_trace")  # doctest: +SKIP
        >>> print(hang.verdict)  # doctest: +SKIP
        rank 1 blocks all other ranks: it has not called all_reduce 5 of default_pg (group 0)
    """
    hang = read_calls(places)
    return hang if hang.stuck else None


def read_calls(places: Sequence[str | Path]) -> Hang:
    """Read the dumps and examine their calls, stuck or not. Raises DataError like find_hang."""
    dumps, warnings = read_dumps(places)
    if not dumps:
        why = f": {warnings[0].message}" if warnings else ""
        raise DataError(places[0] if places else "no path", f"no Flight Recorder dump found{why}",
                        "pass the folder with the dumps of the job")  # fmt: skip
    return examine_dumps(dumps, warnings)


def read_dumps(
    places: Sequence[str | Path],
) -> tuple[tuple[FlightDump, ...], tuple[HangWarning, ...]]:
    """The dumps in the places, and warnings about unreadable files. Raises DataError."""
    dumps: list[FlightDump] = []
    warnings: list[HangWarning] = []
    with list_files([str(place) for place in places]) as sources:
        for source in (one for one in sources if FLIGHT.name in _detect_kinds(one)):
            try:
                dumps.append(read_dump(source))
            except DataError as error:
                problem = f"{source.inner.name}: {error.problem}"
                warnings.append(HangWarning("file_skipped", problem))
    warnings += [HangWarning(n.code, n.message, n.rank) for dump in dumps for n in dump.notes]
    return tuple(dump for dump in dumps if dump.rank >= 0), tuple(warnings)


def _detect_kinds(source: Source) -> tuple[str, ...]:
    try:
        return tuple(kind.name for kind in find_kinds(source))
    except DataError:
        return ()


def examine_dumps(dumps: Sequence[FlightDump], warnings: Sequence[HangWarning] = ()) -> Hang:
    """Examine the calls of the dumps, one dump per rank, whether or not any call is stuck.

    Raises DataError for two dumps of the same rank, which belong to two incidents.
    """
    _refuse_duplicate_ranks(dumps)
    groups = find_job_groups(dumps)
    ranks = collect_progress(dumps, groups)
    mismatches = find_mismatches(ranks)
    stuck = (*find_stuck_collectives(ranks, mismatches), *find_stuck_messages(ranks))
    inputs = HangInputs(stuck, mismatches if stuck else (), ranks)
    culprits = find_culprits(inputs)
    return Hang(
        verdict="; ".join(format_verdict([one.message for one in culprits])),
        ranks=tuple(rank.rank for rank in ranks),
        no_dump=tuple(sorted(set(groups.ranks) - {rank.rank for rank in ranks})),
        culprits=culprits,
        stuck=tuple(sorted(stuck, key=lambda call: _order_stuck(call, culprits))),
        mismatches=inputs.mismatches,
        last_calls=_list_last_calls(ranks, culprits, stuck),
        warnings=(*warnings, *_warn_guessed(groups)),
    )


def _refuse_duplicate_ranks(dumps: Sequence[FlightDump]) -> None:
    rank, count = Counter(dump.rank for dump in dumps).most_common(1)[0] if dumps else (-1, 0)
    if count > 1:
        first, second = [dump.source for dump in dumps if dump.rank == rank][:2]
        problem = f"second dump of the same rank; the first is {first}"
        raise DataError(second, problem, "pass the dumps of one hang only", rank)


def _order_stuck(call: Stuck, culprits: Sequence[Culprit]) -> tuple[int, int, int]:
    """Sort key: calls that wait for a culprit, then calls in which a culprit waits, then others."""
    to_blame = {rank for one in culprits for rank in one.ranks}
    if to_blame & (set(call.waits_for) - set(call.waiting)):
        level = 0
    elif to_blame & set(call.waiting):
        level = 1
    else:
        level = 2 if call.missing or call.no_dump else 3
    return level, -len(call.waiting), int(call.called_unix_ns)


def _list_last_calls(
    ranks: Sequence[Progress], culprits: Sequence[Culprit], stuck: Iterable[Stuck]
) -> tuple[LastCall, ...]:
    """The last calls of the culprits, then of other missing ranks."""
    to_blame = [rank for one in culprits for rank in one.ranks]
    missing = sorted({one.rank for call in stuck for one in call.missing})
    calls = {rank.rank: rank.calls[-1] for rank in ranks if rank.calls}
    return tuple(
        LastCall(
            rank=rank,
            group=describe_group(call.group),
            op=call.op,
            seq=call.seq,
            state=call.state,
            called_unix_ns=str(call.created_unix_ns),
            stack=tuple(StackFrame(one.function, one.file, one.line) for one in call.stack),
        )
        for rank in dict.fromkeys([*to_blame, *missing])
        if (call := calls.get(rank)) is not None
    )


def _warn_guessed(groups: JobGroups) -> tuple[HangWarning, ...]:
    return (HangWarning("groups_guessed", _GUESSED_TEXT),) if groups.guessed else ()


# The text of a finding: one sentence per cause.

NOTHING_STUCK = "nothing is stuck: every call in the dumps has completed"

_MAX_RANKS, _MAX_MESSAGES = 8, 3


def format_verdict(messages: Sequence[str]) -> tuple[str, ...]:
    """The sentences of the first culprits, and the number of further ones."""
    more = len(messages) - _MAX_MESSAGES
    rest = (f"and {more} more",) if more > 0 else ()
    return (*messages[:_MAX_MESSAGES], *rest) or (NOTHING_STUCK,)


def describe_blocking(ranks: tuple[int, ...], blocked: tuple[int, ...], inputs: HangInputs) -> str:
    """Which ranks block how many others."""
    others = {one.rank for one in inputs.ranks} - set(ranks)
    whom = f"{len(blocked)} of {len(others)} other ranks"
    if others <= set(blocked):
        whom = "all other ranks"
    if not blocked:
        return f"{_format_ranks(ranks)} {_choose_verb(ranks, 'hangs', 'hang')}"
    return f"{_format_ranks(ranks)} {_choose_verb(ranks, 'blocks', 'block')} {whom}"


def format_not_called(ranks: tuple[int, ...], call: Stuck) -> str:
    """The ranks have not made a call."""
    return f"{_choose_verb(ranks, 'it has', 'they have')} not called {_format_call(call)}"


def format_unfinished(ranks: tuple[int, ...], call: Stuck, inputs: HangInputs) -> str:
    """The ranks have not made a call because they are stuck in an older one."""
    stuck = f"{_choose_verb(ranks, 'is', 'are')} stuck in {_format_open_call(ranks, inputs)}"
    return f"{format_not_called(ranks, call)} and {stuck}"


def format_no_dump(ranks: tuple[int, ...], call: Stuck) -> str:
    """Only these ranks can be missing, since they left no dump."""
    left = (
        f"no dump of {_choose_verb(ranks, 'it', 'them')}, and all others have called "
        f"{_format_call(call)}"
    )
    return f" (inferred): {left}"


def format_mismatch(mismatch: Mismatch) -> str:
    """What the members of a call disagree on."""
    sides = "; ".join(f"{side.value} on {_format_ranks(side.ranks)}" for side in mismatch.sides)
    return f"call {mismatch.seq} of {mismatch.group.in_words} differs in {mismatch.what}: {sides}"


def format_deadlock(ranks: tuple[int, ...], calls: Sequence[Stuck]) -> str:
    """The ranks wait for each other in different calls."""
    waits = [
        f"{_format_ranks(call.waiting)} in {_format_call(call)} waiting for "
        f"{_format_ranks(call.waits_for)}"
        for call in calls
        if call.missing
    ]
    return f"deadlock of {_format_ranks(ranks)}: {'; '.join(waits[:_MAX_MESSAGES])}"


def format_not_ending(ranks: tuple[int, ...], call: Stuck) -> str:
    """All members have called it, and it does not end."""
    there = f"all members have called {_format_call(call)} but none has completed it"
    return f"{there}: check the devices and the network of {_format_ranks(ranks)}"


def format_lone_ranks(ranks: tuple[int, ...], inputs: HangInputs) -> str:
    """The ranks are stuck in a call from which no member is missing."""
    verb = _choose_verb(ranks, "is", "are")
    call = _format_open_call(ranks, inputs)
    return f"{_format_ranks(ranks)} {verb} stuck in {call}: no rank is missing"


def _format_call(call: Stuck) -> str:
    return _format_call_name(call.op, call.seq, call.group)


def _format_call_name(op: str, seq: int, group: StuckGroup) -> str:
    return f"{op} {seq} of {group.in_words}"


def _format_ranks(ranks: Sequence[int]) -> str:
    """Such as "rank 3", "ranks 3 and 7", "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 9 more"."""
    names = [str(rank) for rank in ranks[:_MAX_RANKS]]
    if len(ranks) == 1:
        return f"rank {names[0]}"
    more = len(ranks) - len(names)
    last = f"{more} more" if more else names.pop()
    return f"ranks {', '.join(names)} and {last}"


def _choose_verb(ranks: Sequence[int], one: str, several: str) -> str:
    return one if len(ranks) == 1 else several


def _format_open_call(ranks: tuple[int, ...], inputs: HangInputs) -> str:
    """The oldest call in which all the ranks wait, else the oldest open call of the first rank."""
    shared = [call for call in inputs.stuck if set(ranks) <= set(call.waiting)]
    if shared:
        call = min(shared, key=lambda one: (bool(one.waits_for), int(one.called_unix_ns)))
        return _format_call(call) + (
            ", which its other members have completed" if call.completed else ""
        )  # fmt: skip
    first = inputs.find_oldest_open(ranks[0])
    assert first is not None, "an unfinished rank has an open call"
    return _format_call_name(first.op, first.seq, describe_group(first.group))


# The culprits: the ranks at the end of the chains of waits, and the cause.


def find_culprits(inputs: HangInputs) -> tuple[Culprit, ...]:
    """The ranks at which the chains of waits end, merged by cause and call."""
    ends = find_chain_ends(inputs.stuck)
    if not ends:
        return _build_lone_culprit(inputs)
    same: dict[tuple[str, int], list[ChainEnd]] = {}
    for end in ends:
        same.setdefault(
            (_classify_cause(end, inputs), _find_awaited_call(end, inputs.stuck)), []
        ).append(end)
    return tuple(
        _build_culprit(cause, at, group_ends, inputs) for (cause, at), group_ends in same.items()
    )


def _classify_cause(end: ChainEnd, inputs: HangInputs) -> str:
    calls = [inputs.stuck[place] for place in end.calls]
    if any(inputs.find_mismatch(call) for call in calls):
        return "mismatch"
    if calls:
        return "deadlock" if any(call.missing for call in calls) else "not_ending"
    if not inputs.has_dump(end.ranks[0]):
        return "no_dump"
    return "not_called" if inputs.find_oldest_open(end.ranks[0]) is None else "unfinished"


def _find_awaited_call(end: ChainEnd, stuck: Sequence[Stuck]) -> int:
    """The index of the oldest call of the chain end, else of the call with most ranks waiting."""
    if end.calls:
        return min(end.calls, key=lambda at: int(stuck[at].called_unix_ns))
    places = [at for at, call in enumerate(stuck) if set(end.ranks) & set(call.waits_for)]
    return max(places, key=lambda at: (len(stuck[at].waiting), -int(stuck[at].called_unix_ns)))


def _build_culprit(cause: str, at: int, ends: Sequence[ChainEnd], inputs: HangInputs) -> Culprit:
    ranks = tuple(sorted({rank for end in ends for rank in end.ranks}))
    blocked = tuple(sorted({rank for end in ends for rank in end.blocked} - set(ranks)))
    call = inputs.stuck[at]
    hold = describe_blocking(ranks, blocked, inputs)
    match cause:
        case "mismatch":
            return _build_mismatch_culprit(
                ranks, blocked, [inputs.stuck[i] for i in ends[0].calls], inputs
            )
        case "deadlock":
            among = sorted({place for end in ends for place in end.calls})
            message = format_deadlock(ranks, [inputs.stuck[place] for place in among])
        case "not_ending":
            message = format_not_ending(ranks, call)
        case "no_dump":
            message = f"{hold}{format_no_dump(ranks, call)}"
        case "unfinished":
            message = f"{hold}: {format_unfinished(ranks, call, inputs)}"
        case _:
            message = f"{hold}: {format_not_called(ranks, call)}"
    return Culprit(ranks, cause, blocked, message)


def _build_mismatch_culprit(
    ranks: tuple[int, ...], blocked: tuple[int, ...], calls: Sequence[Stuck], inputs: HangInputs
) -> Culprit:
    """The ranks that differ from the majority are to blame; the ranks waiting with them are not."""
    mismatch: Mismatch = next(one for call in calls if (one := inputs.find_mismatch(call)))
    odd = tuple(rank for rank in ranks if rank in mismatch.odd) or ranks
    blocked = tuple(sorted({*blocked, *ranks} - set(odd)))
    message = f"{describe_blocking(odd, blocked, inputs)}: {format_mismatch(mismatch)}"
    return Culprit(odd, "mismatch", blocked, message)


def _build_lone_culprit(inputs: HangInputs) -> tuple[Culprit, ...]:
    """The ranks with open calls, if no rank is missing from any call."""
    ranks = tuple(sorted({rank for call in inputs.stuck for rank in call.waiting}))
    if not ranks:
        return ()
    return (Culprit(ranks, "unfinished", (), format_lone_ranks(ranks, inputs)),)
