"""Which collectives do not end, where each member stands, and on what members disagree."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from stepsplit.analyzer.hang.groups import JobGroup
from stepsplit.analyzer.hang.hang import Mismatch, Missing, Side, Stuck, StuckGroup
from stepsplit.analyzer.hang.progress import (
    COMPLETED,
    ENQUEUED,
    MISSING,
    STARTED,
    Called,
    Progress,
)


def stuck_collectives(
    ranks: Sequence[Progress], mismatches: Sequence[Mismatch]
) -> tuple[Stuck, ...]:
    """The collectives at which ranks stand: each rank's first that is not done, of each group."""
    fronts = {(call.group, call.seq): call for rank in ranks for call in _fronts(rank)}
    present = {rank.rank: rank for rank in ranks}
    disagreed = {(one.group, one.seq): one.odd for one in mismatches}
    return tuple(
        _stuck(call, present, disagreed.get((named(group), seq), ()))
        for (group, seq), call in fronts.items()
    )


def named(group: JobGroup) -> StuckGroup:
    """The group as it is told."""
    return StuckGroup(group.name, group.description, group.ranks)


def _fronts(rank: Progress) -> list[Called]:
    first: dict[JobGroup, Called] = {}
    for call in rank.open:
        known = first.get(call.group)
        if not call.is_message and (known is None or call.seq < known.seq):
            first[call.group] = call
    return list(first.values())


def _stuck(call: Called, present: Mapping[int, Progress], odd: tuple[int, ...]) -> Stuck:
    group, seq = call.group, call.seq
    at: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(group.ranks):
        at[present[rank].state(group, seq) if rank in present else ""].append(rank)
    waiting = [present[rank] for rank in (*at[ENQUEUED], *at[STARTED])]
    calls = [one for rank in waiting if (one := rank.collective(group, seq)) is not None]
    sizes = {one.message_bytes for one in calls}
    return Stuck(
        group=named(group),
        op=call.op,
        seq=seq,
        dtype=call.dtype or None,
        message_bytes=call.message_bytes if len(sizes) == 1 and call.message_bytes >= 0 else None,
        called_unix_ns=str(min(one.created_unix_ns for one in calls)),
        enqueued=tuple(at[ENQUEUED]),
        started=tuple(at[STARTED]),
        completed=tuple(at[COMPLETED]),
        missing=tuple(_missing(present[rank], group) for rank in at[MISSING]),
        no_dump=tuple(at[""]),
        waits_for=_waits_for(at, odd),
        queued=max(_behind(rank, group, seq) for rank in waiting),
    )


def _waits_for(at: Mapping[str, list[int]], odd: tuple[int, ...]) -> tuple[int, ...]:
    """Those who are not there; else who called something else; else all who are not done.

    Where some are done all have been there, so that nobody is waited for. A rank without a dump is
    only suspected where nobody is known to be missing.
    """
    away = at.get(MISSING, []) or at.get("", [])
    if away or odd:
        return tuple(sorted({*away, *odd}))
    done = at.get(COMPLETED, [])
    return () if done else tuple(sorted(at.get(ENQUEUED, []) + at.get(STARTED, [])))


def _missing(rank: Progress, group: JobGroup) -> Missing:
    reach = rank.reach(group)
    known = (one if one >= 0 else None for one in (reach.enqueued, reach.completed))
    return Missing(rank.rank, *known)


def _behind(rank: Progress, group: JobGroup, seq: int) -> int:
    return sum(call.group == group and call.seq > seq and not call.is_message for call in rank.open)


def find_mismatches(ranks: Sequence[Progress]) -> tuple[Mismatch, ...]:
    """The first call of each group on which members disagree: later ones follow from it."""
    same: dict[tuple[JobGroup, int], list[Called]] = defaultdict(list)
    for call in (call for rank in ranks for call in rank.collectives):
        same[call.group, call.seq].append(call)
    first: dict[JobGroup, Mismatch] = {}
    for (group, _), calls in same.items():
        found = _mismatch(calls) if len(calls) > 1 else None
        if found is not None and (group not in first or found.seq < first[group].seq):
            first[group] = found
    return tuple(first.values())


def _mismatch(calls: Sequence[Called]) -> Mismatch | None:
    """What the members differ in first: the op, else the dtype, else the size where it matters."""
    told = (
        ("op", [call.op for call in calls]),
        ("dtype", [call.dtype for call in calls]),
        ("size", [str(call.agreed_bytes) if call.agreed_bytes >= 0 else "" for call in calls]),
    )
    for what, values in told:
        sides: dict[str, list[int]] = defaultdict(list)
        for call, value in zip(calls, values, strict=True):
            if value:
                sides[value].append(call.rank)
        if len(sides) > 1:
            ordered = sorted(sides.items(), key=lambda side: (-len(side[1]), min(side[1])))
            told_sides = tuple(Side(value, tuple(sorted(at))) for value, at in ordered)
            return Mismatch(named(calls[0].group), calls[0].seq, what, told_sides)
    return None
