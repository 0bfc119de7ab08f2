"""What one rank tells of its own recording: rank{rank}_record.json, in and out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stepsplit.collectors.paths import record_path
from stepsplit.collectors.run_spec import (
    GroupInfo,
    HostInfo,
    RankInfo,
    RunSpec,
    group_of,
    known,
    merged_groups,
    write_whole,
)

RANK_SCHEMA = "stepsplit.rank/1"


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Wall time of steps in ns: before the profiler ran, under it, and after it had gone.

    The first step of the job and the ones in which the profiler started or ended are in none.
    """

    before_ns: tuple[int, ...] = ()
    profiled_ns: tuple[int, ...] = ()
    after_ns: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class MemoryState:
    """What a rank's memory held at the end of a step; None where it was not measured.

    weights, gradients and optimizer are the storages that the optimizers know. The peaks are the
    allocator's since the job began. activations is the most that a recorded step allocated beyond
    what it began with, without the gradients that it left.
    """

    weights_bytes: int | None = None
    gradients_bytes: int | None = None
    optimizer_bytes: int | None = None
    activations_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ClockProbe:
    """The host's clock less rank 0's, from the quickest of some round trips, and when it was."""

    offset_ns: int
    round_trip_ns: int
    at_unix_ns: int


@dataclass(frozen=True, slots=True)
class GpuState:
    """One reading of NVML: clock, what throttles it (bits), errors of its links so far."""

    at_unix_ns: int
    sm_clock_mhz: int | None = None
    throttle_reasons: int | None = None
    link_errors: int | None = None


@dataclass(frozen=True, slots=True)
class RankRecord:
    """One rank of one recording. detail: "full", "thin" or "none" of the trace was kept."""

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
    """Writes the record into the folder, whole or not at all."""
    body: dict[str, Any] = {"schema": RANK_SCHEMA} | asdict(record)
    body["versions"] = dict(record.versions)
    text = json.dumps(body, indent=1) + "\n"
    return write_whole(record_path(folder, record.rank.rank), text.encode())


def read_record(text: str | bytes) -> RankRecord:
    """The record of the file's text. Raises ValueError where the text is none."""
    body = json.loads(text)
    if not isinstance(body, dict) or body.get("schema") != RANK_SCHEMA:
        raise ValueError(f"not a {RANK_SCHEMA} file")
    try:
        return RankRecord(
            run=str(body["run"]),
            rank=_of(RankInfo, body["rank"]),
            world_size=int(body["world_size"]),
            backend=str(body["backend"]),
            detail=str(body.get("detail", "full")),
            groups=tuple(map(group_of, body.get("groups", ()))),
            versions=tuple((str(k), str(v)) for k, v in body.get("versions", {}).items()),
            machine=known(HostInfo, body.get("machine")),
            first_step=int(body.get("first_step", 0)),
            steps=_steps(body.get("steps", {})),
            memory=known(MemoryState, body.get("memory")),
            clocks=tuple(_of(ClockProbe, each) for each in body.get("clocks", ())),
            gpu=tuple(_of(GpuState, each) for each in body.get("gpu", ())),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a field is missing or odd: {error}") from error


def spec_of(records: Sequence[RankRecord], known: RunSpec | None = None) -> RunSpec:
    """What the ranks together know of the run; mesh, model and training as `known` has them."""
    first = records[0]
    hosts = {each.machine.host: each.machine for each in records if each.machine is not None}
    return RunSpec(
        name=first.run,
        world_size=first.world_size,
        backend=first.backend,
        mesh=known.mesh if known else None,
        model=known.model if known else None,
        training=known.training if known else None,
        ranks=tuple(record.rank for record in records),
        groups=merged_groups(group for record in records for group in record.groups),
        versions=first.versions,
        hosts=tuple(hosts.values()),
    )


def _of(kind: Any, body: Mapping[str, Any]) -> Any:
    found = known(kind, body)
    if found is None:
        raise TypeError(f"no {kind.__name__}")
    return found


def _steps(body: Mapping[str, Any]) -> StepTimes:
    names = ("before_ns", "profiled_ns", "after_ns")
    return StepTimes(*(tuple(map(int, body.get(name, ()))) for name in names))
