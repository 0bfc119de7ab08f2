"""How fast each kind of collective moved its data, its waiting left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stepsplit.analyzer.busbw import busbw_factor
from stepsplit.analyzer.split.calls.arrivals import Arrivals
from stepsplit.analyzer.split.calls.match import Matched
from stepsplit.analyzer.split.labels import labels_of, runs_of
from stepsplit.analyzer.trace import OPS, Int64, RankTrace


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
    names, dtype = _dtypes(traces)
    dtype, size = _known_by_any(matched, dtype, names.index(""))
    order, first = runs_of(labels_of(matched.group, matched.op, dtype, size))
    kinds = np.split(order, first[1:]) if len(order) else []
    stats = []
    for rows in sorted(kinds, key=lambda rows: int(rows[0])):
        one = rows[0]
        kind = (int(matched.group[one]), int(matched.op[one]), names[dtype[one]], int(size[one]))
        stats.append(_stat(kind, rows, matched, arrivals))
    return tuple(sorted(stats, key=lambda s: (-s.transfer_ns_median * s.count, s.group, s.op)))


def _dtypes(traces: Sequence[RankTrace]) -> tuple[tuple[str, ...], Int64]:
    """(all names of dtypes, among them "" for unknown; which one each call has)."""
    names = tuple(dict.fromkeys(("", *(name for trace in traces for name in trace.calls.dtypes))))
    number = {name: i for i, name in enumerate(names)}
    columns = [
        np.array([number[name] for name in trace.calls.dtypes], dtype=np.int64)[trace.calls.dtype]
        for trace in traces
    ]
    return names, np.concatenate(columns)


def _known_by_any(matched: Matched, dtype: Int64, unknown: int) -> tuple[Int64, Int64]:
    """Each call's dtype and size; of a matched collective those of the member that knows most.

    A root may know the size alone. The last dtype counts beside which no larger size was stated.
    """
    rows = np.flatnonzero((matched.key >= 0) & ~matched.is_message)
    order, first = runs_of(matched.key[rows])
    rows = rows[order]
    call = np.repeat(np.arange(len(first)), np.diff(first, append=len(rows)))
    sizes, place = np.unique(matched.message_bytes[rows], return_inverse=True)
    rising = call * len(sizes) + place
    knows = np.maximum.accumulate(rising) == rising
    named = knows & (dtype[rows] != unknown)
    best_size = np.empty(len(first), dtype=np.int64)
    best_size[call[knows]] = matched.message_bytes[rows][knows]
    best_dtype = np.full(len(first), unknown, dtype=np.int64)
    best_dtype[call[named]] = dtype[rows][named]
    dtype, size = dtype.copy(), matched.message_bytes.copy()
    dtype[rows], size[rows] = best_dtype[call], best_size[call]
    return dtype, size


def _stat(
    kind: tuple[int, int, str, int], rows: Int64, matched: Matched, arrivals: Arrivals
) -> CollectiveStat:
    group, op_code, dtype, size = kind
    op = OPS[op_code]
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
        dtype=dtype,
        message_bytes=size,
        count=len(np.unique(keys[keys >= 0])) + int((keys < 0).sum()),
        transfer_ns_median=transfer,
        wait_ns_median=int(np.median(waited)),
        algbw_bytes_per_s=algbw,
        busbw_bytes_per_s=None if algbw is None else algbw * busbw_factor(op, ranks),
    )
