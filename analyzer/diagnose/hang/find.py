"""Flight Recorder dumps and rank states: which rank is missing in which call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from stepsplit.analyzer.diagnose.hang.culprits import find_culprits
from stepsplit.analyzer.diagnose.hang.inputs import HangInputs
from stepsplit.analyzer.diagnose.hang.job_groups import describe_group, find_job_groups
from stepsplit.analyzer.diagnose.hang.mismatches import find_mismatches
from stepsplit.analyzer.diagnose.hang.progress import Progress, collect_progress
from stepsplit.analyzer.diagnose.hang.rank_states import (
    MAX_STATE_BYTES,
    describe_progress,
    describe_short_wait,
    explain_culprit,
    find_culprits_by_state,
    is_peer_error,
    read_heads,
    read_states,
    summarize_state,
)
from stepsplit.analyzer.diagnose.hang.ras import RAS_ALONE, describe_ras
from stepsplit.analyzer.diagnose.hang.result import (
    CLEAR,
    LATE,
    MOVING,
    STUCK,
    Culprit,
    Hang,
    HangWarning,
    LastCall,
    StackFrame,
    Stuck,
)
from stepsplit.analyzer.diagnose.hang.sentences import (
    NO_STEP_NO_CALL,
    NOTHING_STUCK,
    format_verdict,
)
from stepsplit.analyzer.diagnose.hang.stuck_collectives import find_stuck_collectives
from stepsplit.analyzer.diagnose.hang.stuck_messages import find_stuck_messages
from stepsplit.analyzer.diagnose.hang.watchdog import examine_watchdog_logs
from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.readers.compression import list_files
from stepsplit.analyzer.readers.file_kinds import FLIGHT, find_kinds
from stepsplit.analyzer.readers.flight_recorder import FlightDump, read_dump
from stepsplit.analyzer.readers.run_metadata import read_run_spec
from stepsplit.analyzer.readers.watchdog_log import IS_WATCHDOG, read_watchdog_log
from stepsplit.analyzer.trace import Group
from stepsplit.collectors.formats.rank_state import RAISED, RankState
from stepsplit.collectors.formats.run_spec import RUN_FILE, RunSpec

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


def read_calls(places: Sequence[str | Path], states: tuple[RankState, ...] | None = None) -> Hang:
    """Read the dumps and examine their calls, stuck or not; states are those of the places where
    they have been read. Raises DataError like find_hang."""
    dumps, warnings = read_dumps(places)
    states = read_states(places) if states is None else states
    if not dumps and not states and (hang := _examine_other_files(places)) is not None:
        return hang
    if not dumps and not states:
        why = f": {warnings[0].message}" if warnings else ""
        raise DataError(places[0] if places else "no path", f"no Flight Recorder dump found{why}",
                        "pass the folder with the dumps of the job")  # fmt: skip
    spec = read_spec(places)
    known = () if spec is None else spec.groups
    groups = tuple(Group(one.name, one.ranks, one.description) for one in known)
    hang = msgspec.structs.replace(
        examine_dumps(dumps, warnings, states, groups), ras=describe_ras(places)
    )
    if spec is None or states or hang.condition != CLEAR:
        return hang
    # The dumps are part of a recording, which ended before any hang that is looked for now.
    ends_ns = [entry.created_unix_ns for dump in dumps for entry in dump.entries[-1:]]
    at = datetime.fromtimestamp(max(ends_ns, default=0) / 1e9, UTC)
    note = (
        f"no call was open when this recording ended ({at:%Y-%m-%d %H:%M:%S} UTC): a later hang "
        "does not show in it; while the job runs, stepsplit hang PID asks its ranks"
    )
    return msgspec.structs.replace(hang, note=note, verdict=note)


def _examine_other_files(places: Sequence[str | Path]) -> Hang | None:
    """What the logs of NCCL's watchdogs say, or a saved answer of its RAS; None without any."""
    logs = [
        read_watchdog_log(source)
        for source, text in read_heads(places, MAX_STATE_BYTES)
        if IS_WATCHDOG.search(text)
    ]
    ras = describe_ras(places)
    if logs:
        return msgspec.structs.replace(examine_watchdog_logs(logs), ras=ras)
    if not ras:
        return None
    return Hang(verdict=RAS_ALONE, ranks=(), condition=LATE, note=RAS_ALONE, ras=ras)


def read_spec(places: Sequence[str | Path]) -> RunSpec | None:
    """The run.json of the recording in the places; None without one, or if it is invalid."""
    with list_files([str(place) for place in places]) as sources:
        for source in (one for one in sources if one.inner.name == RUN_FILE):
            try:
                return read_run_spec(source)
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
    rank, count = Counter(dump.rank for dump in dumps).most_common(1)[0] if dumps else (-1, 0)
    if count > 1:
        first, second = [dump.source for dump in dumps if dump.rank == rank][:2]
        problem = f"second dump of the same rank; the first is {first}"
        raise DataError(second, problem, "pass the dumps of one hang only", rank)
    known = [*known, *(Group(g.name, g.ranks, g.description) for one in states for g in one.groups)]
    groups = find_job_groups(dumps, known)
    # The ranks whose last collective raised an error, because a peer has gone.
    ranks = collect_progress(
        dumps,
        groups,
        frozenset(one.rank for one in states if one.condition == RAISED and is_peer_error(one)),
    )
    mismatches = find_mismatches(ranks)
    collectives = list(find_stuck_collectives(ranks, mismatches))
    for at, call in enumerate(collectives):
        # All that ever called on a group of unknown members wait in it: another member is missing,
        # perhaps one of the ranks that are in no call.
        if call.group.name in groups.guessed and set(call.waiting) == set(call.group.ranks):
            of_group = call.group.ranks
            idle = tuple(one.rank for one in ranks if one.rank not in of_group and not one.open)
            collectives[at] = msgspec.structs.replace(call, waits_for=idle or call.waits_for)
    stuck = (*collectives, *find_stuck_messages(ranks))
    inputs = HangInputs(stuck, mismatches if stuck else (), ranks, groups.guessed)
    by_rank = {one.rank: one for one in states}
    condition, culprits = _judge(inputs, by_rank)
    # Why the job is not known to be stuck; empty if it is.
    note = ""
    if condition == MOVING:
        note = f"not a hang: {describe_progress(states)}"
    elif condition == CLEAR:
        note = NO_STEP_NO_CALL if states else NOTHING_STUCK
    elif condition == LATE:
        why = describe_short_wait(states) or "the rank that is late is not idle"
        note = f"not known to be a hang: {why}"
    guessed = (HangWarning("groups_guessed", _GUESSED_TEXT),) if groups.guessed else ()
    sentences = format_verdict([one.message for one in culprits])
    return Hang(
        verdict="; ".join(filter(None, (note, *sentences))),
        ranks=tuple(rank.rank for rank in ranks),
        no_dump=tuple(sorted({*groups.ranks, *by_rank} - {rank.rank for rank in ranks})),
        culprits=culprits,
        stuck=tuple(sorted(stuck, key=lambda call: _order_stuck(call, culprits))),
        mismatches=inputs.mismatches,
        last_calls=_list_last_calls(ranks, culprits, stuck),
        warnings=(*warnings, *guessed),
        condition=condition,
        note=note,
        states=tuple(map(summarize_state, states)),
    )


def _judge(inputs: HangInputs, states: Mapping[int, RankState]) -> tuple[str, tuple[Culprit, ...]]:
    """Whether the job is stuck, and the ranks to blame if it is."""
    if describe_progress(tuple(states.values())) is not None:
        return MOVING, ()
    culprits = tuple(explain_culprit(one, states) for one in find_culprits(inputs))
    if not culprits and states:
        culprits = find_culprits_by_state(tuple(states.values()))
    if not culprits:
        return CLEAR, ()
    late = describe_short_wait(tuple(states.values())) is not None
    return (LATE if late or all(one.cause == LATE for one in culprits) else STUCK), culprits


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
