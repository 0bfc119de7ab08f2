"""When collectives of NCCL's copy engines end: on no rank before the copies of all."""

from __future__ import annotations

import dataclasses

import numpy as np
from msgspec.structs import replace

from stepsplit.analyzer.arrays import group_max
from stepsplit.analyzer.readers.kineto.copy_engine import COPIES
from stepsplit.analyzer.split.clock import Alignment
from stepsplit.analyzer.split.matching import MatchedCalls
from stepsplit.analyzer.trace import DEVICE_CATEGORIES, RankTrace


def extend_copy_ends(
    traces: list[RankTrace], matched: MatchedCalls, alignment: Alignment
) -> tuple[list[RankTrace], MatchedCalls]:
    """The traces and their calls with the copies of each call up to the end of those of its last
    recorded member: a rank waits for its flags, by a stream memory operation that no trace has.

    At most to what the stream runs next. Calls of one recorded rank end with its own copies.
    """
    masks = [trace.events.name_mask(tuple(n == COPIES for n in trace.events.names))
             for trace in traces]  # fmt: skip
    if not any(mask.any() for mask in masks):
        return traces, matched
    copies = np.concatenate([m[t.calls.event] for m, t in zip(masks, traces, strict=True)])
    call = np.where(copies, matched.shared, -1)
    common_ns = np.concatenate(
        [
            clock.map_to_common_ns(matched.end_ns[matched.slice_trace(i)])
            for i, clock in enumerate(alignment.clocks)
        ]
    )
    last_ns = group_max(call, common_ns, int(call.max(initial=-1)) + 1)
    extended, all_ends_ns = [], matched.end_ns.copy()
    for i, (trace, clock) in enumerate(zip(traces, alignment.clocks, strict=True)):
        rows, events = matched.slice_trace(i), trace.events
        mine = np.flatnonzero(call[rows] >= 0)
        event = trace.calls.event[mine].astype(np.int64)
        own_ns, on_device = events.ends_of(event), events.is_category(*DEVICE_CATEGORIES)
        end_ns = np.maximum(clock.map_to_own_ns(last_ns[call[rows][mine]]), own_ns)
        for lane in np.unique(events.lane[event]).tolist():
            here = np.flatnonzero(events.lane[event] == lane)
            on_lane = np.flatnonzero((events.lane == lane) & on_device)
            after = np.searchsorted(on_lane, event[here], side="right")
            next_ns = np.append(events.start_ns[on_lane], np.iinfo(np.int64).max)[after]
            end_ns[here] = np.maximum(np.minimum(end_ns[here], next_ns), own_ns[here])
        dur_ns = events.dur_ns.copy()
        dur_ns[event] = end_ns - events.start_ns[event]
        extended.append(replace(trace, events=dataclasses.replace(events, dur_ns=dur_ns)))
        all_ends_ns[rows][mine] = end_ns
    return extended, replace(matched, end_ns=all_ends_ns)
