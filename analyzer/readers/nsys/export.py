"""An Nsight Systems SQLite export -> a RankTrace for each of its processes that ran kernels."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.readers.nsys.calls import calls_of, communicators_of, payloads_of
from stepsplit.analyzer.readers.nsys.database import EXPORT_AGAIN, Database, opened
from stepsplit.analyzer.readers.nsys.tables import Process, process_key, processes_of
from stepsplit.analyzer.readers.rules import Rules
from stepsplit.analyzer.readers.rules_file import BUILT_IN
from stepsplit.analyzer.readers.sources import Source
from stepsplit.analyzer.trace import Note, RankTrace

_MAGIC = b"SQLite format 3\0"
_TABLES = re.compile(rb"CREATE TABLE \W?(StringIds|NVTX_EVENTS|TARGET_INFO_|ENUM_NSYS_|META_DATA_)")
_RECORD = "record with nsys profile -t cuda,nvtx and export again"
_RANK_IN_NAME = re.compile(r"rank[-_ ]?(\d{1,7})", re.I)
_RANK_NAMES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
_SIZE_NAMES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
_MOST_RANKS = 10_000_000
_MOST_ENVIRONMENT = 1 << 20


def recognizes(head: bytes) -> bool:
    """Whether a file that begins so is an export of Nsight Systems: SQLite with its tables.

    A long schema may lie beyond the head: such a file is taken for one.
    """
    if not head.startswith(_MAGIC):
        return False
    is_elsewhere = head[100:101] == b"\x05" and b"CREATE " not in head
    return is_elsewhere or _TABLES.search(head) is not None


def read_nsys(source: Source, rules: Rules = BUILT_IN) -> tuple[RankTrace, ...]:
    """The traces of the export, in the order of their ranks, at least one.

    Raises DataError where the file is damaged, no such export, or has no kernels.
    """
    with opened(source) as db:
        if "StringIds" not in db.columns:
            raise DataError(source.where, "SQLite, but no Nsight Systems export", EXPORT_AGAIN)
        processes = processes_of(db)
        if not processes:
            raise DataError(source.where, "no GPU kernels or copies in it", _RECORD)
        session = _session(db)
        ranks = _ranks(db, session, source, processes)
        payloads = payloads_of(db)
    groups = communicators_of(processes, ranks.of_process, payloads)
    world_size = max(session.world_size, 1 + max(ranks.of_process))
    traces = []
    for process, rank in zip(processes, ranks.of_process, strict=True):
        found = calls_of(process, payloads, groups, rules)
        notes = tuple(Note(n.code, n.message, rank) for n in (*session.notes, *ranks.notes))
        traces.append(
            RankTrace(
                source=Path(source.where),
                rank=rank,
                world_size=world_size,
                host=session.host,
                device=session.device,
                backend="nccl" if any(n.startswith("nccl") for n in process.events.names) else "",
                t0_unix_ns=session.start_unix_ns + process.start_ns,
                events=process.events,
                calls=found.calls,
                groups=found.groups,
                notes=notes,
            )
        )
    return tuple(sorted(traces, key=lambda trace: trace.rank))


@dataclass(frozen=True, slots=True)
class _Session:
    """What the export says of the whole recording; world_size and rank are -1 where it is silent.

    rank is that of the environment in which nsys itself ran.
    """

    start_unix_ns: int
    host: str
    device: str
    rank: int
    world_size: int
    notes: tuple[Note, ...]


def _session(db: Database) -> _Session:
    table = "TARGET_INFO_SYSTEM_ENV"
    values = db.texts(table, "value", most=_MOST_ENVIRONMENT)
    pairs = list(zip(db.texts(table, "name"), values, strict=False))
    environment = "\n".join(f"{name}={value}" for name, value in pairs)
    began = db.ints("TARGET_INFO_SESSION_START_TIME", ("utcEpochNs",)).ravel().tolist()
    known = bool(began) and began[0] > 0
    notes = []
    if not known:
        text = "the export does not say when the session began: its clock counts from 0"
        notes.append(Note("no_clock", text))
    if len(db.ints("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", ("start",))):
        text = "CUDA graphs were recorded whole and count as compute: record with "
        notes.append(Note("graphs_whole", text + "--cuda-graph-trace=node"))
    return _Session(
        start_unix_ns=began[0] if known else 0,
        host=next((value for name, value in pairs if name == "Hostname"), ""),
        device=next(db.texts("TARGET_INFO_GPU", "name"), ""),
        rank=_variable(environment, _RANK_NAMES),
        world_size=_variable(environment, _SIZE_NAMES),
        notes=tuple(notes),
    )


def _variable(environment: str, names: Sequence[str]) -> int:
    """The number that the first of the variables holds, -1 where none is set."""
    for name in names:
        pattern = rf"(?<![A-Za-z0-9_]){name}[\"']?\s*[=:]\s*[\"']?(\d{{1,7}})(?!\d)"
        if (match := re.search(pattern, environment)) is not None:
            return int(match[1])
    return -1


@dataclass(frozen=True, slots=True)
class _Ranks:
    """The rank of each process, and how it was guessed."""

    of_process: tuple[int, ...]
    notes: tuple[Note, ...]


def _ranks(db: Database, session: _Session, source: Source, processes: Sequence[Process]) -> _Ranks:
    """The rank of each process: MPI's, that of the one process, else by device and guessed."""
    rows = db.ints("MPI_RANKS", ("globalTid", "rank"))
    mpi = dict(zip(process_key(rows[:, 0]).tolist(), rows[:, 1].tolist(), strict=True))
    by_mpi = [mpi.get(process.key, -1) for process in processes]
    if min(by_mpi) >= 0 and max(by_mpi) < _MOST_RANKS and len(set(by_mpi)) == len(by_mpi):
        return _Ranks(tuple(by_mpi), ())
    if len(processes) == 1:
        named = _RANK_IN_NAME.search(source.inner.name) or _RANK_IN_NAME.search(
            source.inner.parent.name
        )
        rank = session.rank if session.rank >= 0 or named is None else int(named[1])
        if rank >= 0:
            return _Ranks((rank,), ())
    order = sorted(range(len(processes)), key=lambda i: (_first_device(processes[i]), i))
    text = "the export names no ranks: they are taken in the order of the devices"
    return _Ranks(tuple(order.index(i) for i in range(len(order))), (Note("rank_guessed", text),))


def _first_device(process: Process) -> int:
    return min(lane.device for lane in process.events.lanes if lane.device >= 0)
