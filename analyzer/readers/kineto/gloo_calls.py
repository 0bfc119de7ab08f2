"""The collectives and messages of a gloo run -> Calls.

A gloo trace tells when a collective worked; which group and call it was comes from the Flight
Recorder. A message's identity comes from the collector's annotation around ProcessGroup.send and
recv, else from the arguments of the c10d op.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from stepsplit.analyzer.readers.calls import Call, FoundCalls, to_calls
from stepsplit.analyzer.readers.communication import dtype_named, message_bytes, op_named
from stepsplit.analyzer.readers.flight.dump import FlightEntry
from stepsplit.analyzer.readers.kineto.gloo_lanes import Range, Request, assign
from stepsplit.analyzer.readers.kineto.rows import Sorted
from stepsplit.analyzer.trace import Category, Group, Note

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
    """A call for each gloo range, in the order of the events, and what could not be told."""
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
        note = Note("gloo_unpaired", "gloo's collectives name no group and no Flight Recorder dump "
                    "explains them: they are split as for a single rank")  # fmt: skip
        return [Call(r.event, op_named(r.name)) for r in ranges], (note,)
    numbers = {group.name: i for i, group in enumerate(groups)}
    found = [r for r in ranges if r.event in pairs]
    calls = [_collective(r, *entries[pairs[r.event]], rows, numbers, groups) for r in found]
    calls += [Call(r.event, op_named(r.name)) for r in ranges if r.event not in pairs]
    return calls, (_dropped(len(ranges) - len(found)),) if len(found) < len(ranges) else ()


def _dropped(count: int) -> Note:
    return Note(
        "flight_incomplete",
        f"the Flight Recorder has dropped the oldest {count} collectives: they are split as for a "
        "single rank; record with a higher TORCH_FR_BUFFER_SIZE",
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
    """The Flight Recorder's entries that were made while the trace ran, each with its c10d op.

    A call that no op of the trace surrounds came from outside of the profiled window.
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
    """The candidate on the event's thread inside which the event starts."""
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
    """A message of a plain trace: its op states the peer's place in a group without a name."""
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
    """The peer's place in the group, "" where the op does not state it."""
    args = rows.args_of(op)
    return str(args.concrete[2]) if args is not None and len(args.concrete) > 2 else ""


def _pipeline_group(groups: Sequence[Group]) -> int:
    """The group that messages of a pipeline use: the one described so, else the default group."""
    described = [i for i, group in enumerate(groups) if group.description in ("mesh_pp", "pp")]
    default = [i for i, group in enumerate(groups) if group.description == "default_pg"]
    return (described or default or [-1])[0]
