"""Every kind of file that is read, and how its content tells it from the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from stepsplit.analyzer.readers import (
    execution_trace,
    flight,
    golden_values,
    kineto,
    memory_snapshot,
    nccl_inspector,
    nccl_log,
    nccl_tests,
    nsys,
    train_log,
)
from stepsplit.analyzer.readers.execution_trace import ExecutionTrace
from stepsplit.analyzer.readers.flight import FlightDump
from stepsplit.analyzer.readers.kineto import KinetoFile
from stepsplit.analyzer.readers.memory_record import MemoryRecord
from stepsplit.analyzer.readers.nccl_inspector import InspectorLog
from stepsplit.analyzer.readers.nccl_nouns import NcclLog
from stepsplit.analyzer.readers.nccl_tests import Sweeps
from stepsplit.analyzer.readers.sources import Source
from stepsplit.analyzer.readers.train_log import TrainLog
from stepsplit.analyzer.readers.unpack import unpacked
from stepsplit.analyzer.trace import RankTrace

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
)
"""What a reader makes of a file."""
_HEAD_BYTES = 1 << 16
_LONG_HEAD_BYTES = 1 << 20
"""A job's output may begin with pages of other programs' before a line tells what it is."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of file: its name for people, whether a beginning is one's, and its reader."""

    name: str
    recognizes: Callable[[bytes], bool]
    read: Callable[[Source], Content | None]


TRACE = Kind("torch.profiler trace", kineto.recognizes, kineto.read_kineto)
NSYS = Kind("Nsight Systems export", nsys.recognizes, nsys.read_nsys)
FLIGHT = Kind("Flight Recorder dump", flight.recognizes, flight.read_dump)
KINDS = (
    NSYS,
    FLIGHT,
    Kind("memory snapshot", memory_snapshot.recognizes, memory_snapshot.read_memory),
    Kind("execution trace", execution_trace.recognizes, execution_trace.read_execution_trace),
    Kind("NCCL Inspector dump", nccl_inspector.recognizes, nccl_inspector.read_inspector),
    Kind("golden values", golden_values.recognizes, golden_values.read_golden_values),
    TRACE,
    Kind("NCCL log", nccl_log.recognizes, nccl_log.read_nccl_log),
    Kind("nccl-tests output", nccl_tests.recognizes, nccl_tests.read_sweeps),
    Kind("training log", train_log.recognizes, train_log.read_train_log),
)
"""A file of text may be of several kinds at once: a job's output holds whatever it printed."""


def kinds_of(source: Source) -> tuple[Kind, ...]:
    """The kinds of which the file's content is; none where no reader knows it. Raises DataError."""
    with unpacked(source) as content:
        head = content.read(_HEAD_BYTES)
        found = tuple(kind for kind in KINDS if kind.recognizes(head))
        if found or len(head) < _HEAD_BYTES or b"\0" in head:
            return found
        while len(head) < _LONG_HEAD_BYTES and (more := content.read(_LONG_HEAD_BYTES - len(head))):
            head += more
    return tuple(kind for kind in KINDS if kind.recognizes(head))
