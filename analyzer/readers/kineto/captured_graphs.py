"""What a replayed CUDA graph launches: which captured op or launch each of its kernels is."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from stepsplit.analyzer.arrays import is_inside, union
from stepsplit.analyzer.ops import parse_op
from stepsplit.analyzer.readers.kineto.schema import Args
from stepsplit.analyzer.trace import Bool, Category, Events, Int64

# While a graph is captured c10d describes its collectives, and nothing runs; a replay runs their
# kernels, which carry no arguments. Kernels of one stream keep the order of the capture.

BEGIN_CAPTURE, END_CAPTURE = re.compile("StreamBeginCapture"), re.compile("StreamEndCapture")

_GRAPH_LAUNCH = re.compile("GraphLaunch")

_Ops = tuple[int, ...]


def find_captured_ops(
    events: Events,
    kernels: Int64,
    launches: Int64,
    ops: Sequence[int],
    args_of_op: Mapping[int, Args],
    find_op: Callable[[int], str],
) -> Int64:
    """For each kernel of communication the captured op that it replays, -1 for none.

    A replay is one of a capture if its kernels are as many and of the same ops, in the same order
    on each stream; if several captures fit, their ops must be the same.

    Args:
        events: The events of the trace.
        kernels: The rows of the kernels.
        launches: The row of the launch of each, -1 if it is unknown.
        ops: The rows of the ops of collectives, in order.
        args_of_op: The arguments of each op.
        find_op: The op of a kernel by its name, "unknown" if it does not tell.
    """
    found = np.full(len(kernels), -1, dtype=np.int64)
    captures = _list_captures(events, ops)
    graph = events.is_category(Category.RUNTIME) & events.match_names(_GRAPH_LAUNCH)
    if not captures:
        return found
    by_launch: dict[int, list[int]] = defaultdict(list)
    for at in np.flatnonzero((launches >= 0) & graph[launches]).tolist():
        by_launch[int(launches[at])].append(at)
    for places in by_launch.values():
        in_time = sorted(places, key=lambda at: int(events.start_ns[kernels[at]]))
        kinds = [find_op(int(kernels[at])) for at in in_time]
        lanes = [int(events.lane[kernels[at]]) for at in in_time]
        fitting = [
            fit for one in captures if (fit := _fit(one, args_of_op, kinds, lanes)) is not None
        ]
        described = {tuple(_describe(args_of_op[op]) for op in fit) for fit in fitting}
        if len(described) == 1:
            found[in_time] = fitting[0]
    return found


def _list_captures(events: Events, ops: Sequence[int]) -> list[_Ops]:
    """The ops of each capture of a graph, in order."""
    captures = []
    for begin, end in _list_spans(events):
        inside = [op for op in ops if begin <= events.start_ns[op] < end]
        if inside:
            captures.append(tuple(inside))
    return captures


def _list_spans(events: Events) -> list[tuple[int, int]]:
    """When each graph was captured."""
    runtime = events.is_category(Category.RUNTIME)
    begins, ends = (
        events.start_ns[runtime & events.match_names(edge)] for edge in (BEGIN_CAPTURE, END_CAPTURE)
    )
    after = np.append(ends, -1)[np.searchsorted(ends, begins, side="right")]
    return [
        (begin, end) for begin, end in zip(begins.tolist(), after.tolist(), strict=True) if end >= 0
    ]


_NODE_LAUNCH = re.compile(r"Launch(Cooperative)?Kernel|Mem(cpy|set)\w{0,40}Async")
"""Calls that make a node of a graph while it is captured."""

_COLLECTIVE = ("record_param_comms", "nccl:", "c10d::")


def find_captured_launches(events: Events, communicates: Bool) -> Int64:
    """The launch of each event, -1 for none: of what a graph replays the one in its capture.

    A replay is of a capture if it has as many kernels and copies besides those of communication, on
    one stream, whose order is that of the capture; if several captures fit, it is of none.

    Args:
        events: The events of the trace.
        communicates: Which of them communicate.
    """
    launches = events.launches.call.astype(np.int64)
    spans = _list_spans(events)
    if not spans:
        return launches
    runtime = events.is_category(Category.RUNTIME)
    host = events.is_category(Category.OP, Category.ANNOTATION) & events.match_prefix(*_COLLECTIVE)
    collectives = union(events.start_ns[host], events.ends_of(host))
    nodes = np.flatnonzero(runtime & events.match_names(_NODE_LAUNCH))
    nodes = nodes[~is_inside(collectives, events.start_ns[nodes])]
    captures: dict[int, list[Int64]] = defaultdict(list)
    for begin, end in spans:
        inside = nodes[(events.start_ns[nodes] >= begin) & (events.start_ns[nodes] < end)]
        captures[len(inside)].append(inside)
    graphs = runtime & events.match_names(_GRAPH_LAUNCH)
    runs = events.is_category(Category.KERNEL, Category.MEMCPY, Category.MEMSET) & ~communicates
    replayed = np.flatnonzero(runs & (launches >= 0) & graphs[launches])
    for launch in np.unique(launches[replayed]).tolist():
        own = replayed[launches[replayed] == launch]
        fitting = captures.get(len(own), [])
        if len(fitting) == 1 and len(np.unique(events.lane[own])) == 1:
            launches[own] = fitting[0]
    return launches


def _fit(
    captured: _Ops, args_of_op: Mapping[int, Args], kinds: Sequence[str], lanes: Sequence[int]
) -> list[int] | None:
    """The op of each kernel of a replay; None if the replay is not one of this capture, or if the
    order of its streams leaves several possibilities."""
    if len(captured) != len(kinds):
        return None
    stated = {op: parse_op(args_of_op[op].collective or "") for op in captured}
    on_one_stream = len(set(lanes)) == 1
    if on_one_stream:
        same = all(map(_may_be, kinds, (stated[op] for op in captured)))
        return list(captured) if same else None
    by_lane: dict[int, list[int]] = defaultdict(list)
    for place, lane in enumerate(lanes):
        by_lane[lane].append(place)
    by_group: dict[str, list[int]] = defaultdict(list)
    for op in captured:
        by_group[args_of_op[op].group_name].append(op)
    found = [-1] * len(kinds)
    left = dict(by_group)
    for places in by_lane.values():
        alike = [
            name
            for name, ops in left.items()
            if len(ops) == len(places)
            and all(_may_be(kinds[at], stated[op]) for at, op in zip(places, ops, strict=True))
        ]
        if len(alike) != 1:
            return None
        for at, op in zip(places, left.pop(alike[0]), strict=True):
            found[at] = op
    return found


def _may_be(kind: str, stated: str) -> bool:
    return kind in ("unknown", stated) or (kind == "send_recv" and stated in ("send", "recv"))


def _describe(args: Args) -> tuple[str, str, int, int]:
    return args.collective or "", args.group_name, args.in_nelems, args.out_nelems
