"""Idle time of the host that has a name: data loading, allocation, garbage collection, and
synchronization that all ranks have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial

import numpy as np

from stepsplit.analyzer import units
from stepsplit.analyzer.arrays import select_rows
from stepsplit.analyzer.diagnose.causes.cause import CauseEntry, Remedy, replay_remedy
from stepsplit.analyzer.diagnose.causes.code_places import describe_place
from stepsplit.analyzer.diagnose.causes.context import CauseContext
from stepsplit.analyzer.diagnose.causes.host_time import MIN_LATE_SHARE
from stepsplit.analyzer.report.report import EventRef
from stepsplit.analyzer.trace import Int64

_IN_PROCESS_LOADER = "_SingleProcessDataLoaderIter"

_ALIKE = 0.5
"""Ranks with less than this share of the time of the rank with most of it are not named: their mean
would be true of none of them."""


def find_named_idle(context: CauseContext, cause: str, text: str) -> Iterator[Remedy]:
    """Find all idle time with one cause of HostTime.named; text begins the message, with {who},
    {share} and {steps} replaced."""
    named = context.host.named.get(cause)
    if named is None:
        return
    mean_ns = named.mean_ns
    has_some = mean_ns > MIN_LATE_SHARE * context.mean_ns
    has_most = has_some & (mean_ns >= _ALIKE * mean_ns.max())
    ranks = np.flatnonzero(has_most)
    numbers = context.ranks[ranks].tolist()
    who = f"each of ranks {units.format_number_list(numbers)}"
    if len(ranks) == 1:
        who = f"rank {numbers[0]}"
    elif len(ranks) == len(context.ranks):
        who = "every rank"
    measured_ns = float(mean_ns[ranks].mean())
    share = units.format_percent(measured_ns / context.mean_ns)
    less_ns = float(mean_ns[has_some & ~has_most].max(initial=0))
    less = units.format_percent(less_ns / context.mean_ns)
    others = f" (the others at most {less})" if less_ns else ""
    own = select_rows(named.idle, np.isin(named.idle.rank, ranks))
    counted = np.isin(context.graph.steps.rank, ranks) & context.counted
    mine = counted & (named.removed_ns > 0)
    events = []
    for at in np.argsort(own.start_ns - own.end_ns, kind="stable")[:3].tolist():
        rank, start, end = (int(column[at]) for column in (own.rank, own.start_ns, own.end_ns))
        one = context.split.ranks[rank]
        begin = one.clock.map_instant_to_common_ns(start) - context.origin_ns
        events.append(EventRef(one.trace.rank, begin, end - start, "idle"))
    step = context.graph.steps.step
    steps = f"{len(np.unique(step[mine]))} of {len(np.unique(step[counted]))} steps"
    yield replay_remedy(
        context,
        named.remove,
        bucket="idle",
        measured_ns=measured_ns,
        predicted_ns=0,
        rows=mine,
        message=text.format(who=who, share=share, steps=steps)
        + others
        + _describe(context, cause, ranks)
        + describe_place(context, own.list_spans()),
        ranks=() if len(ranks) == len(context.ranks) else tuple(numbers),
        events=tuple(events),
        gains=named.gains,
        names_steps="{steps}" in text,
    )


def _describe(context: CauseContext, cause: str, ranks: Int64) -> str:
    """What is known of the cause besides its time; "" if nothing."""
    if cause == "gc_pause":
        pauses = [
            pause
            for rank in ranks.tolist()
            for one in context.list_records(rank)
            for pause in one.host.gc_pauses
        ]
        longest = max(pauses, key=lambda pause: pause.took_ns)
        return (
            f" (up to {units.format_milliseconds(longest.took_ns)} at once, generation "
            f"{longest.generation}); gc.freeze() after the setup shortens it"
        )
    if cause == "compilation":
        return ""
    ops = Counter[str]()
    for rank in ranks.tolist():
        for one in context.split.detail.idle[rank]:
            if one.cause == cause and one.op:
                ops[one.op] += one.idle_ns
    op = max(ops, key=lambda name: ops[name], default="")
    if cause == "data_loading":
        in_process = "; it loads in the training process (num_workers=0)"
        return in_process if _IN_PROCESS_LOADER in op else ""
    text = f"; mostly in {op}" if op else ""
    if cause == "allocation":
        memories = [
            one.memory
            for rank in ranks.tolist()
            for one in context.list_records(rank)
            if one.memory is not None
        ]
        retries = sum(memory.allocation_retries or 0 for memory in memories)
        if retries:
            text += f"; the allocator ran full {retries} times and freed its cache"
    return text


DATA_LOADING = CauseEntry(
    "data_loading",
    partial(
        find_named_idle,
        cause="data_loading",
        text="{who} waits for its data loader {share} of the step",
    ),
    basis="measured",
    as_set="waiting for their data loaders",
)
ALLOCATION = CauseEntry(
    "allocation",
    partial(
        find_named_idle,
        cause="allocation",
        text="{who} allocates or frees memory within the step: GPU idle {share} of it",
    ),
    basis="measured",
    as_set="allocating memory",
)
GC_PAUSE = CauseEntry(
    "gc_pause",
    partial(
        find_named_idle,
        cause="gc_pause",
        text="Python's garbage collector stops {who} for {share} of the step",
    ),
    basis="measured",
    as_set="stopped by garbage collection",
)
HOST_SYNC = CauseEntry(
    "host_sync",
    partial(
        find_named_idle,
        cause="synchronize",
        text="{who} waits for its device and launches late: GPU idle {share} of the step",
    ),
    basis="measured",
)
