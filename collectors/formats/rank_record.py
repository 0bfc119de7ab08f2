"""The record of one rank of a recording (rank{rank}_record.json)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stepsplit.collectors.formats.file_names import build_record_path
from stepsplit.collectors.formats.json_decode import decode_field, decode_value, parse_object
from stepsplit.collectors.formats.run_spec import (
    GroupInfo,
    HostInfo,
    RankInfo,
    RunSpec,
    check_role,
    decode_labels,
    decode_versions,
    decode_world_size,
    merge_groups,
    put_labels,
)
from stepsplit.collectors.safe_io.atomic_file import write_whole

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
class StepWork:
    """What a rank processed in one recorded step; None where the job did not say.

    step has the number of the step's mark in the trace.
    """

    step: int
    tokens: int | None = None
    samples: int | None = None
    flops: int | None = None

    def __post_init__(self) -> None:
        if any(one is not None and one < 0 for one in (self.tokens, self.samples, self.flops)):
            raise ValueError(f"work: less than nothing in step {self.step}")


@dataclass(frozen=True, slots=True)
class RecordedWork:
    """What a rank processed in the recorded steps, and who counted it: "run.step" for the script,
    or the name of the framework."""

    origin: str
    steps: tuple[StepWork, ...]


WHY_UNNAMED = {
    "compiled": "torch.compile is used, and its code would be compiled again",
    "own_hooks": "the job has hooks of its own for all modules",
    "stacks": "--stacks has them in every step",
    "one_step": "only one step was to be recorded, and none shows what that takes",
    "no_warmup": "the calls of modules could not be counted in a step before",
    "no_calls": "no module was called in the step before",
    "many_calls": "they are called too often",
    "paths": "the model does not list its modules",
    "cost": "that takes more than 2 % of a step",
}
"""Why a recording has no names of modules, in words that follow `not named:`."""


@dataclass(frozen=True, slots=True)
class ModuleNames:
    """The recorded step in which the modules are named, by the number of its mark, or why none.

    why is a key of WHY_UNNAMED. cost_ns: what the names were expected to take, and step_ns the
    shortest recorded step before, where the recorder decided by them; else None.
    """

    step: int | None = None
    why: str | None = None
    cost_ns: int | None = None
    step_ns: int | None = None


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
    CUDA_DEVICE_MAX_CONNECTIONS of its process, None if not set. work: what it processed in the
    recorded steps, None if the job did not say. role: what it does in a job of several roles.
    labels: (name, value) of what else the job is called, such as SLURM_JOB_ID.
    module_names: whether its modules are named, None if the user wanted none or the recording ended
    before that was decided.
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
    work: RecordedWork | None = None
    role: str = ""
    module_names: ModuleNames | None = None
    labels: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        check_role(self.role)

    def count_steps(self) -> int:
        """How many steps are recorded; records without end_step have the times of all but a named
        one."""
        if self.end_step is not None:
            return max(0, self.end_step - self.first_step)
        is_named = self.module_names is not None and self.module_names.step is not None
        return len(self.steps.profiled_ns) + is_named


def write_record(folder: Path, record: RankRecord) -> Path:
    """Writes the record into the folder atomically."""
    body: dict[str, Any] = {"schema": RANK_SCHEMA} | asdict(record)
    body["versions"] = dict(record.versions)
    if record.work is None:
        del body["work"]
    if not record.role:
        del body["role"]
    if record.module_names is None:
        del body["module_names"]
    put_labels(body, record.labels)
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
        work=decode_value(body.get("work"), RecordedWork | None, "work"),
        role=decode_value(body.get("role", ""), str, "role"),
        module_names=decode_value(body.get("module_names"), ModuleNames | None, "module_names"),
        labels=decode_labels(body),
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
        role=first.role,
        labels=first.labels,
    )
