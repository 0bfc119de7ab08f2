"""Gloo collectives that the files of a rank leave open, completed from those of its peers.

Two ranges of gloo's workers may each have carried out either of two calls, and neither has a number
then. A peer that has the numbers in between shows which calls these were.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from stepsplit.analyzer.readers.kineto.calls import (
    OPEN_CALLS,
    Range,
    are_interchangeable,
    note_open_calls,
)
from stepsplit.analyzer.trace import RANGE_CODE, Bool, Calls, Category, Int64, RankTrace


class _PeerCall(Struct, frozen=True):
    """What a peer knows of a call."""

    op: int
    dtype: str
    input_bytes: int
    message_bytes: int


class _Completion(Struct, frozen=True):
    """What is known of an open call afterwards: its group, number and time of issue."""

    group: int
    number: int
    issued_ns: int
    call: _PeerCall


def complete_open_calls(traces: Sequence[RankTrace]) -> Sequence[RankTrace]:
    """The traces; open gloo collectives between two known calls of a group, before the first or
    after the last one have the op, number, size and time of issue of the calls missing there,
    if it makes no difference which of them is which."""
    return [
        _complete(trace, traces) if any(note.code == OPEN_CALLS for note in trace.notes) else trace
        for trace in traces
    ]


_NEVER_NS = np.iinfo(np.int64).max


def _complete(trace: RankTrace, traces: Sequence[RankTrace]) -> RankTrace:
    calls, events = trace.calls, trace.events
    is_open = _find_open(calls)
    # The starts of the c10d ops in which no known call was issued: each open one is of one of them.
    issued_ns = np.sort(calls.issued_ns[calls.issued_ns >= 0])
    ops = np.flatnonzero(events.is_category(Category.OP) & events.match_prefix("c10d::"))
    first_issued = np.searchsorted(issued_ns, events.start_ns[ops], side="left")
    after_issued = np.searchsorted(issued_ns, events.ends_of(ops), side="right")
    unclaimed: Int64 = events.start_ns[ops[after_issued == first_issued]]
    starts = events.start_ns[calls.event]
    found: dict[int, _Completion] = {}
    claimed_twice = set[int]()
    for group in np.unique(calls.group_id[calls.group_id >= 0]).tolist():
        missing = _list_missing(trace, group, traces)
        known = np.flatnonzero((calls.group_id == group) & (calls.seq >= 0))
        known = known[np.argsort(calls.seq[known], kind="stable")].tolist()
        for before, after in pairwise([-1, *known, -1]):
            first, last = (
                (-1, -_NEVER_NS, -_NEVER_NS)
                if before < 0
                else (int(calls.seq[before]), int(starts[before]), int(calls.issued_ns[before])),
                (_NEVER_NS, _NEVER_NS, _NEVER_NS)
                if after < 0
                else (int(calls.seq[after]), int(starts[after]), int(calls.issued_ns[after])),
            )
            numbers = sorted(number for number in missing if first[0] < number < last[0])
            rows = np.flatnonzero(is_open & (first[1] <= starts) & (starts <= last[1]))
            rows = rows[np.argsort(starts[rows], kind="stable")]
            issued = unclaimed[(first[2] < unclaimed) & (unclaimed < last[2])]
            # All that is open there must be these calls.
            if not len(rows) == len(numbers) == len(issued):
                continue
            peers = [missing[number] for number in numbers]
            ran_as = RANGE_CODE[[one.op for one in peers]]
            if RANGE_CODE[calls.op[rows]].tolist() != ran_as.tolist():
                continue
            ends = events.ends_of(calls.event[rows])
            ranges = [
                Range(row, "", begin, end)
                for row, begin, end in zip(
                    rows.tolist(), starts[rows].tolist(), ends.tolist(), strict=True
                )
            ]
            if are_interchangeable(ranges, [one.input_bytes for one in peers]):
                claimed_twice |= found.keys() & set(rows.tolist())
                for row, *one in zip(rows.tolist(), numbers, issued.tolist(), peers, strict=True):
                    found[row] = _Completion(group, *one)
    found = {row: one for row, one in found.items() if row not in claimed_twice}
    return _set_calls(trace, found) if found else trace


def _find_open(calls: Calls) -> Bool:
    return (calls.group_id < 0) & (calls.seq < 0) & ~calls.is_message


def _list_missing(
    trace: RankTrace, number: int, traces: Sequence[RankTrace]
) -> Mapping[int, _PeerCall]:
    """The calls of a group, by sequence number, that peers have and this rank does not."""
    group, calls = trace.groups[number], trace.calls
    own = set(calls.seq[calls.group_id == number].tolist())
    found: dict[int, _PeerCall] = {}
    for peer in traces:
        if peer is trace or peer.rank not in group.ranks:
            continue
        same = [
            i
            for i, one in enumerate(peer.groups)
            if (one.name, one.ranks) == (group.name, group.ranks)
        ]
        theirs = peer.calls
        rows = np.flatnonzero(np.isin(theirs.group_id, same) & ~theirs.is_message)
        for row in rows.tolist():
            if (seq := int(theirs.seq[row])) >= 0 and seq not in own:
                found[seq] = _PeerCall(
                    int(theirs.op[row]), theirs.dtypes[int(theirs.dtype[row])],
                    int(theirs.input_bytes[row]), int(theirs.message_bytes[row]),
                )  # fmt: skip
    return found


def _set_calls(trace: RankTrace, found: Mapping[int, _Completion]) -> RankTrace:
    """The trace in which these rows of its calls are known."""
    calls = trace.calls
    dtypes = tuple(dict.fromkeys([*calls.dtypes, *(one.call.dtype for one in found.values())]))
    rows, values = np.array([*found], dtype=np.int64), found.values()

    def complete(column: npt.NDArray[Any], new: Iterable[int]) -> npt.NDArray[Any]:
        completed = column.copy()
        completed[rows] = list(new)
        return completed

    completed = replace(
        calls,
        op=complete(calls.op, (one.call.op for one in values)),
        issued_ns=complete(calls.issued_ns, (one.issued_ns for one in values)),
        group_id=complete(calls.group_id, (one.group for one in values)),
        seq=complete(calls.seq, (one.number for one in values)),
        dtype=complete(calls.dtype, (dtypes.index(one.call.dtype) for one in values)),
        input_bytes=complete(calls.input_bytes, (one.call.input_bytes for one in values)),
        message_bytes=complete(calls.message_bytes, (one.call.message_bytes for one in values)),
        dtypes=dtypes,
    )
    notes = [note for note in trace.notes if note.code != OPEN_CALLS]
    left = int(_find_open(completed).sum())
    return replace(trace, calls=completed, notes=(*notes, *note_open_calls(left)))
