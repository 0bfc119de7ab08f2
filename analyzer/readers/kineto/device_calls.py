"""The collectives and messages that a device's kernels carry out -> Calls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from stepsplit.analyzer.readers.calls import Call, FoundCalls, to_calls
from stepsplit.analyzer.readers.communication import (
    dtype_named,
    element_bytes,
    known_bytes,
    message_bytes,
    op_named,
)
from stepsplit.analyzer.readers.kineto.batches import posted_before
from stepsplit.analyzer.readers.kineto.columns import PARAM_COMMS
from stepsplit.analyzer.readers.kineto.launches import ops_around
from stepsplit.analyzer.readers.kineto.rows import Sorted
from stepsplit.analyzer.readers.kineto.schema import Args, comm_args, ranks_in
from stepsplit.analyzer.readers.rules import Rules
from stepsplit.analyzer.readers.rules_file import BUILT_IN
from stepsplit.analyzer.trace import Bool, Category, Group, Int64

_MOST_DIMS = 64
_MESSAGES = ("send", "recv")


def calls_of_device(rows: Sorted, known: Sequence[Group], rules: Rules = BUILT_IN) -> FoundCalls:
    """A call for each kernel that communicates; groups seen only in arguments are added.

    What a kernel does not state, the record_param_comms around its launch does. Where other
    kernels name their collective, a SendRecv that does not is a batch of messages.
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
    """Whether the kernel carries out messages and does not say which."""
    return "SendRecv" in name and op_named(args.collective or "") == "unknown"


def _posted(
    rows: Sorted, own: dict[int, Args], kernels: Int64, around: Int64, launches: Int64
) -> list[list[int]]:
    """The ops that posted the messages of each kernel that does not describe itself."""
    events, ops = rows.events, rows.noted_row[_params(rows)]
    messages = [op for op in ops.tolist() if op_named(own[op].collective or "") in _MESSAGES]
    free = np.setdiff1d(np.array(messages, dtype=np.int64), around)
    batches = [
        _is_batch(events.name_of(event), _stated(own[event], own.get(op)))
        for event, op in zip(kernels.tolist(), around.tolist(), strict=True)
    ]
    return posted_before(events, free, np.where(batches, launches, -1))


def _params(rows: Sorted) -> Bool:
    """Which of the noted rows are ops that describe a collective."""
    events = rows.events
    return (events.named(PARAM_COMMS) & events.of(Category.OP))[rows.noted_row]


def _stated(kernel: Args | None, op: Args | None) -> Args:
    """What the kernel states of its call, else the op that launched it."""
    if kernel is not None and kernel.collective is not None:
        return kernel
    if op is None or op.collective == "wait":
        return kernel or Args()
    return op if op.in_nelems >= 0 else _sized(op)


def _sized(op: Args) -> Args:
    """The op with the size of its first tensors, for traces that name no message."""
    nelems = _elements(op.dims[0] if op.dims else None)
    kind = str(op.types[0]) if op.types else ""
    if nelems < 0 or element_bytes(kind) < 0:
        return op
    return msgspec.structs.replace(op, in_nelems=nelems, dtype=kind)


def _elements(dims: Any) -> int:
    """Of tensors of these shapes, or of one of this shape; -1 for what is no shape."""
    if not isinstance(dims, list) or not dims:
        return -1
    shapes = [dims] if isinstance(dims[0], int) else dims
    known = all(isinstance(shape, list) and len(shape) <= _MOST_DIMS for shape in shapes)
    whole = known and all(isinstance(dim, int) for shape in shapes for dim in shape)
    return sum(map(math.prod, shapes)) if whole else -1


class _GroupBook:
    """The groups of a trace, numbered; it grows by those that only arguments name."""

    def __init__(self, known: Sequence[Group]) -> None:
        self.groups = list(known)
        self._numbers = {(group.name, group.ranks): i for i, group in enumerate(known)}

    def number(self, args: Args) -> int:
        """The number of the group that the arguments name, -1 where they do not say enough."""
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
    if op == "unknown":  # "coalesced" says nothing of what the kernel does
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
