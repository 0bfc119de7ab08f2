"""A hang as far as the log of NCCL's watchdogs shows it.

A watchdog writes which call its own rank gave up on, and how far the rank came in the group. A rank
without a line may be missing in the call, have ended, or have written to another log: it has no
report, and is not called missing. It is known to be missing where it says itself that it has not
made the call.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from stepsplit.analyzer.diagnose.hang.result import (
    CLEAR,
    STUCK,
    Culprit,
    Hang,
    HangWarning,
    Missing,
    Stuck,
    StuckGroup,
)
from stepsplit.analyzer.diagnose.hang.sentences import (
    choose_verb,
    format_not_called,
    format_ranks,
    format_verdict,
)
from stepsplit.analyzer.readers.watchdog_log import TimedOut, WatchdogLog, WatchdogStatus

_UNKNOWN_GROUP = "?"

_NO_MEMBERS = (
    "the log of the watchdogs lists no members of a group and no stacks: a rank without a line in"
    " it may wait elsewhere, have ended, or have written to another log; with"
    " TORCH_NCCL_TRACE_BUFFER_SIZE=2000 and TORCH_NCCL_DUMP_ON_TIMEOUT=1 Flight Recorder dumps show"
    " which rank has not made which call"
)

_GROUP_RANKS = "the lines have no ranks of the job: ranks are those within the group"


def examine_watchdog_logs(logs: Sequence[WatchdogLog]) -> Hang:
    """What the watchdogs of a job say, from the logs of its ranks."""
    timeouts = [one for log in logs for one in log.timeouts]
    statuses = [one for log in logs for one in log.statuses]
    ranks = sorted({one.rank for one in timeouts})
    by_call: dict[tuple[str, str, int, str], dict[int, TimedOut]] = defaultdict(dict)
    for one in timeouts:
        group, description = _find_group(one, statuses)
        by_call[group, description, one.seq, one.op][one.rank] = one
    # Of a rank's calls the first that it gave up on; later ones are queued behind it.
    firsts = {rank: min(one.seq for one in timeouts if one.rank == rank) for rank in ranks}
    stuck = [
        _build_stuck(key, waiting, statuses, ranks)
        for key, waiting in by_call.items()
        if any(one.seq == firsts[rank] for rank, one in waiting.items())
    ]
    stuck.sort(key=lambda call: (-len(call.waiting), call.seq))
    unlike = [
        call
        for call in stuck
        if any(
            other.group.name == call.group.name != _UNKNOWN_GROUP
            and other.seq == call.seq
            and other.op != call.op
            for other in stuck
        )
    ]
    culprits = tuple(
        Culprit(
            call.waits_for,
            "not_called",
            call.waiting,
            f"{format_ranks(call.waits_for)} {choose_verb(call.waits_for, 'blocks', 'block')}"
            f" {format_ranks(call.waiting)}: {format_not_called(call.waits_for, call)}, by"
            f" {choose_verb(call.waits_for, 'its', 'their')} own watchdog",
        )
        for call in stuck
        if call.waits_for
    )
    reports = tuple(_describe_wait(call, by_call) for call in stuck)
    if unlike and not culprits:
        sides = "; ".join(f"{one.op} on {format_ranks(one.waiting)}" for one in unlike)
        first = unlike[0]
        text = f"call {first.seq} of {_name_group(first.group)} differs in op: {sides}"
        odd = min(unlike, key=lambda call: len(call.waiting)).waiting
        culprits = (Culprit(odd, "mismatch", (), text),)
    note = "" if culprits else "; ".join(format_verdict(reports))
    warnings = [HangWarning("watchdog_log", _NO_MEMBERS)]
    if any(one.is_group_rank for one in timeouts):
        warnings.append(HangWarning("group_ranks", _GROUP_RANKS))
    return Hang(
        verdict="; ".join([*format_verdict([one.message for one in culprits]), *reports]),
        ranks=tuple(ranks),
        no_dump=_find_silent(ranks),
        culprits=culprits,
        stuck=tuple(stuck),
        warnings=tuple(warnings),
        condition=STUCK if stuck else CLEAR,
        note=note,
    )


def _find_group(one: TimedOut, statuses: Sequence[WatchdogStatus]) -> tuple[str, str]:
    """The group in which the rank's watchdog gave up on this call; unknown if no line says so."""
    named = {
        (status.group, status.description)
        for status in statuses
        if (status.rank, status.is_group_rank, status.seq) == (one.rank, one.is_group_rank, one.seq)
    }
    return named.pop() if len(named) == 1 else (_UNKNOWN_GROUP, "")


def _build_stuck(
    key: tuple[str, str, int, str],
    waiting: dict[int, TimedOut],
    statuses: Sequence[WatchdogStatus],
    ranks: Sequence[int],
) -> Stuck:
    group, description, seq, op = key
    behind = {
        status.rank: status
        for status in statuses
        if status.group == group != _UNKNOWN_GROUP and status.last_enqueued < seq
    }
    missing = [
        Missing(rank, status.last_enqueued, status.last_completed)
        for rank, status in sorted(behind.items())
        if rank not in waiting
    ]
    members = sorted({*waiting, *(one.rank for one in missing)})
    # All ranks are in the default group; who else is in other groups is not known.
    silent = _find_silent(ranks) if description == "default_pg" else ()
    return Stuck(
        group=StuckGroup(group, description, tuple(sorted((*members, *silent)))),
        op=op,
        seq=seq,
        dtype=None,
        message_bytes=None,
        called_unix_ns="0",
        enqueued=tuple(sorted(waiting)),
        missing=tuple(missing),
        no_dump=silent,
        waits_for=tuple(one.rank for one in missing),
    )


def _find_silent(ranks: Sequence[int]) -> tuple[int, ...]:
    """The ranks below the last one of which there is no line."""
    return tuple(rank for rank in range(max(ranks, default=0)) if rank not in ranks)


def _describe_wait(
    call: Stuck, by_call: dict[tuple[str, str, int, str], dict[int, TimedOut]]
) -> str:
    waited = by_call[call.group.name, call.group.description, call.seq, call.op]
    longest_s = max(one.waited_ms for one in waited.values()) / 1000
    sizes = {one.elements for one in waited.values()} - {None}
    size = f" of {sizes.pop():,} elements" if len(sizes) == 1 else ""
    text = (
        f"{format_ranks(call.waiting)} gave up on {call.op} {call.seq}{size} of"
        f" {_name_group(call.group)} after {longest_s:,.0f} s"
    )
    if call.no_dump:
        text += f"; no report of {format_ranks(call.no_dump)}"
    if not call.waits_for:
        text += "; the log does not say which rank has not made the call"
    return text


def _name_group(group: StuckGroup) -> str:
    return "a group that the log does not name" if group.name == _UNKNOWN_GROUP else group.in_words
