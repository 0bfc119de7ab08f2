"""The recorder: torch.profiler and run metadata around some steps of a job."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from stepsplit.collectors.guard import deferred_sigterm, guarded, warn_lost
from stepsplit.collectors.job_info import (
    HostClock,
    Presence,
    collect,
    gpu_state,
    groups,
    job,
    presence,
    publish,
    versions,
)
from stepsplit.collectors.memory import MemoryMeter
from stepsplit.collectors.rank_files import RankFiles
from stepsplit.collectors.rank_record import (
    GpuState,
    MemoryState,
    RankRecord,
    StepClock,
    write_record,
)
from stepsplit.collectors.record import Detail, RecordPlan, detail
from stepsplit.collectors.run_spec import (
    Mesh,
    ModelSpec,
    RunSpec,
    Training,
    merged_groups,
    write_run_json,
)
from stepsplit.collectors.trace_window import TraceWindow

# run.json as rank 0 of a running job writes it: of what the ranks have told so far.


@dataclass(frozen=True, slots=True)
class Stated:
    """What only the user can tell of a run; None is unknown."""

    mesh: Mesh | None = None
    model: ModelSpec | None = None
    training: Training | None = None


class RunFile:
    """The run.json of a recording. Ranks find each other under the key in the job's store."""

    def __init__(self, folder: Path, name: str, key: str, stated: Stated) -> None:
        self._folder, self._name, self._key, self._stated = folder, name, key, stated
        self._told: Presence | None = None
        self._ranks_written = 0

    def publish(self) -> Presence:
        """Tells the other ranks of this one."""
        self._told = presence()
        publish(self._key, self._told)
        return self._told

    def write(self, timeout_s: float) -> None:
        """On rank 0 only, and again only where more ranks have become known."""
        rank, world_size, backend = job()
        if rank != 0 or self._told is None or self._ranks_written == world_size:
            return
        told = collect(self._key, self._told, world_size, timeout_s)
        if len(told) > self._ranks_written:
            write_run_json(self._folder, self._spec(told, world_size, backend))
            self._ranks_written = len(told)

    def _spec(self, told: tuple[Presence, ...], world_size: int, backend: str) -> RunSpec:
        return RunSpec(
            name=self._name,
            world_size=world_size,
            backend=backend,
            mesh=self._stated.mesh,
            model=self._stated.model,
            training=self._stated.training,
            ranks=tuple(each.rank for each in told),
            groups=merged_groups(group for each in told for group in each.groups),
            versions=versions(),
            hosts=tuple({each.machine.host: each.machine for each in told}.values()),
        )


# One rank's recording from its begin to its files, whoever counts the steps.

LATE_RANKS_S = 10.0


class ActiveRecording:
    """One rank's share of a recording, by a plan that says when it begins.

    begin(), then after(step) at the end of every step, then close(). Whatever fails is lost with a
    warning: none of these raises or makes a collective, and only close() waits for others.
    """

    def __init__(self, plan: RecordPlan, stated: Stated) -> None:
        self._plan, self._first = plan, plan.first or 0
        self._last = self._first + plan.steps - 1
        self._folder = Path(plan.out)
        self.rank, self._world_size, self._backend = job()
        self._files = RankFiles(self._folder, self.rank)
        self._run = RunFile(self._folder, plan.name, f"{plan.name}@{self._first}", stated)
        self._told: Presence | None = None
        self._detail: Detail = "none"
        self._window: TraceWindow | None = None
        self._meter: MemoryMeter | None = None
        self._memory: MemoryState | None = None
        self._clock: HostClock | None = None
        self._gpu: list[GpuState] = []
        self._times = StepClock()
        self._began_unix_ns = time.time_ns()
        self._recording = self._recorded = False

    @property
    def over(self) -> bool:
        """Whether nothing more is to be learned from further steps."""
        return not self._recording and (self._times.full or not self._recorded)

    def begin(self, next_step: int) -> None:
        """Call before the step of that number, after init_process_group."""
        if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
            warn_lost(self.rank, "faithful times: TORCH_DISTRIBUTED_DEBUG=DETAIL adds collectives")
        with guarded(self.rank, "its place in run.json"):
            self._told = self._run.publish()
            self._clock = HostClock(self._plan.name, self.rank, self._told.rank.host)
        with guarded(self.rank, "its trace"):
            self._files.clear()
            ranks = groups()
            self._detail = detail(self._plan.ranks, self.rank, self._world_size, ranks)
            if self._detail != "none":
                self._window = TraceWindow(self._plan, self._first, self._give_way)
            self._recording = True
            self._before(next_step)
            return
        self._finish(whole=False)

    def after(self, step: int) -> None:
        """Ends the step of that number. After the last one planned the files are written."""
        self._times.step(self._kind(step))
        if not self._recording:
            return
        goes_on = False
        with guarded(self.rank, "its trace"):
            if self._window is not None:
                self._window.after()
            goes_on = step < self._last
            if goes_on:
                self._before(step + 1)
                return
        self._finish(whole=not goes_on)

    def close(self, failed: bool = False) -> None:
        """Ends the recording with the job; waits for what is still being written, not for ever."""
        unfinished = self._recording
        with deferred_sigterm():
            self._finish(whole=False)
            self._write_record()
        if unfinished and not self._recorded and not failed:
            warn_lost(self.rank, "its trace: the run ended before the first step to record")
        with guarded(self.rank, "run.json"):
            self._run.write(0.0 if failed else LATE_RANKS_S)
        self._files.wait()

    def _kind(self, step: int) -> str:
        """In which steps of StepTimes it belongs; none where another profiler runs meanwhile."""
        if not self._recording and torch.autograd._profiler_enabled():
            return ""
        if self._recorded:
            return "after" if step > self._last + 1 else ""
        if step >= self._first:
            return "profiled"
        return "before" if 0 < step < self._first - self._plan.warmup else ""

    def _before(self, step: int) -> None:
        if step == self._first:
            self._read_gpu()
            self._meter = MemoryMeter(self._plan.memory)
        if self._window is not None:
            self._window.before(step)

    def _give_way(self) -> None:
        """Another profiler starts: ours ends with what it has."""
        warn_lost(self.rank, "the rest of its trace: another torch.profiler was started")
        self._finish(whole=False)

    def _finish(self, whole: bool) -> None:
        """Ends the window and writes what it recorded; whole: all the steps of the plan."""
        if not self._recording:
            return
        self._recording, window, profiler = False, self._window, None
        with guarded(self.rank, "its trace"):
            profiler = None if window is None else window.end()
        self._recorded = profiler is not None or (whole and window is None)
        if self._recorded:
            self._files.write(profiler, self._began_unix_ns, self._detail == "thin")
        self._see_memory(profiler)
        self._read_gpu()
        self._write_record()
        # A first run.json beside the traces, in case the job is killed before the end.
        with guarded(self.rank, "run.json"):
            self._run.write(0.0)

    def _see_memory(self, profiler: Any) -> None:
        meter, self._meter = self._meter, None
        if meter is not None:
            with guarded(self.rank, "what its memory held"):
                self._memory = meter.close(profiler, self._folder, self.rank)

    def _read_gpu(self) -> None:
        state = gpu_state()
        if state is not None:
            self._gpu.append(state)

    def _write_record(self) -> None:
        if self._told is not None and self._recorded:
            with guarded(self.rank, "its record"):
                write_record(self._folder, self._record(self._told))

    def _record(self, told: Presence) -> RankRecord:
        return RankRecord(
            run=self._plan.name,
            rank=told.rank,
            world_size=self._world_size,
            backend=self._backend,
            detail=self._detail,
            groups=groups(),
            versions=versions(),
            machine=told.machine,
            first_step=self._first,
            steps=self._times.times(),
            memory=self._memory,
            clocks=self._clock.probes() if self._clock else (),
            gpu=tuple(self._gpu),
        )


# The one-line recorder: torch.profiler and what else is known of some steps of a job.


def profile_run(
    out: str | Path,
    *,
    name: str | None = None,
    mesh: MeshLike = None,
    model: ModelSpec | None = None,
    training: Training | None = None,
    wait: int = 1,
    warmup: int = 1,
    active: int = 5,
    ranks: str = "all",
    record_shapes: bool = False,
    profile_memory: bool = False,
    with_stack: bool = False,
) -> ProfiledRun:
    """A recording of `active` steps into the folder `out`, after `wait` + `warmup` steps.

        with profile_run("runs/exp1", mesh={"pp": 2, "tp": 2}) as run:
            for batch in data:
                train(batch)
                run.step()

    Begin after init_process_group. mesh: a Mesh, {axis: size} outermost first, or the DeviceMesh of
    all ranks. ranks: "all", "auto" (one whole pipeline in full, of the others communication and
    what computed when) or a list such as "0-7,16". profile_memory also measures activations. Every
    rank records itself, without a collective; whatever fails is lost with a warning and breaks no
    training. A rank's older files in the folder are removed. At the end rank 0 waits up to 10 s for
    ranks that did not tell where they are, and each rank for its files to be packed. torch has one
    profiler a process: ours ends where another is started. Steps beyond the recorded ones are
    timed, so that the report can say what the profiler cost.
    """
    plan = RecordPlan(
        out=str(out),
        name=name or Path(out).resolve().name,
        first=wait + warmup,
        steps=active,
        warmup=warmup,
        ranks=ranks,
        shapes=record_shapes,
        memory=profile_memory,
        stacks=with_stack,
    )
    return ProfiledRun(plan, mesh, model, training)


class ProfiledRun:
    """A recording under way: call step() at the end of each training step.

    As a context, or with start() and stop().
    """

    def __init__(
        self,
        plan: RecordPlan,
        mesh: MeshLike = None,
        model: ModelSpec | None = None,
        training: Training | None = None,
    ) -> None:
        self._plan, self._mesh = plan, mesh
        self._model, self._training = model, training
        self._recording: ActiveRecording | None = None
        self._step = 0

    def start(self) -> Self:
        """Begins; the next step is number 0."""
        mesh = mesh_of(self._mesh, job()[1])
        self._recording = ActiveRecording(self._plan, Stated(mesh, self._model, self._training))
        self._recording.begin(0)
        return self

    def step(self) -> None:
        """Ends a training step. After the last one to record the files of the rank are written."""
        if self._recording is not None:
            self._recording.after(self._step)
            self._step += 1

    def stop(self, failed: bool = False) -> None:
        """Ends the recording; what was recorded so far is kept."""
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.close(failed)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.stop(failed=error is not None)


# The mesh as users state it: ours, sizes by axis, or torch's DeviceMesh.

MeshLike = Mesh | Mapping[str, int] | Any


def mesh_of(given: MeshLike, world_size: int) -> Mesh | None:
    """The user's mesh as ours; None, with a warning, where it does not fit the job."""
    with guarded(0, "the mesh in run.json"):
        if given is None or isinstance(given, Mesh):
            mesh: Mesh | None = given
        elif isinstance(given, Mapping):
            mesh = Mesh.of(given)
        else:
            mesh = _device_mesh(given)
        if mesh is not None and mesh.world_size != world_size:
            raise ValueError(f"it has {mesh.world_size} ranks, the job {world_size}")
        return mesh
    return None


def _device_mesh(given: Any) -> Mesh:
    ranks = given.mesh.flatten().tolist()
    if given.mesh_dim_names is None or ranks != list(range(len(ranks))):
        raise ValueError("a DeviceMesh needs names of its dims and all ranks of the job in order")
    return Mesh.of(dict(zip(given.mesh_dim_names, given.mesh.shape, strict=True)))
