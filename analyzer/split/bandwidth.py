"""How fast each kind of collective moved its data, its waiting left out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stepsplit.analyzer.split.match import Matched
from stepsplit.analyzer.split.waits import Arrivals
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


def busbw_factor(op: str, ranks: int) -> float:
    """busbw / algbw, as nccl-tests define it (doc/PERFORMANCE.md of NVIDIA/nccl-tests)."""
    if op == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if op in ("all_gather", "reduce_scatter", "all_to_all"):
        return (ranks - 1) / ranks
    return 1.0


def collective_stats(
    traces: Sequence[RankTrace], matched: Matched, arrivals: Arrivals
) -> tuple[CollectiveStat, ...]:
    """One row a kind of call, the most transfer time first."""
    dtypes = [trace.calls.dtypes[d] for trace in traces for d in trace.calls.dtype.tolist()]
    known = _known_by_any(matched, dtypes)
    kinds: dict[tuple[int, int, str, int], list[int]] = defaultdict(list)
    for row, dtype in enumerate(dtypes):
        key, own = int(matched.key[row]), (dtype, int(matched.message_bytes[row]))
        dtype, size = known.get(key, own) if not matched.is_message[row] else own
        kinds[int(matched.group[row]), int(matched.op[row]), dtype, size].append(row)
    stats = [_stat(kind, np.array(rows), matched, arrivals) for kind, rows in kinds.items()]
    return tuple(sorted(stats, key=lambda s: (-s.transfer_ns_median * s.count, s.group, s.op)))


def _known_by_any(matched: Matched, dtypes: Sequence[str]) -> dict[int, tuple[str, int]]:
    """Each matched collective's dtype and size, of the member that knows most: a root may alone."""
    known: dict[int, tuple[str, int]] = {}
    sizes = matched.message_bytes.tolist()
    for key, dtype, size in zip(matched.key.tolist(), dtypes, sizes, strict=True):
        if key >= 0 and size >= known.get(key, ("", -1))[1]:
            known[key] = (dtype or known.get(key, ("", -1))[0], size)
    return known


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
