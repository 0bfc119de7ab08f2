"""Reads Nsight Systems exports, SQLite or Parquet: a RankTrace for each process with kernels."""

from __future__ import annotations

import re
import sqlite3
import tempfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from msgspec import Struct

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.ops import compute_message_bytes, parse_op
from stepsplit.analyzer.readers.compression import find_opener, open_source_file, open_unpacked
from stepsplit.analyzer.readers.kernel_rules import BUILT_IN, EventClassifier, Rules
from stepsplit.analyzer.readers.nsys_parquet import STRINGS_FILE, copy_tables_to_sqlite
from stepsplit.analyzer.readers.rank_limits import MAX_RANKS
from stepsplit.analyzer.readers.sources import DiskFile, Source
from stepsplit.analyzer.trace import (
    DEVICE_CATEGORIES,
    MAX_NAME_LENGTH,
    Call,
    CallsWithGroups,
    Category,
    Events,
    Group,
    Int64,
    Lane,
    Note,
    RankTrace,
    UInt8,
    build_calls,
)

_RECORD_HINT = "record with nsys profile -t cuda,nvtx and export again"

_RANK_IN_NAME = re.compile(r"rank[-_ ]?(\d{1,7})", re.I)

# torchrun, Open MPI, MPICH and Slurm; torchrun first, since it may run within one of the others.
_RANK_NAMES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")

_SIZE_NAMES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")


# Linux limits one variable to 128 KiB; a damaged export is cut here.
_MAX_ENVIRONMENT = 1 << 20


_MAGIC = b"SQLite format 3\0"

# Each version exports other tables, and each export has one of these.
_TABLES = re.compile(rb"CREATE TABLE \W?(StringIds|NVTX_EVENTS|TARGET_INFO_|ENUM_NSYS_|META_DATA_)")


def is_nsys_export(head: bytes) -> bool:
    """Whether the bytes are the beginning of an Nsight Systems export: SQLite with its tables.

    Also true if the schema is so long that it is not within these bytes.
    """
    if not head.startswith(_MAGIC):
        return False
    # A first page of type 5 (interior) has no rows: then the schema is in other pages.
    is_elsewhere = head[100:101] == b"\x05" and b"CREATE " not in head
    return is_elsewhere or _TABLES.search(head) is not None


def read_nsys(source: Source, rules: Rules = BUILT_IN) -> tuple[RankTrace, ...]:
    """The traces of the export in rank order, at least one.

    Raises DataError if the file is damaged, not such an export, or has no kernels.
    """
    with open_database(source) as db:
        if "StringIds" not in db.columns:
            raise DataError(source.where, "SQLite, but not an Nsight Systems export", EXPORT_AGAIN)
        processes = read_processes(db)
        if not processes:
            raise DataError(source.where, "no GPU kernels or copies found", _RECORD_HINT)
        session = _read_session(db)
        ranks = _assign_ranks(db, session, source, processes)
        # The NCCL payloads by row of NVTX_EVENTS. binaryData is four numbers of 8 bytes (domain,
        # schema, size, and offset of the rest), then the fields at the offsets in
        # NVTX_PAYLOAD_SCHEMA_ENTRIES.
        table = "NVTX_PAYLOAD_SCHEMA_ENTRIES"
        schema_rows = db.read_ints(table, ("domainId", "schemaId", "offset")).tolist()
        fields = defaultdict(list)
        for (domain, schema, offset), name in zip(
            schema_rows, db.read_texts(table, "name"), strict=False
        ):
            if name in _FIELDS:
                fields[domain, schema].append((_FIELDS[name], max(offset, 0)))
        payloads = {}
        for row, data in db.read_payloads(build_range_condition(db)):
            known_fields = fields.get((_read_number(data, 0, 8), _read_number(data, 8, 8)), ())
            values = {
                name: _read_number(data, _HEADER_BYTES + offset, 8 if name in _EIGHT_BYTES else 4)
                for name, offset in known_fields
            }
            if values:
                payloads[row] = Payload(**values)
    groups = build_communicators(processes, ranks.of_process, payloads)
    # An export of one host may know the size only by the ranks in it and their communicators.
    sizes = [one.size for one in groups.values() if one.size <= MAX_RANKS]
    least = max([1 + max(ranks.of_process), *sizes])
    traces, classifier = [], EventClassifier(rules)
    for process, rank in zip(processes, ranks.of_process, strict=True):
        rank_calls = match_calls(process, payloads, groups, rules)
        notes = tuple(Note(n.code, n.message, rank) for n in (*session.notes, *ranks.notes))
        traces.append(
            RankTrace(
                source=Path(source.where),
                rank=rank,
                world_size=max(session.world_size, least),
                host=session.host,
                device=session.device,
                backend="nccl" if any(n.startswith("nccl") for n in process.events.names) else "",
                t0_unix_ns=session.start_unix_ns + process.start_ns,
                events=process.events,
                calls=rank_calls.calls,
                groups=rank_calls.groups,
                kinds=classifier.classify(process.events, rank_calls.calls),
                notes=notes,
                states_size=session.world_size >= least,
            )
        )
    return tuple(sorted(traces, key=lambda trace: trace.rank))


class _Session(Struct, frozen=True):
    """Properties of the whole recording; world_size and rank are -1 if unknown.

    rank is that of the environment in which nsys itself ran.
    """

    start_unix_ns: int
    host: str
    device: str
    rank: int
    world_size: int
    notes: tuple[Note, ...]


def _read_session(db: NsysDatabase) -> _Session:
    table = "TARGET_INFO_SYSTEM_ENV"
    values = db.read_texts(table, "value", max_chars=_MAX_ENVIRONMENT)
    pairs = list(zip(db.read_texts(table, "name"), values, strict=False))
    environment = "\n".join(f"{name}={value}" for name, value in pairs)
    start_ns = db.read_ints("TARGET_INFO_SESSION_START_TIME", ("utcEpochNs",)).ravel().tolist()
    has_start = bool(start_ns) and start_ns[0] > 0
    notes = []
    if not has_start:
        text = "the export has no start time of the session: its clock counts from 0"
        notes.append(Note("no_clock", text))
    if len(db.read_ints("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", ("start",))):
        text = "CUDA graphs were recorded as single events and count as compute; record with "
        notes.append(Note("graphs_whole", text + "--cuda-graph-trace=node"))
    return _Session(
        start_unix_ns=start_ns[0] if has_start else 0,
        host=next((value for name, value in pairs if name == "Hostname"), ""),
        device=next(db.read_texts("TARGET_INFO_GPU", "name"), ""),
        rank=_parse_variable(environment, _RANK_NAMES),
        world_size=_parse_variable(environment, _SIZE_NAMES),
        notes=tuple(notes),
    )


def _parse_variable(environment: str, names: Sequence[str]) -> int:
    """The number in the first of these variables that is set, -1 if none is."""
    for name in names:
        pattern = rf"(?<![A-Za-z0-9_]){name}[\"']?\s*[=:]\s*[\"']?(\d{{1,7}})(?!\d)"
        if (match := re.search(pattern, environment)) is not None:
            return int(match[1])
    return -1


class _Ranks(Struct, frozen=True):
    """The rank of each process, and a note if it was guessed."""

    of_process: tuple[int, ...]
    notes: tuple[Note, ...]


def _assign_ranks(
    db: NsysDatabase, session: _Session, source: Source, processes: Sequence[Process]
) -> _Ranks:
    """The rank of each process: from MPI, from the environment or name, else by device order."""
    rows = db.read_ints("MPI_RANKS", ("globalTid", "rank"))
    mpi = dict(zip(compute_process_key(rows[:, 0]).tolist(), rows[:, 1].tolist(), strict=True))
    by_mpi = [mpi.get(process.key, -1) for process in processes]
    # A damaged or incomplete table of ranks is not used at all: ranks from two sources may collide.
    if min(by_mpi) >= 0 and max(by_mpi) < MAX_RANKS and len(set(by_mpi)) == len(by_mpi):
        return _Ranks(tuple(by_mpi), ())
    if len(processes) == 1:
        match = _RANK_IN_NAME.search(source.inner.name) or _RANK_IN_NAME.search(
            source.inner.parent.name
        )
        rank = session.rank if session.rank >= 0 or match is None else int(match[1])
        if rank >= 0:
            return _Ranks((rank,), ())
    # One process per device is how every launcher starts a job, in the order of local ranks.
    first_device = [
        min(lane.device for lane in p.events.lanes if lane.device >= 0) for p in processes
    ]
    order = sorted(range(len(processes)), key=first_device.__getitem__)
    text = "the export contains no ranks: they are assigned in device order"
    return _Ranks(tuple(order.index(i) for i in range(len(order))), (Note("rank_guessed", text),))


# Matching of NCCL kernels with the API calls that launched them.

# ncclAllReduce, but not a range of the user such as nccl_warmup.
_NCCL = re.compile(r"nccl[A-Z]")

_HEADER_BYTES = 32
"""Of a payload before its fields: domain, schema, size and offset, 8 bytes each."""

_FIELDS = {
    "NCCL communicator ID": "communicator",
    "No. of ranks": "size",
    "Rank": "rank",
    "Message size [bytes]": "sent_bytes",
    "Peer rank": "peer",
}

_EIGHT_BYTES = ("communicator", "sent_bytes")

# A petabyte: more than any message, so a payload with more is damaged.
_MAX_BYTES = 1 << 50

_PER_RANK_OPS = ("reduce_scatter", "all_to_all", "scatter")
"""Collectives whose callers pass the size of one rank's part of the input."""


@dataclass(frozen=True, slots=True)
class Payload:
    """NCCL's NVTX payload of a call or a communicator; -1 is unknown.

    rank and peer count within the communicator. sent_bytes is the count argument of the call times
    the element size: of one rank's part if the buffer has a part for each rank.
    """

    communicator: int = -1
    size: int = -1
    rank: int = -1
    sent_bytes: int = -1
    peer: int = -1


def _read_number(data: bytes, offset: int, width: int) -> int:
    """The unsigned number at the offset, -1 if the data is too short."""
    part = data[offset : offset + width]
    return int.from_bytes(part, "little") if len(part) == width else -1


class NsysCommunicator(Struct, frozen=True):
    """Size of a communicator, -1 if unknown, and its ranks if all are in the export, else ()."""

    size: int
    ranks: tuple[int, ...]


def build_communicators(
    processes: Sequence[Process], ranks: Sequence[int], payloads: Mapping[int, Payload]
) -> Mapping[int, NsysCommunicator]:
    """The communicators that were created during the recording."""
    members: dict[int, dict[int, int]] = defaultdict(dict)
    sizes: dict[int, int] = {}
    for process, rank in zip(processes, ranks, strict=True):
        for row in process.row[process.row >= 0].tolist():
            payload = payloads.get(row)
            if payload is not None and payload.size > 0:
                members[payload.communicator][payload.rank] = rank
                sizes[payload.communicator] = payload.size
    ranks_by_communicator = {
        number: tuple(found[i] for i in sorted(found)) for number, found in members.items()
    }
    return {
        number: NsysCommunicator(
            size,
            ranks_by_communicator[number] if len(ranks_by_communicator[number]) == size else (),
        )
        for number, size in sizes.items()
    }


@dataclass(frozen=True, slots=True)
class _ApiCall:
    """A call of NCCL's API that transfers data."""

    op: str
    payload: Payload


_UNKNOWN = NsysCommunicator(-1, ())

_MESSAGES = {"send", "recv"}


class _LaunchWindow(Struct, frozen=True):
    """An interval on a thread in which NCCL launches the kernels of these API calls."""

    start_ns: int
    end_ns: int
    api_calls: tuple[_ApiCall, ...]


def match_calls(
    process: Process,
    payloads: Mapping[int, Payload],
    communicators: Mapping[int, NsysCommunicator],
    rules: Rules = BUILT_IN,
) -> CallsWithGroups:
    """A call for each kernel and copy that communicates.

    The op is from the kernel's name, else from the API call that launched it. Size and communicator
    are from NCCL's payload of that call, if recorded. A communicator with members missing in the
    export becomes a group without ranks.
    """
    events = process.events
    is_work = events.is_category(Category.KERNEL, Category.MEMCPY)
    names = {n: events.names[n] for n in np.unique(events.name_id[is_work]).tolist()}
    comm_names = [n for n, name in names.items() if rules.is_communication(name)]
    rows = np.flatnonzero(is_work & np.isin(events.name_id, comm_names))
    kernels = rows.tolist()
    by_name = {names[n]: rules.find_op(names[n]) for n in comm_names}
    api_calls = _match_api_calls(process, payloads, kernels, by_name)
    groups: dict[int, int] = {}
    calls = []
    for kernel, issued_ns in zip(kernels, events.find_launch_ns(rows).tolist(), strict=True):
        api_call = _merge_api_calls(by_name[events.name_of(kernel)], api_calls.get(kernel, ()))
        number = api_call.payload.communicator
        group = -1 if number < 0 else groups.setdefault(number, len(groups))
        calls.append(
            _build_call(kernel, api_call, issued_ns, group, communicators.get(number, _UNKNOWN))
        )
    return CallsWithGroups(
        build_calls(calls),
        tuple(Group(f"{n:#018x}", communicators.get(n, _UNKNOWN).ranks, "") for n in groups),
    )


def _build_call(
    kernel: int, api_call: _ApiCall, issued_ns: int, group_id: int, communicator: NsysCommunicator
) -> Call:
    sent_bytes, size, peer = api_call.payload.sent_bytes, communicator.size, api_call.payload.peer
    # Collectives with a part per rank are called with the size of one part.
    full_bytes = sent_bytes * size if sent_bytes >= 0 and size > 0 else -1
    input_bytes = full_bytes if api_call.op in _PER_RANK_OPS else sent_bytes
    return Call(
        event=kernel,
        op=api_call.op,
        issued_ns=issued_ns,
        group_id=group_id,
        peer=communicator.ranks[peer] if 0 <= peer < len(communicator.ranks) else -1,
        input_bytes=_sanitize_bytes(input_bytes),
        message_bytes=_sanitize_bytes(compute_message_bytes(api_call.op, input_bytes, -1, size)),
    )


def _sanitize_bytes(size_bytes: int) -> int:
    """The size, -1 if it is implausible because the payload is damaged."""
    return size_bytes if size_bytes < _MAX_BYTES else -1


def _merge_api_calls(op_by_name: str, api_calls: Sequence[_ApiCall]) -> _ApiCall:
    """Merges the API calls of one kernel; several sends and receives become a send_recv."""
    if len(api_calls) < 2:
        return api_calls[0] if api_calls else _ApiCall(op_by_name, Payload())
    ops = {one.op for one in api_calls}
    sizes = [one.payload.sent_bytes for one in api_calls if one.op != "recv"]
    communicators = {one.payload.communicator for one in api_calls}
    return _ApiCall(
        "send_recv" if ops <= _MESSAGES else ops.pop() if len(ops) == 1 else "unknown",
        Payload(
            communicator=communicators.pop() if len(communicators) == 1 else -1,
            sent_bytes=sum(sizes) if sizes and min(sizes) >= 0 else -1,
        ),
    )


def _match_api_calls(
    process: Process,
    payloads: Mapping[int, Payload],
    kernels: Sequence[int],
    by_name: Mapping[str, str],
) -> Mapping[int, tuple[_ApiCall, ...]]:
    """The API calls that each kernel carries out, if known."""
    events = process.events
    launches = events.find_launches(np.array(kernels, dtype=np.int64)).tolist()
    # The launch windows of each lane: a call, or the end of the outermost group of calls.
    of_nccl = events.name_mask(tuple(_NCCL.match(name) is not None for name in events.names))
    rows = np.flatnonzero(of_nccl & events.is_category(Category.ANNOTATION))
    lanes = events.lane[rows]
    windows = {
        lane: tuple(_split_launch_windows(process, payloads, rows[lanes == lane].tolist()))
        for lane in np.unique(lanes).tolist()
    }
    starts = {lane: [window.start_ns for window in found] for lane, found in windows.items()}
    inside: dict[tuple[int, int], list[int]] = defaultdict(list)
    for kernel, launch in zip(kernels, launches, strict=True):
        lane = int(events.lane[launch]) if launch >= 0 else -1
        at = bisect_right(starts.get(lane, ()), int(events.start_ns[launch])) - 1
        if at >= 0 and events.start_ns[launch] <= windows[lane][at].end_ns:
            inside[lane, at].append(kernel)
    api_calls: dict[int, tuple[_ApiCall, ...]] = {}
    for (lane, at), launched in inside.items():
        ops = [by_name[events.name_of(kernel)] for kernel in launched]
        api_calls.update(
            zip(launched, _distribute_api_calls(windows[lane][at].api_calls, ops), strict=True)
        )
    return api_calls


def _split_launch_windows(
    process: Process, payloads: Mapping[int, Payload], rows: Sequence[int]
) -> Iterator[_LaunchWindow]:
    """The launch windows among the ranges of one thread, in order."""
    events, depth, waiting = process.events, 0, list[_ApiCall]()
    for row in rows:
        start_ns, name = int(events.start_ns[row]), events.names[events.name_id[row]]
        end_ns = start_ns + int(events.dur_ns[row])
        # The op of a function of NCCL's API, "unknown" if it transfers no data.
        api_call = _ApiCall(
            "broadcast" if name == "ncclBcast" else parse_op(name.removeprefix("nccl")),
            payloads.get(int(process.row[row]), Payload()),
        )
        if name == "ncclGroupStart":
            depth += 1
        elif name == "ncclGroupEnd":
            # A recording may begin within a group of calls.
            depth = max(depth - 1, 0)
            if not depth:
                yield _LaunchWindow(start_ns, end_ns, tuple(waiting))
                waiting = []
        elif api_call.op != "unknown" and depth:
            waiting.append(api_call)
        elif api_call.op != "unknown":
            yield _LaunchWindow(start_ns, end_ns, (api_call,))


def _distribute_api_calls(
    api_calls: Sequence[_ApiCall], ops: Sequence[str]
) -> list[tuple[_ApiCall, ...]]:
    """Distributes the API calls of a launch window to its kernels by op.

    Calls and kernels of an op are paired in order if their numbers are equal; otherwise the sizes
    are unknown. Kernels without an op in their name get the calls whose op no other kernel has.
    """
    shares = []
    for kernel, op in enumerate(ops):
        candidates = [o for o in api_calls if o.op == op or (op == "unknown" and o.op not in ops)]
        n_same_op = ops.count(op)
        # As many kernels as calls of this op: NCCL launches them in the order of the calls.
        if n_same_op == len(candidates):
            candidates = [candidates[ops[:kernel].count(op)]]
        # One kernel may have fused several of the calls: the communicator is sure, the size is not.
        elif n_same_op > 1 and len(candidates) > 1:
            candidates = [replace(o, payload=replace(o.payload, sent_bytes=-1)) for o in candidates]
        shares.append(tuple(candidates))
    return shares


# Conversion of the tables, of any version, to events by process.

# A lane's key has the stream in the low 40 bits, the device above it, and bit 62 to tell it from
# the key of a thread, which is its id.
_STREAM = (1 << 40) - 1

_DEVICE_LANE = 1 << 62
"""Set in the lanes of devices: no id of a thread reaches it."""

_KERNEL_NAMES = ("demangledName", "shortName", "mangledName")

# By CUPTI's number of the kind; those after PtoP are Nsight's own, for unified memory.
_COPIES = ("Unknown", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH",
           "PtoP", "HtoD", "DtoH", "DtoD")  # fmt: skip

_DTOD, _PTOP = _COPIES.index("DtoD"), _COPIES.index("PtoP")

# By CUPTI's number of the kind of memory.
_MEMORY = ("Pageable", "Pinned", "Device", "Array", "Managed", "Device", "Managed")

_KERNEL, _GRAPH, _MEMCPY, _MEMSET = _ON_DEVICE = tuple(
    f"CUPTI_ACTIVITY_KIND_{kind}" for kind in ("KERNEL", "GRAPH_TRACE", "MEMCPY", "MEMSET")
)

_PLACE = ("start", "end", "globalPid", "deviceId", "streamId", "correlationId")


class Process(Struct, frozen=True):
    """The events of one process.

    Their times count from start_ns after the session's start. row has the row in NVTX_EVENTS of
    each range, -1 for other events.
    """

    key: int
    start_ns: int
    events: Events
    row: Int64


class _Part(Struct, frozen=True):
    """One table; place has columns start, end, process or thread, device, stream, correlation."""

    category: Category
    place: Int64
    name: Int64
    names: tuple[str, ...]
    row: Int64


class _Activity(Struct, frozen=True):
    """All tables concatenated; name indexes all their names."""

    place: Int64
    process: Int64
    category: UInt8
    name: Int64
    row: Int64
    names: tuple[str, ...]


def read_processes(db: NsysDatabase) -> tuple[Process, ...]:
    """The processes that used a device, sorted by key: the id of nsys without the thread."""
    name = next((name for name in _KERNEL_NAMES if db.has_column(_KERNEL, name)), _KERNEL_NAMES[0])
    parts = [
        _build_named_part(db, Category.KERNEL, db.read_ints(_KERNEL, (*_PLACE, name))),
        # CUDA graphs recorded as single events; their kernels are not in the export.
        _build_uniform_part(Category.KERNEL, db.read_ints(_GRAPH, _PLACE), "CUDA graph"),
        _read_copies(db),
        _build_uniform_part(Category.MEMSET, db.read_ints(_MEMSET, _PLACE), "Memset (Device)"),
    ]
    columns = ("start", "end", "globalTid", "deviceId", "streamId", "correlationId", "nameId")
    for table in ("CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_DRIVER"):
        part = _build_named_part(db, Category.RUNTIME, db.read_ints(table, columns))
        # nsys writes the version of the API with the name: cudaLaunchKernel_v7000.
        names = tuple(name.partition("_v")[0] for name in part.names)
        parts.append(_Part(part.category, part.place, part.name, names, part.row))
    parts.append(_read_ranges(db))
    first = np.cumsum([0, *(len(part.names) for part in parts)])
    place = np.concatenate([part.place for part in parts])
    # Old exports do not say which process ran a kernel: then the export is taken for one process.
    has_pid = all(db.has_column(table, "globalPid") for table in _ON_DEVICE if table in db.columns)
    activity = _Activity(
        place=place,
        process=compute_process_key(place[:, 2])
        if has_pid
        else np.zeros(len(place), dtype=np.int64),
        category=np.repeat([p.category for p in parts], [len(p.place) for p in parts]),
        name=np.concatenate([p.name + n for p, n in zip(parts, first, strict=False)]),
        row=np.concatenate([part.row for part in parts]),
        names=tuple(chain.from_iterable(part.names for part in parts)),
    )
    used = np.unique(activity.process[np.isin(activity.category, DEVICE_CATEGORIES)])
    return tuple(_build_process(activity, key) for key in used.tolist())


def compute_process_key(global_id: Int64) -> Int64:
    """The part of nsys's serialized ids that is equal for all threads of a process."""
    return global_id & ~0xFFFFFF


def _build_process(activity: _Activity, key: int) -> Process:
    rows = np.flatnonzero(activity.process == key)
    rows = rows[np.argsort(activity.place[rows, 0], kind="stable")]
    start, end, place, device, stream, correlation = activity.place[rows].T
    category = activity.category[rows].astype(np.uint8)
    # Each process keeps its own names only: an export of a host has those of all its ranks.
    names, name_id = np.unique(activity.name[rows], return_inverse=True)
    on_device = np.isin(category, DEVICE_CATEGORIES)
    keys = np.where(
        on_device, _DEVICE_LANE | (device & 0xFFFF) << 40 | stream & _STREAM, place & 0xFFFFFF
    )
    lanes, lane = np.unique(keys, return_inverse=True)
    pid = int(place[0]) >> 24 & 0xFFFFFF
    events = Events(
        start_ns=start - start[0],
        dur_ns=np.maximum(end - start, 0),
        category=category,
        name_id=name_id.astype(np.int32),
        lane=lane.astype(np.int32),
        correlation=np.where(correlation > 0, correlation, -1),
        names=tuple(activity.names[name][:MAX_NAME_LENGTH] for name in names.tolist()),
        lanes=tuple(
            Lane(str(pid), "", key >> 40 & 0xFFFF, key & _STREAM)
            if key >= _DEVICE_LANE
            else Lane(str(pid), str(key), -1, -1)
            for key in lanes.tolist()
        ),
    )
    return Process(key, int(start[0]), events, activity.row[rows])


def _read_copies(db: NsysDatabase) -> _Part:
    kinds = ("copyKind", "srcKind", "dstKind", "srcDeviceId", "dstDeviceId")
    rows = db.read_ints(_MEMCPY, (*_PLACE, *kinds))
    kind, from_memory, to_memory, from_device, to_device = rows[:, len(_PLACE) :].T
    # A copy between devices is a DtoD in CUPTI; Kineto, whose names the rules know, says PtoP.
    is_peer_copy = (
        (kind == _DTOD) & (from_device >= 0) & (to_device >= 0) & (from_device != to_device)
    )
    kind = np.where(is_peer_copy, _PTOP, kind).clip(-1, 255)
    code = (kind + 1) * 65536 + (from_memory.clip(-1, 254) + 1) * 256 + to_memory.clip(-1, 254) + 1
    codes, name = np.unique(code, return_inverse=True)
    names = []
    for number in codes.tolist():
        copied, source, target = number // 65536 - 1, number // 256 % 256 - 1, number % 256 - 1
        known = 0 <= source < len(_MEMORY) and 0 <= target < len(_MEMORY)
        memory = f" ({_MEMORY[source]} -> {_MEMORY[target]})" if known else ""
        named = _COPIES[copied] if 0 <= copied < len(_COPIES) else _COPIES[0]
        names.append(f"Memcpy {named}{memory}")
    unknown_rows = np.full(len(rows), -1)
    return _Part(Category.MEMCPY, rows[:, : len(_PLACE)], name, tuple(names), unknown_rows)


def _read_ranges(db: NsysDatabase) -> _Part:
    """The completed NVTX ranges, named by their own text or a registered string."""
    table, columns = "NVTX_EVENTS", ("start", "end", "globalTid", "deviceId", "streamId")
    ended = build_range_condition(db)
    rows = db.read_ints(table, (*columns, "correlationId", "textId", "_rowid_"), ended)
    numbers: dict[str, int] = {}
    own = (numbers.setdefault(text, len(numbers)) for text in db.read_texts(table, "text", ended))
    code = np.fromiter(own, np.int64)
    if not len(code):
        # The export has no column for texts: all are registered strings.
        numbers, code = {"": 0}, np.zeros(len(rows), dtype=np.int64)
    part = _build_named_part(db, Category.ANNOTATION, rows[:, :7])
    registered = code == numbers.get("", -1)
    name = np.where(registered, part.name + len(numbers), code)
    return _Part(part.category, part.place, name, (*numbers, *part.names), rows[:, 7])


def build_range_condition(db: NsysDatabase) -> str:
    """The SQL condition for completed ranges in NVTX_EVENTS."""
    # 59 and 60 are push-pop and start-end ranges, 70 and 71 those of imported texts (NVTXT).
    ended = "end >= start" if db.has_column("NVTX_EVENTS", "end") else "0"
    kinds = "eventType IN (59, 60, 70, 71)" if db.has_column("NVTX_EVENTS", "eventType") else "1"
    return f"{ended} AND {kinds}"


def _build_named_part(db: NsysDatabase, category: Category, rows: Int64) -> _Part:
    """A part from rows whose last column is the id of the name."""
    ids, name = np.unique(rows[:, -1], return_inverse=True)
    return _Part(category, rows[:, :-1], name, db.read_strings(ids), np.full(len(rows), -1))


def _build_uniform_part(category: Category, place: Int64, name: str) -> _Part:
    zeros = np.zeros(len(place), dtype=np.int64)
    return _Part(category, place, zeros, (name,), zeros - 1)


# Access to the tables of the export, independent of its version.

EXPORT_AGAIN = "export it again with nsys export --type sqlite"

MAX_TEXT = 4096
"""The most characters read of a name or payload."""

# The statement of 30,000 ids of 20 digits stays below SQLite's limit of a million bytes.
_IDS_PER_QUERY = 30_000


class NsysDatabase(Struct, frozen=True):
    """An open export. A missing table reads as empty; a missing column or NULL as -1."""

    where: str
    connection: sqlite3.Connection
    columns: Mapping[str, frozenset[str]]

    def has_column(self, table: str, column: str) -> bool:
        """Whether the export has this column."""
        return column in self.columns.get(table, ())

    def read_ints(self, table: str, columns: tuple[str, ...], condition: str = "1") -> Int64:
        """The rows of the table, shape (rows, columns)."""
        terms = [
            f"IFNULL(CAST({name} AS INTEGER), -1)" if self.has_column(table, name) else "-1"
            for name in columns
        ]
        rows = self._select_rows(table, ", ".join(terms), condition)
        return np.fromiter(chain.from_iterable(rows), np.int64).reshape(-1, len(columns))

    def read_texts(
        self, table: str, column: str, condition: str = "1", max_chars: int = MAX_TEXT
    ) -> Iterator[str]:
        """One column of the table as text, truncated to max_chars characters; "" for NULL."""
        if self.has_column(table, column):
            term = f"IFNULL(SUBSTR(CAST({column} AS TEXT), 1, {max_chars}), '')"
            yield from chain.from_iterable(self._select_rows(table, term, condition))

    def read_payloads(self, condition: str) -> Iterator[tuple[int, bytes]]:
        """The row numbers and payloads of NVTX ranges that have one."""
        if self.has_column("NVTX_EVENTS", "binaryData"):
            term = f"_rowid_, SUBSTR(CAST(binaryData AS BLOB), 1, {MAX_TEXT})"
            condition = f"binaryData IS NOT NULL AND {condition}"
            yield from self._select_rows("NVTX_EVENTS", term, condition)

    def read_strings(self, ids: Int64) -> tuple[str, ...]:
        """The text of each id in StringIds, "" if missing."""
        texts: dict[int, str] = {}
        for begin in range(0, len(ids), _IDS_PER_QUERY):
            id_list = ",".join(map(str, ids[begin : begin + _IDS_PER_QUERY].tolist()))
            term = f"id, SUBSTR(CAST(value AS TEXT), 1, {MAX_TEXT})"
            texts.update(self._select_rows("StringIds", term, f"id IN ({id_list})"))
        return tuple(texts.get(number) or "" for number in ids.tolist())

    def _select_rows(self, table: str, terms: str, condition: str) -> Iterator[tuple[Any, ...]]:
        if table not in self.columns:
            return iter(())
        return self.connection.execute(f"SELECT {terms} FROM {table} WHERE {condition}")


@contextmanager
def open_database(source: Source) -> Iterator[NsysDatabase]:
    """Opens the export. Raises DataError if it is damaged or not an export."""
    with _unpack_to_disk(source) as path:
        try:
            address = f"file:{quote(str(path.resolve()))}?mode=ro&immutable=1"
            with closing(sqlite3.connect(address, uri=True)) as connection:
                connection.text_factory = lambda text: text.decode("utf-8", "replace")
                connection.execute("PRAGMA trusted_schema = OFF")
                # Only real tables: views and virtual tables could run without end.
                tables = connection.execute(
                    "SELECT name FROM sqlite_master"
                    " WHERE type = 'table' AND sql NOT LIKE 'CREATE VIRTUAL%'"
                )
                names = [str(name) for (name,) in tables if str(name).isidentifier()]
                columns = {}
                for name in names:
                    rows = connection.execute(f"PRAGMA table_info({name})")
                    columns[name] = frozenset(["_rowid_", *(row[1] for row in rows)])
                yield NsysDatabase(source.where, connection, columns)
        except (
            sqlite3.Error,
            UnicodeDecodeError,
        ) as error:  # the latter from error messages of sqlite3
            problem = " ".join(str(error).split())[:100]
            raise DataError(source.where, f"damaged database ({problem})", EXPORT_AGAIN) from None


@contextmanager
def _unpack_to_disk(source: Source) -> Iterator[Path]:
    """The unpacked file on disk; SQLite needs random access, so it is unpacked first. Tables in
    Parquet are copied to one."""
    if source.inner.name == STRINGS_FILE:
        # Of another source this file alone would be there, and beside it what others have in /tmp.
        if not isinstance(source, DiskFile):
            problem = "the other tables of an export in Parquet are read from a folder on disk only"
            raise DataError(source.where, problem, "copy or unpack it first")
        with source.open_local() as path, tempfile.TemporaryDirectory(prefix="stepsplit-") as made:
            target = Path(made, "export.sqlite")
            copy_tables_to_sqlite(path.parent, source.where, target)
            yield target
        return
    with source.open_local() as path:
        with open_source_file(path, source.where) as raw:
            packed = find_opener(raw.read(6)) is not None
        if not packed:
            yield path
            return
    with tempfile.TemporaryDirectory(prefix="stepsplit-") as folder:
        target = Path(folder, "export.sqlite")
        with open_unpacked(source) as content, target.open("wb") as plain:
            while block := content.read(1 << 20):
                plain.write(block)
        if content.torn:
            raise DataError(
                source.where, f"the compressed file is damaged ({content.torn})", EXPORT_AGAIN
            )
        yield target
