"""Whether a rank sends back what it receives at once, or works on it first."""

from __future__ import annotations

import numpy as np

from stepsplit.analyzer.arrays import Intervals
from stepsplit.analyzer.split.classify import work_of
from stepsplit.analyzer.trace import OP_CODE, Int64, RankTrace

SHARE = 0.8
"""Of all compute between its messages, a rank that swaps does at least so much after it has sent
and before it has received again; a last stage works between receiving and sending."""


def swaps(trace: RankTrace, peer: int) -> bool:
    """Whether nearly all compute between messages with the peer follows a send, not a receive.

    So it does in a ring, where each round swaps data first; a last stage of a pipeline computes the
    forward and the backward of what it has received before it sends. True where nothing tells.
    """
    calls, events = trace.calls, trace.events
    rows = np.flatnonzero(calls.is_message & (calls.peer == peer))
    sends = calls.op[rows] == OP_CODE["send"]
    event = calls.event[rows]
    when = np.where(sends, events.start_ns[event], events.end_ns[event])
    order = np.lexsort((~sends, when))
    when, sends = when[order], sends[order]
    worked = np.diff(_worked_until(work_of(trace).compute, when))
    after_sending = sends[:-1] & ~sends[1:]
    return bool(worked[after_sending].sum() >= SHARE * worked.sum())


def _worked_until(compute: Intervals, when: Int64) -> Int64:
    """The compute before each instant, in ns."""
    done = np.concatenate(([0], np.cumsum(compute.end_ns - compute.start_ns)))
    last = np.searchsorted(compute.start_ns, when, side="right")
    if not len(compute.start_ns):
        return np.zeros(len(when), dtype=np.int64)
    running = np.clip(compute.end_ns[np.maximum(last - 1, 0)] - when, 0, None)
    return done[last] - np.where(last > 0, running, 0)
