"""The calls that a log names with NCCL_DEBUG_SUBSYS=COLL, in columns a process."""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from stepsplit.analyzer.readers.communication import op_named
from stepsplit.analyzer.readers.nccl.communicators import Joined, World, global_ranks
from stepsplit.analyzer.readers.nccl.lines import Speaker
from stepsplit.analyzer.readers.nccl.members import Handle, Handles, Owner
from stepsplit.analyzer.readers.nccl.nouns import Communicator
from stepsplit.analyzer.trace import OP_CODE, Bool, Calls, Group, Int32, Int64, RankCalls

_COLL = re.compile(
    rb"(\w+): opCount ([0-9a-f]{1,15}) sendbuff \S+ recvbuff \S+ (?:acc \S+ )?count (\d{1,12})"
    rb" datatype (\d{1,3}) op \d+ root (-?\d{1,7}) comm (\S+) \[nranks=(\d{1,6})\]"
    rb"(?: stream \S+(?: task -?\d+ globalrank (\d{1,7}))?)?"
)
_DTYPES = (
    ("int8", 1), ("uint8", 1), ("int32", 4), ("uint32", 4), ("int64", 8), ("uint64", 8),
    ("float16", 2), ("float32", 4), ("float64", 8), ("bfloat16", 2), ("float8_e4m3", 1),
    ("float8_e5m2", 1),
)  # fmt: skip
"""torch's name and the bytes of an element, by ncclDataType_t."""

_COLUMNS = 9


@dataclass(slots=True)
class CollRows:
    """The calls so far: an array a process, _COLUMNS numbers a call."""

    _rows: dict[tuple[str, int], array[int]] = field(default_factory=dict)
    _ops: dict[bytes, int] = field(default_factory=dict)

    def take(self, by: Speaker, stamp_ns: int, text: bytes, handles: Handles) -> bool:
        """Takes a "...: opCount ..." over; False where it is cut."""
        match = _COLL.match(text)
        if match is None:
            return False
        name, seq, count, dtype, root, pointer, nranks, global_rank = match.groups()
        op = self._ops.get(name)
        if op is None:
            op = self._ops[name] = OP_CODE[op_named(name.decode(errors="replace"))]
        size = int(nranks)
        handle = handles.called(by, pointer.decode(errors="replace"), size)
        process = (by.host, by.pid)
        rows = self._rows.get(process)
        if rows is None:
            rows = self._rows[process] = array("q")
        rows.extend(
            (handle, op, int(dtype), int(count), int(root), int(seq, 16), size, stamp_ns,
             int(global_rank) if global_rank else -1)
        )  # fmt: skip
        return True

    def tables(self) -> list[Int64]:
        """The rows of each process, (calls, _COLUMNS)."""
        return [
            np.frombuffer(rows, dtype=np.int64).reshape(-1, _COLUMNS)
            for rows in self._rows.values()
        ]


def rank_calls(
    source: str, tables: Sequence[Int64], handles: Sequence[Handle], joined: Joined, world: World
) -> tuple[RankCalls, ...]:
    """The calls of each process and device, by rank; times count from the first of the log."""
    stamps = [rows[:, 7][rows[:, 7] >= 0] for rows in tables]
    t0_unix_ns = min((int(known.min()) for known in stamps if len(known)), default=0)
    holders = [handle.owner for handle in handles]
    found: list[tuple[Owner, RankCalls]] = []
    for rows in tables:
        for owner in dict.fromkeys(holders[handle] for handle in _in_order(rows[:, 0])):
            mine = np.array([holder == owner for holder in holders], dtype=np.bool_)[rows[:, 0]]
            told = _of_owner(source, owner, rows[mine], joined, world, t0_unix_ns)
            found.append((owner, told))
    return tuple(calls for _, calls in sorted(found, key=lambda one: (one[1].rank, one[0])))


def _of_owner(
    source: str, owner: Owner, rows: Int64, joined: Joined, world: World, t0_unix_ns: int
) -> RankCalls:
    used = _in_order(rows[:, 0])
    communicators = [joined.communicators[joined.comm_of[handle]] for handle in used]
    told = int(rows[:, 8].max())
    return RankCalls(
        source=source,
        rank=told if told >= 0 else world.ranks.get(owner, -1),
        world_size=world.size,
        host=owner[0],
        t0_unix_ns=t0_unix_ns,
        calls=_calls(rows, used, communicators, world, t0_unix_ns),
        dur_ns=np.full(len(rows), -1, dtype=np.int64),
        groups=tuple(_group(one, world) for one in communicators),
    )


def _calls(
    rows: Int64,
    used: Sequence[int],
    communicators: Sequence[Communicator],
    world: World,
    t0_unix_ns: int,
) -> Calls:
    handle, op, code, count, root, seq, nranks, stamp_ns, _ = rows.T
    codes, dtype = np.unique(code, return_inverse=True)
    element_bytes = np.array([_dtype(c)[1] for c in codes], dtype=np.int64)[dtype]
    each = np.where(element_bytes > 0, count * element_bytes, -1)
    whole = np.where(each >= 0, each * nranks, -1)
    return Calls(
        event=np.full(len(rows), -1, dtype=np.int64),
        issued_ns=np.where(stamp_ns >= 0, stamp_ns - t0_unix_ns, -1),
        group_id=_positions(handle, used),
        seq=seq.copy(),
        op=op.astype(np.uint8),
        dtype=dtype.astype(np.int32),
        peer=_peers(handle, op, root, used, communicators, world),
        input_bytes=np.where(_one_of(op, "reduce_scatter", "all_to_all", "scatter"), whole, each),
        message_bytes=np.where(
            _one_of(op, "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"),
            whole,
            each,
        ),
        dtypes=tuple(_dtype(c)[0] for c in codes),
    )


def _peers(
    handle: Int64,
    op: Int64,
    root: Int64,
    used: Sequence[int],
    communicators: Sequence[Communicator],
    world: World,
) -> Int32:
    """The global rank of whom a send or recv names, where the communicator tells."""
    peers = np.full(len(handle), -1, dtype=np.int32)
    for index, communicator in zip(used, communicators, strict=True):
        ranks = global_ranks(communicator, world)
        mine = (handle == index) & _one_of(op, "send", "recv")
        peers[mine] = [ranks.get(rank, -1) for rank in root[mine].tolist()]
    return peers


def _group(communicator: Communicator, world: World) -> Group:
    """The communicator's global ranks in its order, () where the log does not tell them all."""
    ranks = global_ranks(communicator, world)
    whole = len(ranks) == communicator.nranks
    return Group(communicator.id, tuple(ranks[r] for r in sorted(ranks)) if whole else (), "")


def _dtype(code: int) -> tuple[str, int]:
    return _DTYPES[code] if code < len(_DTYPES) else (f"nccl_{code}", -1)


def _one_of(op: Int64, *names: str) -> Bool:
    return np.isin(op, [OP_CODE[name] for name in names])


def _in_order(handle: Int64) -> list[int]:
    """The handles that occur, in the order of their first call."""
    indices, first = np.unique(handle, return_index=True)
    return [int(index) for index in indices[np.argsort(first)]]


def _positions(handle: Int64, used: Sequence[int]) -> Int32:
    at = np.full(max(used) + 1, -1, dtype=np.int32)
    at[list(used)] = np.arange(len(used), dtype=np.int32)
    return at[handle]
