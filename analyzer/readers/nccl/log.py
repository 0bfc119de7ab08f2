"""Reader of NCCL (2.4 to 2.30) and RCCL debug logs: communicators, members and calls."""

from __future__ import annotations

import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from msgspec import Struct

from stepsplit.analyzer.ops import parse_op
from stepsplit.analyzer.readers.compression import open_unpacked
from stepsplit.analyzer.readers.nccl import records
from stepsplit.analyzer.readers.nccl.messages import (
    Channels,
    CostTables,
    Graph,
    Graphs,
    Init,
    InitTime,
    Network,
    Topology,
    find_parser,
    is_table,
)
from stepsplit.analyzer.readers.sources import Source
from stepsplit.analyzer.trace import OP_CODE, Bool, Calls, Group, Int64, Note, RankCalls

# The communicators of a log, one handle per process.

Owner = tuple[str, int, int]
"""Host, pid and device of one rank."""


@dataclass(slots=True)
class CommHandle:
    """One communicator in one process; filled in while the log is read."""

    host: str
    pid: int
    pointer: str
    dev: int
    nranks: int
    rank: int = -1
    comm_id: str = ""
    nvml_dev: int = -1
    bus_id: str = ""
    parent: int = -1
    split: int = -1
    color: int | None = None
    key: int | None = None
    nodes: int = -1
    local_ranks: int = -1
    coll_channels: int = -1
    p2p_channels: int = -1
    init_ns: int = -1
    complete: bool = False

    @property
    def owner(self) -> Owner:
        return self.host, self.pid, self.dev


@dataclass(slots=True)
class CommHandles:
    """The handles of a log, in order of their first appearance.

    A record without a communicator belongs to the one that its thread is initializing: it gets the
    number of a slot, which is bound to a handle later.
    """

    all: list[CommHandle] = field(default_factory=list)
    _by_pointer: dict[tuple[str, int, str], int] = field(default_factory=dict)
    _slots: list[int] = field(default_factory=list)
    _processes: list[tuple[str, int]] = field(default_factory=list)
    _slot_of: dict[tuple[str, int, int], int] = field(default_factory=dict)
    _done: set[int] = field(default_factory=set)
    _channels: dict[int, Channels] = field(default_factory=dict)

    def add_init(self, speaker: records.Speaker, init: Init) -> None:
        """Adds an "Init START" or "Init COMPLETE" message."""
        index = self._find_or_add(speaker, init.pointer, init.rank, init.nranks, init.comm_id)
        handle = self.all[index]
        handle.complete = init.complete
        handle.comm_id = init.comm_id or handle.comm_id
        handle.dev = init.cuda_dev if init.cuda_dev >= 0 else handle.dev
        # "Init START" and "Init COMPLETE" name different fields: what one lacks stays.
        handle.nvml_dev = max(init.nvml_dev, handle.nvml_dev)
        handle.bus_id = init.bus_id or handle.bus_id
        handle.split = max(init.split, handle.split)
        if init.color is not None:
            handle.color, handle.key = init.color, init.key
            parent = self._by_pointer.get((speaker.host, speaker.pid, init.parent), -1)
            # A handle that has the address of its freed parent is not its own parent.
            handle.parent = handle.parent if parent == index else parent
        if not init.complete:
            self._slot_of[speaker[:3]] = self._add_slot(speaker, index)
        slot = self._bind_slot(speaker, index)
        if init.complete:
            self._done.add(slot)

    def add_topology(self, speaker: records.Speaker, topology: Topology) -> None:
        """Adds the number of nodes of a communicator."""
        index = self._find_or_add(speaker, topology.pointer, topology.rank, topology.nranks, "")
        self.all[index].nodes, self.all[index].local_ranks = topology.nodes, topology.local_ranks
        self._bind_slot(speaker, index)

    def add_init_time(self, speaker: records.Speaker, init_time: InitTime) -> None:
        """Adds the init time of the communicator that the thread has completed."""
        slot = self._slot_of.get(speaker[:3], -1)
        index, ranks = self._slots[slot] if slot >= 0 else -1, (init_time.rank, init_time.nranks)
        # A thread may have initialized another communicator since: then the time gets its own.
        if index < 0 or (self.all[index].rank, self.all[index].nranks) != ranks:
            index = self._add(speaker, "", init_time.nranks)
            self.all[index].rank = init_time.rank
        self.all[index].init_ns = init_time.init_ns

    def find_handle(self, speaker: records.Speaker, pointer: str, nranks: int) -> int:
        """The index of the handle of a call."""
        index = self._by_pointer.get((speaker.host, speaker.pid, pointer))
        return self._add(speaker, pointer, nranks) if index is None else index

    def find_slot(self, speaker: records.Speaker, pointer: str = "") -> int:
        """The slot of a record: that of its pointer if it has one, else of its thread."""
        index = self._by_pointer.get((speaker.host, speaker.pid, pointer), -1) if pointer else -1
        if index >= 0:
            return self._add_slot(speaker, index)
        slot = self._slot_of.get(speaker[:3], -1)
        # What a thread writes after "Init COMPLETE" is of the next communicator.
        if slot < 0 or slot in self._done:
            slot = self._slot_of[speaker[:3]] = self._add_slot(speaker, -1)
        return slot

    def add_channels(self, speaker: records.Speaker, channels: Channels) -> None:
        """Adds the numbers of channels, which are printed before the end of the init."""
        slot = self.find_slot(speaker)
        self._channels[slot] = channels
        if self._slots[slot] >= 0:
            self._bind_slot(speaker, self._slots[slot])

    def resolve_slots(self) -> tuple[int, ...]:
        """The handle of each slot: as bound, else the only one of its process, else -1."""
        only: dict[tuple[str, int], int] = {}
        for index, handle in enumerate(self.all):
            process = (handle.host, handle.pid)
            # With several communicators in a process, a record without one may be of any.
            only[process] = -1 if process in only else index
        return tuple(
            index if index >= 0 else only.get(process, -1)
            for index, process in zip(self._slots, self._processes, strict=True)
        )

    def _find_or_add(
        self, speaker: records.Speaker, pointer: str, rank: int, nranks: int, comm_id: str
    ) -> int:
        index = self._by_pointer.get((speaker.host, speaker.pid, pointer), -1)
        handle = self.all[index] if index >= 0 else None
        if handle is not None and handle.rank >= 0:
            # A pointer that was freed is reused for another communicator; only an init that goes
            # on, with the same ranks and id, is of the same one.
            same = (handle.rank, handle.nranks) == (rank, nranks)
            ids = {comm_id, handle.comm_id} - {""}
            if handle.complete or not same or len(ids) > 1:
                handle = None
        if handle is None:
            index = self._add(speaker, pointer, nranks)
        self.all[index].rank, self.all[index].nranks = rank, nranks
        return index

    def _add(self, speaker: records.Speaker, pointer: str, nranks: int) -> int:
        self.all.append(CommHandle(speaker.host, speaker.pid, pointer, speaker.dev, nranks))
        if pointer:
            self._by_pointer[speaker.host, speaker.pid, pointer] = len(self.all) - 1
        return len(self.all) - 1

    def _bind_slot(self, speaker: records.Speaker, index: int) -> int:
        slot = self.find_slot(speaker)
        # The thread has begun another communicator without a record of it.
        if self._slots[slot] not in (-1, index):
            slot = self._slot_of[speaker[:3]] = self._add_slot(speaker, index)
        self._slots[slot] = index
        if slot in self._channels:
            channels = self._channels.pop(slot)
            self.all[index].coll_channels = channels.coll
            self.all[index].p2p_channels = channels.p2p
        return slot

    def _add_slot(self, speaker: records.Speaker, index: int) -> int:
        self._slots.append(index)
        self._processes.append((speaker.host, speaker.pid))
        return len(self._slots) - 1


# The debug log of one process, or of a whole job in one file.

# The parts before the word are what a process writes alone, so that a text about a log is not one:
# "[0] NCCL INFO Bootstrap", "host:12:34 [0] NCCL INFO Using network IB".
_WRITTEN = re.compile(
    rb"(?:^|\[\d{1,5}\] +(?:\d{16} )?|:\d+ (?:\([^)\n]{1,80}\) )?)NCCL (?:INFO|WARN) \S", re.M
)


def is_nccl_log(head: bytes) -> bool:
    """Whether these first bytes of a file contain NCCL log lines, quoted ones included."""
    return _WRITTEN.search(head) is not None


def read_nccl_log(source: Source) -> records.NcclLog:
    """Reads the log; complete messages of interleaved lines are recovered.

    Memory use is 72 bytes per call and one record per connection. Raises DataError if the file
    cannot be opened.
    """
    reading = _LogReader()
    with open_unpacked(source) as content:
        for line in content.read_lines():
            reading.take(line)
    return reading.build_log(source.where, content.torn)


@dataclass(slots=True)
class LoggedCalls:
    """The calls so far: one array per process, _COLUMNS numbers per call."""

    _rows: dict[tuple[str, int], array[int]] = field(default_factory=dict)
    _ops: dict[bytes, int] = field(default_factory=dict)

    def add_call(
        self, speaker: records.Speaker, stamp_ns: int, text: bytes, handles: CommHandles
    ) -> bool:
        """Adds a "...: opCount ..." message; False if it is truncated."""
        match = CALL.match(text)
        if match is None:
            return False
        name, seq, count, dtype, root, pointer, nranks, global_rank = match.groups()
        op = self._ops.get(name)
        if op is None:
            op = self._ops[name] = OP_CODE[parse_op(name.decode(errors="replace"))]
        size = int(nranks)
        handle = handles.find_handle(speaker, pointer.decode(errors="replace"), size)
        process = (speaker.host, speaker.pid)
        rows = self._rows.get(process)
        if rows is None:
            rows = self._rows[process] = array("q")
        rows.extend(
            (handle, op, int(dtype), int(count), int(root), int(seq, 16), size, stamp_ns,
             int(global_rank) if global_rank else -1)
        )  # fmt: skip
        return True

    def build_tables(self) -> list[Int64]:
        """The rows of each process, (calls, _COLUMNS)."""
        return [
            np.frombuffer(rows, dtype=np.int64).reshape(-1, _COLUMNS)
            for rows in self._rows.values()
        ]


@dataclass(slots=True)
class _LogReader:
    """The data of all lines read so far."""

    lines: int = 0
    nccl_lines: int = 0
    torn: int = 0
    splitter: records.MessageSplitter = field(default_factory=records.MessageSplitter)
    handles: CommHandles = field(default_factory=CommHandles)
    rows: LoggedCalls = field(default_factory=LoggedCalls)
    versions: dict[str, None] = field(default_factory=dict)
    facts: dict[
        records.GraphPattern | records.SystemBandwidth | Network | records.NcclSetting, None
    ] = field(default_factory=dict)
    choices: Counter[records.AlgorithmChoice] = field(default_factory=Counter)
    warnings: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    graphs: list[tuple[int, Graph]] = field(default_factory=list)
    tables: CostTables = field(default_factory=CostTables)

    def take(self, line: bytes) -> None:
        """Adds a line."""
        self.lines += 1
        # Most lines of a job's output are not of NCCL: a search for three bytes is all they cost.
        if b"CCL" not in line:
            self.torn += b" [nranks=" in line  # the rest of a line that another writer interrupted
            return
        if b"CCL version" in line:
            self.versions |= dict.fromkeys(records.find_versions(line))
        messages = self.splitter.split_line(line)
        if messages:
            # A message that cannot be parsed is truncated; a line is counted once for all its own.
            self.nccl_lines += 1
            self.torn += len(messages) > sum(self._take_message(message) for message in messages)

    def _take_message(self, message: records.LogMessage) -> bool:
        """Adds a message; False if it is truncated."""
        speaker, stamp_ns, level, text = message
        if b": opCount " in text:
            return self.rows.add_call(speaker, stamp_ns, text, self.handles)
        decoded = text.decode(errors="replace")
        if level == b"WARN":
            self.warnings[decoded, speaker.host, speaker.pid] += 1
            return bool(decoded)
        if is_table(decoded):
            return self.tables.add_line(speaker, self.handles.find_slot(speaker), decoded)
        parse = find_parser(decoded)
        if parse is None:
            return bool(decoded)
        parsed = parse(decoded)
        if parsed is not None:
            match parsed:
                case Init():
                    self.handles.add_init(speaker, parsed)
                case Topology():
                    self.handles.add_topology(speaker, parsed)
                case InitTime():
                    self.handles.add_init_time(speaker, parsed)
                case Channels():
                    self.handles.add_channels(speaker, parsed)
                case Graphs():
                    slot = self.handles.find_slot(speaker, parsed.pointer)
                    self.graphs += [(slot, graph) for graph in parsed.graphs]
                case records.AlgorithmChoice():
                    self.choices[parsed] += 1
                case _:
                    self.facts[parsed] = None
        return parsed is not None

    def build_log(self, source: str, torn_end: str) -> records.NcclLog:
        """Builds the log, with the communicator of each record."""
        joined_comms = join_handles(self.handles.all)
        world = find_world(joined_comms.communicators)
        facts = tuple(self.facts)
        comm = [joined_comms.comm_of[i] if i >= 0 else -1 for i in self.handles.resolve_slots()]
        graphs = [replace(graph, comm=comm[slot]) for slot, graph in self.graphs]
        calls = build_rank_calls(
            source, self.rows.build_tables(), self.handles.all, joined_comms, world
        )
        return records.NcclLog(
            source=source,
            versions=tuple(self.versions),
            communicators=joined_comms.communicators,
            rings=tuple(one for one in graphs if isinstance(one, records.Ring)),
            neighbors=tuple(one for one in graphs if isinstance(one, records.RingNeighbors)),
            trees=tuple(one for one in graphs if isinstance(one, records.TreeNode)),
            links=tuple(one for one in graphs if isinstance(one, records.TopologyLink)),
            patterns=tuple(one for one in facts if isinstance(one, records.GraphPattern)),
            systems=tuple(one for one in facts if isinstance(one, records.SystemBandwidth)),
            networks=tuple(one.name for one in facts if isinstance(one, Network)),
            settings=tuple(one for one in facts if isinstance(one, records.NcclSetting)),
            calls=calls,
            costs=tuple(
                records.CostTable(comm[table.slot], table.host, table.pid, tuple(table.cells))
                for table in self.tables.all
                if table.cells
            ),
            choices=tuple(replace(one, count=times) for one, times in self.choices.items()),
            warnings=tuple(
                records.NcclWarning(*warned, count) for warned, count in self.warnings.items()
            ),
            lines=self.lines,
            nccl_lines=self.nccl_lines,
            torn=self.torn,
            notes=tuple(list_notes(self.torn, torn_end, joined_comms, world, calls)),
        )


def list_notes(
    torn: int, torn_end: str, joined_comms: JoinedComms, world: World, calls: Sequence[RankCalls]
) -> Iterator[Note]:
    if torn:
        yield Note("nccl_torn_lines", f"{torn} lines are truncated or interleaved")
    if torn_end:
        yield Note("nccl_torn_file", f"the file ends early ({torn_end})")
    if joined_comms.alone:
        yield Note(
            "nccl_alone",
            f"{joined_comms.alone} communicators have no id and could not be joined "
            "across processes",
        )
    if world.comm >= 0:
        name = joined_comms.communicators[world.comm].id
        yield Note(
            "nccl_world",
            f"global ranks are those of {name}, the largest communicator ({world.size} ranks)",
        )
    elif calls:
        yield Note("nccl_no_world", "no communicator of all processes; global ranks are unknown")
    if any((one.calls.issued_ns >= 0).any() for one in calls):
        yield Note("nccl_clock", "times without a time zone are read as UTC")


# The calls that a log has with NCCL_DEBUG_SUBSYS=COLL, as columns per process.

# AllReduce: opCount 1f sendbuff 0x7f recvbuff 0x7f count 1024 datatype 7 op 0 root 0
# comm 0x55d0 [nranks=8] stream 0x55d1 task 0 globalrank 3 (the last two by RCCL)
CALL = re.compile(
    rb"\A(\w+): opCount ([0-9a-f]{1,15}) sendbuff \S+ recvbuff \S+ (?:acc \S+ )?count (\d{1,12})"
    rb" datatype (\d{1,3}) op \d+ root (-?\d{1,7}) comm (\S+) \[nranks=(\d{1,6})\]"
    rb"(?: stream \S+(?: task -?\d+ globalrank (\d{1,7}))?)?"
)

_DTYPES = (
    ("int8", 1), ("uint8", 1), ("int32", 4), ("uint32", 4), ("int64", 8), ("uint64", 8),
    ("float16", 2), ("float32", 4), ("float64", 8), ("bfloat16", 2), ("float8_e4m3", 1),
    ("float8_e5m2", 1),
)  # fmt: skip
"""torch's name and the bytes of an element, by ncclDataType_t."""

# Handle, op, dtype, count, root, sequence number, number of ranks, time and global rank.
_COLUMNS = 9


def build_rank_calls(
    source: str,
    tables: Sequence[Int64],
    handles: Sequence[CommHandle],
    joined: JoinedComms,
    world: World,
) -> tuple[RankCalls, ...]:
    """The calls of each process and device, sorted by rank; times relative to the log's first."""
    stamps = [rows[:, 7][rows[:, 7] >= 0] for rows in tables]
    t0_unix_ns = min((int(known.min()) for known in stamps if len(known)), default=0)
    owner_of_handle = [handle.owner for handle in handles]
    calls_by_owner: list[tuple[Owner, RankCalls]] = []
    for process_rows in tables:
        for owner in dict.fromkeys(
            owner_of_handle[handle] for handle in _list_handles(process_rows[:, 0])
        ):
            is_owned = np.array([holder == owner for holder in owner_of_handle], dtype=np.bool_)
            rows = process_rows[is_owned[process_rows[:, 0]]]
            used = _list_handles(rows[:, 0])
            communicators = [joined.communicators[joined.comm_of[handle]] for handle in used]
            # RCCL prints the global rank with each call; it goes before the one that is inferred.
            global_rank = int(rows[:, 8].max())
            owner_calls = RankCalls(
                source=source,
                rank=global_rank if global_rank >= 0 else world.ranks.get(owner, -1),
                world_size=world.size,
                host=owner[0],
                t0_unix_ns=t0_unix_ns,
                calls=_build_calls(rows, used, communicators, world, t0_unix_ns),
                dur_ns=np.full(len(rows), -1, dtype=np.int64),
                groups=tuple(_build_group(one, world) for one in communicators),
            )
            calls_by_owner.append((owner, owner_calls))
    calls_by_owner.sort(key=lambda one: (one[1].rank, one[0]))
    return tuple(calls for _, calls in calls_by_owner)


def _build_calls(
    rows: Int64,
    used: Sequence[int],
    communicators: Sequence[records.Communicator],
    world: World,
    t0_unix_ns: int,
) -> Calls:
    handle, op, code, count, root, seq, nranks, stamp_ns, _ = rows.T
    codes, dtype = np.unique(code, return_inverse=True)
    # Few codes and many calls: each code is looked up once.
    element_bytes = np.array([_look_up_dtype(c)[1] for c in codes], dtype=np.int64)[dtype]
    rank_bytes = np.where(element_bytes > 0, count * element_bytes, -1)
    full_bytes = np.where(rank_bytes >= 0, rank_bytes * nranks, -1)
    group_ids = np.full(max(used) + 1, -1, dtype=np.int32)
    group_ids[list(used)] = np.arange(len(used), dtype=np.int32)
    # A send or recv has its peer as root, as a rank of the communicator.
    peers = np.full(len(rows), -1, dtype=np.int32)
    for index, communicator in zip(used, communicators, strict=True):
        ranks = map_global_ranks(communicator, world)
        selected = (handle == index) & _is_op(op, "send", "recv")
        peers[selected] = [ranks.get(rank, -1) for rank in root[selected].tolist()]
    return Calls(
        event=np.full(len(rows), -1, dtype=np.int64),
        issued_ns=np.where(stamp_ns >= 0, stamp_ns - t0_unix_ns, -1),
        group_id=group_ids[handle],
        seq=seq.copy(),
        op=op.astype(np.uint8),
        dtype=dtype.astype(np.int32),
        peer=peers,
        input_bytes=np.where(
            _is_op(op, "reduce_scatter", "all_to_all", "scatter"), full_bytes, rank_bytes
        ),
        message_bytes=np.where(
            _is_op(op, "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"),
            full_bytes,
            rank_bytes,
        ),
        dtypes=tuple(_look_up_dtype(c)[0] for c in codes),
    )


def _build_group(communicator: records.Communicator, world: World) -> Group:
    """The communicator as a group of global ranks; no ranks if some are unknown."""
    ranks = map_global_ranks(communicator, world)
    is_complete = len(ranks) == communicator.nranks
    return Group(communicator.id, tuple(ranks[r] for r in sorted(ranks)) if is_complete else (), "")


def _look_up_dtype(code: int) -> tuple[str, int]:
    return _DTYPES[code] if code < len(_DTYPES) else (f"nccl_{code}", -1)


def _is_op(op: Int64, *names: str) -> Bool:
    return np.isin(op, [OP_CODE[name] for name in names])


def _list_handles(handle: Int64) -> list[int]:
    """The distinct handles in order of their first call."""
    indices, first = np.unique(handle, return_index=True)
    return [int(index) for index in indices[np.argsort(first)]]


# Communicators joined from the handles of all processes, and their global ranks.

Key = tuple[object, ...]


class JoinedComms(Struct, frozen=True):
    """The communicators, the communicator of each handle, and the number of unjoined ones."""

    communicators: tuple[records.Communicator, ...]
    comm_of: tuple[int, ...]
    alone: int


def join_handles(handles: Sequence[CommHandle]) -> JoinedComms:
    """Joins the handles of each communicator.

    They share a commId or, for a split without one, the parent, the number of the split and the
    color. Before NCCL 2.16 there is neither: then handles of one size are one communicator if each
    rank is always the same process, in the whole log or on one host; the n-th handles of all
    processes belong together. Ambiguous handles are not joined.
    """
    parts: dict[Key, list[int]] = defaultdict(list)
    turns: Counter[Key] = Counter()
    keys: list[Key] = []
    for index, handle in enumerate(handles):
        turn = (handle.owner, handle.parent, handle.color)
        # NCCL prints an id of zeros until it has one.
        if handle.comm_id.strip("0x"):
            key: Key = ("id", handle.comm_id, handle.nranks)
        elif handle.color is not None:
            parent = keys[handle.parent] if 0 <= handle.parent < len(keys) else ()
            split = handle.split if handle.split >= 0 else turns[turn]
            key = ("split", parent, split, handle.color, handle.nranks)
        else:
            key = ("size", handle.nranks)
        keys.append(key)
        turns[turn] += 1
        parts[key].append(index)
    teams = sorted(team for part in parts.values() for team in _split_teams(handles, part))
    comm_of = [-1] * len(handles)
    for comm, team in enumerate(teams):
        for index in team:
            comm_of[index] = comm
    communicators = tuple(
        _build_communicator([handles[i] for i in team], comm_of) for team in teams
    )
    alone = sum(
        len(one.members) == 1 < one.nranks and ("@" in one.id and one.members[0].rank >= 0)
        for one in communicators
    )
    return JoinedComms(communicators, tuple(comm_of), alone)


def _split_teams(handles: Sequence[CommHandle], part: Sequence[int]) -> list[list[int]]:
    known = [index for index in part if handles[index].rank >= 0]
    # A handle without a rank is only known from calls: nothing says with which it belongs.
    teams = [[index] for index in part if handles[index].rank < 0]
    job_teams = _match_by_turn(handles, known)
    if job_teams is not None:
        return teams + job_teams
    on_host: dict[str, list[int]] = defaultdict(list)
    for index in known:
        on_host[handles[index].host].append(index)
    for on_this_host in on_host.values():
        local = _match_by_turn(handles, on_this_host)
        for team in [[index] for index in on_this_host] if local is None else local:
            # A part of a communicator on one host may go with several parts on others.
            full = len(team) == handles[team[0]].nranks
            teams += [team] if full else [[index] for index in team]
    return teams


def _match_by_turn(handles: Sequence[CommHandle], part: Sequence[int]) -> list[list[int]] | None:
    """Joins the n-th handles of all ranks; None if a rank has several processes."""
    owners: dict[int, Owner] = {}
    turns: Counter[int] = Counter()
    teams: dict[int, list[int]] = defaultdict(list)
    for index in part:
        handle = handles[index]
        if owners.setdefault(handle.rank, handle.owner) != handle.owner:
            return None
        teams[turns[handle.rank]].append(index)
        turns[handle.rank] += 1
    return list(teams.values()) if len(set(owners.values())) == len(owners) else None


def _build_communicator(team: Sequence[CommHandle], comm_of: Sequence[int]) -> records.Communicator:
    # The lowest rank stands for all: parent, color and key are the same, and -1 sorts first.
    team = sorted(team, key=lambda handle: handle.rank)
    first = team[0]
    return records.Communicator(
        id=first.comm_id or f"{first.pointer}@{first.host}:{first.pid}",
        nranks=first.nranks,
        members=tuple(
            records.Member(
                rank=handle.rank,
                host=handle.host,
                pid=handle.pid,
                cuda_dev=handle.dev,
                nvml_dev=handle.nvml_dev,
                bus_id=handle.bus_id,
                pointer=handle.pointer,
                init_ns=handle.init_ns,
            )
            for handle in team
        ),
        nodes=max(handle.nodes for handle in team),
        local_ranks=max(handle.local_ranks for handle in team),
        coll_channels=max(handle.coll_channels for handle in team),
        p2p_channels=max(handle.p2p_channels for handle in team),
        parent=comm_of[first.parent] if first.parent >= 0 else -1,
        color=first.color,
        key=first.key,
    )


class World(Struct, frozen=True):
    """The largest communicator of a log; comm is -1 if it is ambiguous or missing."""

    comm: int
    size: int
    ranks: dict[Owner, int]


NO_WORLD = World(-1, -1, {})


def find_world(communicators: Sequence[records.Communicator]) -> World:
    """The largest communicator, whose ranks are used as global ranks.

    If several have that size, all must have the same processes in the same order.
    """
    with_rank = [i for i, one in enumerate(communicators) if one.members[0].rank >= 0]
    size = max((communicators[i].nranks for i in with_rank), default=-1)
    largest = [i for i in with_rank if communicators[i].nranks == size]
    ranks: dict[Owner, int] = {}
    owners: dict[int, Owner] = {}
    for member in (member for i in largest for member in communicators[i].members):
        # One process may drive several devices, each of which is a rank.
        owner = (member.host, member.pid, member.cuda_dev)
        rank = member.rank
        if ranks.setdefault(owner, rank) != rank or owners.setdefault(rank, owner) != owner:
            return NO_WORLD
    return World(largest[0], size, ranks) if largest else NO_WORLD


def map_global_ranks(communicator: records.Communicator, world: World) -> dict[int, int]:
    """The global rank of each rank of the communicator, if known."""
    # All communicators of that size have the ranks of the largest one: find_world requires it.
    if communicator.nranks == world.size and world.comm >= 0:
        return {rank: rank for rank in range(world.size)}
    global_rank = {
        member.rank: world.ranks.get((member.host, member.pid, member.cuda_dev), -1)
        for member in communicator.members
    }
    return {rank: own for rank, own in global_rank.items() if rank >= 0 and own >= 0}
