"""Hang analysis of Flight Recorder dumps and rank states: which rank is missing in which call."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import msgspec
from msgspec import Struct

from stepsplit.analyzer.diagnose.hang_progress import (
    Called,
    ChainEnd,
    JobGroup,
    JobGroups,
    Progress,
    collect_progress,
    describe_group,
    find_chain_ends,
    find_job_groups,
    find_mismatches,
    find_stuck_collectives,
    find_stuck_messages,
)
from stepsplit.analyzer.diagnose.hang_result import (
    Culprit,
    Hang,
    HangWarning,
    LastCall,
    Mismatch,
    RankNow,
    StackFrame,
    Stuck,
    StuckGroup,
)
from stepsplit.analyzer.errors import RECORD_AGAIN, DataError
from stepsplit.analyzer.readers.compression import list_files, open_unpacked
from stepsplit.analyzer.readers.file_kinds import FLIGHT, find_kinds
from stepsplit.analyzer.readers.flight_recorder import FlightDump, read_dump
from stepsplit.analyzer.readers.nccl.inspector import (
    RasCommunicator,
    RasMissingRank,
    RasRank,
    read_ras,
)
from stepsplit.analyzer.readers.sources import is_special
from stepsplit.analyzer.trace import Group
from stepsplit.collectors.formats.rank_record import CodeFrame
from stepsplit.collectors.formats.rank_state import (
    ENDED,
    RAISED,
    RAS_NAME,
    RUNNING,
    SILENT,
    STATE_SUFFIX,
    STOPPED,
    USUAL_STEPS,
    RankState,
    read_state,
)
from stepsplit.collectors.formats.run_spec import RUN_FILE, RunSpec, from_json

# The input of the search for the culprits of a hang.


class HangInputs(Struct, frozen=True):
    """The stuck calls, the mismatches between members, and the progress of each rank.

    guessed: names of the groups whose members are only those that used them.
    """

    stuck: tuple[Stuck, ...]
    mismatches: tuple[Mismatch, ...]
    ranks: tuple[Progress, ...]
    guessed: frozenset[str] = frozenset()

    def has_dump(self, rank: int) -> bool:
        """Whether there is a dump of the rank."""
        return any(one.rank == rank for one in self.ranks)

    def find_mismatch(self, call: Stuck) -> Mismatch | None:
        """The mismatch between the members of a call, if any."""
        at = call.group, call.seq, call.op in ("send", "recv")
        found = (one for one in self.mismatches if (one.group, one.seq, one.is_message) == at)
        return next(found, None)

    def find_order_breaks(self, ranks: Sequence[int]) -> dict[int, OrderBreak]:
        """The departures of some of the ranks from their order of calls; empty if all departed."""
        found = {one.rank: find_order_break(one) for one in self.ranks if one.rank in ranks}
        breaks = {rank: one for rank, one in found.items() if one is not None}
        return breaks if len(breaks) < len(ranks) else {}

    def find_next_group(self, rank: int) -> StuckGroup | None:
        """The group that the rank is to call on next, if it always has after a call as its last."""
        calls = next((one.calls for one in self.ranks if one.rank == rank), ())
        kinds = _list_kinds(calls)
        usual = _find_only_successor(kinds, kinds[-1]) if kinds else None
        return None if usual is None else describe_group(usual[0])

    def find_oldest_open(self, rank: int) -> Called | None:
        """The rank's first call that is not completed; None if there is none, or no dump."""
        return next((call for one in self.ranks if one.rank == rank for call in one.open), None)


STUCK, LATE, MOVING, CLEAR = "stuck", "late", "moving", "clear"

# Flight Recorder dumps -> Hang.

_MAX_RUN_BYTES = 64 << 20

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
    return hang if hang.condition in (STUCK, LATE) else None


def read_calls(places: Sequence[str | Path]) -> Hang:
    """Read the dumps and examine their calls, stuck or not. Raises DataError like find_hang."""
    dumps, warnings = read_dumps(places)
    states = read_states(places)
    if not dumps and not states:
        why = f": {warnings[0].message}" if warnings else ""
        raise DataError(places[0] if places else "no path", f"no Flight Recorder dump found{why}",
                        "pass the folder with the dumps of the job")  # fmt: skip
    spec = read_spec(places)
    known = () if spec is None else spec.groups
    groups = tuple(Group(one.name, one.ranks, one.description) for one in known)
    hang = msgspec.structs.replace(
        examine_dumps(dumps, warnings, states, groups), ras=_describe_ras(places)
    )
    if spec is None or states or hang.condition != CLEAR:
        return hang
    note = f"{_describe_recording_end(dumps)}: a later hang does not show in it; {_ASK_JOB}"
    return msgspec.structs.replace(hang, note=note, verdict=note)


def _describe_ras(places: Sequence[str | Path]) -> tuple[str, ...]:
    """What NCCL's RAS said of the job, in words: ranks that are behind or do not answer."""
    sentences: list[str] = []
    with list_files([str(place) for place in places]) as sources:
        for source in sources:
            if source.inner.name != RAS_NAME or is_special(source):
                continue
            with open_unpacked(source) as content:
                status = read_ras(content.read(_MAX_STATE_BYTES).decode(errors="replace"))
            sentences += status.findings
            for one in sorted(status.communicators, key=lambda each: -each.size):
                sentences += _describe_communicator(one)
    return tuple(sentences)


def _describe_communicator(one: RasCommunicator) -> Iterator[str]:
    def name(rank: RasRank | RasMissingRank) -> str:
        where = f"rank {rank.rank} of communicator {one.hash} of {one.size}"
        return f"{where} (process {rank.pid} on {rank.host})"

    for missing in one.missing_ranks:
        dead = missing.status.considered_dead
        yield f"{name(missing)} {'is considered dead' if dead else 'does not answer'}"
    for op in dict.fromkeys(op for rank in one.ranks for op in rank.collective_counts):
        counts = Counter(rank.collective_counts.get(op, 0) for rank in one.ranks)
        most = max(counts)
        for rank in one.ranks if len(counts) > 1 else ():
            if (launched := rank.collective_counts.get(op, 0)) < most:
                yield f"{name(rank)} has launched {launched} {op}, others {most}"


_ASK_JOB = "while the job runs, stepsplit hang PID asks its ranks"


def _describe_recording_end(dumps: Sequence[FlightDump]) -> str:
    ends_ns = [entry.created_unix_ns for dump in dumps for entry in dump.entries[-1:]]
    at = datetime.fromtimestamp(max(ends_ns, default=0) / 1e9, UTC)
    return f"no call was open when this recording ended ({at:%Y-%m-%d %H:%M:%S} UTC)"


def read_spec(places: Sequence[str | Path]) -> RunSpec | None:
    """The run.json of the recording in the places; None without one, or if it is invalid."""
    with list_files([str(place) for place in places]) as sources:
        for source in (one for one in sources if one.inner.name == RUN_FILE):
            try:
                with open_unpacked(source) as content:
                    return from_json(content.read(_MAX_RUN_BYTES))
            except (DataError, ValueError):
                continue
    return None


def read_dumps(
    places: Sequence[str | Path],
) -> tuple[tuple[FlightDump, ...], tuple[HangWarning, ...]]:
    """The dumps in the places, and warnings about unreadable files. Raises DataError."""
    dumps: list[FlightDump] = []
    warnings: list[HangWarning] = []
    with list_files([str(place) for place in places]) as sources:
        for source in sources:
            try:
                if find_kinds(source, (FLIGHT,)):
                    dumps.append(read_dump(source))
            except DataError as error:
                problem = f"{source.inner.name}: {error.problem}"
                warnings.append(HangWarning("file_skipped", problem))
    warnings += [HangWarning(n.code, n.message, n.rank) for dump in dumps for n in dump.notes]
    return tuple(dump for dump in dumps if dump.rank >= 0), tuple(warnings)


def examine_dumps(
    dumps: Sequence[FlightDump],
    warnings: Sequence[HangWarning] = (),
    states: Sequence[RankState] = (),
    known: Sequence[Group] = (),
) -> Hang:
    """Examine the calls of the dumps, one dump per rank, whether or not any call is stuck.

    states: what the ranks did when a running job was looked at. known: groups that the dumps may
    not list. Raises DataError for two dumps of the same rank, which belong to two incidents.
    """
    _refuse_duplicate_ranks(dumps)
    known = [*known, *(Group(g.name, g.ranks, g.description) for one in states for g in one.groups)]
    groups = find_job_groups(dumps, known)
    # The ranks whose last collective raised an error, because a peer has gone.
    ranks = collect_progress(
        dumps,
        groups,
        frozenset(one.rank for one in states if one.condition == RAISED and _is_peer_error(one)),
    )
    mismatches = find_mismatches(ranks)
    collectives = find_stuck_collectives(ranks, mismatches)
    collectives = tuple(_suspect_idle_ranks(one, ranks, groups.guessed) for one in collectives)
    stuck = (*collectives, *find_stuck_messages(ranks))
    inputs = HangInputs(stuck, mismatches if stuck else (), ranks, groups.guessed)
    by_rank = {one.rank: one for one in states}
    condition, culprits = _judge(inputs, by_rank)
    note = _explain_condition(condition, states)
    sentences = format_verdict([one.message for one in culprits])
    return Hang(
        verdict="; ".join(filter(None, (note, *sentences))),
        ranks=tuple(rank.rank for rank in ranks),
        no_dump=tuple(sorted({*groups.ranks, *by_rank} - {rank.rank for rank in ranks})),
        culprits=culprits,
        stuck=tuple(sorted(stuck, key=lambda call: _order_stuck(call, culprits))),
        mismatches=inputs.mismatches,
        last_calls=_list_last_calls(ranks, culprits, stuck),
        warnings=(*warnings, *_warn_guessed(groups)),
        condition=condition,
        note=note,
        states=tuple(map(summarize_state, states)),
    )


def _suspect_idle_ranks(call: Stuck, ranks: Sequence[Progress], guessed: frozenset[str]) -> Stuck:
    """A call in which all that ever called on its group wait, so that another member is missing.

    It waits for the ranks that are in no call, if there are any.
    """
    if call.group.name not in guessed or set(call.waiting) != set(call.group.ranks):
        return call
    idle = tuple(one.rank for one in ranks if one.rank not in call.group.ranks and not one.open)
    return msgspec.structs.replace(call, waits_for=idle or call.waits_for)


def _judge(inputs: HangInputs, states: Mapping[int, RankState]) -> tuple[str, tuple[Culprit, ...]]:
    """Whether the job is stuck, and the ranks to blame if it is."""
    if describe_progress(tuple(states.values())) is not None:
        return MOVING, ()
    culprits = tuple(explain_culprit(one, states) for one in find_culprits(inputs))
    if not culprits and states:
        culprits = find_culprits_by_state(tuple(states.values()), _describe_held)
    if not culprits:
        return CLEAR, ()
    late = describe_short_wait(tuple(states.values())) is not None
    return (LATE if late or all(one.cause == LATE for one in culprits) else STUCK), culprits


def _describe_held(ranks: tuple[int, ...]) -> str:
    return f"{_format_ranks(ranks)} {_choose_verb(ranks, 'blocks', 'block')} all other ranks"


def _explain_condition(condition: str, states: Sequence[RankState]) -> str:
    """Why the job is not known to be stuck; empty if it is."""
    if condition == MOVING:
        return f"not a hang: {describe_progress(states)}"
    if condition == CLEAR:
        return NO_STEP_NO_CALL if states else NOTHING_STUCK
    if condition == LATE:
        why = describe_short_wait(states) or "the rank that is late is not idle"
        return f"not known to be a hang: {why}"
    return ""


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

NO_STEP_NO_CALL = (
    "no step has ended and no collective is open: every rank is in its own code, see the stacks"
)

NOTHING_STUCK = "nothing is stuck: every call in the dumps has completed"

_MAX_RANKS, _MAX_MESSAGES = 8, 3


def format_verdict(messages: Sequence[str]) -> tuple[str, ...]:
    """The sentences of the first culprits, and the number of further ones."""
    more = len(messages) - _MAX_MESSAGES
    rest = (f"and {more} more",) if more > 0 else ()
    return (*messages[:_MAX_MESSAGES], *rest)


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
    inferred = "" if set(ranks) <= set(call.group.ranks) else " (inferred: no list of its members)"
    away = _choose_verb(ranks, "it has", "they have")
    owed = {"recv": "the send of ", "send": "the recv of "}.get(call.op, "")
    return f"{away} not called {owed}{_format_call(call)}{inferred}"


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
    departures = [_format_break(breaks[rank]) for rank in ranks[:_MAX_MESSAGES]]
    return f"{describe_blocking(ranks, blocked, inputs)}: {'; '.join([*away, *departures])}"


def _format_break(found: OrderBreak) -> str:
    before, call = found.before, found.call
    usual = describe_group(found.usual[0]).in_words
    return (
        f"rank {call.rank} called"
        f" {_format_call_name(call.op, call.seq, describe_group(call.group))}"
        f" right after {_format_call_name(before.op, before.seq, describe_group(before.group))},"
        f" where {found.usual[1]} of {usual} had always followed"
    )


def format_unknown_members(ranks: tuple[int, ...], call: Stuck) -> str:
    """Who else is in the group is unknown, so that a rank may be missing."""
    return (
        f"{_format_ranks(ranks)} {_choose_verb(ranks, 'waits', 'wait')} in {_format_call(call)};"
        " the dumps do not list its members: one that never called on it may be missing"
    )


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
            return _build_mismatch_culprit(
                ranks, blocked, [inputs.stuck[i] for i in ends[0].calls], inputs
            )
        case "deadlock":
            among = sorted({place for end in ends for place in end.calls})
            # The ranks wait for each other in different calls.
            calls = [inputs.stuck[place] for place in among]
            waits = [
                f"{_format_ranks(call.waiting)} in {_format_call(call)} waiting for "
                f"{_format_ranks(call.waits_for)}"
                for call in calls
                if call.missing
            ]
            message = f"deadlock of {_format_ranks(ranks)}: {'; '.join(waits[:_MAX_MESSAGES])}"
        case "order":
            return _build_order_culprit(ranks, blocked, ends, inputs)
        case "not_ending":
            # All members have called it, and it does not end.
            there = f"all members have called {_format_call(call)} but none has completed it"
            message = f"{there}: check the devices and the network of {_format_ranks(ranks)}"
        case "members_unknown":
            message = format_unknown_members(ranks, call)
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


def _build_order_culprit(
    ranks: tuple[int, ...], blocked: tuple[int, ...], ends: Sequence[ChainEnd], inputs: HangInputs
) -> Culprit:
    """Of ranks that wait for each other, those that left their usual order are to blame."""
    breaks = inputs.find_order_breaks(ranks)
    odd = tuple(sorted(breaks))
    blocked = tuple(sorted({*blocked, *ranks} - set(odd)))
    calls = [inputs.stuck[place] for place in sorted({at for end in ends for at in end.calls})]
    return Culprit(odd, "order", blocked, format_order(odd, blocked, calls, breaks, inputs))


# Of ranks that wait for each other, those that left their usual order of calls.

_Kind = tuple[JobGroup, str, int]
"""Group, operation and size."""

_RECENT_CALLS = 64
"""A departure further back than this many calls does not explain a hang."""

_MIN_REPEATS = 2


class OrderBreak(Struct, frozen=True):
    """The first call of a rank that never before followed the call before it.

    usual is the kind of call that always followed one like `before` earlier.
    """

    before: Called
    call: Called
    usual: _Kind


def find_order_break(rank: Progress) -> OrderBreak | None:
    """The rank's first recent departure from its order of calls; None if it has kept to it."""
    calls = [call for call in rank.calls if not call.is_message]
    kinds = _list_kinds(calls)
    for at in range(max(1, len(calls) - _RECENT_CALLS), len(calls)):
        usual = _find_only_successor(kinds[:at], kinds[at - 1])
        if usual is not None and usual != kinds[at]:
            return OrderBreak(calls[at - 1], calls[at], usual)
    return None


def _list_kinds(calls: Iterable[Called]) -> list[_Kind]:
    return [(one.group, one.op, one.message_bytes) for one in calls if not one.is_message]


def _find_only_successor(kinds: Sequence[_Kind], kind: _Kind) -> _Kind | None:
    """The kind of call that has followed each earlier call of a kind, if always the same."""
    later = Counter(after for before, after in pairwise(kinds) if before == kind)
    if len(later) != 1:
        return None
    only, count = later.most_common(1)[0]
    return only if count >= _MIN_REPEATS else None


# The states of the ranks of a running job, and what they add to its dumps.

BUSY_FRACTION = 0.3
"""A main thread that runs or is ready to for more of the time between two looks computes."""

BUSY_IO = 1 << 20
"""A process that reads and writes more than this between two looks makes progress."""

_MAX_STATE_BYTES = 16 << 20

_PEER_ERRORS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe",
                "Timed out waiting", "remote process exited")  # fmt: skip
"""Errors of a rank whose peer has ended: a consequence, not the cause."""


def read_states(places: Sequence[str | Path]) -> tuple[RankState, ...]:
    """The states of the ranks in the places, sorted by rank. Raises DataError for an invalid one.

    A state is a file rank{rank}_state.json, as `stepsplit hang` writes it for a running job.
    """
    states: dict[int, RankState] = {}
    with list_files([str(place) for place in places]) as sources:
        for source in sources:
            if not source.inner.name.endswith(STATE_SUFFIX) or is_special(source):
                continue
            with open_unpacked(source) as content:
                text = content.read(_MAX_STATE_BYTES)
            try:
                state = read_state(text)
            except ValueError as error:
                raise DataError(source.where, f"invalid state: {error}", RECORD_AGAIN) from None
            states[state.rank] = state
    return tuple(states[rank] for rank in sorted(states))


def _is_peer_error(state: RankState) -> bool:
    return any(text in state.error for text in _PEER_ERRORS)


def summarize_state(state: RankState) -> RankNow:
    """The state of a rank as it is reported."""
    last = state.looks[-1] if state.looks else None
    stack = state.error_stack or (last.stack if last is not None else ())
    return RankNow(
        rank=state.rank,
        condition=state.condition,
        steps=None if last is None else last.steps,
        since_step_ns=None if last is None else last.since_step_ns,
        busy_fraction=_measure_busy_fraction(state),
        error=state.error,
        stack=tuple(StackFrame(one.function, one.file, one.line) for one in stack),
    )


def _measure_busy_fraction(state: RankState) -> float | None:
    if len(state.looks) < 2:
        return None
    first, last = state.looks[0], state.looks[-1]
    elapsed_ns = last.at_unix_ns - first.at_unix_ns
    return round((last.busy_ns - first.busy_ns) / elapsed_ns, 3) if elapsed_ns > 0 else None


# Whether the job moves.


def describe_progress(states: Sequence[RankState]) -> str | None:
    """What has gone on between the looks, in words; None if no step or call has."""
    seen = [state for state in states if len(state.looks) > 1]
    best = max(seen, key=_count_progress, default=None)
    if best is None or _count_progress(best) == (0, 0):
        return None
    steps, calls = _count_progress(best)
    seconds = (best.looks[-1].at_unix_ns - best.looks[0].at_unix_ns) / 1e9
    done = f"ended {steps} steps" if steps else f"made {calls} collective calls"
    return f"rank {best.rank} {done} in {seconds:.1f} s"


def _count_progress(state: RankState) -> tuple[int, int]:
    first, last = state.looks[0], state.looks[-1]
    return last.steps - first.steps, last.calls - first.calls


def describe_short_wait(states: Sequence[RankState]) -> str | None:
    """That the current step is not much longer than recent ones, in words; None if it is."""
    running = [one for one in states if one.condition == RUNNING and one.looks and one.step_ns]
    if len(running) < len(states):
        return None
    age_ns = min((one.looks[-1].since_step_ns for one in running), default=0)
    usual_ns = max((one.step_ns for one in running), default=0)
    if not running or age_ns > USUAL_STEPS * usual_ns:
        return None
    return (
        f"the current step has lasted {age_ns / 1e9:.1f} s, and recent ones took up to"
        f" {usual_ns / 1e9:.1f} s"
    )


# The culprits, with what their processes and Python stacks do.


def explain_culprit(culprit: Culprit, states: Mapping[int, RankState]) -> Culprit:
    """The culprit with the condition of its processes as cause, and what they do in words."""
    known = [states[rank] for rank in culprit.ranks if rank in states]
    if not known:
        return culprit
    cause = next(
        (
            found
            for found in map(_find_cause, known)
            if found and culprit.cause in ("not_called", "no_dump")
        ),
        None,
    )
    doing = dict.fromkeys(describe_rank(one, culprit.ranks) for one in known[:_MAX_DESCRIBED])
    message = "; ".join([_NO_DUMP.sub(":", culprit.message), *doing])
    return msgspec.structs.replace(culprit, cause=cause or culprit.cause, message=message)


_NO_DUMP = re.compile(r" \(inferred\): no dump of \w+, and")
"""A rank whose state is known needs no inference from its missing dump."""

_MAX_ERROR = 160

_MAX_DESCRIBED = 4


def _find_cause(state: RankState) -> str | None:
    if state.condition in (ENDED, RAISED, STOPPED, SILENT):
        return state.condition
    return LATE if is_busy(state) else None


def is_busy(state: RankState) -> bool:
    """Whether the rank computed, or read or wrote files, between the looks."""
    return state.condition == RUNNING and (_is_computing(state) or _count_io_bytes(state) > BUSY_IO)


def _is_computing(state: RankState) -> bool:
    return (_measure_busy_fraction(state) or 0.0) > BUSY_FRACTION


def _count_io_bytes(state: RankState) -> int:
    return state.looks[-1].io_bytes - state.looks[0].io_bytes if state.looks else 0


def describe_rank(state: RankState, among: Sequence[int] = ()) -> str:
    """What a rank does, in words. among: the ranks of which the sentence speaks already."""
    whom = "it" if len(among) == 1 else f"rank {state.rank}"
    subject = "its" if len(among) == 1 else f"rank {state.rank}'s"
    place = f" in {name_place(state.error_stack)}" if state.error_stack else ""
    error = state.error
    if len(error) > _MAX_ERROR:
        error = f"{error[: _MAX_ERROR - 3]}..."
    match state.condition:
        case "ended":
            # A rank that ends by itself leaves its last step; one that is killed leaves nothing.
            why = (
                f" with {error}{place}"
                if error
                else (" without an error" if state.looks else " (killed, or crashed)")
            )
            return f"{subject} process has ended{why}"
        case "raised":
            return f"{whom} has raised {error}{place}, and its process has not ended"
        case "stopped":
            return f"{subject} process {state.pid} is stopped (SIGSTOP or a debugger)"
        case "silent":
            held = f"{subject} process {state.pid} does not answer: it holds Python's lock"
            return f"{held} in {name_place(state.looks[-1].stack)}" if state.looks else held
    stack = state.looks[-1].stack if state.looks else ()
    how = "waits"
    if _is_computing(state):
        how = f"computes (busy {_measure_busy_fraction(state):.0%} of the time)"
    elif is_busy(state):
        how = f"reads or writes ({_count_io_bytes(state) / 1e6:.0f} MB)"
    return f"{whom} {how} in {name_place(stack)}" if stack else f"{whom} {how}"


def name_place(stack: Sequence[CodeFrame]) -> str:
    """The innermost frame of the user's code, and below it the innermost of all."""
    inner = stack[0]
    own = next((one for one in stack if _is_user_code(one)), inner)
    place = f"{_shorten(own.file)}:{own.line} {own.function}"
    return place if own is inner else f"{place} > {inner.function} ({_shorten(inner.file)})"


_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "<", "/stepsplit/",
              "/collectors/attach/")  # fmt: skip


def _is_user_code(frame: CodeFrame) -> bool:
    return not any(part in frame.file for part in _LIBRARIES) and "/torch/" not in frame.file


def _shorten(file: str) -> str:
    return "/".join(file.split("/")[-1:])


# The culprits if no call is open.


def find_culprits_by_state(
    states: Sequence[RankState], describe: Callable[[tuple[int, ...]], str]
) -> tuple[Culprit, ...]:
    """The ranks to blame for steps that have stopped while no collective is open.

    They are those whose process has ended or raised, else those that are not in a call of
    torch.distributed while others are. describe: names ranks and those that they block.
    """
    gone = [one for one in states if one.condition != RUNNING and not _is_peer_error(one)]
    away = [one for one in states if not _is_in_distributed(one)]
    to_blame = gone or (away if len(away) < len(states) else [])
    if not to_blame:
        return ()
    ranks = tuple(one.rank for one in to_blame)
    held = tuple(one.rank for one in states if one.rank not in ranks)
    cause = _find_cause(to_blame[0]) or "not_called"
    plain = Culprit(ranks, cause, held, f"{describe(ranks)}: no collective is open")
    return (explain_culprit(plain, {one.rank: one for one in to_blame}),)


def _is_in_distributed(state: RankState) -> bool:
    stack = state.looks[-1].stack if state.looks else ()
    return any("/torch/distributed/" in frame.file for frame in stack)
