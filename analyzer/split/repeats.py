"""Where the steps of a trace lie that marks none: told from what comes again in every step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stepsplit.analyzer.arrays import labels_of
from stepsplit.analyzer.trace import Category, Events, Int64, RankTrace

_FEWEST_CALLS, _FEWEST_TIMES = 4, 3
"""A step that its calls tell has so many calls at least, and comes again so many times."""


@dataclass(frozen=True, slots=True)
class Repeats:
    """The instants on the host at which one step ends and the next begins; what told them."""

    ends_ns: Int64
    told_by: str


def repeats_of(trace: RankTrace) -> Repeats | None:
    """The ends of the steps by the optimizer, else by the sequence of calls; None if untold."""
    ends = _optimizer_ends(trace.events)
    if len(ends):
        return Repeats(ends, "the optimizer's steps")
    ends = _sequence_ends(trace)
    return Repeats(ends, "the sequence of collectives, which repeats") if len(ends) else None


def _optimizer_ends(events: Events) -> Int64:
    """When each step's last optimizer is done; several may follow upon one backward."""
    marks = events.named("Optimizer.step#") & events.of(Category.ANNOTATION, Category.OP)
    ends = np.sort(events.end_ns[marks])
    backward = np.sort(events.start_ns[events.named("autograd::engine")])
    if not len(backward):
        return ends
    before = np.searchsorted(backward, ends)
    last = np.ones(len(ends), dtype=np.bool_)
    last[:-1] = before[1:] > before[:-1]
    return ends[last]


def _sequence_ends(trace: RankTrace) -> Int64:
    """When the host made the last call of each period of the sequence of calls.

    A period counts if one of its calls comes once in it: it is then a step's, not a layer's.
    """
    calls = trace.calls
    known = np.flatnonzero(calls.issued_ns >= 0)
    known = known[np.argsort(calls.issued_ns[known], kind="stable")]
    if len(known) < _FEWEST_TIMES * _FEWEST_CALLS:
        return np.empty(0, dtype=np.int64)
    kind = labels_of(calls.group_id[known], calls.op[known], calls.message_bytes[known])
    count = np.bincount(kind)
    rarest = int(np.flatnonzero(count == count[count > 0].min())[0])
    at = np.flatnonzero(kind == rarest)
    if not _is_period(kind, at):
        return np.empty(0, dtype=np.int64)
    return calls.issued_ns[known[at]] + 1


def _is_period(kind: Int64, at: Int64) -> bool:
    """Whether what lies between the places of the rarest call is always the same."""
    if len(at) < _FEWEST_TIMES:
        return False
    length = np.diff(at)
    period = int(length[0])
    if period < _FEWEST_CALLS or (length != period).any():
        return False
    return bool((kind[:-period] == kind[period:]).all())
