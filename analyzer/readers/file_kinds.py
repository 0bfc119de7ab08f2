"""Every kind of file that the analyzer knows, one entry each, and how the kind of a file is found.

An entry says all that is particular to a kind. The rooms that list, read, reduce or redact files
ask the entry, never which kind it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from enum import Enum, auto
from functools import partial
from importlib import import_module
from typing import Any, Generic, TypeVar

from msgspec import Struct

from stepsplit.analyzer.readers.compression import HEAD_BYTES, open_unpacked
from stepsplit.analyzer.readers.flight_recorder import is_flight_dump, read_dump
from stepsplit.analyzer.readers.kineto.reader import read_kineto_ranks
from stepsplit.analyzer.readers.kineto.trace_file import is_kineto, read_kineto
from stepsplit.analyzer.readers.rank_traces import ReadRanks, read_whole_files
from stepsplit.analyzer.readers.run_metadata import is_rank_record, read_rank_record, read_run_spec
from stepsplit.analyzer.readers.sources import Source, is_special
from stepsplit.collectors.formats.run_spec import RUN_FILE

_ContentT = TypeVar("_ContentT")


class FileRole(Enum):
    """What the files of a kind are in a recording."""

    NO_PART = auto()
    TRACE = auto()
    """What ranks did; at least one is needed."""
    FLIGHT = auto()
    """The calls of a rank, which complete its trace."""
    RECORD = auto()
    """What the recorder knows of a rank."""
    RUN = auto()
    """What it knows of the run; of several the one nearest to the top folder counts."""
    MEMORY = auto()
    """A history of allocations, of which the recording says what it lacks."""


class Unreadable(Enum):
    """What a file of a recording that cannot be read leads to."""

    NOTE = auto()
    ERROR_IF_NAMED = auto()
    """An error if the user named the file itself, and not its folder; else a note."""
    ERROR = auto()


class FileKind(Struct, Generic[_ContentT], frozen=True, eq=False):
    """A kind of file. Only `name` and one of `recognize` and `file_name` are needed.

    Attributes:
        name: As it is displayed.
        recognize: Whether the bytes are the beginning of such a file. None: its name decides.
        file_name: The names of such files, whatever they contain.
        read: The content, or None if the file turns out to be of another kind. Raises only
            DataError.
        count: How many entries the content has; see `FileRead.events`.
        role: What such files are in a recording.
        read_ranks: The traces in many such files, for FileRole.TRACE; `read_whole_files` makes one
            of a function that reads one file.
        unreadable: What follows if such a file of a recording cannot be read.
        beside: Names of such files that are read too if a file next to them was named.
        unpacked_ratio: About how many bytes of a raw trace one byte of the file stands for; large
            recordings are moved to the event store. 0: files of this kind are not counted.
        is_raw: Whether `stepsplit reduce` counts the file in the size of the raw traces.
        is_copied: Whether `stepsplit reduce` copies the file as it is.
        redact_as: Its key in redact.copies.COPIES; "": a redacted copy leaves it out.
    """

    name: str
    recognize: Callable[[bytes], bool] | None = None
    read: Callable[[Source], _ContentT | None] = lambda _: None
    count: Callable[[_ContentT], int] = lambda _: 1
    file_name: re.Pattern[str] | None = None
    role: FileRole = FileRole.NO_PART
    read_ranks: ReadRanks | None = None
    unreadable: Unreadable = Unreadable.ERROR_IF_NAMED
    beside: re.Pattern[str] | None = None
    unpacked_ratio: int = 0
    is_raw: bool = False
    is_copied: bool = False
    redact_as: str = ""


_LONG_HEAD_BYTES = 1 << 20
"""A job's output may begin with pages of other text before the first recognizable line."""


def find_kinds(source: Source, kinds: Iterable[FileKind[Any]]) -> tuple[FileKind[Any], ...]:
    """Those of the kinds that the file has by its name, else by its content; () if none.

    Raises DataError if the file cannot be opened.
    """
    kinds = tuple(kinds)
    name = source.inner.name
    named = tuple(kind for kind in kinds if kind.file_name and kind.file_name.fullmatch(name))
    if named and not is_special(source):
        return named
    with open_unpacked(source) as content:
        head = content.read(HEAD_BYTES)
        # A text that is no JSON: it may be the output of a job.
        if b"\0" not in head and head.lstrip()[:1] not in (b"{", b"["):
            head += content.read(_LONG_HEAD_BYTES)
    return tuple(kind for kind in kinds if kind.recognize and kind.recognize(head))


def list_recorded_kinds() -> tuple[FileKind[Any], ...]:
    """The kinds of files that a recording consists of."""
    return tuple(kind for kind in KINDS if kind.role is not FileRole.NO_PART)


def list_formats() -> tuple[FileKind[Any], ...]:
    """The kinds that are recognized by content, which `read_files` reads."""
    return tuple(kind for kind in KINDS if kind.recognize is not None)


class Import(Struct, frozen=True):
    """A function of a reader that is imported when it is first called: few recordings have files of
    its format, and all readers together take half as long to import as those of traces."""

    module: str
    function: str

    def load(self) -> Callable[..., Any]:
        """The function itself."""
        module = import_module(f"stepsplit.analyzer.readers.{self.module}")
        function: Callable[..., Any] = getattr(module, self.function)
        return function

    def __call__(self, *arguments: Any) -> Any:
        return self.load()(*arguments)


# The kinds.

TRACE = FileKind(
    "torch.profiler trace",
    recognize=is_kineto,
    read=read_kineto,
    count=lambda file: file.rows.counts.entries,
    role=FileRole.TRACE,
    read_ranks=read_kineto_ranks,
    unpacked_ratio=1,
    is_raw=True,
    redact_as="trace",
)

FLIGHT = FileKind(
    "Flight Recorder dump",
    recognize=is_flight_dump,
    read=read_dump,
    count=lambda dump: len(dump.entries),
    role=FileRole.FLIGHT,
    unreadable=Unreadable.NOTE,
    beside=re.compile("flight"),
    redact_as="flight",
)

_SQLITE = b"SQLite format 3\0"

KINDS: tuple[FileKind[Any], ...] = (
    FileKind(
        RUN_FILE,
        file_name=re.compile(re.escape(RUN_FILE)),
        read=read_run_spec,
        role=FileRole.RUN,
        unreadable=Unreadable.ERROR,
        beside=re.compile(rf"\A{re.escape(RUN_FILE)}\Z"),
        is_copied=True,
        redact_as="run",
    ),
    # A job's config is read by the model; in a recording it only has to be found for a copy.
    FileKind("job.toml", file_name=re.compile(r".+\.toml", re.S), redact_as="job"),
    FLIGHT,
    FileKind(
        "rank record",
        recognize=is_rank_record,
        read=read_rank_record,
        count=lambda record: record.count_steps(),
        role=FileRole.RECORD,
        unreadable=Unreadable.NOTE,
        beside=re.compile(r"_record\.json\Z"),
        is_copied=True,
        redact_as="record",
    ),
    FileKind(
        "memory snapshot",
        recognize=Import("memory_snapshot", "is_memory_snapshot"),
        read=Import("memory_snapshot", "read_memory"),
        count=lambda memory: sum(len(device.curve) for device in memory.devices),
        role=FileRole.MEMORY,
        unreadable=Unreadable.NOTE,
    ),
    FileKind(
        "execution trace",
        recognize=Import("execution_trace", "is_execution_trace"),
        read=Import("execution_trace", "read_execution_trace"),
        count=lambda trace: len(trace.nodes),
    ),
    FileKind(
        "NCCL Inspector dump",
        recognize=Import("nccl.inspector", "is_inspector_log"),
        read=Import("nccl.inspector", "read_inspector"),
        count=lambda log: sum(len(calls.calls) for calls in log.calls),
    ),
    FileKind(
        "golden values",
        recognize=Import("training_log", "is_golden_values"),
        read=Import("training_log", "read_golden_values"),
        count=lambda log: len(log.steps),
    ),
    TRACE,
    FileKind(
        "Nsight Systems export",
        # The first bytes first: the reader is not imported for a file of another format.
        recognize=lambda head: head.startswith(_SQLITE) and Import("nsys", "is_nsys_export")(head),
        read=Import("nsys", "read_nsys"),
        count=lambda traces: sum(len(trace.events) for trace in traces),
        role=FileRole.TRACE,
        read_ranks=partial(read_whole_files, Import("nsys", "read_nsys")),
        # An export may hold all ranks of a host, which would be left out with a note.
        unreadable=Unreadable.ERROR,
        is_raw=True,
    ),
    FileKind(
        "Nsight Systems export",
        # nsys export --type parquetdir: each table is a file, and this one stands for the folder.
        file_name=re.compile(r"StringIds\.parquet"),
        read=Import("nsys", "read_nsys"),
        count=lambda traces: sum(len(trace.events) for trace in traces),
        role=FileRole.TRACE,
        read_ranks=partial(read_whole_files, Import("nsys", "read_nsys")),
        unreadable=Unreadable.ERROR,
    ),
    FileKind(
        "rank table",
        recognize=lambda head: head.startswith(b"PAR1"),
        read=Import("rank_table", "read_rank_table"),
        count=lambda traces: sum(len(trace.events) for trace in traces),
        role=FileRole.TRACE,
        read_ranks=partial(read_whole_files, Import("rank_table", "read_rank_table")),
        unpacked_ratio=40,
    ),
    FileKind(
        "NCCL log",
        recognize=Import("nccl.log", "is_nccl_log"),
        read=Import("nccl.log", "read_nccl_log"),
        count=lambda log: log.nccl_lines,
        redact_as="nccl",
    ),
    FileKind(
        "nccl-tests output",
        recognize=Import("nccl.nccl_tests", "is_sweep"),
        read=Import("nccl.nccl_tests", "read_intact_sweeps"),
        count=lambda sweeps: sum(len(sweep.rows) for sweep in sweeps.sweeps),
    ),
    FileKind(
        "training log",
        recognize=Import("training_log", "is_training_log"),
        read=Import("training_log", "read_train_log"),
        count=lambda log: len(log.steps),
    ),
)
"""The order is that in which they are listed if a file is of several kinds at once: the output of a
job contains all that was printed."""
