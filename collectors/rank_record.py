"""The record and the state of one rank, and the file names of a recording."""

from __future__ import annotations

import json
import os
import re
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

from stepsplit.collectors.run_spec import (
    RUN_FILE,
    GroupInfo,
    HostInfo,
    RankInfo,
    RunSpec,
    decode_field,
    decode_value,
    decode_versions,
    decode_world_size,
    merge_groups,
    parse_object,
    write_whole,
)

# Step times with and without the profiler, to measure its overhead.

MAX_KEPT_STEPS = 20
"""Number of step times kept per kind: the last ones before and the first ones after."""

STEPS_TIMED_BEFORE = 6
"""Steps that are timed before the warmup: the steps after it may be slower, as CUPTI stays."""


class StepClock:
    """Measures the wall times of steps before, during and after profiling."""

    def __init__(self) -> None:
        self._last_ns: int | None = None
        self._before: deque[int] = deque(maxlen=MAX_KEPT_STEPS)
        self._profiled: list[int] = []
        self._after: list[int] = []

    def start(self, earlier_ns: Sequence[int] = ()) -> None:
        """Begins the first step. earlier_ns: times of the steps before it, as far as known."""
        self._before.extend(earlier_ns)
        self._last_ns = time.perf_counter_ns()

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
    """Times of steps in ns, on the host: before, during and after profiling.

    The first step of the job and the steps in which the profiler started or ended are excluded.
    gpu_...: the same on the GPU, which the host may be ahead of by several steps.
    """

    before_ns: tuple[int, ...] = ()
    profiled_ns: tuple[int, ...] = ()
    after_ns: tuple[int, ...] = ()
    gpu_before_ns: tuple[int, ...] = ()
    gpu_profiled_ns: tuple[int, ...] = ()
    gpu_after_ns: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class MemoryState:
    """Memory of a rank at the end of a step; None if not measured.

    weights, gradients and optimizer are the storages known to the optimizers. The peaks are the
    allocator's since the job began. activations is the peak allocation of a recorded step above
    its begin, without the gradients that remain at its end, on the GPU or else the CPU.
    allocation_retries counts how often the allocator freed its cache and tried again in the
    recorded steps.
    """

    weights_bytes: int | None = None
    gradients_bytes: int | None = None
    optimizer_bytes: int | None = None
    activations_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    allocation_retries: int | None = None


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
class CodeFrame:
    """A frame of a Python stack."""

    function: str
    file: str
    line: int


@dataclass(frozen=True, slots=True)
class GcPause:
    """A garbage collection of Python, during which no Python code of the process runs."""

    at_unix_ns: int
    took_ns: int
    generation: int


@dataclass(frozen=True, slots=True)
class HostSamples:
    """Looks at the stack of the training thread in the recorded steps, and garbage collections.

    Each look has a time and a place, an index of places. A place is the innermost frame outside of
    the standard library and torch, and if that is in another installed package, the innermost frame
    of the user's code after it.
    """

    places: tuple[tuple[CodeFrame, ...], ...] = ()
    at_unix_ns: tuple[int, ...] = ()
    place: tuple[int, ...] = ()
    gc_pauses: tuple[GcPause, ...] = ()

    def __post_init__(self) -> None:
        known = all(0 <= one < len(self.places) for one in self.place) and all(self.places)
        if not known or len(self.place) != len(self.at_unix_ns):
            raise ValueError("host: looks without a time or a place")


@dataclass(frozen=True, slots=True)
class RankRecord:
    """One rank of one recording.

    detail: "full", "thin" or "none", how much of the trace exists. device_stopped_step: the step in
    which Kineto stopped to record the GPU because its buffers were full; the recording ends with
    it. None if it did not stop. gpu_note: why there is no reading of the GPU, or of what it is.
    host: what its host did in Python.
    steps_before: the steps that a resumed job had done before this process; the other numbers of
    steps count them, like the marks of the trace. end_step: the first step after the recorded ones,
    of which the trace may hold a part; None if unknown. max_connections:
    CUDA_DEVICE_MAX_CONNECTIONS of its process, None if not set.
    """

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
    device_stopped_step: int | None = None
    gpu_note: str = ""
    host: HostSamples = HostSamples()
    steps_before: int = 0
    end_step: int | None = None
    max_connections: int | None = None


def write_record(folder: Path, record: RankRecord) -> Path:
    """Writes the record into the folder atomically."""
    body: dict[str, Any] = {"schema": RANK_SCHEMA} | asdict(record)
    body["versions"] = dict(record.versions)
    text = json.dumps(body, indent=1) + "\n"
    return write_whole(build_record_path(folder, record.rank.rank), text.encode())


def read_record(text: str | bytes) -> RankRecord:
    """Decodes the text of a record. Raises ValueError if it is invalid."""
    body = parse_object(text, RANK_SCHEMA)
    connections = body.get("max_connections")
    stopped = body.get("device_stopped_step")
    return RankRecord(
        run=decode_field(body, "run", str),
        rank=decode_field(body, "rank", RankInfo),
        world_size=decode_world_size(body),
        backend=decode_field(body, "backend", str),
        detail=decode_value(body.get("detail", "full"), str, "detail"),
        groups=decode_value(body.get("groups", []), tuple[GroupInfo, ...], "groups"),
        versions=decode_versions(body),
        machine=decode_value(body.get("machine"), HostInfo | None, "machine"),
        first_step=decode_value(body.get("first_step", 0), int, "first_step"),
        steps=decode_value(body.get("steps", {}), StepTimes, "steps"),
        memory=decode_value(body.get("memory"), MemoryState | None, "memory"),
        clocks=decode_value(body.get("clocks", []), tuple[ClockProbe, ...], "clocks"),
        gpu=decode_value(body.get("gpu", []), tuple[GpuState, ...], "gpu"),
        device_stopped_step=decode_value(stopped, int | None, "device_stopped_step"),
        gpu_note=decode_value(body.get("gpu_note", ""), str, "gpu_note"),
        host=decode_value(body.get("host", {}), HostSamples, "host"),
        steps_before=decode_value(body.get("steps_before", 0), int, "steps_before"),
        end_step=decode_value(body.get("end_step"), int | None, "end_step"),
        max_connections=decode_value(connections, int | None, "max_connections"),
    )


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
        max_connections=first.max_connections,
    )


# The state of one rank of a running job: steps, calls and stack (rank{rank}_state.json).

STATE_SCHEMA = "stepsplit.state/1"

STATE_SUFFIX = "_state.json"

RAS_NAME = "nccl_ras.txt"
"""What NCCL's RAS said of the job when its ranks were looked at."""

RUNNING, RAISED, STOPPED, SILENT, ENDED = "running", "raised", "stopped", "silent", "ended"


USUAL_STEPS = 3.0
"""A step that has lasted less than this many times the longest recent one may be only slow."""


@dataclass(frozen=True, slots=True)
class Look:
    """One look at a rank.

    steps: ended steps. since_step_ns: time since the last one ended, or since the rank joined the
    job. calls: collectives called so far in all groups. stack: of the main thread, innermost frame
    first. busy_ns: time in which the main thread has run or has waited for a CPU. io_bytes:
    read and written by the process.
    """

    at_unix_ns: int
    steps: int
    since_step_ns: int
    calls: int
    stack: tuple[CodeFrame, ...]
    busy_ns: int = 0
    io_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RankState:
    """The state of a rank.

    condition: "running"; "raised" if its main thread has ended with an exception; "stopped" if the
    process is (SIGSTOP, a debugger); "silent" if its agent does not answer; "ended" if the process
    has. step_ns: the longest of its recent steps, 0 if unknown. looks: one or more, oldest first.
    error: the exception, with its innermost frame first in error_stack.
    """

    rank: int
    world_size: int
    host: str = ""
    pid: int = 0
    job: str = ""
    condition: str = RUNNING
    step_ns: int = 0
    looks: tuple[Look, ...] = ()
    groups: tuple[GroupInfo, ...] = ()
    error: str = ""
    error_stack: tuple[CodeFrame, ...] = ()


def format_state(state: RankState) -> str:
    """The state as JSON on one line, as read by read_state."""
    return json.dumps({"schema": STATE_SCHEMA} | asdict(state)) + "\n"


def read_state(text: str | bytes) -> RankState:
    """Decodes a state. Raises ValueError if it is invalid."""
    state: RankState = decode_value(parse_object(text, STATE_SCHEMA), RankState, "state")
    return state


def write_state(folder: Path, state: RankState) -> Path:
    """Writes the state into the folder atomically."""
    path = folder / f"rank{state.rank}{STATE_SUFFIX}"
    return write_whole(path, format_state(state).encode())


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
    """The hidden file, in the same folder, in which the raw content of a packed file begins."""
    return out.with_name(f".{out.name.removesuffix('.gz')}.{os.getpid()}.raw")


def find_free_folder(folder: Path) -> Path:
    """The folder, or if it exists the first of FOLDER-2, FOLDER-3, ... that does not exist."""
    names = (folder if n == 1 else folder.with_name(f"{folder.name}-{n}") for n in count(1))
    return next(name for name in names if not name.exists())


def list_recorded(folder: Path) -> list[Path]:
    """The files of a recording in the folder, without its logs and memory snapshots."""
    return sorted(path for path in folder.glob("r*.json*") if is_recorded_name(path.name))


def is_recorded_name(name: str) -> bool:
    """Whether stepsplit's recordings have files of this name."""
    return name == RUN_FILE or _RANK_FILE.fullmatch(name) is not None


def is_trace_name(name: str) -> bool:
    """Whether traces have this name: stepsplit's, torch's tensorboard handler's, Nsight's."""
    found = _RANK_FILE.fullmatch(name)
    return (found is not None and found["kind"] == "trace") or name.endswith(_TRACE_ENDINGS)


_RANK_FILE = re.compile(r"rank\d{1,7}_(?P<kind>trace|flight|record)\.json(?:\.(?:gz|zst|xz|bz2))?")

_TRACE_ENDINGS = (".pt.trace.json", ".pt.trace.json.gz", ".pt.trace.json.zst", ".sqlite")
