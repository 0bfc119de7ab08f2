"""How fast each kind of collective moved its data, its waiting left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stepsplit.analyzer.ops import busbw_factor
from stepsplit.analyzer.split.calls.arrivals import Arrivals
from stepsplit.analyzer.split.calls.kinds import CallKind, kinds_of
from stepsplit.analyzer.split.calls.match import Matched
from stepsplit.analyzer.trace import Int64, RankTrace


@dataclass(frozen=True, slots=True)
class CollectiveStat:
    """All calls of one op, dtype and size on one group; -1 and None are unknown."""

    group: int
    op: str
    dtype: str
    message_bytes: int
    count: int
    transfer_ns_median: int
    wait_ns_median: int
    algbw_bytes_per_s: float | None
    busbw_bytes_per_s: float | None


def collective_stats(
    traces: Sequence[RankTrace], matched: Matched, arrivals: Arrivals
) -> tuple[CollectiveStat, ...]:
    """One row a kind of call, the most transfer time first."""
    stats = [_stat(kind, rows, matched, arrivals) for kind, rows in kinds_of(traces, matched)]
    return tuple(sorted(stats, key=lambda s: (-s.transfer_ns_median * s.count, s.group, s.op)))


def _stat(kind: CallKind, rows: Int64, matched: Matched, arrivals: Arrivals) -> CollectiveStat:
    group, op, size = kind.group, kind.op, kind.message_bytes
    moved = np.maximum(arrivals.moved_ns[rows] - arrivals.moves_ns[rows], 0)
    life = arrivals.end_ns[rows] - arrivals.start_ns[rows]
    waited = np.clip(arrivals.moves_ns[rows] - arrivals.start_ns[rows], 0, life)
    transfer = int(np.median(moved))
    known = group >= 0 and size > 0 and transfer > 0 and not arrivals.estimated[rows].any()
    algbw = size / (transfer / 1e9) if known else None
    ranks = len(matched.groups[group].ranks) if group >= 0 else 1
    keys = matched.key[rows]
    return CollectiveStat(
        group=group,
        op=op,
        dtype=kind.dtype,
        message_bytes=size,
        count=len(np.unique(keys[keys >= 0])) + int((keys < 0).sum()),
        transfer_ns_median=transfer,
        wait_ns_median=int(np.median(waited)),
        algbw_bytes_per_s=algbw,
        busbw_bytes_per_s=None if algbw is None else algbw * busbw_factor(op, ranks),
    )
