"""The supported file formats, how each is recognized, and reading of any file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from stepsplit.analyzer.errors import RECORD_AGAIN, DataError
from stepsplit.analyzer.readers.compression import HEAD_BYTES, list_files, open_unpacked
from stepsplit.analyzer.readers.execution_trace import (
    ExecutionTrace,
    is_execution_trace,
    read_execution_trace,
)
from stepsplit.analyzer.readers.flight_recorder import FlightDump, is_flight_dump, read_dump
from stepsplit.analyzer.readers.kernel_rules import BUILT_IN, Rules
from stepsplit.analyzer.readers.kineto.trace_file import KinetoFile, is_kineto, read_kineto
from stepsplit.analyzer.readers.memory_snapshot import MemoryRecord, is_memory_snapshot, read_memory
from stepsplit.analyzer.readers.nccl import inspector, log
from stepsplit.analyzer.readers.nccl.inspector import InspectorLog
from stepsplit.analyzer.readers.nccl.nccl_tests import Sweeps, is_sweep, read_intact_sweeps
from stepsplit.analyzer.readers.nccl.records import NcclLog
from stepsplit.analyzer.readers.nsys import is_nsys_export, read_nsys
from stepsplit.analyzer.readers.sources import Source
from stepsplit.analyzer.readers.training_log import (
    TrainLog,
    is_golden_values,
    is_training_log,
    read_golden_values,
    read_train_log,
)
from stepsplit.analyzer.trace import Note, RankTrace
from stepsplit.collectors.rank_record import RANK_SCHEMA, RankRecord, read_record

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


# The table of a rank, a Parquet file: pyarrow is imported where there is one.


def is_parquet(head: bytes) -> bool:
    """Whether the bytes are the beginning of a Parquet file."""
    return head.startswith(b"PAR1")


def read_rank_table(source: Source, rules: Rules = BUILT_IN) -> RankTraces:
    """The trace of a rank in the table that `stepsplit reduce` wrote. Raises DataError."""
    from stepsplit.analyzer.readers.rank_table import read_table

    return (read_table(source, rules),)


# Reading a file of any kind.

UNKNOWN = "unknown format"


@dataclass(frozen=True, slots=True)
class FileRead:
    """One file, read as one kind.

    Attributes:
        where: The path, the archive and its member, or the URL.
        kind: Name of the kind such as "torch.profiler trace"; "" if the format is unknown.
        events: Number of entries: events of a trace, entries of a dump, nodes of an execution
            trace, rows of a memory curve, sweep or call log, lines of an NCCL log, steps of a
            training log or rank record.
        notes: Limitations of the content.
        content: The record that the reader returned; None if refused.
        refused: Why the file could not be read; "" if it was.
    """

    where: str
    kind: str
    events: int
    notes: tuple[Note, ...]
    content: Content | None
    refused: str = ""


def read_files(*places: str | Path) -> tuple[FileRead, ...]:
    """Reads all files of the places, whatever their format.

    A file that cannot be read gives a row with the reason, not an error. A file of several kinds,
    such as a job's output with an NCCL log and a training log, gives a row per kind.

    Args:
        places: Files, folders, archives or URLs.

    Returns:
        A row per file and kind.

    Raises:
        DataError: A place is missing, or an archive is damaged.

    Examples:
        >>> for file in read_files("sample_traces/pp2_m2/rank0_trace.json.gz"):
        ...     print(file.where, file.kind or file.refused)
        sample_traces/pp2_m2/rank0_trace.json.gz torch.profiler trace
    """
    with list_files([str(place) for place in places]) as sources:
        return tuple(found for source in sources for found in _read_source(source))


def _read_source(source: Source) -> Iterator[FileRead]:
    try:
        kinds = find_kinds(source)
    except DataError as error:
        yield FileRead(source.where, "", 0, (), None, error.problem)
        return
    if not kinds:
        yield FileRead(source.where, "", 0, (), None, UNKNOWN)
    for kind in kinds:
        yield _read_as(source, kind)


def _read_as(source: Source, kind: Kind) -> FileRead:
    try:
        content = kind.read(source)
    except DataError as error:
        return FileRead(source.where, kind.name, 0, (), None, error.problem)
    if content is None:
        return FileRead(source.where, kind.name, 0, (), None, UNKNOWN)
    return FileRead(source.where, kind.name, _count_events(content), _list_notes(content), content)


def _count_events(content: Content) -> int:
    match content:
        case KinetoFile():
            return content.rows.counts.entries
        case tuple():
            return sum(len(trace.events) for trace in content)
        case FlightDump():
            return len(content.entries)
        case RankRecord():
            return len(content.steps.profiled_ns)
        case MemoryRecord():
            return sum(len(device.curve) for device in content.devices)
        case ExecutionTrace():
            return len(content.nodes)
        case InspectorLog():
            return sum(len(calls.calls) for calls in content.calls)
        case NcclLog():
            return content.nccl_lines
        case Sweeps():
            return sum(len(sweep.rows) for sweep in content.sweeps)
    return len(content.steps)


def _list_notes(content: Content) -> tuple[Note, ...]:
    if isinstance(content, tuple):
        return tuple(note for trace in content for note in trace.notes)
    return () if isinstance(content, RankRecord) else content.notes


# The supported kinds of files.

RankTraces = tuple[RankTrace, ...]

Content: TypeAlias = (
    KinetoFile
    | RankTraces
    | FlightDump
    | MemoryRecord
    | ExecutionTrace
    | InspectorLog
    | NcclLog
    | Sweeps
    | TrainLog
    | RankRecord
)
"""What a reader returns."""

_LONG_HEAD_BYTES = 1 << 20
"""A job's output may begin with pages of other text before the first recognizable line."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of file: its display name, the test on the first bytes, and its reader."""

    name: str
    recognizes: Callable[[bytes], bool]
    read: Callable[[Source], Content | None]


TRACE = Kind("torch.profiler trace", is_kineto, read_kineto)

NSYS = Kind("Nsight Systems export", is_nsys_export, read_nsys)

FLIGHT = Kind("Flight Recorder dump", is_flight_dump, read_dump)

RECORD = Kind("rank record", is_rank_record, read_rank_record)

RANK_TABLE = Kind("rank table", is_parquet, read_rank_table)

KINDS = (
    NSYS,
    RANK_TABLE,
    FLIGHT,
    RECORD,
    Kind("memory snapshot", is_memory_snapshot, read_memory),
    Kind("execution trace", is_execution_trace, read_execution_trace),
    Kind("NCCL Inspector dump", inspector.is_inspector_log, inspector.read_inspector),
    Kind("golden values", is_golden_values, read_golden_values),
    TRACE,
    Kind("NCCL log", log.is_nccl_log, log.read_nccl_log),
    Kind("nccl-tests output", is_sweep, read_intact_sweeps),
    Kind("training log", is_training_log, read_train_log),
)
"""A text file may be of several kinds at once: a job's output contains all that was printed."""


def find_kinds(source: Source) -> tuple[Kind, ...]:
    """The kinds of the file by its content, () if unknown. Raises DataError."""
    with open_unpacked(source) as content:
        head = content.read(HEAD_BYTES)
        if b"\0" not in head and head.lstrip()[:1] not in (b"{", b"["):
            head += content.read(_LONG_HEAD_BYTES)
    return tuple(kind for kind in KINDS if kind.recognizes(head))
