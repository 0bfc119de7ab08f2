"""Who caused the waiting, and by what."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.split.attribute import Band, Exposed
from stepsplit.analyzer.split.waits import BUBBLE, SKEW
from stepsplit.analyzer.trace import Int64, UInt8

_CAUSE = {
    "compute": "compute",
    "collective": "transfer",
    "p2p": "transfer",
    "copy": "copy",
    "idle": "host",
}


@dataclass(frozen=True, slots=True)
class RankTime:
    """What one rank did, on the common clock: its band of buckets, and its waits with their owners.

    step numbers the windows that the band and the waits refer to; axis has the axis of each wait.
    """

    rank: int
    step: tuple[int, ...]
    band_bucket: UInt8
    band_start_ns: Int64
    band_end_ns: Int64
    waits: Exposed
    axis: tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class Blame:
    """Waiting that one rank (None: nobody in particular) caused on one axis in one step."""

    rank: int | None
    cause: str
    axis: str | None
    step: int
    skew_ns: int
    bubble_ns: int


def rank_time(
    rank: int,
    step: Sequence[int],
    band: Band,
    exposed: Exposed,
    axis: Sequence[str | None],
    lead_ns: int,
) -> RankTime:
    """The rank's band and waits moved to the common clock; axis has one entry an exposed row."""
    waits = np.flatnonzero(np.isin(exposed.bucket, (SKEW, BUBBLE)))
    moved = Exposed(
        exposed.window[waits], exposed.bucket[waits], exposed.call[waits], exposed.owner[waits],
        exposed.start_ns[waits] + lead_ns, exposed.end_ns[waits] + lead_ns,
    )  # fmt: skip
    axes = tuple(axis[i] for i in waits.tolist())
    start, end = band.start_ns + lead_ns, band.end_ns + lead_ns
    return RankTime(rank, tuple(step), band.bucket, start, end, moved, axes)


def blame(
    ranks: Sequence[RankTime], schedule_ns: Mapping[tuple[int, int], int]
) -> tuple[Blame, ...]:
    """All skew and bubble of all ranks, each instant once, by who caused it.

    What the late rank did while it was waited for is the cause; where it waited itself, the blame
    passes on. schedule_ns is the ideal bubble of each (rank, step): that much of its bubble is the
    schedule's.
    """
    by_rank = {one.rank: one for one in ranks}
    found: dict[tuple[int | None, str, str | None, int], list[int]] = defaultdict(lambda: [0, 0])
    for one in ranks:
        for (cause_rank, cause, axis, step, bucket), ns in _of_rank(one, by_rank, schedule_ns):
            found[cause_rank, cause, axis, step][bucket == BUBBLE] += ns
    return tuple(Blame(*key, skew, bubble) for key, (skew, bubble) in found.items())


_Key = tuple[int | None, str, str | None, int, int]


def _of_rank(
    one: RankTime, by_rank: Mapping[int, RankTime], schedule_ns: Mapping[tuple[int, int], int]
) -> list[tuple[_Key, int]]:
    found: dict[_Key, int] = defaultdict(int)
    waits = one.waits
    for i in range(len(waits.start_ns)):
        step, bucket = one.step[waits.window[i]], int(waits.bucket[i])
        start, end = int(waits.start_ns[i]), int(waits.end_ns[i])
        causes = _causes(int(waits.owner[i]), start, end, by_rank, (one.rank,))
        for (rank, cause), ns in causes.items():
            found[rank, cause, one.axis[i], step, bucket] += ns
    shares: list[tuple[_Key, int]] = []
    for step in {key[3] for key in found}:
        of_step = {key: ns for key, ns in found.items() if key[3] == step}
        shares += _with_schedule(of_step, schedule_ns.get((one.rank, step), 0))
    return shares


def _causes(
    owner: int, start: int, end: int, by_rank: Mapping[int, RankTime], waiting: tuple[int, ...]
) -> dict[tuple[int | None, str], int]:
    """What the owner did in [start, end), in ns; what it waited for itself is passed on.

    waiting are the ranks through which blame came here: those who wait for each other are held up
    by nobody but the transfer between them.
    """
    if owner < 0:
        return {(None, "unknown"): end - start}
    if owner in waiting:
        return {(owner, "transfer"): end - start}
    if (late := by_rank.get(owner)) is None:
        return {(owner, "missing"): end - start}
    found: dict[tuple[int | None, str], int] = defaultdict(int)
    seen = 0
    first = int(np.searchsorted(late.band_end_ns, start, side="right"))
    after = int(np.searchsorted(late.band_start_ns, end, side="left"))
    for row in range(first, after):
        low, high = max(start, int(late.band_start_ns[row])), min(end, int(late.band_end_ns[row]))
        seen += high - low
        bucket = int(late.band_bucket[row])
        if bucket in (SKEW, BUBBLE):
            for cause, ns in _passed_on(late, low, high, by_rank, (*waiting, owner)).items():
                found[cause] += ns
        else:
            found[owner, _CAUSE[BUCKETS[bucket]]] += high - low
    if seen < end - start:
        found[None, "unknown"] += end - start - seen
    return found


def _passed_on(
    late: RankTime, start: int, end: int, by_rank: Mapping[int, RankTime], waiting: tuple[int, ...]
) -> dict[tuple[int | None, str], int]:
    waits = late.waits
    found: dict[tuple[int | None, str], int] = defaultdict(int)
    first = int(np.searchsorted(waits.end_ns, start, side="right"))
    after = int(np.searchsorted(waits.start_ns, end, side="left"))
    for row in range(first, after):
        low, high = max(start, int(waits.start_ns[row])), min(end, int(waits.end_ns[row]))
        for cause, ns in _causes(int(waits.owner[row]), low, high, by_rank, waiting).items():
            found[cause] += ns
    return found


def _with_schedule(of_step: Mapping[_Key, int], ideal_ns: int) -> list[tuple[_Key, int]]:
    """A step's causes, with the schedule's share of the bubble taken from all in proportion."""
    total = sum(ns for key, ns in of_step.items() if key[4] == BUBBLE)
    share = min(ideal_ns, total)
    found: list[tuple[_Key, int]] = []
    for key, ns in of_step.items():
        moved = ns * share // total if key[4] == BUBBLE and total else 0
        found += [(key, ns - moved), ((None, "schedule", *key[2:]), moved)]
    return found
