"""Blame: which rank caused each wait, and why.

A wait ends when the last rank arrives. The begin of the wait and that arrival each have a chain of
events that determined them, back to their last common event: paths of the dependency graph along
its binding dependencies. They begin at the same instant, so the wait is what the path of the last
rank has in addition: compute, copies, idle time (late host) or transfers, of whichever rank they
are. A rank that waited itself is thus not blamed for it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
from msgspec import Struct

from stepsplit.analyzer.arrays import first_rows, group_ids, group_rows
from stepsplit.analyzer.buckets import Bucket
from stepsplit.analyzer.diagnose.counted_work import WorkLaw
from stepsplit.analyzer.diagnose.graph.binding_paths import BLAME_CAUSES, COMPUTES, BindingPaths
from stepsplit.analyzer.diagnose.graph.charges import Charges, KnownDelay, find_significant
from stepsplit.analyzer.diagnose.graph.dependency_graph import DependencyGraph
from stepsplit.analyzer.diagnose.graph.exposed_waits import ExposedWaits
from stepsplit.analyzer.diagnose.graph.path_pairs import compare_paths
from stepsplit.analyzer.diagnose.graph.path_tree import PathTree
from stepsplit.analyzer.split.run import RunSplit
from stepsplit.analyzer.trace import Bool, Float, Int64


class Blame(Struct, frozen=True):
    """Waits that one rank (None: no single rank) caused on one axis by what it did in one step."""

    rank: int | None
    cause: str
    axis: str | None
    step: int
    skew_ns: int
    bubble_ns: int


def blame(
    split: RunSplit,
    graph: DependencyGraph,
    slow_ranks: frozenset[int] = frozenset(),
    known: Collection[KnownDelay] = (),
    law: WorkLaw | None = None,
) -> tuple[Blame, ...]:
    """Attributes all skew and bubble of all ranks to causes, each instant once.

    As much of a rank's bubble as its schedule makes inevitable is attributed to the schedule,
    starting with waits that no rank caused by above-average work. Delays that are no larger than
    their variation between steps are summed in rows of no rank, `variation`; slow_ranks have
    kernels that are known to be slow, and known are the delays that findings name. law says what of
    the compute the counted work explains, where ranks have different work.
    """
    splits = [step.split for rank in split.ranks for step in rank.steps]
    if not any(one.skew_ns or one.bubble_ns for one in splits):
        return ()
    waits = ExposedWaits.collect(split, graph)
    paths = BindingPaths.build(split, graph, law)
    tree = PathTree.build(graph.levels, paths) if graph.levels.is_wide else None
    # The bubble that the schedule makes inevitable, by rank and step.
    fraction = (split.schedule.ideal_bubble_fraction if split.schedule else None) or 0.0
    ideal_ns = {
        (bubble.rank, bubble.step): int(bubble.window_ns * fraction)
        for bubble in split.stage_bubbles
    }
    charges = Charges.build(split, graph, waits)
    unrecorded, schedule = np.zeros(len(waits)), np.zeros(len(waits))
    for rows in waits.list_parts():
        some = waits.select(rows)
        pairs = compare_paths(graph, paths, tree, some)
        amount = _divide_by_cause(some, pairs.added)
        inevitable = _take_schedule_part(some, amount, ideal_ns)
        charges.add(some, pairs, paths, amount - inevitable)
        unrecorded[rows] = (amount - inevitable)[:, -1]
        schedule[rows] = inevitable.sum(axis=1)
    charges = charges.drop_steps_without_waits(waits)
    significant = find_significant(graph, charges, slow_ranks, known)
    shares = _collect_shares(
        waits, charges, significant, unrecorded, schedule, any(ideal_ns.values())
    )
    blamed = _build_rows(waits, shares)
    # Every instant of skew and bubble is blamed exactly once.
    for bucket, caused in (
        (Bucket.SKEW, [b.skew_ns for b in blamed]),
        (Bucket.BUBBLE, [b.bubble_ns for b in blamed]),
    ):
        total_ns = sum(one.buckets_ns[bucket] for one in splits)
        assert sum(caused) == total_ns, f"{bucket.label}: blamed {sum(caused)} of {total_ns} ns"
    return blamed


def _divide_by_cause(waits: ExposedWaits, added: Float) -> Float:
    """The length of each wait by cause, shape (waits, BLAME_CAUSES + 1); the last column is a wait
    for a rank that is not recorded."""
    share: Float = np.append(np.maximum(added, 0.0), np.zeros((len(added), 1)), axis=1)
    # What the path computes in addition is first due to a slower rank or to more work; only the
    # rest is usual compute.
    compute = added[:, :COMPUTES]
    total = np.maximum(compute.sum(axis=1, keepdims=True), 0.0)
    excess = np.maximum(compute[:, 1:], 0.0)
    excess *= np.minimum(1.0, total / np.maximum(excess.sum(axis=1, keepdims=True), 1e-9))
    share[:, :COMPUTES] = np.append(total - excess.sum(axis=1, keepdims=True), excess, axis=1)
    share[~waits.traced] = np.arange(len(BLAME_CAUSES) + 1) == len(BLAME_CAUSES)
    share[share.sum(axis=1) <= 0, BLAME_CAUSES.index("transfer")] = 1.0
    share *= (waits.length_ns / share.sum(axis=1))[:, np.newaxis]
    return share


def _take_schedule_part(
    waits: ExposedWaits, amount: Float, ideal_ns: Mapping[tuple[int, int], int]
) -> Float:
    """The part of each amount that the schedule itself causes, first from usual compute."""
    part = np.zeros_like(amount)
    usual = BLAME_CAUSES.index("compute")
    bubble = np.flatnonzero(waits.bucket == Bucket.BUBBLE)
    order, first = group_rows(group_ids(waits.rank[bubble], waits.step[bubble]))
    for rows in np.split(bubble[order], first[1:]) if len(bubble) else []:
        ideal = ideal_ns.get((int(waits.rank[rows[0]]), int(waits.step[rows[0]])), 0)
        free = float(amount[rows, usual].sum())
        part[rows, usual] = amount[rows, usual] * (min(ideal, free) / free if free else 0.0)
        rest = amount[rows] - part[rows]
        left = min(float(ideal), float(amount[rows].sum())) - float(part[rows].sum())
        part[rows] += rest * (left / float(rest.sum()) if left > 0 and rest.any() else 0.0)
    return part


_Key = tuple[int | None, str, int]


def _collect_shares(
    waits: ExposedWaits,
    charges: Charges,
    significant: Bool,
    unrecorded: Float,
    schedule: Float,
    has_ideal: bool,
) -> dict[_Key, Float]:
    """The caused waits of each (rank, cause, step) by origin; unrecorded and schedule have one
    amount per wait. Without an ideal bubble, how much of a bubble is the schedule's is unknown."""
    shares: dict[_Key, Float] = {}
    for who, at, kind in zip(*np.nonzero(charges.table.any(axis=2)), strict=True):
        cause, amount, step = BLAME_CAUSES[kind], charges.table[who, at, :, kind], charges.steps[at]
        # Of no rank: what nothing explains, and what is no more than variation between steps.
        key: tuple[int | None, str] = (None, cause)
        if cause != "unexplained" and not significant[who, at, kind]:
            key = (None, "variation")
        elif cause != "unexplained":
            key = (charges.ranks[who], "compute" if cause == "slower" else cause)
        if key == (None, "variation") and cause == "compute" and not has_ideal:
            bubble = np.arange(waits.origins) % 2 == 1
            _add_share(shares, (None, "unknown", step), np.where(bubble, amount, 0.0))
            amount = np.where(bubble, 0.0, amount)
        _add_share(shares, (*key, step), amount)
    missing = np.where(waits.owner >= 0, unrecorded, 0.0)
    _add_waits(shares, waits, waits.owner, "missing", missing)
    no_rank = np.full(len(waits.owner), -1)
    _add_waits(shares, waits, no_rank, "unknown", unrecorded - missing)
    _add_waits(shares, waits, no_rank, "schedule", schedule)
    return shares


def _add_waits(
    shares: dict[_Key, Float], waits: ExposedWaits, owner: Int64, cause: str, amount: Float
) -> None:
    """Adds an amount of each wait to the shares of its owner (-1: no rank)."""
    label = group_ids(owner, waits.step)
    first = first_rows(label)
    sums = np.zeros((len(first), waits.origins))
    np.add.at(sums, (label, waits.origin), amount)
    for rank, step, row in zip(
        owner[first].tolist(), waits.step[first].tolist(), sums, strict=True
    ):
        if row.any():
            _add_share(shares, (None if rank < 0 else rank, cause, step), row)


def _add_share(shares: dict[_Key, Float], key: _Key, amount: Float) -> None:
    shares[key] = shares[key] + amount if key in shares else amount


def _build_rows(waits: ExposedWaits, shares: Mapping[_Key, Float]) -> tuple[Blame, ...]:
    """The shares in whole ns, which add up exactly to the waits of each origin."""
    keys = list(shares)
    table = np.stack([shares[key] for key in keys])
    whole = np.zeros(table.shape, dtype=np.int64)
    for origin in range(waits.origins):
        total = int(waits.length_ns[waits.origin == origin].sum())
        whole[:, origin] = _round_to_total(table[:, origin], total)
    rows = []
    for key, row in zip(keys, whole, strict=True):
        for axis, skew, bubble in waits.iterate_by_axis(row.tolist()):
            if skew or bubble:
                rows.append(Blame(key[0], key[1], axis, key[2], skew, bubble))
    return tuple(rows)


def _round_to_total(amount: Float, total: int) -> Int64:
    """Rounds the amounts to whole numbers that add up to total (largest remainders)."""
    scale = total / float(amount.sum()) if amount.any() else 0.0
    exact = amount * scale
    whole = np.floor(exact).astype(np.int64)
    short = total - int(whole.sum())
    order = np.argsort(whole - exact, kind="stable")
    whole[order[: max(short, 0)]] += 1
    for row in order[::-1][: max(-short, 0)].tolist():
        whole[row] -= 1
    return whole
