"""The groups and calls that nodes of an execution trace tell of."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any

import msgspec
from msgspec import Struct

from stepsplit.analyzer.readers.calls import Call
from stepsplit.analyzer.readers.communication import (
    dtype_named,
    element_bytes,
    message_bytes,
    op_named,
)
from stepsplit.analyzer.readers.execution.nodes import NOT_JSON, Node, known
from stepsplit.analyzer.trace import Group

MOST_RANKS = 1 << 20
ROOTED = ("broadcast", "reduce", "gather", "scatter")
MESSAGES = ("send", "recv")
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
