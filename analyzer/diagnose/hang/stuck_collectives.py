"""Collectives that do not end, and the state of each member."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from stepsplit.analyzer.diagnose.hang.job_groups import JobGroup, describe_group
from stepsplit.analyzer.diagnose.hang.progress import (
    COMPLETED,
    ENQUEUED,
    MISSING,
    STARTED,
    Called,
    Progress,
)
from stepsplit.analyzer.diagnose.hang.result import Mismatch, Missing, Stuck


def find_stuck_collectives(
    ranks: Sequence[Progress], mismatches: Sequence[Mismatch]
) -> tuple[Stuck, ...]:
    """The stuck collectives: the first open one of each rank in each group."""
    fronts: dict[tuple[JobGroup, int], Called] = {}
    for rank in ranks:
        first: dict[JobGroup, Called] = {}
        for call in rank.open:
            known = first.get(call.group)
            if not call.is_message and (known is None or call.seq < known.seq):
                first[call.group] = call
        fronts |= {(call.group, call.seq): call for call in first.values()}
    present = {rank.rank: rank for rank in ranks}
    disagreed = {(one.group, one.seq): one.odd for one in mismatches if not one.is_message}
    return tuple(
        _build_stuck_collective(call, present, disagreed.get((describe_group(group), seq), ()))
        for (group, seq), call in fronts.items()
    )


def _build_stuck_collective(
    call: Called, present: Mapping[int, Progress], odd: tuple[int, ...]
) -> Stuck:
    group, seq = call.group, call.seq
    at: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(group.ranks):
        at[present[rank].infer_state(group, seq) if rank in present else ""].append(rank)
    waiting = [present[rank] for rank in (*at[ENQUEUED], *at[STARTED])]
    calls = [one for rank in waiting if (one := rank.find_collective(group, seq)) is not None]
    sizes = {one.message_bytes for one in calls}
    missing, queued = [], 0
    for rank in at[MISSING]:
        reach = present[rank].find_reach(group)
        known = (one if one >= 0 else None for one in (reach.enqueued, reach.completed))
        missing.append(Missing(rank, *known))
    for rank_waiting in waiting:
        later = [each for each in rank_waiting.open if each.group == group and each.seq > seq]
        queued = max(queued, sum(not each.is_message for each in later))
    return Stuck(
        group=describe_group(group),
        op=call.op,
        seq=seq,
        dtype=call.dtype or None,
        message_bytes=call.message_bytes if len(sizes) == 1 and call.message_bytes >= 0 else None,
        called_unix_ns=str(min(one.created_unix_ns for one in calls)),
        enqueued=tuple(at[ENQUEUED]),
        started=tuple(at[STARTED]),
        completed=tuple(at[COMPLETED]),
        missing=tuple(missing),
        no_dump=tuple(at[""]),
        waits_for=_find_blockers(at, odd),
        queued=queued,
    )


def _find_blockers(at: Mapping[str, list[int]], odd: tuple[int, ...]) -> tuple[int, ...]:
    """The ranks that block a call: missing or mismatched ranks, else all that are not done.

    If some ranks have completed the call, all have arrived and no rank blocks it. A rank without a
    dump is suspected only if no rank is known to be missing.
    """
    away = at.get(MISSING, []) or at.get("", [])
    if away or odd:
        return tuple(sorted({*away, *odd}))
    done = at.get(COMPLETED, [])
    return () if done else tuple(sorted(at.get(ENQUEUED, []) + at.get(STARTED, [])))
