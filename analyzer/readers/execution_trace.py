"""PyTorch execution traces (ExecutionTraceObserver, the host part of Chakra)."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Struct

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.ops import MESSAGES, dtype_named, element_bytes, message_bytes, op_named
from stepsplit.analyzer.readers.compression import Unpacked, unpacked
from stepsplit.analyzer.readers.sources import Source
from stepsplit.analyzer.trace import Call, Group, Int32, Int64, Note, RankCalls, to_calls

# A PyTorch execution trace (ExecutionTraceObserver, the host part of Chakra) -> its nouns.

COMM, GROUPS = "record_param_comms", "## process_group:init ##"

_OF_SCHEMA = re.compile(rb'"schema"\s*:\s*"\d+\.\d+\.\d+-chakra')

_OF_NODE = (re.compile(rb'"id"\s*:\s*\d'), re.compile(rb'"(?:ctrl_deps|rf_id)"\s*[:,]'))

_RANK_IN_NAME = re.compile(r"(?:rank|et|trace)[-_.]?(\d{1,6})(?!.*\d)", re.IGNORECASE)

BOOKKEEPING = ("wait", "init")

NUMBERS = ("rf_id", "fw_parent", "seq_id", "scope", "tid", "fw_tid")

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


def is_execution_trace(head: bytes) -> bool:
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
        hint = "record it again, or check that it is of torch's ExecutionTraceObserver"
        raise DataError(source.where, "no whole node of an execution trace in it", hint)
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


# The groups and calls that nodes of an execution trace tell of.

MOST_RANKS = 1 << 20

ROOTED = ("broadcast", "reduce", "gather", "scatter")

_TENSOR = re.compile(r"Tensor\(([^)]*)\)")

_CONFIG = re.compile(r"\{(?:[^{}]++|\{[^{}]*+\})*+\}")


@dataclass(frozen=True, slots=True)
class Comm:
    """One record_param_comms; -1 and "" are unknown.

    told_rank is a rank within the group: the peer of a message, the root of a rooted op, else the
    rank that recorded. ranks are the global ranks of the group, where the call tells them.
    """

    rf_id: int
    name: str
    group_name: str
    group_description: str
    group_size: int
    ranks: tuple[int, ...]
    told_rank: int
    seq: int
    dtype: str
    input_bytes: int
    output_bytes: int

    @property
    def op(self) -> str:
        return op_named(self.name)


class _Values(Struct):
    values: list[Any] = []
    types: list[Any] = []


_Rank = Annotated[int, msgspec.Meta(ge=0, lt=MOST_RANKS)]


class _Config(Struct):
    """A group; ids are what calls name it by before torch 2.4, and in 2.1 it has no name.

    ranks are global, in 2.1 the keys of a mapping to those within the group; none are all.
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
        """All that calls may name it by, its own name first."""
        told = (self.pg_name, self.pg_id, self.backend_id, self.uid)
        return [str(name) for name in told if name is not None]


class GroupBook:
    """The groups of a trace, numbered: those of its init nodes, then those only calls name."""

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self._numbers: dict[str, int] = {}
        self.world_size = -1

    def add(self, node: Node) -> bool:
        """Adds the groups that an init node lists; whether all of them could be read."""
        listed = _values(node.inputs, node.input_types).values
        text = listed[0] if listed and isinstance(listed[0], str) else ""
        try:
            configs, whole = msgspec.json.decode(text, type=list[_Config]), True
        except NOT_JSON:  # torch cuts a long list short
            configs, whole = _whole_configs(text), False
        for config in configs:
            self._add(config)
        return whole

    def _add(self, config: _Config) -> None:
        ranks = tuple(config.ranks) or tuple(range(min(config.group_size, MOST_RANKS)))
        self.world_size = max(self.world_size, config.group_size, len(ranks))
        own, *others = config.names or [""]
        number = self._enter(own, ranks, config.pg_desc or "")
        for name in others:
            self._numbers.setdefault(name, number)

    @property
    def ranks_in_all(self) -> frozenset[int]:
        """The ranks that are in every group."""
        ranks = [frozenset(group.ranks) for group in self.groups if group.ranks]
        return frozenset.intersection(*ranks) if ranks else frozenset()

    def number(self, comm: Comm) -> int:
        """The number of the group of a call; -1 where the call names none."""
        if not comm.group_name:
            return -1
        return self._enter(comm.group_name, comm.ranks, comm.group_description)

    def global_rank(self, comm: Comm) -> int:
        """The global rank that the call tells as one of its group, -1 where it is not known."""
        number = self.number(comm)
        ranks = self.groups[number].ranks if number >= 0 else ()
        return ranks[comm.told_rank] if 0 <= comm.told_rank < len(ranks) else -1

    def call(self, comm: Comm) -> Call:
        """The call as a row."""
        return Call(
            event=-1,
            op=comm.op,
            group_id=self.number(comm),
            seq=comm.seq,
            dtype=dtype_named(comm.dtype),
            peer=self.global_rank(comm) if comm.op in MESSAGES else -1,
            input_bytes=comm.input_bytes,
            message_bytes=known(
                message_bytes(comm.op, comm.input_bytes, comm.output_bytes, comm.group_size)
            ),
        )

    def _enter(self, name: str, ranks: tuple[int, ...], description: str) -> int:
        """The number of the group of that name, added where it is new."""
        if name not in self._numbers:
            self._numbers[name] = len(self.groups)
            self.groups.append(Group(name, ranks, description))
        return self._numbers[name]


def _whole_configs(text: str) -> list[_Config]:
    """The groups of a list that is damaged or cut, those that can be read."""
    found = []
    for one in _CONFIG.findall(text):
        try:
            found.append(msgspec.json.decode(one, type=_Config))
        except NOT_JSON:
            continue
    return found


def comm_of(node: Node) -> Comm:
    """What a record_param_comms node says: its attributes, and before there were any its inputs.

    The inputs are a list of tensors (where there are some), the sequence number, the group, a rank,
    the name, two lists of split sizes, the group's first rank and stride (since 2.3) and its size.
    """
    inputs = _values(node.inputs, node.input_types)
    outputs = _values(node.outputs, node.output_types)
    at = _place_of_name(inputs.values)
    told = inputs.values if at >= 0 else []
    seq, group, rank = [None, None, None, *told[: max(at, 0)]][-3:]
    after = told[at + 3 :]
    size = _first_known(node.number("pg_size"), known(after[-1]) if after else -1)
    name, description = _group_named(group)
    dtype = node.text("dtype") or _dtype(inputs.types) or _dtype(outputs.types)
    start, stride = (known(after[0]), known(after[1])) if len(after) > 2 else (-1, -1)
    return Comm(
        rf_id=node.numbers()[0],
        name=node.text("collective_name") or (told[at] if told else ""),
        group_name=node.text("pg_name") or name,
        group_description=node.text("pg_desc") or description,
        group_size=size,
        ranks=_strided(start, stride, size),
        told_rank=known(rank),
        seq=known(seq[0] if isinstance(seq, list) and seq else seq),
        dtype=dtype,
        input_bytes=_bytes(node.number("in_msg_nelems"), dtype, inputs),
        output_bytes=_bytes(node.number("out_msg_nelems"), dtype, outputs),
    )


def _values(text: msgspec.Raw, types: msgspec.Raw) -> _Values:
    """The values and types of inputs or outputs, which stood apart before Chakra."""
    try:
        if bytes(text).startswith(b"{"):
            return msgspec.json.decode(text, type=_Values)
        values = msgspec.json.decode(text, type=list[Any])
        return _Values(values, msgspec.json.decode(types, type=list[Any]))
    except NOT_JSON:
        return _Values()


def _place_of_name(values: list[Any]) -> int:
    """Where the name is: a text that is followed by the split sizes; -1 where none is."""
    named = (
        i for i, (a, b) in enumerate(pairwise(values)) if isinstance(a, str) and isinstance(b, list)
    )
    return next(named, -1)


def _group_named(group: Any) -> tuple[str, str]:
    if isinstance(group, list) and len(group) == 2:
        return str(group[0]), str(group[1])
    return ("" if group is None else str(group)), ""


def _strided(start: int, stride: int, size: int) -> tuple[int, ...]:
    """The ranks of a group by its first rank and stride; none where it has no stride."""
    if start < 0 or size < 1 or stride < 0 or (stride == 0 and size > 1):
        return ()
    last = start + (size - 1) * stride
    return tuple(range(start, last + 1, stride or 1)) if last < MOST_RANKS else ()


def _bytes(nelems: int, dtype: str, tensors: _Values) -> int:
    width = element_bytes(dtype)
    if nelems >= 0 and width > 0:
        return known(nelems * width)
    if not (tensors.types and "Tensor" in str(tensors.types[0]) and tensors.values):
        return -1
    return known(_tensor_bytes(tensors.values[0]))


def _tensor_bytes(value: Any) -> int:
    """The bytes of a tensor [id, storage, offset, elements, element's bytes, ...], or of a list."""
    if not isinstance(value, list):
        return 0
    if len(value) >= 5 and all(isinstance(number, int) for number in value[:5]):
        return int(value[3] * value[4])
    return sum(map(_tensor_bytes, value))


def _dtype(types: list[Any]) -> str:
    """The dtype of the first tensor of a type as C++ spells it."""
    found = _TENSOR.search(str(types[0])) if types else None
    return "" if found is None else found[1]


def _first_known(*values: int) -> int:
    return next((value for value in values if value >= 0), -1)


# The nodes of a PyTorch execution trace, one by one as its text is read.

BLOCK_BYTES = 1 << 20

MOST_NODE_BYTES = 4 << 20
"""A node beyond this size is damage."""

NODES = re.compile(rb'"nodes"\s*:\s*\[')

_TEXT = rb'"(?:[^"\\]++|\\.)*+"'

_FLAT = rb'\{(?:[^{}"]++|' + _TEXT + rb")*+\}"

_DEEP = rb'\{(?:[^{}"]++|' + _TEXT + rb"|" + _FLAT + rb")*+\}"

_NODE = re.compile(rb'\{(?:[^{}"]++|' + _TEXT + rb"|" + _DEEP + rb")*+\}", re.DOTALL)

_BEGIN = re.compile(rb'\{\s*"(?:id"|name"\s*:\s*"[^"]*"\s*,\s*"id")')

_BETWEEN = re.compile(rb"[\s,]*+")


class Attribute(Struct):
    """A named value of a node."""

    name: str
    value: Any = None


class Node(Struct):
    """A node as the file has it: attributes stand in attrs, before Chakra in the node itself."""

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

    def numbers(self) -> tuple[int, ...]:
        """The values of NUMBERS, -1 where one is not told."""
        if not self.attrs:
            return tuple(known(getattr(self, name)) for name in NUMBERS)
        told = {attribute.name: attribute.value for attribute in self.attrs}
        return tuple(known(told.get(name)) for name in NUMBERS)

    def number(self, name: str) -> int:
        """The attribute of that name, -1 where it is not told."""
        return known(self._value(name))

    def text(self, name: str) -> str:
        """The attribute of that name, "" where it is not told."""
        value = self._value(name)
        return value if isinstance(value, str) else ""

    def _value(self, name: str) -> Any:
        return next((a.value for a in self.attrs if a.name == name), None)

    @property
    def parent_id(self) -> int:
        """The node that called this one, -1 where it is not told."""
        deps = self.ctrl_deps if self.parent is None else self.parent
        return known(deps[0] if isinstance(deps, list) and deps else deps)


class Envelope(Struct):
    """What stands around the nodes."""

    schema: str = ""
    pid: int = -1


NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_DECODER = msgspec.json.Decoder(Node)


class NodeStream:
    """The nodes of a trace; iterate once.

    Memory is bounded by a block and a node. Afterwards skipped counts what is no node, whole says
    whether there was a list of nodes and it was closed, and envelope is what stands around it.
    """

    def __init__(self, content: Unpacked) -> None:
        self._content = content
        self.skipped = 0
        self.whole = False
        self.envelope = Envelope()

    def __iter__(self) -> Iterator[Node]:
        text = self._begin()
        opened = NODES.search(text)
        if opened is None:
            return
        before, at = text[: opened.end() - 1], opened.end()
        while at >= 0:
            at = _end(_BETWEEN.match(text, at))
            if text.startswith(b"]", at):
                break
            node = _NODE.match(text, at)
            if node is None and (more := self._more(len(text) - at)):
                text, at = text[at:] + more, 0
            elif node is not None and (decoded := _decoded(node[0])):
                yield decoded
                at = node.end()
            else:
                at = self._skip(text, at, node)
        self.whole = at >= 0
        after = text[at:] + self._content.read(BLOCK_BYTES) if self.whole else b"]}"
        self.envelope = _envelope(before + b"[" + after)

    def _begin(self) -> bytes:
        """The text up to the list of nodes and a little more; all of it where none is near."""
        text = b""
        while len(text) < MOST_NODE_BYTES and (block := self._content.read(BLOCK_BYTES)):
            text += block
            if NODES.search(text):
                break
        return text

    def _more(self, size: int) -> bytes:
        return self._content.read(BLOCK_BYTES) if size < MOST_NODE_BYTES else b""

    def _skip(self, text: bytes, at: int, odd: re.Match[bytes] | None) -> int:
        """Where to go on after what is no node: at the next beginning; -1 where none follows."""
        begin = _BEGIN.search(text, at + 1)
        if begin is None and odd is None:
            return -1
        self.skipped += 1
        return begin.start() if begin is not None else _end(odd)


def known(value: object) -> int:
    """The value where it is a number that a column holds, else -1."""
    return value if isinstance(value, int) and -1 <= value < 1 << 63 else -1


def _end(match: re.Match[bytes] | None) -> int:
    assert match is not None
    return match.end()


def _decoded(text: bytes) -> Node | None:
    try:
        return _DECODER.decode(text)
    except UnicodeDecodeError:
        return _decoded(text.decode(errors="replace").encode())
    except NOT_JSON:
        return None


def _envelope(text: bytes) -> Envelope:
    try:
        return msgspec.json.decode(text, type=Envelope)
    except NOT_JSON:
        return Envelope()
