"""What NCCL's kernels in an Nsight Systems export carry out: the API calls that launched them."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stepsplit.analyzer.readers.calls import Call, FoundCalls, to_calls
from stepsplit.analyzer.readers.communication import message_bytes, op_named
from stepsplit.analyzer.readers.nsys.database import Database
from stepsplit.analyzer.readers.nsys.tables import Process, range_condition
from stepsplit.analyzer.readers.rules import Rules
from stepsplit.analyzer.readers.rules_file import BUILT_IN
from stepsplit.analyzer.trace import Category, Group

_NCCL = re.compile(r"nccl[A-Z]")
_HEADER_BYTES = 32
_FIELDS = {
    "NCCL communicator ID": "communicator",
    "No. of ranks": "size",
    "Rank": "rank",
    "Message size [bytes]": "sent_bytes",
    "Peer rank": "peer",
}
_EIGHT_BYTES = ("communicator", "sent_bytes")
_MOST_BYTES = 1 << 50
_BY_PART = ("reduce_scatter", "all_to_all")
"""Collectives whose callers state the size of one rank's part of what they hand in."""


@dataclass(frozen=True, slots=True)
class Payload:
    """What NCCL says of a call or a communicator, -1 where it does not.

    rank and peer count within the communicator. sent_bytes is the count that the caller states
    times the size of an element: of one rank's part where a buffer has a part for each rank.
    """

    communicator: int = -1
    size: int = -1
    rank: int = -1
    sent_bytes: int = -1
    peer: int = -1


def payloads_of(db: Database) -> Mapping[int, Payload]:
    """The payload behind each row of NVTX_EVENTS that carries one of NCCL's.

    binaryData is four numbers of 8 bytes (domain, schema, size, and place of the rest), then the
    fields where NVTX_PAYLOAD_SCHEMA_ENTRIES puts them.
    """
    table = "NVTX_PAYLOAD_SCHEMA_ENTRIES"
    places = db.ints(table, ("domainId", "schemaId", "offset")).tolist()
    fields = defaultdict(list)
    for (domain, schema, offset), name in zip(places, db.texts(table, "name"), strict=False):
        if name in _FIELDS:
            fields[domain, schema].append((_FIELDS[name], max(offset, 0)))
    found = {}
    for row, data in db.blobs("NVTX_EVENTS", "binaryData", range_condition(db)):
        known = fields.get((_number(data, 0, 8), _number(data, 8, 8)), ())
        values = {
            name: _number(data, _HEADER_BYTES + offset, 8 if name in _EIGHT_BYTES else 4)
            for name, offset in known
        }
        if values:
            found[row] = Payload(**values)
    return found


def _number(data: bytes, offset: int, width: int) -> int:
    """The unsigned number at that place, -1 where the data ends before."""
    part = data[offset : offset + width]
    return int.from_bytes(part, "little") if len(part) == width else -1


@dataclass(frozen=True, slots=True)
class Communicator:
    """How many ranks a communicator has, -1 unknown; all of them, if they are in the export."""

    size: int
    ranks: tuple[int, ...]


def communicators_of(
    processes: Sequence[Process], ranks: Sequence[int], payloads: Mapping[int, Payload]
) -> Mapping[int, Communicator]:
    """The communicators that were made while nsys recorded."""
    members: dict[int, dict[int, int]] = defaultdict(dict)
    sizes: dict[int, int] = {}
    for process, rank in zip(processes, ranks, strict=True):
        for row in process.row[process.row >= 0].tolist():
            payload = payloads.get(row)
            if payload is not None and payload.size > 0:
                members[payload.communicator][payload.rank] = rank
                sizes[payload.communicator] = payload.size
    every = {number: tuple(found[i] for i in sorted(found)) for number, found in members.items()}
    return {
        number: Communicator(size, every[number] if len(every[number]) == size else ())
        for number, size in sizes.items()
    }


@dataclass(frozen=True, slots=True)
class _Asked:
    """A call of NCCL's API that moves data."""

    op: str
    payload: Payload


_UNKNOWN = Communicator(-1, ())
_MESSAGES = {"send", "recv"}


@dataclass(frozen=True, slots=True)
class _Launching:
    """A time on a thread in which NCCL launches the kernels of what was asked."""

    start_ns: int
    end_ns: int
    asked: tuple[_Asked, ...]


def calls_of(
    process: Process,
    payloads: Mapping[int, Payload],
    known: Mapping[int, Communicator],
    rules: Rules = BUILT_IN,
) -> FoundCalls:
    """A call for each kernel and copy that communicates.

    Its op is that of the kernel's name, else of the API call that launched it; the latter tells
    size and communicator where the export carries NCCL's payloads. A communicator of which members
    are missing in the export is a group without ranks.
    """
    events = process.events
    carries = events.of(Category.KERNEL, Category.MEMCPY)
    names = {n: events.names[n] for n in np.unique(events.name_id[carries]).tolist()}
    moving = [n for n, name in names.items() if rules.communicates(name)]
    kernels = np.flatnonzero(carries & np.isin(events.name_id, moving)).tolist()
    by_name = {names[n]: rules.op_of(names[n]) for n in moving}
    asked = _asked_of(process, payloads, kernels, by_name)
    groups: dict[int, int] = {}
    issued = events.launch_ns()
    calls = []
    for kernel in kernels:
        one = _merged(by_name[events.name_of(kernel)], asked.get(kernel, ()))
        number = one.payload.communicator
        group = -1 if number < 0 else groups.setdefault(number, len(groups))
        calls.append(_call(kernel, one, int(issued[kernel]), group, known.get(number, _UNKNOWN)))
    return FoundCalls(
        to_calls(calls),
        tuple(Group(f"{n:#018x}", known.get(n, _UNKNOWN).ranks, "") for n in groups),
    )


def _call(
    kernel: int, one: _Asked, issued_ns: int, group_id: int, communicator: Communicator
) -> Call:
    stated, size, peer = one.payload.sent_bytes, communicator.size, one.payload.peer
    whole = stated * size if stated >= 0 and size > 0 else -1
    input_bytes = whole if one.op in _BY_PART else stated
    return Call(
        event=kernel,
        op=one.op,
        issued_ns=issued_ns,
        group_id=group_id,
        peer=communicator.ranks[peer] if 0 <= peer < len(communicator.ranks) else -1,
        input_bytes=_known(input_bytes),
        message_bytes=_known(message_bytes(one.op, input_bytes, -1, size)),
    )


def _known(size_bytes: int) -> int:
    """The size, -1 where no buffer could have it: the payload is damaged."""
    return size_bytes if size_bytes < _MOST_BYTES else -1


def _merged(op_by_name: str, asked: Sequence[_Asked]) -> _Asked:
    """What one kernel carries out, as one call; several messages are a batch without a peer."""
    if len(asked) < 2:
        return asked[0] if asked else _Asked(op_by_name, Payload())
    ops = {one.op for one in asked}
    sizes = [one.payload.sent_bytes for one in asked if one.op != "recv"]
    communicators = {one.payload.communicator for one in asked}
    return _Asked(
        "send_recv" if ops <= _MESSAGES else ops.pop() if len(ops) == 1 else "unknown",
        Payload(
            communicator=communicators.pop() if len(communicators) == 1 else -1,
            sent_bytes=sum(sizes) if sizes and min(sizes) >= 0 else -1,
        ),
    )


def _asked_of(
    process: Process,
    payloads: Mapping[int, Payload],
    kernels: Sequence[int],
    by_name: Mapping[str, str],
) -> Mapping[int, tuple[_Asked, ...]]:
    """What was asked of each kernel, where the API call that launched it is known."""
    events = process.events
    launches = events.launches_of(np.array(kernels, dtype=np.int64)).tolist()
    windows = _windows(process, payloads)
    starts = {lane: [window.start_ns for window in found] for lane, found in windows.items()}
    inside: dict[tuple[int, int], list[int]] = defaultdict(list)
    for kernel, launch in zip(kernels, launches, strict=True):
        lane = int(events.lane[launch]) if launch >= 0 else -1
        at = bisect_right(starts.get(lane, ()), int(events.start_ns[launch])) - 1
        if at >= 0 and events.start_ns[launch] <= windows[lane][at].end_ns:
            inside[lane, at].append(kernel)
    found: dict[int, tuple[_Asked, ...]] = {}
    for (lane, at), together in inside.items():
        ops = [by_name[events.name_of(kernel)] for kernel in together]
        found.update(zip(together, _shares(windows[lane][at].asked, ops), strict=True))
    return found


def _windows(
    process: Process, payloads: Mapping[int, Payload]
) -> Mapping[int, tuple[_Launching, ...]]:
    """When NCCL launches, on each lane: in a call, or where the outermost group of calls ends."""
    events = process.events
    of_nccl = events.name_mask(tuple(_NCCL.match(name) is not None for name in events.names))
    rows = np.flatnonzero(of_nccl & events.of(Category.ANNOTATION))
    lanes = events.lane[rows]
    return {
        lane: tuple(_launchings(process, payloads, rows[lanes == lane].tolist()))
        for lane in np.unique(lanes).tolist()
    }


def _launchings(
    process: Process, payloads: Mapping[int, Payload], rows: Sequence[int]
) -> Iterator[_Launching]:
    """The launches among the ranges of one thread, in their order."""
    events, depth, waiting = process.events, 0, list[_Asked]()
    for row in rows:
        start_ns, name = int(events.start_ns[row]), events.names[events.name_id[row]]
        end_ns = start_ns + int(events.dur_ns[row])
        one = _Asked(_op(name), payloads.get(int(process.row[row]), Payload()))
        if name == "ncclGroupStart":
            depth += 1
        elif name == "ncclGroupEnd":
            depth = max(depth - 1, 0)
            if not depth:
                yield _Launching(start_ns, end_ns, tuple(waiting))
                waiting = []
        elif one.op != "unknown" and depth:
            waiting.append(one)
        elif one.op != "unknown":
            yield _Launching(start_ns, end_ns, (one,))


def _op(name: str) -> str:
    """What a function of NCCL's API asks for, "unknown" where it moves no data."""
    return "broadcast" if name == "ncclBcast" else op_named(name.removeprefix("nccl"))


def _shares(asked: Sequence[_Asked], ops: Sequence[str]) -> list[tuple[_Asked, ...]]:
    """What of all that was asked each of the kernels carries out, by the ops of their names.

    As many calls as kernels of an op are paired in order; where their numbers differ, the sizes
    of the kernels are not known. Kernels without a name do what no other kernel is named for.
    """
    shares = []
    for kernel, op in enumerate(ops):
        fitting = [o for o in asked if o.op == op or (op == "unknown" and o.op not in ops)]
        alike = ops.count(op)
        if alike == len(fitting):
            fitting = [fitting[ops[:kernel].count(op)]]
        elif alike > 1 and len(fitting) > 1:
            fitting = [replace(o, payload=replace(o.payload, sent_bytes=-1)) for o in fitting]
        shares.append(tuple(fitting))
    return shares
