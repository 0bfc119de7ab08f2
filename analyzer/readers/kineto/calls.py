"""Communication calls of a Kineto trace: from device kernels, or from gloo's workers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from stepsplit.analyzer.ops import (
    MAX_DIMS,
    compute_element_bytes,
    compute_message_bytes,
    normalize_dtype,
    parse_op,
    sanitize_bytes,
)
from stepsplit.analyzer.readers.flight_recorder import FlightEntry, parse_entry_op
from stepsplit.analyzer.readers.kernel_rules import BUILT_IN, Rules
from stepsplit.analyzer.readers.kineto.block_events import PARAM_COMMS
from stepsplit.analyzer.readers.kineto.captured_graphs import find_captured_ops
from stepsplit.analyzer.readers.kineto.collective_launches import (
    MadeCall,
    find_launched,
    find_surrounding_ops,
    note_missing,
)
from stepsplit.analyzer.readers.kineto.columns import SortedRows, posted_before
from stepsplit.analyzer.readers.kineto.schema import Args, decode_comm_args, parse_ranks
from stepsplit.analyzer.trace import (
    OPS,
    Bool,
    Call,
    Calls,
    CallsWithGroups,
    Category,
    Events,
    Group,
    Int64,
    Note,
    build_calls,
)

# Collectives and messages of device kernels -> Calls.

_MESSAGES = ("send", "recv")


def build_device_calls(
    rows: SortedRows, known: Sequence[Group], rules: Rules = BUILT_IN
) -> tuple[CallsWithGroups, tuple[Note, ...]]:
    """A call for each communication kernel, and notes; groups that appear only in arguments are
    added.

    Arguments missing on a kernel are taken from the record_param_comms around its launch. A kernel
    without a description, before whose launch messages were posted that no other launch carries
    out, is a batch of these messages. If other kernels name their collective, any SendRecv kernel
    without a description is a batch. What else a collective launched is its call if nothing better
    is known (find_launched); collectives without any device event are counted in a note.
    """
    group_table = _GroupTable(known)
    events = rows.events
    args_of_event = dict(
        zip(rows.noted_row.tolist(), map(decode_comm_args, rows.noted_args), strict=True)
    )
    kernels = rows.find_communication(rules)
    launches = events.find_launches(kernels)
    params = rows.noted_row[_find_params(rows)]
    surrounding_ops = find_surrounding_ops(events, params, launches)
    others = np.flatnonzero(events.is_category(Category.KERNEL, Category.MEMCPY))
    others = np.setdiff1d(others, kernels, assume_unique=True)
    around = find_surrounding_ops(events, params, events.find_launches(others))
    carried = set(surrounding_ops.tolist())
    found = find_launched(events, others, around, args_of_event, carried, rules)
    notes = found.notes
    if len(found.rows):
        order = np.argsort(np.concatenate((kernels, found.rows)), kind="stable")
        kernels = np.concatenate((kernels, found.rows))[order]
        launches = events.find_launches(kernels)
        surrounding_ops = np.concatenate((surrounding_ops, found.ops))[order]
    captured = find_captured_ops(
        events, kernels, launches, [op for op in params.tolist() if _is_call(args_of_event[op])],
        args_of_event, lambda row: rules.find_op(events.name_of(row)),
    )  # fmt: skip
    surrounding_ops = np.where(captured >= 0, captured, surrounding_ops)
    surrounding_ops = _leave_batches(rows, args_of_event, kernels, surrounding_ops, launches)
    issued = np.where(launches >= 0, events.start_ns[launches], -1)
    posted = _find_posted(rows, args_of_event, kernels, surrounding_ops, launches)
    is_earlier = dict(
        zip(kernels.tolist(), events.is_launched_before(kernels).tolist(), strict=True)
    )
    any_named = any(args.collective is not None for args in args_of_event.values())
    by_name = {name: rules.find_op(name) for name in set(map(events.name_of, kernels.tolist()))}
    library_ops = _find_library_ops(events, launches)
    by_range = _describe_by_ranges(events, launches)
    calls: list[Call] = []
    made: list[MadeCall] = []
    for event, op, issued_ns, batch, library_op, (stated, library) in zip(
        kernels.tolist(), surrounding_ops.tolist(), issued.tolist(), posted, library_ops, by_range,
        strict=True,
    ):  # fmt: skip
        own_args, name = args_of_event.get(event), events.name_of(event)
        args = _merge_args(own_args, args_of_event.get(op))
        by_library = stated is not None and args.collective is None
        if stated is not None and by_library:
            args = stated
        parts = [args_of_event[post] for post in batch] or [args]
        named_op = library_op or by_name[name]
        numbers = [group_table.find_number(part, library if by_library else "") for part in parts]
        if by_library and numbers[0] >= 0:
            size = len(group_table.groups[numbers[0]].ranks)
            parts = [replace(args, group_size=size)]
        parts_as_calls = [
            _build_call(event, named_op, part, number, issued_ns)
            for part, number in zip(parts, numbers, strict=True)
        ]
        unnamed = not batch and any_named and "SendRecv" in name and _may_be_batch(name, args)
        calls += (
            [replace(call, op="send_recv") for call in parts_as_calls]
            if unnamed
            else parts_as_calls
        )
        if issued_ns >= 0 or not is_earlier[event]:
            carries = tuple(batch) or ((op,) if _is_call(args_of_event.get(op)) else ())
            made += [MadeCall(one.op, one.group_id, carries) for one in parts_as_calls]
    groups = tuple(group_table.groups)
    ops = [
        (op, args_of_event[op], group_table.find_number(args_of_event[op]))
        for op in params.tolist()
        if _is_call(args_of_event[op])
    ]
    notes += note_missing(events, ops, made)
    largest = max((args.group_size for args in args_of_event.values()), default=0)
    return CallsWithGroups(build_calls(calls), groups, largest), notes


def _is_call(args: Args | None) -> bool:
    """Whether an op is a collective or message by name, unlike "wait" and "coalesced"."""
    return args is not None and parse_op(args.collective or "") != "unknown"


def number_device_calls(
    found: CallsWithGroups, flight: Sequence[FlightEntry], t0_unix_ns: int
) -> CallsWithGroups:
    """Gives collectives without a sequence number, as torch before 2.13 writes them, that of their
    Flight Recorder entry: the last one of their group that was created before their launch.

    A group is numbered if all of its launched collectives have entries of their own with their op
    and size.
    """
    calls = found.calls
    seq = calls.seq.copy()
    plain = (calls.seq < 0) & ~calls.is_message & (calls.issued_ns >= 0)
    for number, group in enumerate(found.groups):
        rows = np.flatnonzero(plain & (calls.group_id == number))
        if not len(rows):
            continue
        entries = [e for e in flight if e.group_name == group.name and not e.is_p2p]
        created = np.array([e.created_unix_ns - t0_unix_ns for e in entries], dtype=np.int64)
        at = np.searchsorted(created, calls.issued_ns[rows], side="right") - 1
        if at.min() >= 0 and len(np.unique(at)) == len(at):
            own = [entries[place] for place in at.tolist()]
            if all(_is_entry_of(calls, row, e) for row, e in zip(rows.tolist(), own, strict=True)):
                seq[rows] = [entry.seq for entry in own]
    return replace(found, calls=replace(calls, seq=seq))


def _is_entry_of(calls: Calls, row: int, entry: FlightEntry) -> bool:
    """Whether op and size of the call are those of the entry."""
    same_size = entry.input_bytes in (-1, calls.input_bytes[row]) or calls.input_bytes[row] < 0
    return same_size and parse_entry_op(entry.name) == OPS[calls.op[row]]


def _may_be_batch(name: str, args: Args) -> bool:
    """Whether neither the arguments nor the name say which collective the kernel is: true for
    NCCL's SendRecv, and for RCCL's Generic kernels, which run any collective."""
    return parse_op(name) == "unknown" and parse_op(args.collective or "") == "unknown"


def _leave_batches(
    rows: SortedRows, args_of_event: dict[int, Args], kernels: Int64, around: Int64, launches: Int64
) -> Int64:
    """The ops around the launches, without ops that posted the last message of a batch.

    Small errors let such an op end after the launch; another message was posted before it, and no
    kernel was launched in between.
    """
    events, posts = rows.events, _list_posts(rows, args_of_event)
    calls = np.flatnonzero(
        events.is_category(Category.RUNTIME)
        & events.name_mask(tuple("Launch" in name for name in events.names))
    )
    found = around.copy()
    for i in np.flatnonzero(np.isin(around, posts)).tolist():
        event, op, launch = int(kernels[i]), int(around[i]), int(launches[i])
        if _may_be_batch(events.name_of(event), args_of_event.get(event) or Args()):
            lane = events.lane[op]
            before = _find_previous(events, posts, op, lane)
            if before >= 0 and _find_previous(events, calls, launch, lane) < before:
                found[i] = -1
    return found


def _find_previous(events: Events, rows: Int64, row: int, lane: int) -> int:
    """The last of the sorted rows before this one on the lane; -1 for none."""
    at = int(np.searchsorted(rows, row))
    while at and events.lane[rows[at - 1]] != lane:
        at -= 1
    return int(rows[at - 1]) if at else -1


def _list_posts(rows: SortedRows, args_of_event: dict[int, Args]) -> Int64:
    """The ops that post a message."""
    ops = rows.noted_row[_find_params(rows)].tolist()
    posts = [op for op in ops if parse_op(args_of_event[op].collective or "") in _MESSAGES]
    return np.array(posts, dtype=np.int64)


def _find_posted(
    rows: SortedRows, args_of_event: dict[int, Args], kernels: Int64, around: Int64, launches: Int64
) -> list[list[int]]:
    """For each kernel without a description, the ops that posted its messages."""
    events = rows.events
    unmatched = np.setdiff1d(_list_posts(rows, args_of_event), around)
    batches = [
        _may_be_batch(
            events.name_of(event), _merge_args(args_of_event.get(event), args_of_event.get(op))
        )
        for event, op in zip(kernels.tolist(), around.tolist(), strict=True)
    ]
    return posted_before(events, unmatched, np.where(batches, launches, -1))


def _find_params(rows: SortedRows) -> Bool:
    """A mask of the noted rows that are record_param_comms ops."""
    events = rows.events
    return (events.match_prefix(PARAM_COMMS) & events.is_category(Category.OP))[rows.noted_row]


def _merge_args(kernel: Args | None, op: Args | None) -> Args:
    """The arguments of the kernel; if it has none, those of the op that launched it."""
    if kernel is not None and kernel.collective is not None:
        return kernel
    if op is None or op.collective == "wait":
        return kernel or Args()
    return op if op.in_nelems >= 0 else _infer_size(op)


def _infer_size(op: Args) -> Args:
    """The op's arguments with the size from its input shapes, for traces without message sizes."""
    nelems = _count_elements(op.dims[0] if op.dims else None)
    kind = str(op.types[0]) if op.types else ""
    if nelems < 0 or compute_element_bytes(kind) < 0:
        return op
    return replace(op, in_nelems=nelems, dtype=kind)


def _count_elements(dims: Any) -> int:
    """The number of elements of one shape or a list of shapes; -1 if the shape is invalid."""
    if not isinstance(dims, list) or not dims:
        return -1
    shapes = [dims] if isinstance(dims[0], int) else dims
    known = all(isinstance(shape, list) and len(shape) <= MAX_DIMS for shape in shapes)
    is_complete = known and all(isinstance(dim, int) for shape in shapes for dim in shape)
    return sum(map(math.prod, shapes)) if is_complete else -1


class _GroupTable:
    """The numbered process groups of a trace; groups found in arguments are added."""

    def __init__(self, known: Sequence[Group]) -> None:
        self.groups = list(known)
        self._numbers = {(group.name, group.ranks): i for i, group in enumerate(known)}

    def find_number(self, args: Args, library: str = "") -> int:
        """The number of the group in the arguments; -1 if it is ambiguous or missing.

        A library has a group of its own of these ranks: its calls have no numbers.
        """
        number = self._find_listed(args)
        if not library or number < 0:
            return number
        listed = self.groups[number]
        own = replace(listed, name=f"{listed.name} ({library})")
        key = (own.name, own.ranks)
        if key not in self._numbers:
            self._numbers[key] = len(self.groups)
            self.groups.append(own)
        return self._numbers[key]

    def _find_listed(self, args: Args) -> int:
        ranks = parse_ranks(args.group_ranks)
        if not ranks:
            matching = [i for (name, _), i in self._numbers.items() if name == args.group_name]
            ranks = () if matching else args.strided_ranks
            if not ranks:
                return matching[0] if len(matching) == 1 else -1
        key = (args.group_name, ranks)
        if key not in self._numbers:
            self._numbers[key] = len(self.groups)
            self.groups.append(Group(args.group_name, ranks, args.group_description))
        return self._numbers[key]


def _build_call(event: int, by_name: str, args: Args, group_id: int, issued_ns: int) -> Call:
    op = parse_op(args.collective or "")
    if op == "unknown":  # such as "coalesced", which does not name the operation
        op = by_name
    input_bytes = _compute_bytes(args.in_nelems, args.dtype)
    if args.collective is None and input_bytes < 0:
        input_bytes = sanitize_bytes(args.copied_bytes)
    output_bytes = _compute_bytes(args.out_nelems, args.dtype)
    return Call(
        event=event,
        op=op,
        issued_ns=issued_ns,
        group_id=group_id,
        seq=args.seq,
        dtype=normalize_dtype(args.dtype),
        peer={"send": args.dst_rank, "recv": args.src_rank}.get(op, -1),
        input_bytes=input_bytes,
        message_bytes=-1
        if args.collective is None and args.copied_bytes >= 0
        else sanitize_bytes(compute_message_bytes(op, input_bytes, output_bytes, args.group_size)),
    )


def _compute_bytes(nelems: int, dtype: str) -> int:
    width = compute_element_bytes(dtype)
    return sanitize_bytes(nelems * width) if nelems >= 0 and width > 0 else -1


# What the ranges and library ops around the launch of a device event say.

_LIBRARY_OPS = "symm_mem::"
"""Prefix of torch's ops of symmetric memory; they contain each other."""


_LIBRARY_CALL = re.compile(
    r"stepsplit::(?:dispatch|combine|symm_mem) library=(?P<library>\w+) group=(?P<group>\S*)"
    r"(?: tokens=\d{1,15} bytes=(?P<bytes>\d{1,15}) dtype=(?P<dtype>\S*))?",
    re.ASCII,
)
"""The collector's range around a call of a library of expert parallelism or symmetric memory."""

_LIBRARY_RANGES = ("stepsplit::dispatch ", "stepsplit::combine ", "stepsplit::symm_mem ")


def _describe_by_ranges(events: Events, launches: Int64) -> Iterator[tuple[Args | None, str]]:
    """For each launch the arguments that the collector's range around it states, and the library;
    (None, "") without one."""
    ranges = np.flatnonzero(
        events.name_mask(tuple(name.startswith(_LIBRARY_RANGES) for name in events.names))
        & events.is_category(Category.ANNOTATION)
    )
    for op in find_surrounding_ops(events, ranges, launches).tolist():
        match = _LIBRARY_CALL.match(events.name_of(op)) if op >= 0 else None
        if match is None:
            yield None, ""
            continue
        dtype, size = match["dtype"] or "", int(match["bytes"] or -1)
        width = compute_element_bytes(dtype)
        known = size >= 0 and width > 0
        nelems = size // width if known else -1
        library = match["library"].replace("_", " ")
        yield Args(in_nelems=nelems, dtype=dtype, group_name=match["group"]), library


def _find_library_ops(events: Events, launches: Int64) -> list[str]:
    """For each launch the op by the name of the outermost library op around it, "" for none."""
    ops = np.flatnonzero(events.match_prefix(_LIBRARY_OPS) & events.is_category(Category.OP))
    if not len(ops):
        return [""] * len(launches)
    outer, ends_ns = list[int](), dict[int, int]()
    for op in ops.tolist():
        lane = int(events.lane[op])
        if events.start_ns[op] >= ends_ns.get(lane, -(2**62)):
            outer.append(op)
            ends_ns[lane] = int(events.start_ns[op] + events.dur_ns[op])
    around = find_surrounding_ops(events, np.array(outer, dtype=np.int64), launches)
    found = [parse_op(events.name_of(op)) if op >= 0 else "" for op in around.tolist()]
    return ["" if op == "unknown" else op for op in found]


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


def build_gloo_calls(
    rows: SortedRows, flight: Sequence[FlightEntry], groups: Sequence[Group]
) -> tuple[CallsWithGroups, tuple[Note, ...]]:
    """A call for each gloo range, in the order of the events, and notes on unmatched ranges."""
    collectives, notes = _build_collectives(rows, flight, groups)
    calls = sorted(collectives + _build_messages(rows, groups), key=lambda call: call.event)
    return CallsWithGroups(build_calls(calls), tuple(groups)), notes


def _build_collectives(
    rows: SortedRows, flight: Sequence[FlightEntry], groups: Sequence[Group]
) -> tuple[list[Call], tuple[Note, ...]]:
    events = rows.events
    mask = events.is_category(Category.ANNOTATION) & events.match_prefix("gloo:")
    ranges = []
    for event in np.flatnonzero(mask).tolist():
        name = rows.events.name_of(event)
        start = int(events.start_ns[event])
        if not name.startswith(MESSAGES):
            end = start + int(events.dur_ns[event])
            # The size of a range's input, if shapes were recorded; else -1.
            args = rows.decode_args(event)
            elements = _count_elements(args.dims) if args is not None else -1
            each = (
                {compute_element_bytes(str(kind)) for kind in args.types}
                if args is not None
                else {-1}
            )
            ranges.append(
                Range(
                    event,
                    name,
                    start,
                    end,
                    elements * min(each)
                    if elements >= 0 and len(each) == 1 and min(each) > 0
                    else -1,
                )
            )
    if not ranges:
        return [], ()
    entries = _match_recorded(rows, flight)
    threads: dict[int, list[Range]] = {}
    for gloo_range in ranges:
        thread = rows.events.lanes[rows.events.lane[gloo_range.event]].tid
        threads.setdefault(int(thread) if _NUMBER.fullmatch(thread) else 0, []).append(gloo_range)
    found = assign(threads, _list_requests(entries, rows.t0_unix_ns))
    if found is None:
        note = Note("gloo_unpaired", "gloo collectives have no process group and no Flight Recorder"
                    " dump matches them; they are split as for a single rank")  # fmt: skip
        return [Call(r.event, parse_op(r.name)) for r in ranges], (note,)
    numbers = {group.name: i for i, group in enumerate(groups)}
    calls = [Call(r.event, parse_op(r.name)) for r in ranges if r.event not in found.pairs]
    dropped = len(calls) - len(found.open)
    for r in ranges:
        if r.event in found.pairs:
            entry = entries[found.pairs[r.event]]
            calls.append(_build_collective(r, *entry, rows, numbers, groups))
    return calls, (*_note_dropped(dropped), *note_open_calls(len(found.open)))


def _note_dropped(count: int) -> tuple[Note, ...]:
    text = (
        f"the Flight Recorder dropped the oldest {count} collectives, which are split as for a "
        "single rank; record with a larger TORCH_FR_BUFFER_SIZE"
    )
    return (Note("flight_incomplete", text),) if count else ()


OPEN_CALLS = "gloo_order_unknown"
"""The code of the note on collectives of which nothing tells which call they carried out."""


def note_open_calls(count: int) -> tuple[Note, ...]:
    """The note on so many of them; () for none."""
    text = (
        f"{count} gloo collectives are split as for a single rank: a worker thread was late, or a "
        "call had not ended with the recording, and which call each of them is remains open; "
        "recorded shapes (--shapes) tell"
    )
    return (Note(OPEN_CALLS, text),) if count else ()


def _match_recorded(
    rows: SortedRows, flight: Sequence[FlightEntry]
) -> list[tuple[FlightEntry, str]]:
    """The Flight Recorder entries created within the trace, each with its c10d op.

    An entry that is not inside an op of the trace is outside of the profiled window.
    """
    events = rows.events
    ops = np.flatnonzero(events.is_category(Category.OP) & events.match_prefix("c10d::"))
    recorded = []
    for entry in flight:
        if entry.name.startswith("nccl"):
            continue
        at = entry.created_unix_ns - rows.t0_unix_ns
        last = int(np.searchsorted(events.start_ns[ops], at, side="right")) - 1
        if last >= 0 and at <= events.ends_of(ops[last]):
            recorded.append((entry, rows.events.name_of(ops[last])))
    return recorded


def _list_requests(
    entries: Sequence[tuple[FlightEntry, str]], t0_unix_ns: int
) -> list[list[Request]]:
    groups: dict[int, list[Request]] = {}
    for index, (entry, _) in enumerate(entries):
        created_ns = entry.created_unix_ns - t0_unix_ns
        request = Request(index, entry.name, created_ns, entry.input_bytes)
        groups.setdefault(entry.group_number, []).append(request)
    return [groups[number] for number in sorted(groups)]


def _build_collective(
    gloo_range: Range,
    entry: FlightEntry,
    c10d_op: str,
    rows: SortedRows,
    numbers: dict[str, int],
    groups: Sequence[Group],
) -> Call:
    op = parse_op(c10d_op)
    group_id = numbers.get(entry.group_name, -1)
    group_size = len(groups[group_id].ranks) if group_id >= 0 else -1
    return Call(
        event=gloo_range.event,
        op=op if op != "unknown" else parse_op(entry.name),
        issued_ns=entry.created_unix_ns - rows.t0_unix_ns,
        group_id=group_id,
        seq=entry.seq,
        dtype=normalize_dtype(entry.dtype),
        input_bytes=entry.input_bytes,
        message_bytes=compute_message_bytes(op, entry.input_bytes, entry.output_bytes, group_size),
    )


def _build_messages(rows: SortedRows, groups: Sequence[Group]) -> list[Call]:
    events = rows.events
    ranges = np.flatnonzero(
        events.is_category(Category.ANNOTATION)
        & (events.match_prefix("gloo:send") | events.match_prefix("gloo:recv"))
    )
    annotated = np.flatnonzero(
        events.match_prefix("stepsplit::send") | events.match_prefix("stepsplit::recv")
    )
    native = np.flatnonzero(events.match_prefix("c10d::send") | events.match_prefix("c10d::recv"))
    calls = []
    for event in ranges.tolist():
        if (around := _find_surrounding(rows, event, annotated)) is not None:
            calls.append(_build_annotated(rows, event, around, groups))
        elif (around := _find_surrounding(rows, event, native)) is not None:
            calls.append(_build_native(rows, event, around, groups))
        else:
            calls.append(Call(event, parse_op(rows.events.name_of(event))))
    return calls


def _find_surrounding(rows: SortedRows, event: int, candidates: np.ndarray) -> int | None:
    """The candidate on the event's thread in which the event starts."""
    events = rows.events
    at = events.start_ns[event]
    last = int(np.searchsorted(events.start_ns[candidates], at, side="right")) - 1
    for candidate in candidates[max(last - 3, 0) : last + 1][::-1].tolist():
        same_thread = events.lane[candidate] == events.lane[event]
        if same_thread and at <= events.start_ns[candidate] + events.dur_ns[candidate]:
            return int(candidate)
    return None


def _build_annotated(rows: SortedRows, event: int, op_row: int, groups: Sequence[Group]) -> Call:
    match = _ANNOTATED.match(rows.events.name_of(op_row))
    if match is None:
        return Call(event, parse_op(rows.events.name_of(event)))
    op, size = match["op"], int(match["bytes"])
    numbers = {group.name: i for i, group in enumerate(groups)}
    return Call(
        event=event,
        op=op,
        issued_ns=int(rows.events.start_ns[op_row]),
        group_id=numbers.get(match["group"], -1),
        dtype=match["dtype"],
        peer=int(match["dst"] if op == "send" else match["src"]),
        input_bytes=size,
        message_bytes=size,
    )


def _build_native(rows: SortedRows, event: int, op_row: int, groups: Sequence[Group]) -> Call:
    """A message of a trace without annotations: its op has the peer's index in the group."""
    op = parse_op(rows.events.name_of(event))
    # The peer's index in the group; "" if the op does not have it.
    args = rows.decode_args(op_row)
    place = str(args.concrete[2]) if args is not None and len(args.concrete) > 2 else ""
    # The group of pipeline messages: the one described as pp, else the default group.
    described = [i for i, group in enumerate(groups) if group.description in ("mesh_pp", "pp")]
    default = [i for i, group in enumerate(groups) if group.description == "default_pg"]
    group_id = (described or default or [-1])[0]
    peer = -1
    known = group_id >= 0 and _NUMBER.fullmatch(place)
    if known and int(place) < len(groups[group_id].ranks):
        peer = groups[group_id].ranks[int(place)]
    issued = int(rows.events.start_ns[op_row])
    return Call(event, op, issued, group_id, peer=peer)


# Assignment of gloo's worker threads to process groups.
#
# A gloo range in a trace has no group; a Flight Recorder entry has one, but no end time. A group
# has two workers that take its calls in order, so with the right assignment each range starts when
# its call was made and a worker was free. Worker threads are numbered in the order in which groups
# are created, so few assignments are possible: each group has a run of consecutive threads. The
# numbers begin anew at the system's largest one, often 32,768.

WORKERS = 2
"""PyTorch starts two a device (torch/csrc/distributed/c10d/init.cpp)."""

EARLY_NS = 1_000_000
"""Tolerance for a range that starts before its call, because two clocks are read in sequence."""

_SWAP_NS = 1e6
"""A worker that has taken a call may be delayed before it starts, so that the other worker starts
the next one first. That order costs so much misfit: it is chosen only if names require it."""

_SIZE_NS = 1e7
"""A range and a call of different sizes cost so much misfit."""

_MOST_MISFIT_NS = 1e8
"""Ranges do not start later than this on average, even on a loaded machine."""

_WRAP = 1 << 14
"""A larger gap between the numbers of a process's threads may be where they began anew."""

_LIKE_NS, _LIKE_SIZE = 1_000_000, 2
"""Calls whose ranges end within this time, and whose sizes differ by at most this factor, may be
mistaken for each other: gloo's ranges end later than their calls by as much."""

_SAME_SHARE = 0.1
"""Ranges that start and end within this fraction of the shortest one may be mistaken for each
other, whatever their sizes: DDP's last bucket and its bitmap of used parameters, which are launched
together and wait for the same rank, were up to 0.035 apart."""

_UNLIKE_SIZE = 64
"""Of two ranges of calls whose sizes differ by this factor, the larger call's is not the one that
ended first."""


class Range(Struct, frozen=True):
    """A running collective on a thread: event, name, start and end in ns, and the size of its
    input if shapes were recorded (else -1)."""

    event: int
    name: str
    start_ns: int
    end_ns: int
    size_bytes: int = -1


def are_interchangeable(ranges: Sequence[Range], sizes: Sequence[int]) -> bool:
    """Whether it makes no difference which of these ranges carried out which of their calls, or the
    order in which they started is that of the calls.

    Args:
        ranges: In the order in which they started.
        sizes: The input of the call that each seems to have carried out, in bytes; -1 if unknown.
    """
    if len(ranges) < 2:
        return True
    starts, ends = [one.start_ns for one in ranges], [one.end_ns for one in ranges]
    apart_ns = max(max(starts) - min(starts), max(ends) - min(ends))
    if apart_ns <= _SAME_SHARE * min(one.end_ns - one.start_ns for one in ranges):
        return True
    if max(ends) - min(ends) <= _LIKE_NS and max(sizes) <= _LIKE_SIZE * min(sizes):
        return True
    if len(ranges) != 2:
        return False
    return 0 <= _UNLIKE_SIZE * sizes[1] <= sizes[0] and ends[1] <= ends[0]


class Request(Struct, frozen=True):
    """A call on a group: its index, the name that its range must have, its time in ns, and the
    size of its input (-1: unknown)."""

    index: int
    name: str
    created_ns: int
    size_bytes: int = -1


class Assignment(Struct, frozen=True):
    """{event of a range: index of its request}; open are the events that carried out one of several
    requests, and nothing tells which."""

    pairs: Mapping[int, int]
    open: frozenset[int]


def assign(
    threads: Mapping[int, Sequence[Range]], groups: Sequence[Sequence[Request]]
) -> Assignment | None:
    """The requests of all ranges; None if no assignment matches them.

    threads are the ranges by thread number, groups the requests of each group in order of creation.
    The oldest ranges of a group may have no request, because the Flight Recorder keeps only the
    latest entries. Requests whose work had not ended with the recording have no range: one that a
    worker is busy with, and the last ones.
    """
    orders = [[threads[number] for number in order] for order in _list_orders(sorted(threads))]
    for unended in (0, WORKERS):
        fits = (_assign(lanes, groups, unended) for lanes in orders)
        fit = min(filter(None, fits), key=lambda fit: fit.cost, default=None)
        if fit is not None and fit.misfit_ns <= _MOST_MISFIT_NS * len(fit.pairs):
            pairs = {event: index for event, index in fit.pairs if event not in fit.open}
            return Assignment(pairs, fit.open)
    return None


def _list_orders(numbers: list[int]) -> list[list[int]]:
    """The orders in which threads of these sorted numbers may have been created."""
    gap, at = max((after - n, i) for i, (n, after) in enumerate(pairwise([numbers[0], *numbers])))
    return [numbers, numbers[at:] + numbers[:at]] if gap >= _WRAP else [numbers]


class _Fit(Struct, frozen=True):
    """How well the times agree; (event of a range, index of its request), and which are open; how
    many calls have no range, or ranges no call."""

    misfit_ns: float
    pairs: tuple[tuple[int, int], ...]
    open: frozenset[int]
    unpaired: int = 0

    @property
    def cost(self) -> tuple[int, float]:
        """The fewest unpaired ones come first."""
        return self.unpaired, self.misfit_ns

    def join(self, other: _Fit) -> _Fit:
        """The fit of both groups."""
        return _Fit(
            self.misfit_ns + other.misfit_ns,
            self.pairs + other.pairs,
            self.open | other.open,
            self.unpaired + other.unpaired,
        )


def _assign(
    lanes: Sequence[Sequence[Range]], groups: Sequence[Sequence[Request]], unended: int
) -> _Fit | None:
    """The best assignment of all lanes; at most so many calls of a group more than needed have not
    ended."""

    @cache
    def best(lane: int, group: int) -> _Fit | None:
        if group == len(groups):
            return _Fit(0.0, (), frozenset()) if lane == len(lanes) else None
        options = []
        for taken in range(min(WORKERS, len(lanes) - lane) + 1):
            rest = best(lane + taken, group + 1)
            first = _fit(lanes[lane : lane + taken], groups[group], unended) if rest else None
            if rest and first:
                options.append(first.join(rest))
        return min(options, key=lambda fit: fit.cost, default=None)

    return best(0, 0)


def _fit(
    lanes: Sequence[Sequence[Range]], requests: Sequence[Request], unended: int
) -> _Fit | None:
    """The best pairing of these lanes' ranges with a group's requests; None if none is possible."""
    queue = _Queue.merge(lanes)
    count = len(queue.ranges)
    if count and not requests:
        return None
    least = max(len(requests) - count, 0)
    fits = []
    for missing in range(least, least + unended + 1) if unended or not least else ():
        dropped = count - (len(requests) - missing)
        fit = None
        if 0 <= dropped <= count:
            fit = _Pairing(queue, requests, dropped, min(missing, WORKERS - 1)).find()
        if fit is not None:
            fits.append(replace(fit, unpaired=missing + dropped))
    return min(fits, key=lambda fit: fit.cost, default=None)


class _Queue(Struct, frozen=True):
    """The ranges of a group's workers by start: the worker of each, since when it was free, and
    since when any was."""

    ranges: tuple[Range, ...]
    worker: tuple[int, ...]
    own_free_ns: tuple[float, ...]
    free_ns: tuple[float, ...]

    @classmethod
    def merge(cls, lanes: Sequence[Sequence[Range]]) -> _Queue:
        by_start = sorted(
            ((one, lane) for lane, ranges in enumerate(lanes) for one in ranges),
            key=lambda pair: pair[0].start_ns,
        )
        ends = [-math.inf] * WORKERS
        free, own_free = [], []
        for one, lane in by_start:
            free.append(min(ends))
            own_free.append(ends[lane])
            ends[lane] = one.end_ns
        ranges, worker = tuple(one for one, _ in by_start), tuple(lane for _, lane in by_start)
        return cls(ranges, worker, tuple(own_free), tuple(free))

    def may_come_before(self, at: int, earlier: int) -> bool:
        """Whether the range's worker may have taken its call before the earlier one started."""
        apart = self.worker[at] != self.worker[earlier]
        return apart and self.own_free_ns[at] <= self.ranges[earlier].start_ns


_State = tuple[int, int]


class _Pairing(Struct, frozen=True):
    """Ranges from the dropped-th on, paired with requests.

    A state is (ranges paired, requests passed over). At most `most` are passed over, because their
    worker was busy to the end of the recording; other missing ones are the last.
    """

    queue: _Queue
    requests: Sequence[Request]
    dropped: int
    most: int

    def find(self) -> _Fit | None:
        """The pairing with the least misfit."""
        count = len(self.queue.ranges) - self.dropped
        cost, before = {(0, 0): 0.0}, dict[_State, _State]()
        for state in self._list_states(count):
            for then, misfit_ns in self._list_moves(state) if state in cost else ():
                if cost[state] + misfit_ns < cost.get(then, math.inf):
                    cost[then], before[then] = cost[state] + misfit_ns, state
        ends = [(count, passed) for passed in range(self.most + 1) if (count, passed) in cost]
        if not ends:
            return None
        best = min(ends, key=lambda state: cost[state])
        places = self._trace_back(best, before)
        events = [one.event for one in self.queue.ranges[self.dropped :]]
        pairs = tuple(
            (event, self.requests[place].index) for event, place in zip(events, places, strict=True)
        )
        unsure = self._find_swaps(places) | self._find_shifts(places, cost, ends)
        return _Fit(cost[best], pairs, frozenset(events[done] for done in unsure))

    def _list_states(self, count: int) -> list[_State]:
        return [(done, passed) for done in range(count + 1) for passed in range(self.most + 1)]

    def _list_moves(self, state: _State) -> Iterator[tuple[_State, float]]:
        """(next state, its misfit)."""
        done, passed = state
        at, place = self.dropped + done, done + passed
        left = min(len(self.queue.ranges) - at, len(self.requests) - place)
        if left > 0:
            yield (done + 1, passed), self._compute_misfit_ns(at, place)
        if left > 1 and self.queue.may_come_before(at + 1, at):
            swapped = self._compute_misfit_ns(at, place + 1)
            swapped += self._compute_misfit_ns(at + 1, place)
            yield (done + 2, passed), swapped + _SWAP_NS
        # From here on only one worker runs: the other may be busy with a call.
        if left > 0 and passed < self.most and len(set(self.queue.worker[at:])) == 1:
            yield (done, passed + 1), 0.0

    def _compute_misfit_ns(self, at: int, place: int) -> float:
        """How far the range's start is from the one that this request has with two workers."""
        one, request = self.queue.ranges[at], self.requests[place]
        if one.name != request.name or one.start_ns < request.created_ns - EARLY_NS:
            return math.inf
        misfit_ns = abs(one.start_ns - max(request.created_ns, self.queue.free_ns[at]))
        other = 0 <= one.size_bytes != request.size_bytes >= 0
        return misfit_ns + _SIZE_NS if other else misfit_ns

    def _trace_back(self, state: _State, before: Mapping[_State, _State]) -> list[int]:
        """The place of the request of each range."""
        places: list[int] = []
        while state in before:
            (done, passed), then = before[state], state
            taken = then[0] - done
            places += [done + passed + i for i in range(taken)]
            state = before[state]
        return places[::-1]

    def _find_swaps(self, places: Sequence[int]) -> set[int]:
        """The ranges that may have carried out each other's calls, and differ.

        A range's worker may have taken its call earlier than it started. Those that the other
        worker started in between then carried out the calls after the ones that they seem to.
        """
        unsure = set[int]()
        for done in range(1, len(places)):
            chain = [done]
            for earlier in range(done - 1, -1, -1):
                if not self._may_be_later(done, earlier, places):
                    break
                chain.append(earlier)
            ranges = [self.queue.ranges[self.dropped + one] for one in reversed(chain)]
            sizes = [self.requests[places[one]].size_bytes for one in reversed(chain)]
            if not are_interchangeable(ranges, sizes):
                unsure.update(chain)
        return unsure

    def _may_be_later(self, done: int, earlier: int, places: Sequence[int]) -> bool:
        """Whether the earlier range may have carried out the call after its own, and the range
        an earlier one."""
        after = places[earlier] + 1
        if places[earlier + 1] != after:
            return False
        begin = self.dropped + earlier
        possible = self._is_possible(earlier, after, places)
        return possible and self.queue.may_come_before(self.dropped + done, begin)

    def _find_shifts(
        self, places: Sequence[int], cost: Mapping[_State, float], ends: Sequence[_State]
    ) -> set[int]:
        """The ranges whose call depends on which other one has not ended."""
        possible, passed_at = set(ends), dict[int, set[int]]()
        for state in reversed(self._list_states(len(places))):
            for then, misfit_ns in self._list_moves(state) if state in cost else ():
                taken = range(state[0], then[0])
                near = all(self._is_possible(done, done + state[1], places) for done in taken)
                if then in possible and misfit_ns < math.inf and near:
                    possible.add(state)
                    for done in taken:
                        passed_at.setdefault(done, set()).add(state[1])
        return {done for done, passed in passed_at.items() if len(passed) > 1}

    def _is_possible(self, done: int, place: int, places: Sequence[int]) -> bool:
        """Whether the range may have carried out the request at that place, too: it has the name
        and comes before the range, and the range has not the size of its own request only."""
        if place == places[done]:
            return True
        one, own, other = (
            self.queue.ranges[self.dropped + done],
            self.requests[places[done]],
            self.requests[place],
        )
        sized = one.size_bytes == own.size_bytes != other.size_bytes
        return one.name == other.name and other.created_ns <= one.start_ns and not sized
