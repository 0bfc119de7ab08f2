"""Any file, whatever wrote it: what kinds it is of, and what each reader makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.readers.execution.trace import ExecutionTrace
from stepsplit.analyzer.readers.flight.dump import FlightDump
from stepsplit.analyzer.readers.kinds import Content, Kind, kinds_of
from stepsplit.analyzer.readers.kineto.trace import KinetoFile
from stepsplit.analyzer.readers.listing import files_of
from stepsplit.analyzer.readers.memory.record import MemoryRecord
from stepsplit.analyzer.readers.nccl.inspector import InspectorLog
from stepsplit.analyzer.readers.nccl.nouns import NcclLog
from stepsplit.analyzer.readers.nccl.sweeps import Sweeps
from stepsplit.analyzer.readers.sources import Source
from stepsplit.analyzer.trace import Note
from stepsplit.collectors.rank_record import RankRecord

UNKNOWN = "no reader knows this content"


@dataclass(frozen=True, slots=True)
class FileRead:
    """One file as one kind; events counts what that kind consists of.

    Those are entries of a trace, a dump or an execution trace, rows of a memory curve, of a sweep
    or of a log's calls, lines of an NCCL log, steps of a training log or of a rank's record.
    content is None where refused says why, and kind is "" where no reader knows the file.
    """

    where: str
    kind: str
    events: int
    notes: tuple[Note, ...]
    content: Content | None
    refused: str = ""


def read_files(*places: str | Path) -> tuple[FileRead, ...]:
    """What is in every file of the places, once a kind. Raises DataError for a missing place."""
    with files_of([str(place) for place in places]) as sources:
        return tuple(found for source in sources for found in _read(source))


def _read(source: Source) -> Iterator[FileRead]:
    try:
        kinds = kinds_of(source)
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
    return FileRead(source.where, kind.name, _events(content), _notes(content), content)


def _events(content: Content) -> int:
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


def _notes(content: Content) -> tuple[Note, ...]:
    if isinstance(content, tuple):
        return tuple(note for trace in content for note in trace.notes)
    return () if isinstance(content, RankRecord) else content.notes
