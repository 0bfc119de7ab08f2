"""The recorder: runs torch.profiler over some steps of a job and writes run metadata."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from stepsplit.collectors.guard import delay_sigterm, warn_lost, warn_on_failure
from stepsplit.collectors.job_info import (
    HostClock,
    RankDescription,
    collect_descriptions,
    describe_rank,
    list_groups,
    publish,
    read_gpu_state,
    read_job,
    read_versions,
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
from stepsplit.collectors.record import Detail, RecordPlan, choose_detail
from stepsplit.collectors.run_spec import (
    Mesh,
    ModelSpec,
    RunSpec,
    Training,
    merge_groups,
    write_run_json,
)
from stepsplit.collectors.trace_window import TraceWindow

# run.json, written by rank 0 from what the ranks have published so far.


@dataclass(frozen=True, slots=True)
class UserSpec:
    """Run metadata given by the user; None means unknown."""

    mesh: Mesh | None = None
    model: ModelSpec | None = None
    training: Training | None = None


class RunFile:
    """The run.json of a recording; ranks exchange their descriptions through the job's store."""

    def __init__(self, folder: Path, name: str, key: str, user_spec: UserSpec) -> None:
        self._folder, self._name, self._key, self._stated = folder, name, key, user_spec
        self._description: RankDescription | None = None
        self._ranks_written = 0

    def publish(self) -> RankDescription:
        """Publishes this rank's description to the other ranks."""
        self._description = describe_rank()
        publish(self._key, self._description)
        return self._description

    def write(self, timeout_s: float) -> None:
        """Writes run.json on rank 0, and again only if more ranks are known since."""
        rank, world_size, backend = read_job()
        if rank != 0 or self._description is None or self._ranks_written == world_size:
            return
        descriptions = collect_descriptions(self._key, self._description, world_size, timeout_s)
        if len(descriptions) > self._ranks_written:
            write_run_json(self._folder, self._build_spec(descriptions, world_size, backend))
            self._ranks_written = len(descriptions)

    def _build_spec(
        self, descriptions: tuple[RankDescription, ...], world_size: int, backend: str
    ) -> RunSpec:
        return RunSpec(
            name=self._name,
            world_size=world_size,
            backend=backend,
            mesh=self._stated.mesh,
            model=self._stated.model,
            training=self._stated.training,
            ranks=tuple(each.rank for each in descriptions),
            groups=merge_groups(group for each in descriptions for group in each.groups),
            versions=read_versions(),
            hosts=tuple({each.machine.host: each.machine for each in descriptions}.values()),
        )


# The recording of one rank, from its begin to its files; the caller counts the steps.

LATE_RANKS_TIMEOUT_S = 10.0


class ActiveRecording:
    """One rank's part of a recording, following a RecordPlan.

    Call begin(), then after(step) at the end of every step, then close(). A failure is reported as
    a warning: no method raises or issues a collective, and only close() waits for other ranks.
    """

    def __init__(self, plan: RecordPlan, user_spec: UserSpec) -> None:
        self._plan, self._first = plan, plan.first or 0
        self._last = self._first + plan.steps - 1
        self._folder = Path(plan.out)
        self.rank, self._world_size, self._backend = read_job()
        self._files = RankFiles(self._folder, self.rank)
        self._run = RunFile(self._folder, plan.name, f"{plan.name}@{self._first}", user_spec)
        self._description: RankDescription | None = None
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
        """Whether further steps add no information."""
        return not self._recording and (self._times.full or not self._recorded)

    def begin(self, next_step: int) -> None:
        """Begins before step `next_step`; call after init_process_group."""
        if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
            warn_lost(self.rank, "accurate times: TORCH_DISTRIBUTED_DEBUG=DETAIL adds collectives")
        with warn_on_failure(self.rank, "its entry in run.json"):
            self._description = self._run.publish()
            self._clock = HostClock(self._plan.name, self.rank, self._description.rank.host)
        with warn_on_failure(self.rank, "its trace"):
            self._files.clear()
            ranks = list_groups()
            self._detail = choose_detail(self._plan.ranks, self.rank, self._world_size, ranks)
            if self._detail != "none":
                self._window = TraceWindow(self._plan, self._first, self._stop_for_other_profiler)
            self._recording = True
            self._begin_step(next_step)
            return
        self._finish(complete=False)

    def end_step(self, step: int) -> None:
        """Ends step `step`; after the last step of the plan it writes the files."""
        self._times.step(self._classify_step(step))
        if not self._recording:
            return
        continues = False
        with warn_on_failure(self.rank, "its trace"):
            if self._window is not None:
                self._window.end_step()
            continues = step < self._last
            if continues:
                self._begin_step(step + 1)
                return
        self._finish(complete=not continues)

    def close(self, failed: bool = False) -> None:
        """Ends the recording with the job; waits a limited time for files still being written."""
        unfinished = self._recording
        with delay_sigterm():
            self._finish(complete=False)
            self._write_record()
        if unfinished and not self._recorded and not failed:
            warn_lost(self.rank, "its trace: the run ended before the first recorded step")
        with warn_on_failure(self.rank, "run.json"):
            self._run.write(0.0 if failed else LATE_RANKS_TIMEOUT_S)
        self._files.wait()

    def _classify_step(self, step: int) -> str:
        """The field of StepTimes that the step counts in; "" if another profiler is running."""
        if not self._recording and torch.autograd._profiler_enabled():
            return ""
        if self._recorded:
            return "after" if step > self._last + 1 else ""
        if step >= self._first:
            return "profiled"
        return "before" if 0 < step < self._first - self._plan.warmup else ""

    def _begin_step(self, step: int) -> None:
        if step == self._first:
            self._read_gpu()
            self._meter = MemoryMeter(self._plan.memory)
        if self._window is not None:
            self._window.begin_step(step)

    def _stop_for_other_profiler(self) -> None:
        """Ends this recording early because another profiler starts."""
        warn_lost(self.rank, "the rest of its trace: another torch.profiler was started")
        self._finish(complete=False)

    def _finish(self, complete: bool) -> None:
        """Ends the window and writes the files; whole: all steps of the plan were recorded."""
        if not self._recording:
            return
        self._recording, window, profiler = False, self._window, None
        with warn_on_failure(self.rank, "its trace"):
            profiler = None if window is None else window.end()
        self._recorded = profiler is not None or (complete and window is None)
        if self._recorded:
            self._files.write(profiler, self._began_unix_ns, self._detail == "thin")
        self._measure_memory(profiler)
        self._read_gpu()
        self._write_record()
        # Write a first run.json now, in case the job is killed before its end.
        with warn_on_failure(self.rank, "run.json"):
            self._run.write(0.0)

    def _measure_memory(self, profiler: Any) -> None:
        meter, self._meter = self._meter, None
        if meter is not None:
            with warn_on_failure(self.rank, "its memory usage"):
                self._memory = meter.close(profiler, self._folder, self.rank)

    def _read_gpu(self) -> None:
        state = read_gpu_state()
        if state is not None:
            self._gpu.append(state)

    def _write_record(self) -> None:
        if self._description is not None and self._recorded:
            with warn_on_failure(self.rank, "its record"):
                write_record(self._folder, self._build_record(self._description))

    def _build_record(self, description: RankDescription) -> RankRecord:
        return RankRecord(
            run=self._plan.name,
            rank=description.rank,
            world_size=self._world_size,
            backend=self._backend,
            detail=self._detail,
            groups=list_groups(),
            versions=read_versions(),
            machine=description.machine,
            first_step=self._first,
            steps=self._times.collect_times(),
            memory=self._memory,
            clocks=self._clock.list_probes() if self._clock else (),
            gpu=tuple(self._gpu),
        )


# The public API of the recorder.


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
    """Records `active` training steps with torch.profiler into the folder `out`.

    Call it on every rank after init_process_group. It issues no collective, and a failure is only a
    warning. Older files of the rank in `out` are removed. It ends early if another torch.profiler
    starts. At its end rank 0 waits up to 10 s for other ranks, and each up to 60 s for its files.

    Args:
        out: Folder of the recording, shared by all ranks or local to each host.
        name: Name of the run. Default: the name of the folder.
        mesh: Parallel layout: a Mesh, {axis: size} outermost first, or a DeviceMesh of all ranks.
        model: Shape of the model. Default: None, unknown.
        training: Batch sizes, dtype and framework. Default: None, unknown.
        wait: Steps to skip before the warmup. Default: 1.
        warmup: Steps in which the profiler runs without recording. Default: 1.
        active: Steps to record. Default: 5.
        ranks: "all" (default), a list such as "0-7,16", or "auto": up to 8 ranks all, beyond that
            one pipeline in full, and communication and compute times of the other ranks.
        record_shapes: Whether to record the input shapes of ops. Default: False.
        profile_memory: Whether to measure activations, with a CUDA snapshot. Default: False.
        with_stack: Whether to record Python stacks; large and slow. Default: False.

    Returns:
        A ProfiledRun to use as a context manager, or with start() and stop().

    Raises:
        ValueError: If `active` < 1, `warmup` < 0, `wait` + `warmup` < 0, or `ranks` is invalid.

    Examples:
        with profile_run("runs/exp1", mesh={"pp": 2, "tp": 2}) as run:
            for batch in data:
                train(batch)
                run.step()
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
    """A recording in progress, returned by profile_run.

    Use it as a context manager, or call start() and stop(). Call step() at the end of each training
    step. No method raises: a failure of the recorder is reported as a warning.

    Args:
        plan: The steps and ranks to record and the output folder, as profile_run builds it.
        mesh: Parallel layout: a Mesh, {axis: size}, or torch's DeviceMesh. Default: None, unknown.
        model: Shape of the model. Default: None, unknown.
        training: Batch sizes, dtype and framework. Default: None, unknown.

    Examples:
        run = profile_run("runs/exp1").start()
        for batch in data:
            train(batch)
            run.step()
        run.stop()
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
        """Begins the recording; call before the first step, which is step 0.

        Returns:
            This object.
        """
        mesh = convert_mesh(self._mesh, read_job()[1])
        self._recording = ActiveRecording(self._plan, UserSpec(mesh, self._model, self._training))
        self._recording.begin(0)
        return self

    def step(self) -> None:
        """Marks the end of a training step.

        After the last recorded step it writes the files of this rank.
        """
        if self._recording is not None:
            self._recording.end_step(self._step)
            self._step += 1

    def stop(self, failed: bool = False) -> None:
        """Ends the recording and keeps the steps recorded so far.

        Args:
            failed: Whether the training failed; then rank 0 does not wait for other ranks.
                Default: False.
        """
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.close(failed)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.stop(failed=error is not None)


# The mesh as users pass it: a Mesh, sizes by axis, or torch's DeviceMesh.

MeshLike = Mesh | Mapping[str, int] | Any


def convert_mesh(given: MeshLike, world_size: int) -> Mesh | None:
    """Converts the user's mesh to a Mesh; None, with a warning, if it does not match the job."""
    with warn_on_failure(0, "the mesh in run.json"):
        if given is None or isinstance(given, Mesh):
            mesh: Mesh | None = given
        elif isinstance(given, Mapping):
            mesh = Mesh.of(given)
        else:
            mesh = _convert_device_mesh(given)
        if mesh is not None and mesh.world_size != world_size:
            raise ValueError(f"the mesh has {mesh.world_size} ranks but the job has {world_size}")
        return mesh
    return None


def _convert_device_mesh(given: Any) -> Mesh:
    ranks = given.mesh.flatten().tolist()
    if given.mesh_dim_names is None or ranks != list(range(len(ranks))):
        raise ValueError("a DeviceMesh needs mesh_dim_names and all ranks of the job in order")
    return Mesh.of(dict(zip(given.mesh_dim_names, given.mesh.shape, strict=True)))
