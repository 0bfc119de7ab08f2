"""Compute, copies, and fused compute-and-communication kernels of a rank."""

from __future__ import annotations

from collections.abc import Set

import numpy as np
from msgspec import Struct

from stepsplit.analyzer.arrays import Intervals, union
from stepsplit.analyzer.trace import Bool, EventKind, Events, RankTrace


class Work(Struct, frozen=True):
    """Work of one rank as sorted disjoint intervals; fused is a subset of compute."""

    compute: Intervals
    copy: Intervals
    fused: Intervals


def collect_work(trace: RankTrace) -> Work:
    """The work of a rank: device kernels and copies, else the ops of its training threads."""
    events, kinds = trace.events, trace.kinds
    return Work(
        _merge_intervals(events, kinds.computes),
        _merge_intervals(events, kinds.is_kind(EventKind.COPY)),
        _merge_intervals(events, kinds.is_kind(EventKind.FUSED)),
    )


PRODUCT_FAMILIES = frozenset({"gemm", "attention", "moe", "convolution"})
"""Families of kernels that a layer is made of; norms and copies lie anywhere in between."""


def mask_families(trace: RankTrace, families: Set[str]) -> Bool:
    """Which events compute, and belong to one of these families of kernels."""
    events, kinds = trace.events, trace.kinds
    chosen = np.array([one in families for one in kinds.families], dtype=np.bool_)
    rows = np.flatnonzero(kinds.computes)
    mask = np.zeros(len(events), dtype=np.bool_)
    mask[rows] = chosen[kinds.family[events.name_id[rows]]]
    return mask


def _merge_intervals(events: Events, mask: Bool) -> Intervals:
    return union(events.start_ns[mask], events.ends_of(mask))
