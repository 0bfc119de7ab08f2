"""Communication calls of a Kineto trace: from device kernels, or from gloo's workers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import msgspec
import numpy as np

from stepsplit.analyzer.ops import dtype_named, element_bytes, known_bytes, message_bytes, op_named
from stepsplit.analyzer.readers.flight_recorder import FlightEntry
from stepsplit.analyzer.readers.kernel_rules import BUILT_IN, Rules
from stepsplit.analyzer.readers.kineto.columns import PARAM_COMMS, Sorted, posted_before
from stepsplit.analyzer.readers.kineto.schema import Args, comm_args, ranks_in
from stepsplit.analyzer.trace import (
    Bool,
    Call,
    Category,
    Events,
    FoundCalls,
    Group,
    Int64,
    Note,
    to_calls,
)

# Collectives and messages of device kernels -> Calls.

_MOST_DIMS = 64

_MESSAGES = ("send", "recv")


def calls_of_device(rows: Sorted, known: Sequence[Group], rules: Rules = BUILT_IN) -> FoundCalls:
    """A call for each communication kernel; groups that appear only in arguments are added.

    Arguments missing on a kernel are taken from the record_param_comms around its launch. If other
    kernels name their collective, a SendRecv kernel without a name is a batch of messages.
    """
    book = _GroupBook(known)
    events = rows.events
    own = dict(zip(rows.noted_row.tolist(), map(comm_args, rows.noted_args), strict=True))
    kernels = rows.noted_row[events.of(Category.KERNEL, Category.MEMCPY)[rows.noted_row]]
    launches = events.launches_of(kernels)
    around = ops_around(events, rows.noted_row[_params(rows)], launches)
    issued = np.where(launches >= 0, events.start_ns[launches], -1)
    posts = _posted(rows, own, kernels, around, launches)
    any_named = any(args.collective is not None for args in own.values())
    by_name = {name: rules.op_of(name) for name in set(map(events.name_of, kernels.tolist()))}
    calls: list[Call] = []
    for event, op, issued_ns, batch in zip(
        kernels.tolist(), around.tolist(), issued.tolist(), posts, strict=True
    ):
        args, name = _stated(own[event], own.get(op)), events.name_of(event)
        parts = [own[post] for post in batch] or [args]
        found = [_call(event, by_name[name], part, book.number(part), issued_ns) for part in parts]
        unnamed = not batch and any_named and _is_batch(name, args)
        calls += [replace(call, op="send_recv") for call in found] if unnamed else found
    return FoundCalls(to_calls(calls), tuple(book.groups))


def _is_batch(name: str, args: Args) -> bool:
    """Whether the kernel is a SendRecv without a named collective."""
    return "SendRecv" in name and op_named(args.collective or "") == "unknown"


def _posted(
    rows: Sorted, own: dict[int, Args], kernels: Int64, around: Int64, launches: Int64
) -> list[list[int]]:
    """For each kernel without a description, the ops that posted its messages."""
    events, ops = rows.events, rows.noted_row[_params(rows)]
    messages = [op for op in ops.tolist() if op_named(own[op].collective or "") in _MESSAGES]
    free = np.setdiff1d(np.array(messages, dtype=np.int64), around)
    batches = [
        _is_batch(events.name_of(event), _stated(own[event], own.get(op)))
        for event, op in zip(kernels.tolist(), around.tolist(), strict=True)
    ]
    return posted_before(events, free, np.where(batches, launches, -1))


def _params(rows: Sorted) -> Bool:
    """A mask of the noted rows that are record_param_comms ops."""
    events = rows.events
    return (events.named(PARAM_COMMS) & events.of(Category.OP))[rows.noted_row]


def _stated(kernel: Args | None, op: Args | None) -> Args:
    """The arguments of the kernel; if it has none, those of the op that launched it."""
    if kernel is not None and kernel.collective is not None:
        return kernel
    if op is None or op.collective == "wait":
        return kernel or Args()
    return op if op.in_nelems >= 0 else _sized(op)


def _sized(op: Args) -> Args:
    """The op's arguments with the size from its input shapes, for traces without message sizes."""
    nelems = _elements(op.dims[0] if op.dims else None)
    kind = str(op.types[0]) if op.types else ""
    if nelems < 0 or element_bytes(kind) < 0:
        return op
    return msgspec.structs.replace(op, in_nelems=nelems, dtype=kind)


def _elements(dims: Any) -> int:
    """The number of elements of one shape or a list of shapes; -1 if the shape is invalid."""
    if not isinstance(dims, list) or not dims:
        return -1
    shapes = [dims] if isinstance(dims[0], int) else dims
    known = all(isinstance(shape, list) and len(shape) <= _MOST_DIMS for shape in shapes)
    whole = known and all(isinstance(dim, int) for shape in shapes for dim in shape)
    return sum(map(math.prod, shapes)) if whole else -1


class _GroupBook:
    """The numbered process groups of a trace; groups found in arguments are added."""

    def __init__(self, known: Sequence[Group]) -> None:
        self.groups = list(known)
        self._numbers = {(group.name, group.ranks): i for i, group in enumerate(known)}

    def number(self, args: Args) -> int:
        """The number of the group in the arguments; -1 if it is ambiguous or missing."""
        ranks = ranks_in(args.group_ranks)
        if not ranks:
            named = [i for (name, _), i in self._numbers.items() if name == args.group_name]
            ranks = () if named else args.strided_ranks
            if not ranks:
                return named[0] if len(named) == 1 else -1
        key = (args.group_name, ranks)
        if key not in self._numbers:
            self._numbers[key] = len(self.groups)
            self.groups.append(Group(args.group_name, ranks, args.group_description))
        return self._numbers[key]


def _call(event: int, by_name: str, args: Args, group_id: int, issued_ns: int) -> Call:
    op = op_named(args.collective or "")
    if op == "unknown":  # such as "coalesced", which does not name the operation
        op = by_name
    input_bytes = _bytes(args.in_nelems, args.dtype)
    output_bytes = _bytes(args.out_nelems, args.dtype)
    return Call(
        event=event,
        op=op,
        issued_ns=issued_ns,
        group_id=group_id,
        seq=args.seq,
        dtype=dtype_named(args.dtype),
        peer={"send": args.dst_rank, "recv": args.src_rank}.get(op, -1),
        input_bytes=input_bytes,
        message_bytes=known_bytes(message_bytes(op, input_bytes, output_bytes, args.group_size)),
    )


def _bytes(nelems: int, dtype: str) -> int:
    width = element_bytes(dtype)
    return known_bytes(nelems * width) if nelems >= 0 and width > 0 else -1


# The op that surrounds the launch of a device event.


def ops_around(events: Events, ops: Int64, rows: Int64) -> Int64:
    """For each row, the op on the same lane in which it starts; -1 if there is none.

    ops are sorted and not nested; for a row of -1 the result is -1.
    """
    found = np.full(len(rows), -1, dtype=np.int64)
    known = np.flatnonzero(rows >= 0)
    for lane in np.unique(events.lane[rows[known]]).tolist():
        here = ops[events.lane[ops] == lane]
        if not len(here):
            continue
        asking = known[events.lane[rows[known]] == lane]
        starts = events.start_ns[rows[asking]]
        ends = events.start_ns[here] + events.dur_ns[here]
        at = np.searchsorted(events.start_ns[here], starts, side="right") - 1
        inside = (at >= 0) & (starts <= ends[at])
        found[asking[inside]] = here[at[inside]]
    return found


# Collectives and messages of a gloo run -> Calls.
#
# A gloo trace has the time range of each collective; its group and call come from the Flight
# Recorder. The peers of a message come from the collector's annotation around ProcessGroup.send
# and recv, else from the arguments of the c10d op.

_NUMBER = re.compile(r"[0-9]{1,19}")

MESSAGES = ("gloo:send", "gloo:recv")

_ANNOTATED = re.compile(
    r"stepsplit::(?P<op>send|recv) group=(?P<group>\S*) src=(?P<src>-?\d{1,9}) "
    r"dst=(?P<dst>-?\d{1,9}) tag=\S+ n=\d+ bytes=(?P<bytes>-?\d{1,15}) dtype=(?P<dtype>\S*)",
    re.ASCII,
)


def calls_of_gloo(
    rows: Sorted, flight: Sequence[FlightEntry], groups: Sequence[Group]
) -> tuple[FoundCalls, tuple[Note, ...]]:
    """A call for each gloo range, in the order of the events, and notes on unmatched ranges."""
    collectives, notes = _collectives(rows, flight, groups)
    calls = sorted(collectives + _messages(rows, groups), key=lambda call: call.event)
    return FoundCalls(to_calls(calls), tuple(groups)), notes


def _collectives(
    rows: Sorted, flight: Sequence[FlightEntry], groups: Sequence[Group]
) -> tuple[list[Call], tuple[Note, ...]]:
    ranges = _ranges(rows)
    if not ranges:
        return [], ()
    entries = _recorded(rows, flight)
    pairs = assign(_by_thread(rows, ranges), _requests(entries, rows.t0_unix_ns))
    if pairs is None:
        note = Note("gloo_unpaired", "gloo collectives have no process group and no Flight Recorder"
                    " dump matches them; they are split as for a single rank")  # fmt: skip
        return [Call(r.event, op_named(r.name)) for r in ranges], (note,)
    numbers = {group.name: i for i, group in enumerate(groups)}
    found = [r for r in ranges if r.event in pairs]
    calls = [_collective(r, *entries[pairs[r.event]], rows, numbers, groups) for r in found]
    calls += [Call(r.event, op_named(r.name)) for r in ranges if r.event not in pairs]
    return calls, (_dropped(len(ranges) - len(found)),) if len(found) < len(ranges) else ()


def _dropped(count: int) -> Note:
    return Note(
        "flight_incomplete",
        f"the Flight Recorder dropped the oldest {count} collectives, which are split as for a "
        "single rank; record with a larger TORCH_FR_BUFFER_SIZE",
    )


def _ranges(rows: Sorted) -> list[Range]:
    events = rows.events
    mask = events.of(Category.ANNOTATION) & events.named("gloo:")
    found = []
    for event in np.flatnonzero(mask).tolist():
        name = rows.events.name_of(event)
        start = int(events.start_ns[event])
        if not name.startswith(MESSAGES):
            found.append(Range(event, name, start, start + int(events.dur_ns[event])))
    return found


def _recorded(rows: Sorted, flight: Sequence[FlightEntry]) -> list[tuple[FlightEntry, str]]:
    """The Flight Recorder entries created within the trace, each with its c10d op.

    An entry that is not inside an op of the trace is outside of the profiled window.
    """
    events = rows.events
    ops = np.flatnonzero(events.of(Category.OP) & events.named("c10d::"))
    found = []
    for entry in flight:
        at = entry.created_unix_ns - rows.t0_unix_ns
        last = int(np.searchsorted(events.start_ns[ops], at, side="right")) - 1
        if last >= 0 and at <= events.end_ns[ops[last]]:
            found.append((entry, rows.events.name_of(ops[last])))
    return found


def _by_thread(rows: Sorted, ranges: Sequence[Range]) -> list[list[Range]]:
    lanes: dict[int, list[Range]] = {}
    for found in ranges:
        thread = rows.events.lanes[rows.events.lane[found.event]].tid
        lanes.setdefault(int(thread) if _NUMBER.fullmatch(thread) else 0, []).append(found)
    return [lanes[thread] for thread in sorted(lanes)]


def _requests(entries: Sequence[tuple[FlightEntry, str]], t0_unix_ns: int) -> list[list[Request]]:
    groups: dict[int, list[Request]] = {}
    for index, (entry, _) in enumerate(entries):
        request = Request(index, entry.name, entry.created_unix_ns - t0_unix_ns)
        groups.setdefault(entry.group_number, []).append(request)
    return [groups[number] for number in sorted(groups)]


def _collective(
    found: Range,
    entry: FlightEntry,
    c10d_op: str,
    rows: Sorted,
    numbers: dict[str, int],
    groups: Sequence[Group],
) -> Call:
    op = op_named(c10d_op)
    group_id = numbers.get(entry.group_name, -1)
    group_size = len(groups[group_id].ranks) if group_id >= 0 else -1
    return Call(
        event=found.event,
        op=op if op != "unknown" else op_named(entry.name),
        issued_ns=entry.created_unix_ns - rows.t0_unix_ns,
        group_id=group_id,
        seq=entry.seq,
        dtype=dtype_named(entry.dtype),
        input_bytes=entry.input_bytes,
        message_bytes=message_bytes(op, entry.input_bytes, entry.output_bytes, group_size),
    )


def _messages(rows: Sorted, groups: Sequence[Group]) -> list[Call]:
    events = rows.events
    ranges = np.flatnonzero(
        events.of(Category.ANNOTATION) & (events.named("gloo:send") | events.named("gloo:recv"))
    )
    annotated = np.flatnonzero(events.named("stepsplit::send") | events.named("stepsplit::recv"))
    native = np.flatnonzero(events.named("c10d::send") | events.named("c10d::recv"))
    calls = []
    for event in ranges.tolist():
        if (around := _around(rows, event, annotated)) is not None:
            calls.append(_annotated(rows, event, around, groups))
        elif (around := _around(rows, event, native)) is not None:
            calls.append(_native(rows, event, around, groups))
        else:
            calls.append(Call(event, op_named(rows.events.name_of(event))))
    return calls


def _around(rows: Sorted, event: int, candidates: np.ndarray) -> int | None:
    """The candidate on the event's thread in which the event starts."""
    events = rows.events
    at = events.start_ns[event]
    last = int(np.searchsorted(events.start_ns[candidates], at, side="right")) - 1
    for candidate in candidates[max(last - 3, 0) : last + 1][::-1].tolist():
        same_thread = events.lane[candidate] == events.lane[event]
        if same_thread and at <= events.start_ns[candidate] + events.dur_ns[candidate]:
            return int(candidate)
    return None


def _annotated(rows: Sorted, event: int, around: int, groups: Sequence[Group]) -> Call:
    match = _ANNOTATED.match(rows.events.name_of(around))
    if match is None:
        return Call(event, op_named(rows.events.name_of(event)))
    op, size = match["op"], int(match["bytes"])
    numbers = {group.name: i for i, group in enumerate(groups)}
    return Call(
        event=event,
        op=op,
        issued_ns=int(rows.events.start_ns[around]),
        group_id=numbers.get(match["group"], -1),
        dtype=match["dtype"],
        peer=int(match["dst"] if op == "send" else match["src"]),
        input_bytes=size,
        message_bytes=size,
    )


def _native(rows: Sorted, event: int, around: int, groups: Sequence[Group]) -> Call:
    """A message of a trace without annotations: its op has the peer's index in the group."""
    op = op_named(rows.events.name_of(event))
    place = _place(rows, around)
    group_id = _pipeline_group(groups)
    peer = -1
    known = group_id >= 0 and _NUMBER.fullmatch(place)
    if known and int(place) < len(groups[group_id].ranks):
        peer = groups[group_id].ranks[int(place)]
    issued = int(rows.events.start_ns[around])
    return Call(event, op, issued, group_id, peer=peer)


def _place(rows: Sorted, op: int) -> str:
    """The peer's index in the group; "" if the op does not have it."""
    args = rows.args_of(op)
    return str(args.concrete[2]) if args is not None and len(args.concrete) > 2 else ""


def _pipeline_group(groups: Sequence[Group]) -> int:
    """The group of pipeline messages: the one described as pp, else the default group."""
    described = [i for i, group in enumerate(groups) if group.description in ("mesh_pp", "pp")]
    default = [i for i, group in enumerate(groups) if group.description == "default_pg"]
    return (described or default or [-1])[0]


# Assignment of gloo's worker threads to process groups.
#
# A gloo range in a trace has no group; a Flight Recorder entry has one, but no end time. A group
# has two workers that take its calls in order, so with the right assignment each range starts when
# its call was made and a worker was free. Worker threads are numbered in the order in which groups
# are created, so few assignments are possible: each group has a run of consecutive threads.

WORKERS = 2

EARLY_NS = 1_000_000
"""Tolerance for a range that starts before its call, because two clocks are read in sequence."""


@dataclass(frozen=True, slots=True)
class Range:
    """A running collective on a thread: event, name, start and end in ns."""

    event: int
    name: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Request:
    """A call on a group: its index, the name that its range must have, and its time in ns."""

    index: int
    name: str
    created_ns: int


def assign(
    lanes: Sequence[Sequence[Range]], groups: Sequence[Sequence[Request]]
) -> Mapping[int, int] | None:
    """{event of a range: index of its request}; None if no assignment matches the ranges.

    lanes are the threads' ranges in order of thread number, groups the requests of each group in
    order of creation. The oldest ranges of a group may have no request, because the Flight Recorder
    keeps only the latest entries.
    """
    cost = _cost_of(lanes, groups)

    @cache
    def best(lane: int, group: int) -> tuple[float, tuple[int, ...]]:
        if group == len(groups):
            return (0.0 if lane == len(lanes) else math.inf), ()
        options = []
        for taken in range(min(WORKERS, len(lanes) - lane) + 1):
            rest, choice = best(lane + taken, group + 1)
            options.append((cost(lane, taken, group) + rest, (taken, *choice)))
        return min(options)

    total, taken = best(0, 0)
    return None if math.isinf(total) else _pairs(lanes, groups, taken)


def _cost_of(
    lanes: Sequence[Sequence[Range]], groups: Sequence[Sequence[Request]]
) -> Callable[[int, int, int], float]:
    def cost(lane: int, taken: int, group: int) -> float:
        return _misfit_ns(_merged(lanes[lane : lane + taken]), groups[group])

    return cost


def _merged(lanes: Sequence[Sequence[Range]]) -> list[Range]:
    return sorted((r for lane in lanes for r in lane), key=lambda r: r.start_ns)


def _misfit_ns(ranges: Sequence[Range], requests: Sequence[Request]) -> float:
    """The sum of differences between the ranges' starts and those expected with two workers."""
    if len(ranges) < len(requests) or (ranges and not requests):
        return math.inf
    ranges = ranges[len(ranges) - len(requests) :]
    last_end = earlier_end = -math.inf
    misfit = 0.0
    for found, request in zip(ranges, requests, strict=True):
        if found.name != request.name or found.start_ns < request.created_ns - EARLY_NS:
            return math.inf
        misfit += abs(found.start_ns - max(request.created_ns, earlier_end))
        earlier_end, last_end = sorted((*(earlier_end, last_end), found.end_ns))[1:]
    return misfit


def _pairs(
    lanes: Sequence[Sequence[Range]], groups: Sequence[Sequence[Request]], taken: Sequence[int]
) -> dict[int, int]:
    pairs: dict[int, int] = {}
    lane = 0
    for count, requests in zip(taken, groups, strict=True):
        ranges = _merged(lanes[lane : lane + count])
        recorded = ranges[len(ranges) - len(requests) :]
        pairs |= {r.event: q.index for r, q in zip(recorded, requests, strict=True)}
        lane += count
    return pairs
