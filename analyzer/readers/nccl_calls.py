"""The collectives and messages that a device's kernels carry out -> Calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from stepsplit.analyzer.readers.calls import Call, FoundCalls, to_calls
from stepsplit.analyzer.readers.columns import Sorted
from stepsplit.analyzer.readers.communication import (
    COMMUNICATES,
    dtype_named,
    element_bytes,
    message_bytes,
    op_named,
)
from stepsplit.analyzer.readers.kineto import Args
from stepsplit.analyzer.trace import Category, Group


def calls_of_device(rows: Sorted, known: Sequence[Group]) -> FoundCalls:
    """A call for each kernel that communicates; groups seen only in arguments are added.

    Where other kernels name their collective, a SendRecv that does not is a batch of messages.
    """
    book = _GroupBook(known)
    events = rows.events
    issued = events.launch_ns()
    named = np.array(
        [a is not None and a.collective is not None for a in rows.args], dtype=np.bool_
    )
    by_name = events.name_mask(tuple(COMMUNICATES.search(n) is not None for n in events.names))
    communicates = events.of(Category.KERNEL, Category.MEMCPY) & (named | by_name)
    calls = []
    for event in np.flatnonzero(communicates).tolist():
        args, name = rows.args[event] or Args(), rows.entries[event].name
        call = _call(event, name, args, book.number(args), int(issued[event]))
        batch = not named[event] and named.any() and "SendRecv" in name
        calls.append(replace(call, op="send_recv") if batch else call)
    return FoundCalls(to_calls(calls), tuple(book.groups))


class _GroupBook:
    """The groups of a trace, numbered; it grows by those that only arguments name."""

    def __init__(self, known: Sequence[Group]) -> None:
        self.groups = list(known)
        self._numbers = {(group.name, group.ranks): i for i, group in enumerate(known)}

    def number(self, args: Args) -> int:
        """The number of the group that the arguments name, -1 where they do not say enough."""
        ranks = _ranks(args.group_ranks)
        if not ranks:
            named = [i for (name, _), i in self._numbers.items() if name == args.group_name]
            return named[0] if len(named) == 1 else -1
        key = (args.group_name, ranks)
        if key not in self._numbers:
            self._numbers[key] = len(self.groups)
            self.groups.append(Group(args.group_name, ranks, args.group_description))
        return self._numbers[key]


def _call(event: int, name: str, args: Args, group_id: int, issued_ns: int) -> Call:
    op = op_named(args.collective or name)
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
        message_bytes=message_bytes(op, input_bytes, output_bytes, args.group_size),
    )


def _bytes(nelems: int, dtype: str) -> int:
    width = element_bytes(dtype)
    return nelems * width if nelems >= 0 and width > 0 else -1


def _ranks(text: str) -> tuple[int, ...]:
    """The ranks of "[0, 1]"; none where torch has cut a long list short with dots."""
    try:
        return tuple(map(int, json.loads(text)))
    except (ValueError, TypeError):
        return ()
