"""Reading of any file, whatever its kind: a row with the content, or with the reason why not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.readers.compression import list_files
from stepsplit.analyzer.readers.execution_trace import ExecutionTrace
from stepsplit.analyzer.readers.file_kinds import find_kinds, list_formats
from stepsplit.analyzer.readers.flight_recorder import FlightDump
from stepsplit.analyzer.readers.kineto.trace_file import KinetoFile
from stepsplit.analyzer.readers.memory_snapshot import MemoryRecord
from stepsplit.analyzer.readers.nccl.inspector import InspectorLog
from stepsplit.analyzer.readers.nccl.nccl_tests import Sweeps
from stepsplit.analyzer.readers.nccl.records import NcclLog
from stepsplit.analyzer.readers.rank_traces import RankTraces
from stepsplit.analyzer.readers.sources import Source
from stepsplit.analyzer.readers.training_log import TrainLog
from stepsplit.analyzer.trace import Note
from stepsplit.collectors.formats.rank_record import RankRecord

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
        kinds = find_kinds(source, list_formats())
    except DataError as error:
        yield FileRead(source.where, "", 0, (), None, error.problem)
        return
    if not kinds:
        yield FileRead(source.where, "", 0, (), None, UNKNOWN)
    for kind in kinds:
        try:
            content = kind.read(source)
        except DataError as error:
            yield FileRead(source.where, kind.name, 0, (), None, error.problem)
            continue
        if content is None:
            yield FileRead(source.where, kind.name, 0, (), None, UNKNOWN)
            continue
        # A rank record has no limitations of its own; Nsight exports have those of each rank.
        parts = content if isinstance(content, tuple) else (content,)
        notes = tuple(note for part in parts for note in getattr(part, "notes", ()))
        yield FileRead(source.where, kind.name, kind.count(content), notes, content)
