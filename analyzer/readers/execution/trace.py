"""A PyTorch execution trace (ExecutionTraceObserver, the host part of Chakra) -> its nouns."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.readers.calls import to_calls
from stepsplit.analyzer.readers.execution.comms import MESSAGES, ROOTED, Comm, GroupBook, comm_of
from stepsplit.analyzer.readers.execution.nodes import NODES, NUMBERS, Node, NodeStream, known
from stepsplit.analyzer.readers.sources import Source
from stepsplit.analyzer.readers.unpack import unpacked
from stepsplit.analyzer.trace import Int32, Int64, Note, RankCalls

COMM, GROUPS = "record_param_comms", "## process_group:init ##"
_OF_SCHEMA = re.compile(rb'"schema"\s*:\s*"\d+\.\d+\.\d+-chakra')
_OF_NODE = (re.compile(rb'"id"\s*:\s*\d'), re.compile(rb'"(?:ctrl_deps|rf_id)"\s*[:,]'))
_RANK_IN_NAME = re.compile(r"(?:rank|et|trace)[-_.]?(\d{1,6})(?!.*\d)", re.IGNORECASE)
BOOKKEEPING = ("wait", "init")
_COLUMNS = 3 + len(NUMBERS)


@dataclass(frozen=True, slots=True)
class Nodes:
    """What ran on the host, a row a node in the order of the file: as they ended.

    node_id is the trace's number of a node, parent that of the node that called it, fw_parent that
    of the forward node that a backward node belongs to (0 for none). rf_id is what Kineto calls
    "Record function id". tid and fw_tid count threads from 1; seq_id joins forward and backward
    (-1 for none); scope is torch's RecordScope. name_id indexes names. -1 is unknown.
    """

    node_id: Int64
    parent: Int64
    rf_id: Int64
    fw_parent: Int64
    seq_id: Int64
    scope: Int64
    tid: Int64
    fw_tid: Int64
    name_id: Int32
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.node_id)


@dataclass(frozen=True, slots=True)
class ExecutionTrace:
    """What one rank ran on the host, and what it communicated.

    The trace has no times: calls.issued_ns and dur_ns are -1 and t0_unix_ns is 0. call_rf_id has a
    row a call: the "Record function id" of the call's record_param_comms in the Kineto trace of the
    same run, whose "External id" is that of the kernel. schema is as the file says; pid and rank
    are -1 where not told.
    """

    source: str
    schema: str
    pid: int
    rank: int
    nodes: Nodes
    calls: RankCalls
    call_rf_id: Int64
    notes: tuple[Note, ...] = ()


def recognizes(head: bytes) -> bool:
    """Whether these are the first bytes of an execution trace: its schema, or a node's keys."""
    opened = NODES.search(head) if head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{") else None
    if opened is None or b'"traceEvents"' in head[: opened.start()]:
        return False
    first = head[opened.end() : opened.end() + 4096]
    of_node = first.lstrip().startswith(b"{") and all(key.search(first) for key in _OF_NODE)
    return of_node or _OF_SCHEMA.search(head) is not None


def read_execution_trace(source: Source) -> ExecutionTrace:
    """The nodes and calls of one rank. Raises DataError where no node is whole."""
    reading = _Reading()
    with unpacked(source) as content:
        stream = NodeStream(content)
        for node in stream:
            reading.take(node)
        torn = content.torn or ("" if stream.whole else "it ends early")
    if not len(reading):
        mend = "record it again, or check that it is of torch's ExecutionTraceObserver"
        raise DataError(source.where, "no whole node of an execution trace in it", mend)
    rank, guessed = reading.rank(source.inner.name)
    return ExecutionTrace(
        source=source.where,
        schema=stream.envelope.schema,
        pid=stream.envelope.pid,
        rank=rank,
        nodes=reading.nodes(),
        calls=reading.calls(source.where, rank),
        call_rf_id=np.array([comm.rf_id for comm in reading.comms], dtype=np.int64),
        notes=(*_notes(torn, stream.skipped, guessed), *reading.notes()),
    )


def _notes(torn: str, skipped: int, guessed: bool) -> Iterator[Note]:
    if torn:
        yield Note("file_cut", f"the execution trace is cut: {torn}; what is whole is kept")
    if skipped:
        yield Note("nodes_skipped", f"{skipped} entries of the execution trace are no nodes")
    if guessed:
        yield Note("rank_guessed", "the rank is taken from the name of the execution trace")


class _Reading:
    """What was read so far: the nodes' columns, the groups, the calls."""

    def __init__(self) -> None:
        self.comms: list[Comm] = []
        self._book = GroupBook()
        self._rows = array("q")
        self._names: dict[str, int] = {}
        self._unknown = self._unreadable = 0

    def __len__(self) -> int:
        return len(self._rows) // _COLUMNS

    def take(self, node: Node) -> None:
        """Adds a node, and what it says of groups and calls."""
        name_id = self._names.setdefault(node.name, len(self._names))
        self._rows.extend((known(node.id), node.parent_id, *node.numbers(), name_id))
        if node.name == GROUPS:
            self._unreadable += not self._book.add(node)
        elif node.name == COMM:
            self._take_comm(comm_of(node))

    def _take_comm(self, comm: Comm) -> None:
        if comm.op != "unknown":
            self.comms.append(comm)
        elif comm.name not in BOOKKEEPING:
            self._unknown += 1

    def nodes(self) -> Nodes:
        """The nodes as columns."""
        rows = np.array(self._rows, dtype=np.int64).reshape(-1, _COLUMNS)
        node_id, parent, *numbers, name_id = np.ascontiguousarray(rows.T)
        rf_id, fw_parent, seq_id, scope, tid, fw_tid = numbers
        return Nodes(
            node_id=node_id,
            parent=parent,
            rf_id=rf_id,
            fw_parent=fw_parent,
            seq_id=seq_id,
            scope=scope,
            tid=tid,
            fw_tid=fw_tid,
            name_id=name_id.astype(np.int32),
            names=tuple(self._names),
        )

    def calls(self, source: str, rank: int) -> RankCalls:
        """The calls, in the order of the file."""
        calls = to_calls([self._book.call(comm) for comm in self.comms])
        return RankCalls(
            source=source,
            rank=rank,
            world_size=self._book.world_size,
            host="",
            t0_unix_ns=0,
            calls=calls,
            dur_ns=np.full(len(calls), -1, dtype=np.int64),
            groups=tuple(self._book.groups),
        )

    def rank(self, file_name: str) -> tuple[int, bool]:
        """The global rank, -1 where nothing tells it, and whether only the file's name does.

        Its own calls tell it; so do the groups, since a rank lists those that it is in.
        """
        own = (comm for comm in self.comms if comm.op not in (*ROOTED, *MESSAGES))
        told = {self._book.global_rank(comm) for comm in own} - {-1}
        shared = self._book.ranks_in_all
        for ranks in (told, shared):
            if len(ranks) == 1:
                return min(ranks), False
        named = _RANK_IN_NAME.search(file_name)
        rank = -1 if named is None else int(named[1])
        return (rank, True) if rank >= 0 and (not shared or rank in shared) else (-1, False)

    def notes(self) -> Iterator[Note]:
        """What of the groups and calls could not be told."""
        if self._unreadable:
            yield Note("groups_skipped", f"{self._unreadable} lists of groups are not whole")
        if self._unknown:
            yield Note("calls_skipped", f"{self._unknown} calls are of a kind that is not known")
        if not self.comms and any(name.startswith("c10d::") for name in self._names):
            problem = "collectives ran whose backend recorded no parameters (gloo, say)"
            yield Note("calls_missing", problem)
