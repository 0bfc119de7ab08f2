"""Every kind of file that is read, and how its content tells it from the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from stepsplit.analyzer.readers import rank_record
from stepsplit.analyzer.readers.execution import trace as execution
from stepsplit.analyzer.readers.execution.trace import ExecutionTrace
from stepsplit.analyzer.readers.flight import dump as flight
from stepsplit.analyzer.readers.flight.dump import FlightDump
from stepsplit.analyzer.readers.kineto import trace as kineto
from stepsplit.analyzer.readers.kineto.trace import KinetoFile
from stepsplit.analyzer.readers.memory import snapshot as memory
from stepsplit.analyzer.readers.memory.record import MemoryRecord
from stepsplit.analyzer.readers.nccl import inspector, log, sweeps
from stepsplit.analyzer.readers.nccl.inspector import InspectorLog
from stepsplit.analyzer.readers.nccl.nouns import NcclLog
from stepsplit.analyzer.readers.nccl.sweeps import Sweeps
from stepsplit.analyzer.readers.nsys import export as nsys
from stepsplit.analyzer.readers.sources import Source
from stepsplit.analyzer.readers.training import golden_values
from stepsplit.analyzer.readers.training import log as training
from stepsplit.analyzer.readers.training.log import TrainLog
from stepsplit.analyzer.readers.unpack import HEAD_BYTES, unpacked
from stepsplit.analyzer.trace import RankTrace
from stepsplit.collectors.rank_record import RankRecord

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
"""What a reader makes of a file."""
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
RECORD = Kind("rank record", rank_record.recognizes, rank_record.read_rank_record)
KINDS = (
    NSYS,
    FLIGHT,
    RECORD,
    Kind("memory snapshot", memory.recognizes, memory.read_memory),
    Kind("execution trace", execution.recognizes, execution.read_execution_trace),
    Kind("NCCL Inspector dump", inspector.recognizes, inspector.read_inspector),
    Kind("golden values", golden_values.recognizes, golden_values.read_golden_values),
    TRACE,
    Kind("NCCL log", log.recognizes, log.read_nccl_log),
    Kind("nccl-tests output", sweeps.recognizes, sweeps.read_sweeps),
    Kind("training log", training.recognizes, training.read_train_log),
)
"""A file of text may be of several kinds at once: a job's output holds whatever it printed."""


def kinds_of(source: Source) -> tuple[Kind, ...]:
    """The kinds of which the file's content is; none where no reader knows it. Raises DataError."""
    with unpacked(source) as content:
        head = content.read(HEAD_BYTES)
        if b"\0" not in head and head.lstrip()[:1] not in (b"{", b"["):
            head += content.read(_LONG_HEAD_BYTES)
    return tuple(kind for kind in KINDS if kind.recognizes(head))
