"""Calls as they are found, one by one, whatever the backend -> Calls, in columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stepsplit.analyzer.trace import OP_CODE, Calls, Group


@dataclass(frozen=True, slots=True)
class Call:
    """One row of Calls before it is a column; the meanings are the columns'."""

    event: int
    op: str
    issued_ns: int = -1
    group_id: int = -1
    seq: int = -1
    dtype: str = ""
    peer: int = -1
    input_bytes: int = -1
    message_bytes: int = -1


def to_calls(rows: Sequence[Call]) -> Calls:
    """The rows as columns."""
    dtypes = tuple(dict.fromkeys(row.dtype for row in rows))
    code = {dtype: i for i, dtype in enumerate(dtypes)}
    return Calls(
        event=np.array([row.event for row in rows], dtype=np.int64),
        issued_ns=np.array([row.issued_ns for row in rows], dtype=np.int64),
        group_id=np.array([row.group_id for row in rows], dtype=np.int32),
        seq=np.array([row.seq for row in rows], dtype=np.int64),
        op=np.array([OP_CODE[row.op] for row in rows], dtype=np.uint8),
        dtype=np.array([code[row.dtype] for row in rows], dtype=np.int32),
        peer=np.array([row.peer for row in rows], dtype=np.int32),
        input_bytes=np.array([row.input_bytes for row in rows], dtype=np.int64),
        message_bytes=np.array([row.message_bytes for row in rows], dtype=np.int64),
        dtypes=dtypes,
    )


@dataclass(frozen=True, slots=True)
class FoundCalls:
    """The calls of a rank, and the groups that they are on."""

    calls: Calls
    groups: tuple[Group, ...]
