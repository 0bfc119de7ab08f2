"""All supported file formats, and reading of any file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.readers.compression import list_files
from stepsplit.analyzer.readers.execution_trace import (
    ExecutionTrace,
    is_execution_trace,
    read_execution_trace,
)
from stepsplit.analyzer.readers.flight_recorder import FlightDump
from stepsplit.analyzer.readers.kinds import (
    FLIGHT,
    NSYS,
    RANK_TABLE,
    RECORD,
    TRACE,
    Kind,
    RankTraces,
    find_kinds,
)
from stepsplit.analyzer.readers.kineto.trace_file import KinetoFile
from stepsplit.analyzer.readers.memory_snapshot import MemoryRecord, is_memory_snapshot, read_memory
from stepsplit.analyzer.readers.nccl import inspector, log
from stepsplit.analyzer.readers.nccl.inspector import InspectorLog
from stepsplit.analyzer.readers.nccl.nccl_tests import Sweeps, is_sweep, read_intact_sweeps
from stepsplit.analyzer.readers.nccl.records import NcclLog
from stepsplit.analyzer.readers.sources import Source
from stepsplit.analyzer.readers.training_log import (
    TrainLog,
    is_golden_values,
    is_training_log,
    read_golden_values,
    read_train_log,
)
from stepsplit.analyzer.trace import Note
from stepsplit.collectors.formats.rank_record import RankRecord

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
        kinds = find_kinds(source, KINDS)
    except DataError as error:
        yield FileRead(source.where, "", 0, (), None, error.problem)
        return
    if not kinds:
        yield FileRead(source.where, "", 0, (), None, UNKNOWN)
    for kind in kinds:
        yield _read_as(source, kind)


def _read_as(source: Source, kind: Kind[Content]) -> FileRead:
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

KINDS: tuple[Kind[Content], ...] = (
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
