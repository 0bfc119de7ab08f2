"""Who caused the waiting, and by what.

A wait ends when the rank that came last arrives. Its lag behind the waiter is what it did more of
than the waiter since the two were last level, which they were when the waiter last waited for a
call of the same ranks. What it did more of is the cause: computing, copying, moving data, or
nothing at all (its host was late). Where it waited more itself, blame passes on to those that it
waited for, in the shares of those waits, and from there on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stepsplit.analyzer.arrays import firsts_of, labels_of
from stepsplit.analyzer.split.blame.exposed_waits import Waits
from stepsplit.analyzer.split.blame.lags import Lags, lags_of
from stepsplit.analyzer.split.blame.levels import RankTime
from stepsplit.analyzer.split.calls.waits import BUBBLE
from stepsplit.analyzer.trace import Int64

Float = npt.NDArray[np.float64]
CAUSES = ("compute", "imbalance", "host", "copy", "transfer")
_ROUNDS = 24
"""Through how many ranks blame is passed on at most."""
_SETTLED = 1e-4
_Key = tuple[int | None, str, int]


@dataclass(frozen=True, slots=True)
class Blame:
    """Waiting that one rank (None: nobody in particular) caused on one axis in one step."""

    rank: int | None
    cause: str
    axis: str | None
    step: int
    skew_ns: int
    bubble_ns: int


def blame(
    ranks: Sequence[RankTime], schedule_ns: Mapping[tuple[int, int], int]
) -> tuple[Blame, ...]:
    """All skew and bubble of all ranks, each instant once, by who caused it.

    schedule_ns is the ideal bubble of each (rank, step): that much of its bubble is the schedule's,
    first of all where nobody did more than the others.
    """
    waits = Waits.of(ranks)
    if not len(waits.length_ns):
        return ()
    lags = lags_of(ranks, waits)
    schedule = _of_schedule(waits, lags, schedule_ns)
    carried = _carried(waits, lags, schedule)
    return _rows(waits, _shares(waits, lags, carried, schedule))


def _of_schedule(waits: Waits, lags: Lags, schedule_ns: Mapping[tuple[int, int], int]) -> Float:
    """The part of each wait that the schedule itself costs: of what nobody is behind first."""
    part = np.zeros(len(waits.length_ns))
    bubble = waits.bucket == BUBBLE
    innocent = np.where(bubble, waits.length_ns * (1 - _behind(waits, lags)), 0.0)
    whole = np.where(bubble, waits.length_ns, 0.0)
    for (rank, step), ideal_ns in schedule_ns.items():
        rows = np.flatnonzero(bubble & (waits.rank == rank) & (waits.step == step))
        free, total = float(innocent[rows].sum()), float(whole[rows].sum())
        part[rows] += innocent[rows] * (min(ideal_ns, free) / free if free else 0.0)
        rest = whole[rows] - part[rows]
        left = min(float(ideal_ns), total) - float(part[rows].sum())
        part[rows] += rest * (left / float(rest.sum()) if left > 0 and rest.any() else 0.0)
    return part


def _behind(waits: Waits, lags: Lags) -> Float:
    """Which part of each wait somebody is behind who did more than his fair share of work."""
    guilty = 1 - lags.passed - lags.fair
    found = guilty
    for _ in range(_ROUNDS):
        found, before = guilty + lags.passed * lags.mean_of(found * waits.length_ns), found
        if float(np.abs(found - before).max()) < _SETTLED:
            break
    return np.clip(found, 0, 1)


def _carried(waits: Waits, lags: Lags, schedule: Float) -> Float:
    """How much of the waiting of each origin ends up with the cause of each wait: (waits, origins).

    An origin is an (axis, bucket) of the waits. What went round too often stays where it is.
    """
    moving = np.zeros((len(waits.length_ns), waits.origins))
    moving[np.arange(len(moving)), waits.origin] = waits.length_ns - schedule
    settled = np.zeros_like(moving)
    for _ in range(_ROUNDS):
        settled += moving * (1 - lags.passed)[:, np.newaxis]
        moving = lags.passed_on(moving * lags.passed[:, np.newaxis])
        if moving.sum() < _SETTLED * waits.length_ns.sum():
            break
    return settled + moving


def _shares(waits: Waits, lags: Lags, carried: Float, schedule: Float) -> dict[_Key, Float]:
    """For each (rank, cause, step) what it is to blame for, by origin."""
    found: dict[_Key, Float] = {}
    alone = np.where(lags.passed < 1, 1 - lags.passed, 1.0)
    nobody = np.full(len(carried), -1)
    for number, cause in enumerate(CAUSES):
        share = np.where(lags.known, lags.direct[:, number] / alone, 0.0)
        _add(found, waits.owner, waits.step, cause, carried * share[:, np.newaxis])
    missing, unknown = ~lags.known & lags.named, ~lags.known & ~lags.named
    _add(found, waits.owner, waits.step, "missing", carried * missing[:, np.newaxis])
    _add(found, nobody, waits.step, "unknown", carried * unknown[:, np.newaxis])
    of_schedule = np.zeros_like(carried)
    of_schedule[np.arange(len(carried)), waits.origin] = schedule
    _add(found, nobody, waits.step, "schedule", of_schedule)
    return found


def _add(found: dict[_Key, Float], owner: Int64, step: Int64, cause: str, amount: Float) -> None:
    """Adds the amounts of each (owner, step) to those of the cause; an owner of -1 is nobody."""
    label = labels_of(owner, step)
    first = firsts_of(label)
    sums = np.zeros((len(first), amount.shape[1]))
    np.add.at(sums, label, amount)
    for rank, number, row in zip(owner[first].tolist(), step[first].tolist(), sums, strict=True):
        if row.any():
            key = (None if rank < 0 else rank, cause, number)
            found[key] = found[key] + row if key in found else row


def _rows(waits: Waits, shares: Mapping[_Key, Float]) -> tuple[Blame, ...]:
    """The shares in whole ns, which add up to the waits of each origin exactly."""
    keys = list(shares)
    table = np.stack([shares[key] for key in keys])
    whole = np.zeros(table.shape, dtype=np.int64)
    for origin in range(waits.origins):
        total = int(waits.length_ns[waits.origin == origin].sum())
        whole[:, origin] = _apportioned(table[:, origin], total)
    rows = []
    for key, row in zip(keys, whole, strict=True):
        for axis, skew, bubble in waits.by_axis(row.tolist()):
            if skew or bubble:
                rows.append(Blame(key[0], key[1], axis, key[2], skew, bubble))
    return tuple(rows)


def _apportioned(amount: Float, total: int) -> Int64:
    """The amounts in whole numbers that sum to the total, by largest remainders."""
    scale = total / float(amount.sum()) if amount.any() else 0.0
    exact = amount * scale
    whole = np.floor(exact).astype(np.int64)
    short = total - int(whole.sum())
    order = np.argsort(whole - exact, kind="stable")
    whole[order[: max(short, 0)]] += 1
    for row in order[::-1][: max(-short, 0)].tolist():
        whole[row] -= 1
    return whole
