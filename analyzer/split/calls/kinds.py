"""Which calls are of one kind: the same op, dtype and size on the same group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stepsplit.analyzer.arrays import labels_of, runs_of
from stepsplit.analyzer.split.calls.match import Matched
from stepsplit.analyzer.trace import OPS, Int64, RankTrace


@dataclass(frozen=True, slots=True)
class CallKind:
    """One op, dtype and size on one group; -1 and "" are unknown."""

    group: int
    op: str
    dtype: str
    message_bytes: int


def kinds_of(traces: Sequence[RankTrace], matched: Matched) -> list[tuple[CallKind, Int64]]:
    """Each kind with the rows of its calls, in the order of its first."""
    names, dtype = _dtypes(traces)
    dtype, size = _known_by_any(matched, dtype, names.index(""))
    order, first = runs_of(labels_of(matched.group, matched.op, dtype, size))
    kinds = np.split(order, first[1:]) if len(order) else []
    found = []
    for rows in sorted(kinds, key=lambda rows: int(rows[0])):
        one = rows[0]
        op, name = OPS[matched.op[one]], names[dtype[one]]
        found.append((CallKind(int(matched.group[one]), op, name, int(size[one])), rows))
    return found


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
