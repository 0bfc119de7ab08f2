"""The kinds of files that a recording consists of; how the kind of any file is recognized."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from stepsplit.analyzer.errors import RECORD_AGAIN, DataError
from stepsplit.analyzer.readers.compression import HEAD_BYTES, open_unpacked
from stepsplit.analyzer.readers.flight_recorder import is_flight_dump, read_dump
from stepsplit.analyzer.readers.kernel_rules import BUILT_IN, Rules
from stepsplit.analyzer.readers.kineto.trace_file import is_kineto, read_kineto
from stepsplit.analyzer.readers.sources import Source
from stepsplit.analyzer.trace import RankTrace
from stepsplit.collectors.formats.rank_record import RANK_SCHEMA, RankRecord, read_record

RankTraces = tuple[RankTrace, ...]

_ContentT = TypeVar("_ContentT", covariant=True)


@dataclass(frozen=True, slots=True)
class Kind(Generic[_ContentT]):
    """A kind of file: its display name, the test on the first bytes, and its reader."""

    name: str
    recognizes: Callable[[bytes], bool]
    read: Callable[[Source], _ContentT | None]


_LONG_HEAD_BYTES = 1 << 20
"""A job's output may begin with pages of other text before the first recognizable line."""


def find_kinds(source: Source, kinds: Iterable[Kind[_ContentT]]) -> tuple[Kind[_ContentT], ...]:
    """Those of the kinds that the file has by its content, () if none. Raises DataError."""
    with open_unpacked(source) as content:
        head = content.read(HEAD_BYTES)
        if b"\0" not in head and head.lstrip()[:1] not in (b"{", b"["):
            head += content.read(_LONG_HEAD_BYTES)
    return tuple(kind for kind in kinds if kind.recognizes(head))


# Nsight Systems exports. Their reader is loaded for the first one: few recordings have any.

_MAGIC = b"SQLite format 3\0"

_TABLES = re.compile(rb"CREATE TABLE \W?(StringIds|NVTX_EVENTS|TARGET_INFO_|ENUM_NSYS_|META_DATA_)")


def is_nsys_export(head: bytes) -> bool:
    """Whether the bytes are the beginning of an Nsight Systems export: SQLite with its tables.

    Also true if the schema is so long that it is not within these bytes.
    """
    if not head.startswith(_MAGIC):
        return False
    is_elsewhere = head[100:101] == b"\x05" and b"CREATE " not in head
    return is_elsewhere or _TABLES.search(head) is not None


def _read_nsys(source: Source) -> RankTraces:
    from stepsplit.analyzer.readers.nsys import read_nsys

    return read_nsys(source)


# Tables of ranks, Parquet files. Their reader, and with it pyarrow, is loaded for the first one.


def is_parquet(head: bytes) -> bool:
    """Whether the bytes are the beginning of a Parquet file."""
    return head.startswith(b"PAR1")


def read_rank_table(source: Source, rules: Rules = BUILT_IN) -> RankTraces | None:
    """The trace of a rank in the table that `stepsplit reduce` wrote; None if it is no such table.
    Raises DataError."""
    from stepsplit.analyzer.readers.rank_table import read_table

    trace = read_table(source, rules)
    return None if trace is None else (trace,)


# The metadata file that the profiler writes for each rank: the file -> RankRecord.

_BEGIN = re.compile(rb'\A\s*\{\s*"schema"\s*:\s*"' + re.escape(RANK_SCHEMA.encode()) + rb'"')

_MAX_BYTES = 64 << 20


def is_rank_record(head: bytes) -> bool:
    """Whether the bytes are the beginning of a rank record."""
    return _BEGIN.match(head) is not None


def read_rank_record(source: Source) -> RankRecord:
    """The record in the file. Raises DataError if it is cut off or invalid."""
    with open_unpacked(source) as content:
        text = content.read(_MAX_BYTES)
    try:
        return read_record(text)
    except ValueError as error:
        raise DataError(source.where, f"invalid rank record: {error}", RECORD_AGAIN) from None


TRACE = Kind("torch.profiler trace", is_kineto, read_kineto)

NSYS = Kind("Nsight Systems export", is_nsys_export, _read_nsys)

RANK_TABLE = Kind("rank table", is_parquet, read_rank_table)

FLIGHT = Kind("Flight Recorder dump", is_flight_dump, read_dump)

RECORD = Kind("rank record", is_rank_record, read_rank_record)
