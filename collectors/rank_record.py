"""The record of one rank (rank{rank}_record.json) and the file names of a recording."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

from stepsplit.collectors.run_spec import (
    GroupInfo,
    HostInfo,
    RankInfo,
    RunSpec,
    decode_group,
    decode_known,
    merge_groups,
    write_whole,
)

# Step times with and without the profiler, to measure its overhead.

MAX_KEPT_STEPS = 20
"""Number of step times kept per kind: the last ones before and the first ones after."""


class StepClock:
    """Measures the wall times of steps before, during and after profiling."""

    def __init__(self) -> None:
        self._last_ns: int | None = None
        self._before: deque[int] = deque(maxlen=MAX_KEPT_STEPS)
        self._profiled: list[int] = []
        self._after: list[int] = []

    def step(self, kind: str) -> None:
        """Ends a step. kind: "before", "profiled" or "after"; other steps are not kept."""
        now = time.perf_counter_ns()
        last, self._last_ns = self._last_ns, now
        if last is None:
            return
        durations = {"before": self._before, "profiled": self._profiled, "after": self._after}.get(
            kind
        )
        if durations is not None and (kind == "before" or len(durations) < MAX_KEPT_STEPS):
            durations.append(now - last)

    @property
    def full(self) -> bool:
        """Whether enough steps after the profiler were measured."""
        return len(self._after) >= MAX_KEPT_STEPS

    def collect_times(self) -> StepTimes:
        """The step times measured so far."""
        return StepTimes(tuple(self._before), tuple(self._profiled), tuple(self._after))


# The content of rank{rank}_record.json.

RANK_SCHEMA = "stepsplit.rank/1"


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Wall times of steps in ns: before, during and after profiling.

    The first step of the job and the steps in which the profiler started or ended are excluded.
    """

    before_ns: tuple[int, ...] = ()
    profiled_ns: tuple[int, ...] = ()
    after_ns: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class MemoryState:
    """Memory of a rank at the end of a step; None if not measured.

    weights, gradients and optimizer are the storages known to the optimizers. The peaks are the
    allocator's since the job began. activations is the peak allocation of a recorded step above
    its begin, without the gradients that remain at its end.
    """

    weights_bytes: int | None = None
    gradients_bytes: int | None = None
    optimizer_bytes: int | None = None
    activations_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ClockProbe:
    """Offset of the host's clock from rank 0's, from the fastest of several round trips."""

    offset_ns: int
    round_trip_ns: int
    at_unix_ns: int


@dataclass(frozen=True, slots=True)
class GpuState:
    """One NVML reading: SM clock, throttle reasons (bit mask) and link errors so far."""

    at_unix_ns: int
    sm_clock_mhz: int | None = None
    throttle_reasons: int | None = None
    link_errors: int | None = None


@dataclass(frozen=True, slots=True)
class RankRecord:
    """One rank of one recording. detail: "full", "thin" or "none", how much of the trace exists."""

    run: str
    rank: RankInfo
    world_size: int
    backend: str
    detail: str = "full"
    groups: tuple[GroupInfo, ...] = ()
    versions: tuple[tuple[str, str], ...] = ()
    machine: HostInfo | None = None
    first_step: int = 0
    steps: StepTimes = StepTimes()
    memory: MemoryState | None = None
    clocks: tuple[ClockProbe, ...] = ()
    gpu: tuple[GpuState, ...] = ()


def write_record(folder: Path, record: RankRecord) -> Path:
    """Writes the record into the folder atomically."""
    body: dict[str, Any] = {"schema": RANK_SCHEMA} | asdict(record)
    body["versions"] = dict(record.versions)
    text = json.dumps(body, indent=1) + "\n"
    return write_whole(build_record_path(folder, record.rank.rank), text.encode())


def read_record(text: str | bytes) -> RankRecord:
    """Decodes the text of a record. Raises ValueError if it is invalid."""
    body = json.loads(text)
    if not isinstance(body, dict) or body.get("schema") != RANK_SCHEMA:
        raise ValueError(f"not a {RANK_SCHEMA} file")
    try:
        return RankRecord(
            run=str(body["run"]),
            rank=_decode_required(RankInfo, body["rank"]),
            world_size=int(body["world_size"]),
            backend=str(body["backend"]),
            detail=str(body.get("detail", "full")),
            groups=tuple(map(decode_group, body.get("groups", ()))),
            versions=tuple((str(k), str(v)) for k, v in body.get("versions", {}).items()),
            machine=decode_known(HostInfo, body.get("machine")),
            first_step=int(body.get("first_step", 0)),
            steps=_decode_steps(body.get("steps", {})),
            memory=decode_known(MemoryState, body.get("memory")),
            clocks=tuple(_decode_required(ClockProbe, each) for each in body.get("clocks", ())),
            gpu=tuple(_decode_required(GpuState, each) for each in body.get("gpu", ())),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a field is missing or invalid: {error}") from error


def build_spec(records: Sequence[RankRecord], previous: RunSpec | None = None) -> RunSpec:
    """The RunSpec of all ranks' records; mesh, model and training are taken from `known`."""
    first = records[0]
    hosts = {each.machine.host: each.machine for each in records if each.machine is not None}
    return RunSpec(
        name=first.run,
        world_size=first.world_size,
        backend=first.backend,
        mesh=previous.mesh if previous else None,
        model=previous.model if previous else None,
        training=previous.training if previous else None,
        ranks=tuple(record.rank for record in records),
        groups=merge_groups(group for record in records for group in record.groups),
        versions=first.versions,
        hosts=tuple(hosts.values()),
    )


def _decode_required(kind: Any, body: Mapping[str, Any]) -> Any:
    decoded = decode_known(kind, body)
    if decoded is None:
        raise TypeError(f"{kind.__name__} is missing")
    return decoded


def _decode_steps(body: Mapping[str, Any]) -> StepTimes:
    names = ("before_ns", "profiled_ns", "after_ns")
    return StepTimes(*(tuple(map(int, body.get(name, ()))) for name in names))


# File names of a recording.


def build_trace_path(folder: Path, rank: int) -> Path:
    """torch.profiler's trace of a rank."""
    return folder / f"rank{rank}_trace.json.gz"


def build_flight_path(folder: Path, rank: int) -> Path:
    """The Flight Recorder's dump of a rank."""
    return folder / f"rank{rank}_flight.json.gz"


def build_record_path(folder: Path, rank: int) -> Path:
    """The record of a rank."""
    return folder / f"rank{rank}_record.json"


def build_raw_path(out: Path) -> Path:
    """The hidden file, in the same folder, for the raw content of a packed file."""
    return out.with_name(f".{out.name.removesuffix('.gz')}.{os.getpid()}.raw")


def find_free_folder(folder: Path) -> Path:
    """The folder, or if it exists the first of FOLDER-2, FOLDER-3, ... that does not exist."""
    names = (folder if n == 1 else folder.with_name(f"{folder.name}-{n}") for n in count(1))
    return next(name for name in names if not name.exists())
