"""Collectives that NCCL carries out by copy engines: when a rank comes, waits, and moves data."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
from msgspec import structs

from stepsplit.analyzer.arrays import group_ids, group_rows
from stepsplit.analyzer.ops import parse_op
from stepsplit.analyzer.readers.kineto.block_events import PARAM_COMMS
from stepsplit.analyzer.readers.kineto.collective_launches import DEVICE_COPY, find_surrounding_ops
from stepsplit.analyzer.readers.kineto.columns import SortedRows
from stepsplit.analyzer.readers.kineto.schema import Args, decode_comm_args
from stepsplit.analyzer.trace import Category, Int64, Note

# From 2.28 on NCCL carries out an all_gather, all_to_all, gather or scatter between symmetric
# windows by copies (src/ce_coll.cc; NCCL_CTA_POLICY_ZERO, or torch's symmetric memory pools):
#   - a flag of 4 bytes to each other member (to all at once by NVLink SHARP): here is the rank
#   - a stream memory operation that waits for the flags of all others
#   - the copies of the data, one for each member, perhaps with such barriers in between
#   - the flags and the wait once more: the rank has written everywhere
# No profiler records stream memory operations. The first wait lasts from the first flag until the
# data begins to move, so that its end is in the trace; the last one ends when the flags of all
# others have come, which only their traces say (split/copy_ends.py).

READY, COPIES = "ncclCopyEngineReady", "ncclCopyEngineCopies"
"""The names of the two events that stand for the copies of a call."""

_OPS = ("all_gather", "all_to_all", "gather", "scatter")

_FLAG_BYTES = 4
"""Of a barrier, as above."""


def join_copy_engine_calls(rows: SortedRows) -> tuple[SortedRows, tuple[Note, ...]]:
    """The rows with two events for each collective of NCCL's copy engines, and a note on them.

    READY lasts from the first flag until the data begins to move, COPIES from there to the last
    flag.
    Copies that are not in this order stay as they are.
    """
    events = rows.events
    noted = rows.noted_row
    is_copy = events.is_category(Category.MEMCPY) & events.match_names(DEVICE_COPY)
    places = np.flatnonzero(is_copy[noted])
    copied = [decode_comm_args(rows.noted_args[i]).copied_bytes for i in places.tolist()]
    copies, size = noted[places], np.array(copied, dtype=np.int64)
    if not (size == _FLAG_BYTES).any():
        return rows, ()
    is_op = (events.match_prefix(PARAM_COMMS) & events.is_category(Category.OP))[noted]
    args_of_op = {
        int(noted[i]): decode_comm_args(rows.noted_args[i]) for i in np.flatnonzero(is_op).tolist()
    }
    launches = events.find_launches(copies)
    launched = find_surrounding_ops(events, noted[is_op], launches)
    dur, category = events.dur_ns.copy(), events.category.copy()
    correlation, name_id = events.correlation.copy(), events.name_id.copy()
    found = Counter[str]()
    order, first = group_rows(group_ids(launched, events.lane[copies]))
    for of_call in np.split(order, first[1:]):
        args = args_of_op.get(int(launched[of_call[0]]))
        in_time = of_call[np.argsort(copies[of_call], kind="stable")]
        own, begin = copies[in_time], 0
        if args is not None:
            begin = _find_begin_of_data(args, size[in_time])
        if args is None or not begin:
            continue
        found[parse_op(args.collective or "")] += 1
        ends_ns = (int(events.start_ns[own[begin]]), int(events.ends_of(own).max()))
        parts = (slice(0, begin), slice(begin, None))
        for number, (part, end_ns) in enumerate(zip(parts, ends_ns, strict=True)):
            # The first copy stands for all. The others keep their rows, without a time and without
            # a launch, which is one of the first copy, so that none of them counts as lost.
            row, others = own[part][0], own[part][1:]
            dur[row], name_id[row] = end_ns - events.start_ns[row], len(events.names) + number
            category[row] = Category.KERNEL
            dur[others], category[others], correlation[others] = 0, Category.OTHER, -1
            calls = launches[in_time][part]
            correlation[calls[calls >= 0]] = events.correlation[row]
    if not found:
        return rows, ()
    joined = replace(
        events, dur_ns=dur, category=category, name_id=name_id, correlation=correlation,
        names=(*events.names, READY, COPIES),
    )  # fmt: skip
    listed = ", ".join(f"{name} {number:,}" for name, number in found.items())
    text = (
        f"{sum(found.values()):,} collectives ran on NCCL's copy engines ({listed}): a rank waits"
        " from its first flag until its copies begin; when the last flags of the others came is"
        " in no trace, and taken from their copies"
    )
    return structs.replace(rows, events=joined), (Note("copy_engine", text),)


def _find_begin_of_data(args: Args, sizes: Int64) -> int:
    """The number of flags before the data of a call with these copies; 0 if they are not the copies
    of such a call."""
    is_flag = (sizes == _FLAG_BYTES).tolist()
    if parse_op(args.collective or "") not in _OPS or all(is_flag):
        return 0
    begin, end = is_flag.index(False), is_flag[::-1].index(False)
    return begin if begin == end and begin in (1, args.group_size - 1) else 0
