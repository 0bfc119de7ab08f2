"""Reads PyTorch execution traces (ExecutionTraceObserver, the host part of Chakra)."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Struct

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.ops import (
    MESSAGES,
    compute_element_bytes,
    compute_message_bytes,
    normalize_dtype,
    parse_op,
)
from stepsplit.analyzer.readers.compression import UnpackedStream, open_unpacked
from stepsplit.analyzer.readers.rank_limits import MAX_LISTED_RANKS
from stepsplit.analyzer.readers.sources import Source
from stepsplit.analyzer.trace import (
    MAX_NAME_LENGTH,
    Call,
    Group,
    Int32,
    Int64,
    Note,
    RankCalls,
    build_calls,
)

COMM, GROUPS = "record_param_comms", "## process_group:init ##"

_OF_SCHEMA = re.compile(rb'"schema"\s*:\s*"\d+\.\d+\.\d+-chakra')

# Keys of every node, by which a list of nodes without a schema is recognized.
_OF_NODE = (re.compile(rb'"id"\s*:\s*\d'), re.compile(rb'"(?:ctrl_deps|rf_id)"\s*[:,]'))

_RANK_IN_NAME = re.compile(r"(?:rank|et|trace)[-_.]?(\d{1,6})(?!.*\d)", re.IGNORECASE)

BOOKKEEPING = ("wait", "init")

NUMBERS = ("rf_id", "fw_parent", "seq_id", "scope", "tid", "fw_tid")

_COLUMNS = 3 + len(NUMBERS)


@dataclass(frozen=True, slots=True)
class Nodes:
    """The host operations of an execution trace, in file order (by end); -1 is unknown.

    Columns of shape (n,).

    Attributes:
        node_id: Id of the node in the trace.
        parent: node_id of the calling node.
        rf_id: The "Record function id" of Kineto traces.
        fw_parent: node_id of the forward node of a backward node, 0 for none.
        seq_id: Joins forward and backward nodes, -1 for none.
        scope: torch's RecordScope.
        tid: Thread, counted from 1.
        fw_tid: Thread of the forward node, counted from 1.
        name_id: Index into names.
        names: The distinct names.
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
    """The execution trace of one rank: host operations and communication calls, without times.

    Attributes:
        source: The file.
        schema: Version of the format as the file states it.
        pid: Process id, -1 if unknown.
        rank: Global rank, -1 if unknown.
        nodes: The host operations.
        calls: The communication calls; issued_ns and dur_ns are -1 and t0_unix_ns is 0.
        call_rf_id: For each call the "Record function id" of its record_param_comms in the Kineto
            trace of the same run; its "External id" is that of the kernel. Shape (calls,).
        notes: Limitations of the trace.
    """

    source: str
    schema: str
    pid: int
    rank: int
    nodes: Nodes
    calls: RankCalls
    call_rf_id: Int64
    notes: tuple[Note, ...] = ()


def is_execution_trace(head: bytes) -> bool:
    """Whether the bytes are the beginning of an execution trace: a schema, or a node's keys."""
    # A byte order mark may stand before the brace.
    list_begin = (
        NODES.search(head) if head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{") else None
    )
    if list_begin is None or b'"traceEvents"' in head[: list_begin.start()]:
        return False
    first = head[list_begin.end() : list_begin.end() + 4096]
    of_node = first.lstrip().startswith(b"{") and all(key.search(first) for key in _OF_NODE)
    return of_node or _OF_SCHEMA.search(head) is not None


def read_execution_trace(source: Source) -> ExecutionTrace:
    """Reads the nodes and calls of one rank. Raises DataError if there is no complete node."""
    collector = _TraceCollector()
    with open_unpacked(source) as content:
        stream = NodeStream(content)
        for node in stream:
            collector.add_node(node)
        torn = content.torn or ("" if stream.whole else "it ends early")
    if not len(collector):
        hint = "record it again with torch's ExecutionTraceObserver"
        raise DataError(source.where, "no complete node of an execution trace found", hint)
    rank, guessed = collector.infer_rank(source.inner.name)
    return ExecutionTrace(
        source=source.where,
        schema=stream.envelope.schema,
        pid=stream.envelope.pid,
        rank=rank,
        nodes=collector.build_nodes(),
        calls=collector.build_rank_calls(source.where, rank),
        call_rf_id=np.array([comm.rf_id for comm in collector.comms], dtype=np.int64),
        notes=tuple(collector.list_notes(torn, stream.skipped, guessed)),
    )


class _TraceCollector:
    """Collects columns of nodes, groups and calls while the trace is read."""

    def __init__(self) -> None:
        self.comms: list[Comm] = []
        self._book = GroupTable()
        self._rows = array("q")
        self._names: dict[str, int] = {}
        self._unknown = self._unreadable = 0

    def __len__(self) -> int:
        return len(self._rows) // _COLUMNS

    def add_node(self, node: Node) -> None:
        """Adds a node and its groups and calls."""
        name_id = self._names.setdefault(node.name, len(self._names))
        self._rows.extend((sanitize_int(node.id), node.parent_id, *node.list_numbers(), name_id))
        if node.name == GROUPS:
            self._unreadable += not self._book.add(node)
        elif node.name == COMM:
            comm = parse_comm(node)
            if comm.op != "unknown":
                self.comms.append(comm)
            elif comm.name not in BOOKKEEPING:
                self._unknown += 1

    def build_nodes(self) -> Nodes:
        """Converts the collected nodes to columns."""
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
            names=tuple(name[:MAX_NAME_LENGTH] for name in self._names),
        )

    def build_rank_calls(self, source: str, rank: int) -> RankCalls:
        """The calls in file order."""
        calls = build_calls([self._book.build_call(comm) for comm in self.comms])
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

    def infer_rank(self, file_name: str) -> tuple[int, bool]:
        """The global rank, -1 if unknown, and whether it is only from the file name.

        It is known from the rank's own calls, or as the only common member of its groups.
        """
        # Rooted calls name their root and messages their peer in place of the own rank.
        own = (comm for comm in self.comms if comm.op not in (*ROOTED, *MESSAGES))
        own_ranks = {self._book.find_global_rank(comm) for comm in own} - {-1}
        shared = self._book.ranks_in_all
        for ranks in (own_ranks, shared):
            if len(ranks) == 1:
                return min(ranks), False
        match = _RANK_IN_NAME.search(file_name)
        rank = -1 if match is None else int(match[1])
        return (rank, True) if rank >= 0 and (not shared or rank in shared) else (-1, False)

    def list_notes(self, torn: str, skipped: int, guessed: bool) -> Iterator[Note]:
        """Limitations of the trace, its groups and its calls."""
        if torn:
            text = f"the execution trace is cut off ({torn}); complete nodes are kept"
            yield Note("file_cut", text)
        if skipped:
            text = f"{skipped} invalid entries of the execution trace are skipped"
            yield Note("nodes_skipped", text)
        if guessed:
            text = "the rank is taken from the file name of the execution trace"
            yield Note("rank_guessed", text)
        if self._unreadable:
            yield Note("groups_skipped", f"{self._unreadable} lists of groups are incomplete")
        if self._unknown:
            yield Note("calls_skipped", f"{self._unknown} calls of unknown kind are skipped")
        if not self.comms and any(name.startswith("c10d::") for name in self._names):
            problem = (
                "collectives of a backend that records no parameters, such as gloo, are missing"
            )
            yield Note("calls_missing", problem)


# Groups and calls in the nodes of an execution trace.

ROOTED = ("broadcast", "reduce", "gather", "scatter")

_TENSOR = re.compile(r"Tensor\(([^()]*)\)")

_CONFIG = re.compile(r"\{(?:[^{}]++|\{[^{}]*+\})*+\}")


class Comm(Struct, frozen=True):
    """One record_param_comms node; -1 and "" are unknown.

    peer_rank is a rank within the group: the peer of a send or receive, the root of a rooted op,
    else the recording rank. ranks are the global ranks of the group if the call contains them.
    """

    rf_id: int
    name: str
    group_name: str
    group_description: str
    group_size: int
    ranks: tuple[int, ...]
    group_rank: int
    seq: int
    dtype: str
    input_bytes: int
    output_bytes: int

    @property
    def op(self) -> str:
        return parse_op(self.name)


class _Values(Struct):
    values: list[Any] = []
    types: list[Any] = []


_Rank = Annotated[int, msgspec.Meta(ge=0, lt=MAX_LISTED_RANKS)]


class _Config(Struct):
    """A group; calls refer to it by an id before torch 2.4, and it has no name in 2.1.

    ranks are global, in 2.1 the keys of a mapping to group ranks; an empty list is all ranks.
    """

    pg_name: str | int | None = None
    pg_id: str | int | None = None
    backend_id: str | int | None = None
    uid: str | int | None = None
    pg_desc: str | None = None
    ranks: list[_Rank] | dict[_Rank, int] = []
    group_size: int = -1

    @property
    def names(self) -> list[str]:
        """All names that calls may use for it, its own name first."""
        known = (self.pg_name, self.pg_id, self.backend_id, self.uid)
        return [str(name) for name in known if name is not None]


class GroupTable:
    """The numbered groups of a trace: of its init nodes, then those named only by calls."""

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self._numbers: dict[str, int] = {}
        self.world_size = -1

    def add(self, node: Node) -> bool:
        """Adds the groups of an init node; returns whether all of them could be read."""
        listed = _decode_values(node.inputs, node.input_types).values
        text = listed[0] if listed and isinstance(listed[0], str) else ""
        try:
            configs, complete = msgspec.json.decode(text, type=list[_Config]), True
        except JSON_ERRORS:
            # torch truncates a long list: the groups before its end are read one by one.
            configs, complete = [], False
            for config_text in _CONFIG.findall(text):
                with suppress(*JSON_ERRORS):
                    configs.append(msgspec.json.decode(config_text, type=_Config))
        for config in configs:
            ranks = tuple(config.ranks) or tuple(range(min(config.group_size, MAX_LISTED_RANKS)))
            self.world_size = max(self.world_size, config.group_size, len(ranks))
            own_name, *aliases = config.names or [""]
            number = self._register(own_name, ranks, config.pg_desc or "")
            for name in aliases:
                self._numbers.setdefault(name, number)
        return complete

    @property
    def ranks_in_all(self) -> frozenset[int]:
        """The ranks that are in every group."""
        ranks = [frozenset(group.ranks) for group in self.groups if group.ranks]
        return frozenset.intersection(*ranks) if ranks else frozenset()

    def register_group(self, comm: Comm) -> int:
        """The number of the group of a call, -1 if the call names none."""
        if not comm.group_name:
            return -1
        return self._register(comm.group_name, comm.ranks, comm.group_description)

    def find_global_rank(self, comm: Comm) -> int:
        """The global rank of the call's group rank, -1 if unknown."""
        number = self.register_group(comm)
        ranks = self.groups[number].ranks if number >= 0 else ()
        return ranks[comm.group_rank] if 0 <= comm.group_rank < len(ranks) else -1

    def build_call(self, comm: Comm) -> Call:
        """Converts the call to a row."""
        return Call(
            event=-1,
            op=comm.op,
            group_id=self.register_group(comm),
            seq=comm.seq,
            dtype=normalize_dtype(comm.dtype),
            peer=self.find_global_rank(comm) if comm.op in MESSAGES else -1,
            input_bytes=comm.input_bytes,
            message_bytes=sanitize_int(
                compute_message_bytes(comm.op, comm.input_bytes, comm.output_bytes, comm.group_size)
            ),
        )

    def _register(self, name: str, ranks: tuple[int, ...], description: str) -> int:
        """The number of the group of this name, which is added if new."""
        if name not in self._numbers:
            self._numbers[name] = len(self.groups)
            self.groups.append(Group(name, ranks, description))
        return self._numbers[name]


def parse_comm(node: Node) -> Comm:
    """Parses a record_param_comms node from its attributes or, in older versions, its inputs.

    The inputs are a list of tensors (optional), the sequence number, the group, a rank, the name,
    two lists of split sizes, the group's first rank and stride (since 2.3) and its size.
    """
    inputs = _decode_values(node.inputs, node.input_types)
    outputs = _decode_values(node.outputs, node.output_types)
    # The position of the name: a text followed by the split sizes; -1 for none.
    places = (
        i
        for i, (a, b) in enumerate(pairwise(inputs.values))
        if isinstance(a, str) and isinstance(b, list)
    )
    at = next(places, -1)
    values = inputs.values if at >= 0 else []
    seq, group, rank = [None, None, None, *values[: max(at, 0)]][-3:]
    after = values[at + 3 :]
    size = node.read_number("pg_size")
    if size < 0 and after:
        size = sanitize_int(after[-1])
    name, description = _parse_group(group)
    dtype = node.read_text("dtype") or _parse_dtype(inputs.types) or _parse_dtype(outputs.types)
    start, stride = (sanitize_int(after[0]), sanitize_int(after[1])) if len(after) > 2 else (-1, -1)
    return Comm(
        rf_id=node.list_numbers()[0],
        name=node.read_text("collective_name") or (values[at] if values else ""),
        group_name=node.read_text("pg_name") or name,
        group_description=node.read_text("pg_desc") or description,
        group_size=size,
        ranks=_expand_stride(start, stride, size),
        group_rank=sanitize_int(rank),
        seq=sanitize_int(seq[0] if isinstance(seq, list) and seq else seq),
        dtype=dtype,
        input_bytes=_compute_bytes(node.read_number("in_msg_nelems"), dtype, inputs),
        output_bytes=_compute_bytes(node.read_number("out_msg_nelems"), dtype, outputs),
    )


def _decode_values(text: msgspec.Raw, types: msgspec.Raw) -> _Values:
    """The values and types of inputs or outputs, which are separate fields before Chakra."""
    try:
        if bytes(text).startswith(b"{"):
            return msgspec.json.decode(text, type=_Values)
        values = msgspec.json.decode(text, type=list[Any])
        return _Values(values, msgspec.json.decode(types, type=list[Any]))
    except JSON_ERRORS:
        return _Values()


def _parse_group(group: Any) -> tuple[str, str]:
    if isinstance(group, list) and len(group) == 2:
        return str(group[0]), str(group[1])
    return ("" if group is None else str(group)), ""


def _expand_stride(start: int, stride: int, size: int) -> tuple[int, ...]:
    """The ranks of a group from its first rank and stride; () if it has no stride."""
    if start < 0 or size < 1 or stride < 0 or (stride == 0 and size > 1):
        return ()
    last = start + (size - 1) * stride
    return tuple(range(start, last + 1, stride or 1)) if last < MAX_LISTED_RANKS else ()


def _compute_bytes(nelems: int, dtype: str, tensors: _Values) -> int:
    width = compute_element_bytes(dtype)
    if nelems >= 0 and width > 0:
        return sanitize_int(nelems * width)
    if not (tensors.types and "Tensor" in str(tensors.types[0]) and tensors.values):
        return -1
    return sanitize_int(_sum_tensor_bytes(tensors.values[0]))


def _sum_tensor_bytes(value: Any) -> int:
    """Bytes of a tensor [id, storage, offset, elements, bytes per element, ...] or of a list."""
    if not isinstance(value, list):
        return 0
    if len(value) >= 5 and all(isinstance(number, int) for number in value[:5]):
        return int(value[3] * value[4])
    return sum(map(_sum_tensor_bytes, value))


def _parse_dtype(types: list[Any]) -> str:
    """The dtype of the first tensor in C++ spelling, "" for none."""
    match = _TENSOR.search(str(types[0])) if types else None
    return "" if match is None else match[1]


# Streaming of the nodes of an execution trace.

BLOCK_BYTES = 1 << 20
"""Read at a time; chosen, not measured."""

MAX_NODE_BYTES = 4 << 20
"""A larger node is treated as damage."""

NODES = re.compile(rb'"nodes"\s*:\s*\[')

# Possessive quantifiers: a text of megabytes without its end must not cost quadratic time.
_TEXT = rb'"(?:[^"\\]++|\\.)*+"'

_FLAT = rb'\{(?:[^{}"]++|' + _TEXT + rb")*+\}"

_DEEP = rb'\{(?:[^{}"]++|' + _TEXT + rb"|" + _FLAT + rb")*+\}"

# An object of at most three levels, which all nodes of torch are.
_NODE = re.compile(rb'\{(?:[^{}"]++|' + _TEXT + rb"|" + _DEEP + rb")*+\}", re.DOTALL)

_BEGIN = re.compile(rb'\{\s*"(?:id"|name"\s*:\s*"[^"]*"\s*,\s*"id")')

_BETWEEN = re.compile(rb"[\s,]*+")


class Attribute(Struct):
    """A named value of a node."""

    name: str
    value: Any = None


class Node(Struct):
    """A node of the file; attributes are in attrs, before Chakra in the node itself."""

    id: int
    name: str = ""
    ctrl_deps: int | list[int] | None = None
    parent: int | None = None
    attrs: list[Attribute] = []
    inputs: msgspec.Raw = msgspec.Raw()
    outputs: msgspec.Raw = msgspec.Raw()
    input_types: msgspec.Raw = msgspec.Raw()
    output_types: msgspec.Raw = msgspec.Raw()
    rf_id: int = -1
    fw_parent: int = -1
    seq_id: int = -1
    scope: int = -1
    tid: int = -1
    fw_tid: int = -1

    def list_numbers(self) -> tuple[int, ...]:
        """The values of NUMBERS, -1 if unknown."""
        if not self.attrs:
            return tuple(sanitize_int(getattr(self, name)) for name in NUMBERS)
        values = {attribute.name: attribute.value for attribute in self.attrs}
        return tuple(sanitize_int(values.get(name)) for name in NUMBERS)

    def read_number(self, name: str) -> int:
        """The integer attribute of this name, -1 if missing."""
        return sanitize_int(self._find_value(name))

    def read_text(self, name: str) -> str:
        """The text attribute of this name, "" if missing."""
        value = self._find_value(name)
        return value if isinstance(value, str) else ""

    def _find_value(self, name: str) -> Any:
        return next((a.value for a in self.attrs if a.name == name), None)

    @property
    def parent_id(self) -> int:
        """The id of the calling node, -1 if unknown."""
        deps = self.ctrl_deps if self.parent is None else self.parent
        return sanitize_int(deps[0] if isinstance(deps, list) and deps else deps)


class Envelope(Struct):
    """The fields around the list of nodes."""

    schema: str = ""
    pid: int = -1


JSON_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_DECODER = msgspec.json.Decoder(Node)


class NodeStream:
    """The nodes of a trace; iterate once.

    Memory is bounded by a block and a node. After the iteration, skipped is the number of invalid
    nodes, whole is whether the list of nodes is complete, and envelope has the fields around it.
    """

    def __init__(self, content: UnpackedStream) -> None:
        self._content = content
        self.skipped = 0
        self.whole = False
        self.envelope = Envelope()

    def __iter__(self) -> Iterator[Node]:
        # The text up to the beginning of the list of nodes, or the first MOST_NODE_BYTES.
        text = b""
        while len(text) < MAX_NODE_BYTES and (block := self._content.read(BLOCK_BYTES)):
            # Block by block: the fields before the list may be long, and are needed at the end.
            text += block
            if NODES.search(text):
                break
        list_begin = NODES.search(text)
        if list_begin is None:
            return
        before, at = text[: list_begin.end() - 1], list_begin.end()
        while at >= 0:
            at = _end(_BETWEEN.match(text, at))
            # The list has ended; what follows is read with the fields around it.
            if text.startswith(b"]", at):
                break
            node = _NODE.match(text, at)
            is_open = node is None and len(text) - at < MAX_NODE_BYTES
            if is_open and (more := self._content.read(BLOCK_BYTES)):
                text, at = text[at:] + more, 0
                continue
            if node is not None and (decoded := _decode_node(node[0])):
                yield decoded
                at = node.end()
                continue
            # Damage: the next text that begins as a node is the next node, else what could be
            # read as an object is skipped; without either the rest is lost.
            begin = _BEGIN.search(text, at + 1)
            if begin is None and node is None:
                at = -1
                break
            self.skipped += 1
            at = begin.start() if begin is not None else _end(node)
        self.whole = at >= 0
        after = text[at:] + self._content.read(BLOCK_BYTES) if self.whole else b"]}"
        with suppress(*JSON_ERRORS):
            self.envelope = msgspec.json.decode(before + b"[" + after, type=Envelope)


def sanitize_int(value: object) -> int:
    """The value if it is an integer that fits into a column, else -1."""
    return value if isinstance(value, int) and -1 <= value < 1 << 63 else -1


def _end(match: re.Match[bytes] | None) -> int:
    assert match is not None
    return match.end()


def _decode_node(text: bytes) -> Node | None:
    try:
        return _DECODER.decode(text)
    except UnicodeDecodeError:
        # A name may be cut within a character, which costs its node nothing else.
        return _decode_node(text.decode(errors="replace").encode())
    except JSON_ERRORS:
        return None
