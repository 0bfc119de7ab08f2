"""Small collectives: their time is latency, not bandwidth."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np
from msgspec import Struct

from stepsplit.analyzer import units
from stepsplit.analyzer.arrays import group_ids, group_max, group_rows
from stepsplit.analyzer.diagnose.causes.cause import CauseEntry, Remedy, replay_remedy
from stepsplit.analyzer.diagnose.causes.context import CauseContext
from stepsplit.analyzer.diagnose.causes.gradient_calls import classify_issue, find_sync_kernels
from stepsplit.analyzer.diagnose.graph.replay import ReplayContext, compute_times, scale_transfers
from stepsplit.analyzer.split.mesh_inference import SCALAR_BYTES
from stepsplit.analyzer.trace import Bool, Float, Int64

_BUCKET_BYTES = 25 << 20
"""The size of torch's gradient buckets."""

_SMALL_BYTES = 256 << 10
"""Collectives of less on average are small: a quarter of torch's first bucket."""

_MIN_SMALL_CALLS = 8
"""Fewer collectives per step are not worth merging."""

_MIN_BYTES = 8 << 10
"""Fewer bytes per step are metrics: the gradients of a model of 2,000 parameters have as many."""

_METRICS_SHARE = 0.02
"""Less than this fraction of what moves in the backward is neither gradients nor weights."""

_LATENCY_SHARE = 0.5
"""Collectives are latency-bound if latency is at least this fraction of their time."""


def find_small_collectives(context: CauseContext) -> Iterator[Remedy]:
    """Find the data axes on which many collectives take time regardless of their size.

    The gain is that of the same bytes in buckets of torch's default size.
    """
    table = context.graph.kernels
    counted = np.append(context.counted, False)[table.step]
    own = np.flatnonzero(counted & find_sync_kernels(context) & ~_find_metrics(context))
    own = own[context.split.matched.message_bytes[table.row[own]] > 0]
    group = context.split.matched.group[table.row[own]]
    times = compute_times(context.graph)
    merged: dict[str, list[_MergedCalls]] = defaultdict(list)
    order, first = group_rows(group)
    for rows in np.split(order, first[1:]) if len(order) else ():
        name = context.split.layout.name_group(context.split.matched.groups[group[rows[0]]])
        calls = _MergedCalls.build(context, times, own[rows])
        if calls.are_small:
            merged[name or ""].append(calls)
    for axis, parts in merged.items():
        kernels = np.concatenate([part.kernels for part in parts])
        fractions = np.concatenate([np.full(len(part.kernels), part.fraction) for part in parts])
        yield _merge_remedy(
            context, axis, max(parts, key=lambda one: one.calls), kernels, fractions
        )


def _find_metrics(context: CauseContext) -> Bool:
    """Which collectives move neither gradients nor weights, but losses, norms and counts.

    They are issued outside of the backward and of FSDP, and are scalars or, all together, next to
    nothing of what is issued there. A rank without ranges of its host has none.
    """
    table = context.graph.kernels
    size = context.split.matched.message_bytes[table.row]
    found, syncs = np.zeros(len(table), dtype=np.bool_), find_sync_kernels(context)
    for index, rank in enumerate(context.split.ranks):
        mine = table.list_rows(index)
        is_issued = classify_issue(rank)[0][table.call[mine]]
        moved = int(size[mine[syncs[mine] & is_issued]].sum())
        if moved > 0:
            rest = size[mine[syncs[mine] & ~is_issued]].sum()
            few = rest < _METRICS_SHARE * moved
            found[mine] = ~is_issued & ((size[mine] <= SCALAR_BYTES) | few)
    return found


class _MergedCalls(Struct, frozen=True):
    """The collectives of a group: their kernels, calls and bytes per step of a rank, and their time
    in larger buckets as a fraction of the measured one."""

    kernels: Int64
    calls: float
    bytes: float
    fraction: float

    @property
    def are_small(self) -> bool:
        return (
            self.calls >= _MIN_SMALL_CALLS
            and self.bytes >= _MIN_BYTES
            and self.bytes < _SMALL_BYTES * self.calls
            and self.fraction <= 1 - _LATENCY_SHARE
        )

    @classmethod
    def build(cls, context: CauseContext, times: Int64, kernels: Int64) -> _MergedCalls:
        """Their latency is what they take beyond the time of their bytes at the usual rate.

        times are those of the nodes of the replay, in ns.
        """
        table, matched = context.graph.kernels, context.split.matched
        shared = matched.shared[table.row[kernels]]
        known, shared = kernels[shared >= 0], shared[shared >= 0]
        calls, first = np.unique(shared, return_index=True)
        if not len(calls):
            return cls(kernels, 0.0, 0.0, 1.0)
        size = matched.message_bytes[table.row[known[first]]].astype(np.float64)
        took = compute_service_ns(context, times, known, shared)
        steps = len(np.unique(context.graph.steps.step[table.step[known]]))
        count, total = len(calls) / steps, float(took.sum())
        # The time of all these bytes at their usual rate: half of the bytes move at least as
        # fast. What some calls wait for a thread or a link is latency, as is all that small ones
        # take.
        order = np.argsort(took / size, kind="stable")
        moved = np.cumsum(size[order])
        usual = order[int(np.searchsorted(moved, moved[-1] / 2))]
        moving = min(float(moved[-1] * took[usual] / size[usual]), total)
        buckets = -(-size.sum() / steps // _BUCKET_BYTES)
        merged = moving + (total - moving) * min(1.0, buckets / count)
        return cls(kernels, count, float(size.sum()) / steps, merged / max(total, 1.0))


def compute_service_ns(
    context: ReplayContext, times: Int64, kernels: Int64, shared: Int64
) -> Float:
    """For each collective, in order of number, its time since its last member arrived and since the
    one before it on the group ended, by the times of the replay's nodes."""
    label, table = group_ids(shared), context.graph.kernels
    count = int(label.max(initial=-1)) + 1
    begin = group_max(label, times[table.start[kernels]], count)
    end = -group_max(label, -times[table.end[kernels]], count)
    order = np.lexsort((end, begin))
    last = np.maximum.accumulate(np.concatenate(([begin.min(initial=0)], end[order][:-1])))
    took = np.zeros(count)
    took[order] = np.maximum(end[order] - np.maximum(begin[order], last), 0)
    return took


def _merge_remedy(
    context: CauseContext, axis: str, most: _MergedCalls, kernels: Int64, fractions: Float
) -> Remedy:
    exposed = context.sum_exposed_ns()[kernels]
    rows = np.isin(context.graph.steps.rank, context.graph.kernels.rank[kernels])
    count = max(1, int((rows & context.graph.steps.full).sum()))
    return replay_remedy(
        context,
        lambda graph: scale_transfers(graph, kernels, fractions),
        bucket="collective",
        measured_ns=int(exposed.sum()) // count,
        predicted_ns=int((exposed * fractions).sum()) // count,
        rows=rows,
        message=(
            f"small collectives on {axis}: {most.calls:.0f} per step of "
            f"{units.format_size(int(most.bytes / most.calls))} on average, "
            f"{units.format_percent(1 - most.fraction)} of their time is latency; "
            "merge them into larger buckets"
        ),
        events=context.list_longest_calls(kernels),
    )


SMALL_COLLECTIVES = CauseEntry("small_collectives", find_small_collectives, basis="inferred")
