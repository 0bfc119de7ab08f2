"""DDP's search for unused parameters: a walk over the graph of autograd and a bitmap to reduce."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from stepsplit.analyzer import units
from stepsplit.analyzer.arrays import is_inside, union
from stepsplit.analyzer.diagnose.causes.cause import CauseEntry, Remedy, replay_remedy
from stepsplit.analyzer.diagnose.causes.context import CauseContext
from stepsplit.analyzer.diagnose.causes.gradient_calls import find_on_data_axes, find_ops
from stepsplit.analyzer.diagnose.graph.dependency_graph import WORK, DependencyGraph
from stepsplit.analyzer.diagnose.graph.replay import reduce_work, remove_calls

_SEARCH = "torch.distributed.ddp.reducer::search_unused_parameters"
"""The range of DDP's reducer, which has it with find_unused_parameters=True alone."""


def find_unused_search(context: CauseContext) -> Iterator[Remedy]:
    """Find DDP's search, with the calls that reduce which parameters were used."""
    searches = [
        np.flatnonzero(rank.trace.events.match_prefix(_SEARCH)) for rank in context.split.ranks
    ]
    if not any(map(len, searches)):
        return
    # The bitmaps are the all_reduces of int32 on a data axis; on a CPU only those that the rank
    # issues right in its backward.
    table = context.graph.kernels
    is_int = np.zeros(len(table), dtype=np.bool_)
    for index, rank in enumerate(context.split.ranks):
        calls, events = rank.trace.calls, rank.trace.events
        mine = table.list_rows(index)
        rows = table.call[mine]
        backward = events.match_prefix("autograd::engine")
        in_backward = union(events.start_ns[backward], events.ends_of(backward))
        whole = np.isin(calls.dtype[rows], [i for i, d in enumerate(calls.dtypes) if d == "int32"])
        issued = is_inside(in_backward, calls.issued_ns[rows]) | rank.trace.on_device
        is_int[mine] = whole & issued
    is_sum = find_on_data_axes(context) & find_ops(context, ("all_reduce",))
    bitmaps = np.flatnonzero(is_int & is_sum)
    # On a CPU the search is an op; the host of a device runs ahead.
    on_device = context.split.ranks[0].trace.on_device
    searched_ns = np.zeros(len(context.graph), dtype=np.int64)
    if not on_device:
        computed_ns = context.graph.work_ns[:, WORK.index("compute")]
        searched_ns = np.minimum(context.measure_events(searches), computed_ns).astype(np.int64)

    def remove(graph: DependencyGraph) -> DependencyGraph:
        return reduce_work(remove_calls(graph, bitmaps), "compute", searched_ns)

    count = max(1, int(context.counted.sum()))
    in_steps = np.append(context.counted, False)[context.graph.step]
    search_ns = int(searched_ns[in_steps].sum()) // count
    exposed = context.sum_exposed_ns()[bitmaps]
    exposed_ns = int(exposed[context.counted[context.graph.kernels.step[bitmaps]]].sum()) // count
    parts = [f"its walk over the graph takes {units.format_milliseconds(search_ns)}"] * (
        not on_device
    )
    if len(bitmaps):
        size = int(np.median(context.split.matched.message_bytes[table.row[bitmaps]]))
        parts.append(
            f"an all_reduce of {units.format_size(size)} says which were used, exposed for "
            f"{units.format_milliseconds(exposed_ns)}"
        )
    yield replay_remedy(
        context,
        remove,
        bucket="collective",
        measured_ns=search_ns + exposed_ns,
        predicted_ns=0,
        rows=context.counted,
        message=(
            "DDP searches for unused parameters in each step (find_unused_parameters=True): "
            f"{', and '.join(parts) or 'its calls are not known'}; it is needed only if some "
            "parameters get no gradient"
        ),
        events=context.list_longest_calls(bitmaps) if len(bitmaps) else (),
        # Of the last bucket and the bitmap, which are launched together, one holds up the rank in
        # the graph: without the bitmap it would not wait for the bucket either.
        at_most_ns=search_ns + exposed_ns,
    )


FIND_UNUSED = CauseEntry(
    "find_unused_parameters", find_unused_search, basis="measured", note_below=True
)
