"""Blame: which rank caused each wait, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stepsplit.analyzer.arrays import first_rows, group_ids
from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.split.attribute import Attribution
from stepsplit.analyzer.split.kernels import compute_self_ns
from stepsplit.analyzer.split.matching import Clock
from stepsplit.analyzer.split.steps import StepWindow
from stepsplit.analyzer.split.transfers import BUBBLE, SKEW, Arrivals
from stepsplit.analyzer.trace import Bool, Int32, Int64, RankTrace, UInt8

# The exposed waits of all ranks in one table.


@dataclass(frozen=True, slots=True)
class ExposedWaits:
    """The exposed waits of all ranks, by rank and time; columns of one length.

    who and waited_for index the waiting and the awaited rank (-1: not recorded); origin numbers the
    pairs of axis and bucket.
    """

    who: Int64
    waited_for: Int64
    rank: Int64
    owner: Int64
    step: Int64
    bucket: Int64
    origin: Int64
    length_ns: Int64
    end_ns: Int64
    axes: tuple[str | None, ...]
    first: Int64

    @property
    def origins(self) -> int:
        """The number of pairs of axis and bucket."""
        return 2 * len(self.axes)

    def iterate_by_axis(self, amounts: Sequence[int]) -> Iterator[tuple[str | None, int, int]]:
        """Yields (axis, skew, bubble) from amounts by origin."""
        for i, axis in enumerate(self.axes):
            yield axis, amounts[2 * i], amounts[2 * i + 1]

    @classmethod
    def collect(cls, ranks: Sequence[RankTime]) -> ExposedWaits:
        """Collects the waits of these ranks."""
        index = {one.rank: i for i, one in enumerate(ranks)}
        axes = tuple(dict.fromkeys(axis for one in ranks for axis in one.axis))
        number = {axis: i for i, axis in enumerate(axes)}
        count = [len(one.window) for one in ranks]
        owner = np.concatenate([one.owner for one in ranks]).astype(np.int64)
        bucket = np.concatenate([one.bucket for one in ranks]).astype(np.int64)
        axis = np.array([number[axis] for one in ranks for axis in one.axis], dtype=np.int64)
        return cls(
            who=np.repeat(np.arange(len(ranks)), count),
            waited_for=np.array([index.get(rank, -1) for rank in owner.tolist()], dtype=np.int64),
            rank=np.repeat([one.rank for one in ranks], count),
            owner=owner,
            step=np.concatenate([one.step[one.window] for one in ranks]),
            bucket=bucket,
            origin=2 * axis + (bucket == BUBBLE),
            length_ns=np.concatenate([one.length_ns for one in ranks]),
            end_ns=np.concatenate([one.end_ns for one in ranks]),
            axes=axes,
            first=np.concatenate(([0], np.cumsum(count))),
        )


# Cumulative time of a rank in each bucket.


@dataclass(frozen=True, slots=True)
class Activity:
    """Bucket intervals of a rank, sorted and disjoint; sums_ns[i] is the time per bucket before the
    i-th."""

    start_ns: Int64
    end_ns: Int64
    bucket: UInt8
    sums_ns: Int64

    @classmethod
    def build(cls, start_ns: Int64, end_ns: Int64, bucket: UInt8) -> Activity:
        """The activity of these intervals, at least one."""
        spent = np.zeros((len(start_ns) + 1, len(BUCKETS)), dtype=np.int64)
        spent[np.arange(1, len(start_ns) + 1), bucket] = end_ns - start_ns
        return cls(start_ns, end_ns, bucket, np.cumsum(spent, axis=0))

    def sum_spent_ns(self, at_ns: Int64) -> Int64:
        """The time in each bucket before each instant, shape (instants, buckets)."""
        part = np.clip(np.searchsorted(self.start_ns, at_ns, side="right") - 1, 0, None)
        spent = self.sums_ns[part].copy()
        within = np.clip(at_ns, self.start_ns[part], self.end_ns[part]) - self.start_ns[part]
        spent[np.arange(len(at_ns)), self.bucket[part]] += within
        return spent


# The cause of each wait.
#
# A wait ends when the last rank arrives. Its delay relative to the waiting rank is the additional
# time it spent per bucket since their last sync point: the end of the waiting rank's previous wait
# in a call of the same ranks. That bucket is the cause: compute, copy, transfer, or idle (late
# host). If the last rank waited longer itself, the blame is passed on, transitively, to the ranks
# that it waited for, in proportion to those waits.

Float = npt.NDArray[np.float64]

CAUSES = ("compute", "imbalance", "host", "copy", "transfer")

_MAX_ROUNDS = 24
"""Maximum number of ranks through which blame is passed on."""

_SETTLED = 1e-4

_Key = tuple[int | None, str, int]


@dataclass(frozen=True, slots=True)
class Blame:
    """Waits that one rank (None: no single rank) caused on one axis in one step."""

    rank: int | None
    cause: str
    axis: str | None
    step: int
    skew_ns: int
    bubble_ns: int


def blame(
    ranks: Sequence[RankTime], schedule_ns: Mapping[tuple[int, int], int]
) -> tuple[Blame, ...]:
    """Attributes all skew and bubble of all ranks to causes, each instant once.

    schedule_ns is the ideal bubble of each (rank, step). That much of its bubble is attributed to
    the schedule, starting with waits that no rank caused by above-average work.
    """
    waits = ExposedWaits.collect(ranks)
    if not len(waits.length_ns):
        return ()
    delays = compute_delay_causes(ranks, waits)
    schedule = _compute_schedule_part(waits, delays, schedule_ns)
    propagated = _propagate_blame(waits, delays, schedule)
    return _build_rows(waits, _compute_shares(waits, delays, propagated, schedule))


def _compute_schedule_part(
    waits: ExposedWaits, delays: DelayCauses, schedule_ns: Mapping[tuple[int, int], int]
) -> Float:
    """The part of each wait that the schedule itself causes, first from waits without another
    cause."""
    part = np.zeros(len(waits.length_ns))
    bubble = waits.bucket == BUBBLE
    uncaused = np.where(
        bubble, waits.length_ns * (1 - _compute_caused_fraction(waits, delays)), 0.0
    )
    whole = np.where(bubble, waits.length_ns, 0.0)
    for (rank, step), ideal_ns in schedule_ns.items():
        rows = np.flatnonzero(bubble & (waits.rank == rank) & (waits.step == step))
        free, total = float(uncaused[rows].sum()), float(whole[rows].sum())
        part[rows] += uncaused[rows] * (min(ideal_ns, free) / free if free else 0.0)
        rest = whole[rows] - part[rows]
        left = min(float(ideal_ns), total) - float(part[rows].sum())
        part[rows] += rest * (left / float(rest.sum()) if left > 0 and rest.any() else 0.0)
    return part


def _compute_caused_fraction(waits: ExposedWaits, delays: DelayCauses) -> Float:
    """Fraction of each wait caused by a rank with above-average work."""
    direct_fraction = 1 - delays.passed - delays.fair
    fraction = direct_fraction
    for _ in range(_MAX_ROUNDS):
        fraction, before = (
            direct_fraction + delays.passed * delays.compute_mean(fraction * waits.length_ns),
            fraction,
        )
        if float(np.abs(fraction - before).max()) < _SETTLED:
            break
    return np.clip(fraction, 0, 1)


def _propagate_blame(waits: ExposedWaits, delays: DelayCauses, schedule: Float) -> Float:
    """The waiting time of each origin that ends at the cause of each wait, shape (waits, origins).

    An origin is an (axis, bucket) of the waits. What is left after the last round stays where it
    is.
    """
    moving = np.zeros((len(waits.length_ns), waits.origins))
    moving[np.arange(len(moving)), waits.origin] = waits.length_ns - schedule
    settled = np.zeros_like(moving)
    for _ in range(_MAX_ROUNDS):
        settled += moving * (1 - delays.passed)[:, np.newaxis]
        moving = delays.distribute(moving * delays.passed[:, np.newaxis])
        if moving.sum() < _SETTLED * waits.length_ns.sum():
            break
    return settled + moving


def _compute_shares(
    waits: ExposedWaits, delays: DelayCauses, propagated: Float, schedule: Float
) -> dict[_Key, Float]:
    """The waits caused by each (rank, cause, step), by origin."""
    shares: dict[_Key, Float] = {}
    alone = np.where(delays.passed < 1, 1 - delays.passed, 1.0)
    no_owner = np.full(len(propagated), -1)
    for number, cause in enumerate(CAUSES):
        share = np.where(delays.known, delays.direct[:, number] / alone, 0.0)
        _add_share(shares, waits.owner, waits.step, cause, propagated * share[:, np.newaxis])
    missing, unknown = ~delays.known & delays.named, ~delays.known & ~delays.named
    _add_share(shares, waits.owner, waits.step, "missing", propagated * missing[:, np.newaxis])
    _add_share(shares, no_owner, waits.step, "unknown", propagated * unknown[:, np.newaxis])
    of_schedule = np.zeros_like(propagated)
    of_schedule[np.arange(len(propagated)), waits.origin] = schedule
    _add_share(shares, no_owner, waits.step, "schedule", of_schedule)
    return shares


def _add_share(
    shares: dict[_Key, Float], owner: Int64, step: Int64, cause: str, amount: Float
) -> None:
    """Adds the amounts of each (owner, step) to the shares of a cause; owner -1 means no single
    rank."""
    label = group_ids(owner, step)
    first = first_rows(label)
    sums = np.zeros((len(first), amount.shape[1]))
    np.add.at(sums, label, amount)
    for rank, number, row in zip(owner[first].tolist(), step[first].tolist(), sums, strict=True):
        if row.any():
            key = (None if rank < 0 else rank, cause, number)
            shares[key] = shares[key] + row if key in shares else row


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


# For each wait: what the last rank did in addition to what the waiting rank did.

COMPUTE, COPY, IDLE = (BUCKETS.index(name) for name in ("compute", "copy", "idle"))

_MOVING = [BUCKETS.index(name) for name in ("collective", "p2p")]

_WAITING = [SKEW, BUBBLE]

_MIN_EXCESS = 0.01
"""Minimum excess over the peers' compute, as a fraction, to distinguish slower from more work."""


@dataclass(frozen=True, slots=True)
class DelayCauses:
    """The causes of each wait as fractions, 0..1.

    direct has one column per cause in CAUSES, passed is the part that the owner itself waited; they
    add up to 1 if known, that is if the owner is a recorded rank. named: the owner's rank number is
    known. fair is the part of direct that is average compute. low and high delimit the owner's
    waits (rows) that receive the passed part.
    """

    direct: Float
    passed: Float
    fair: Float
    known: Bool
    named: Bool
    low: Int64
    high: Int64
    length_ns: Int64

    def compute_mean(self, amount: Float) -> Float:
        """The sum of amount over the length of the owner's waits, for each wait's range."""
        sums = np.concatenate(([0.0], np.cumsum(amount)))
        length = np.concatenate(([0], np.cumsum(self.length_ns)))
        total = length[self.high] - length[self.low]
        return np.where(total > 0, (sums[self.high] - sums[self.low]) / np.maximum(total, 1), 0.0)

    def distribute(self, amount: Float) -> Float:
        """Distributes amounts (waits, origins) over the waits of the ranges, in proportion to their
        length."""
        length = np.concatenate(([0], np.cumsum(self.length_ns)))
        density = amount / np.maximum(length[self.high] - length[self.low], 1)[:, np.newaxis]
        edges = np.zeros((len(amount) + 1, amount.shape[1]))
        np.add.at(edges, self.low, density)
        np.add.at(edges, self.high, -density)
        distributed = np.cumsum(edges, axis=0)[:-1] * self.length_ns[:, np.newaxis]
        return np.maximum(distributed, 0.0)


def compute_delay_causes(ranks: Sequence[RankTime], waits: ExposedWaits) -> DelayCauses:
    """Computes the causes of each wait."""
    sync_ns = np.concatenate([one.sync_ns for one in ranks])
    arrived_ns = np.concatenate([one.arrived_ns for one in ranks])
    owner_arrived_ns = np.concatenate([one.owner_arrived_ns for one in ranks])
    begin = np.array([one.activity.start_ns[0] for one in ranks])
    known = (waits.waited_for >= 0) & (waits.waited_for != waits.who)
    sync_ns = np.maximum(sync_ns, np.maximum(begin[waits.who], begin[waits.waited_for]))
    sync_ns = np.minimum(sync_ns, arrived_ns)
    more = _sum_spent(ranks, waits.waited_for, sync_ns, owner_arrived_ns) - _sum_spent(
        ranks, waits.who, sync_ns, arrived_ns
    )
    during = _sum_spent(ranks, waits.waited_for, arrived_ns, owner_arrived_ns)
    more = np.maximum(more, 0)
    more = np.where(more.sum(axis=1, keepdims=True) > 0, more, during)
    low, high = _find_wait_ranges(ranks, waits, sync_ns, owner_arrived_ns)
    return _split_causes(ranks, waits, more.astype(np.float64), known, low, high)


def _sum_spent(ranks: Sequence[RankTime], who: Int64, since: Int64, until: Int64) -> Int64:
    """Time per bucket that ranks spent between two instants; 0 for an unknown rank."""
    spent = np.zeros((len(who), len(BUCKETS)), dtype=np.int64)
    until = np.maximum(until, since)
    for i, rank in enumerate(ranks):
        rows = np.flatnonzero(who == i)
        if len(rows):
            spent[rows] = rank.activity.sum_spent_ns(until[rows]) - rank.activity.sum_spent_ns(
                since[rows]
            )
    return spent


def _find_wait_ranges(
    ranks: Sequence[RankTime], waits: ExposedWaits, since: Int64, until: Int64
) -> tuple[Int64, Int64]:
    """The row range of the owner's waits that end between two instants."""
    low, high = (np.zeros(len(waits.waited_for), dtype=np.int64) for _ in range(2))
    for i, rank in enumerate(ranks):
        rows = np.flatnonzero(waits.waited_for == i)
        low[rows] = waits.first[i] + np.searchsorted(rank.end_ns, since[rows], side="right")
        high[rows] = waits.first[i] + np.searchsorted(rank.end_ns, until[rows], side="right")
    return low, np.maximum(low, high)


def _split_causes(
    ranks: Sequence[RankTime],
    waits: ExposedWaits,
    more: Float,
    known: Bool,
    low: Int64,
    high: Int64,
) -> DelayCauses:
    length = np.concatenate(([0], np.cumsum(waits.length_ns)))
    can_pass = known & (length[high] > length[low])
    waited = np.where(can_pass, more[:, _WAITING].sum(axis=1), 0.0)
    moved = more[:, _MOVING].sum(axis=1)
    slower, extra = _compute_excess(ranks, waits)
    computed = more[:, COMPUTE]
    direct = np.stack(
        [computed * (1 - extra), computed * extra, more[:, IDLE], more[:, COPY], moved], axis=1
    )
    total = direct.sum(axis=1) + waited
    nothing = total <= 0
    direct[nothing, -1], total = 1.0, np.where(nothing, 1.0, total)
    fair = computed * (1 - slower) / total
    fair = np.where(waits.bucket == BUBBLE, fair, 0.0)
    share = direct / total[:, np.newaxis]
    passed = np.where(known, waited / total, 0.0)
    return DelayCauses(share, passed, fair, known, waits.owner >= 0, low, high, waits.length_ns)


def _compute_excess(ranks: Sequence[RankTime], waits: ExposedWaits) -> tuple[Float, Float]:
    """(fraction of the owner's compute beyond its peers', fraction of that which is more work)."""
    beyond, extra = np.zeros(len(waits.waited_for)), np.zeros(len(waits.waited_for))
    for i, rank in enumerate(ranks):
        rows = np.flatnonzero(waits.waited_for == i)
        place = np.clip(np.searchsorted(rank.step, waits.step[rows]), 0, len(rank.step) - 1)
        slower, more = rank.workload.slower[place], rank.workload.more[place]
        beyond[rows] = slower + more
        significant = beyond[rows] > _MIN_EXCESS
        extra[rows] = np.where(significant, more / np.maximum(beyond[rows], 1e-12), 0.0)
    return beyond, extra


# Input of the blame analysis for one rank: activity, waits and sync points.


@dataclass(frozen=True, slots=True)
class RankTime:
    """One rank on the common clock; the columns of its exposed waits have one length.

    window indexes step and the workload; owner is the rank waited for (-1: unknown), axis the mesh
    axis. came_ns is this rank's arrival at the call, late_ns the owner's, and level_ns the last
    sync point: the end of this rank's previous wait in a call of the same ranks.
    """

    rank: int
    step: Int64
    activity: Activity
    workload: Workload
    window: Int32
    bucket: UInt8
    owner: Int32
    axis: tuple[str | None, ...]
    length_ns: Int64
    end_ns: Int64
    arrived_ns: Int64
    owner_arrived_ns: Int64
    sync_ns: Int64


def build_rank_time(
    trace: RankTrace,
    rows: slice,
    attribution: Attribution,
    steps: Sequence[int],
    axis: Sequence[str | None],
    clock: Clock,
    arrivals: Arrivals,
    workload: Workload,
) -> RankTime:
    """Builds the input for one rank; axis has one entry per exposed row, rows are the rank's in
    arrivals."""
    band, exposed = attribution.band, attribution.exposed
    waits = np.flatnonzero(np.isin(exposed.bucket, (SKEW, BUBBLE)))
    call = exposed.call[waits]
    level = _find_sync_points_ns(trace, rows, attribution, arrivals)
    end = clock.map_to_common_ns(exposed.end_ns[waits])
    return RankTime(
        rank=trace.rank,
        step=np.array(steps, dtype=np.int64),
        activity=Activity.build(
            clock.map_to_common_ns(band.start_ns), clock.map_to_common_ns(band.end_ns), band.bucket
        ),
        workload=workload,
        window=exposed.window[waits],
        bucket=exposed.bucket[waits],
        owner=exposed.owner[waits],
        axis=tuple(axis[i] for i in waits.tolist()),
        length_ns=(exposed.end_ns - exposed.start_ns)[waits],
        end_ns=end,
        arrived_ns=arrivals.start_ns[rows][call],
        owner_arrived_ns=np.minimum(np.maximum(arrivals.moves_ns[rows][call], level[call]), end),
        sync_ns=level[call],
    )


def _find_sync_points_ns(
    trace: RankTrace, rows: slice, attribution: Attribution, arrivals: Arrivals
) -> Int64:
    """For each call, the end of the previous call of the same ranks that blocked this rank.

    Calls in one gap of compute blocked it together, so only calls of an earlier gap count. The
    smallest int64 if there is none.
    """
    calls = trace.calls
    start, end = arrivals.start_ns[rows], arrivals.end_ns[rows]
    peer = np.where(calls.is_message, calls.peer, -1)
    same = group_ids(np.where(calls.is_message, -1, calls.group_id), peer)
    level = np.full(len(start), np.iinfo(np.int64).min)
    blocking = np.flatnonzero(attribution.gap >= 0)
    order = blocking[np.lexsort((attribution.gap[blocking], same[blocking]))]
    for part in np.split(order, np.flatnonzero(np.diff(same[order])) + 1):
        over = np.maximum.accumulate(end[part])
        before = np.searchsorted(attribution.gap[part], attribution.gap[part], side="left") - 1
        level[part] = np.where(before >= 0, over[before], level[part])
    before_call: Int64 = np.minimum(level, start)
    return before_call


# Why a rank computes longer than others: slower kernels, or more work.


@dataclass(frozen=True, slots=True)
class Workload:
    """The fraction of a rank's compute beyond that of its peers, per window, 0..1.

    slower: the same kernels took longer than on the median rank; more: it ran more kernels. Both of
    shape (windows,).
    """

    slower: Float
    more: Float


def compute_workloads(
    traces: Sequence[RankTrace], windows: Sequence[Sequence[StepWindow]]
) -> list[Workload]:
    """The workload of every rank; kernels are identified by name."""
    names: dict[str, int] = {}
    for trace in traces:
        for name in trace.events.names:
            names.setdefault(name, len(names))
    tables = [
        _build_kernel_table(trace, own, names) for trace, own in zip(traces, windows, strict=True)
    ]
    usual = _compute_median_ns(tables)
    work = [(table.count * usual).sum(axis=1) for table in tables]
    fair = _compute_expected_ns(work, windows)
    return [
        _compute_workload(table.total_ns.sum(axis=1), done, expected)
        for table, done, expected in zip(tables, work, fair, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _KernelTable:
    """Number of runs and total time of each kernel per window, shape (windows, names)."""

    count: Int64
    total_ns: Int64


def _build_kernel_table(
    trace: RankTrace, windows: Sequence[StepWindow], names: dict[str, int]
) -> _KernelTable:
    events = trace.events
    rows = np.flatnonzero(trace.kinds.computes)
    took = events.dur_ns[rows] if trace.on_device else compute_self_ns(events, rows)
    window = np.searchsorted([w.start_ns for w in windows], events.start_ns[rows], side="right") - 1
    rows, took, window = rows[window >= 0], took[window >= 0], window[window >= 0]
    number = np.array([names[name] for name in events.names], dtype=np.int64)
    shape = (len(windows), len(names))
    cell = window * shape[1] + number[events.name_id[rows]]
    count = np.bincount(cell, minlength=shape[0] * shape[1])
    total = np.bincount(cell, weights=took, minlength=shape[0] * shape[1])
    return _KernelTable(count.reshape(shape), total.astype(np.int64).reshape(shape))


def _compute_median_ns(tables: Sequence[_KernelTable]) -> Float:
    """The duration of each kernel on the median rank that runs it."""
    count = np.stack([table.count.sum(axis=0) for table in tables])
    total = np.stack([table.total_ns.sum(axis=0) for table in tables])
    mean = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    some = (count > 0).any(axis=0)
    usual = np.zeros(count.shape[1])
    usual[some] = np.nanmedian(mean[:, some], axis=0)
    return usual


def _compute_expected_ns(
    work: Sequence[Float], windows: Sequence[Sequence[StepWindow]]
) -> list[Float]:
    """The work of the median rank in the steps of each rank's windows."""
    done: dict[int, list[float]] = {}
    for own, amounts in zip(windows, work, strict=True):
        for window, amount in zip(own, amounts.tolist(), strict=True):
            done.setdefault(window.step, []).append(amount)
    fair = {step: float(np.median(amounts)) for step, amounts in done.items()}
    return [np.array([fair[window.step] for window in own]) for own in windows]


def _compute_workload(actual_ns: Int64, work_ns: Float, fair_ns: Float) -> Workload:
    whole = np.maximum(actual_ns, 1)
    slower = np.clip((actual_ns - work_ns) / whole, 0, 1)
    more = np.clip((work_ns - fair_ns) / whole, 0, 1 - slower)
    return Workload(slower, more)
