"""The one-line recorder: torch.profiler and the Flight Recorder over some steps of a job."""

import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from torch.profiler import ProfilerActivity

from stepsplit.collectors import presence
from stepsplit.collectors.annotate import annotations
from stepsplit.collectors.flight import flight_path, write_flight
from stepsplit.collectors.guard import guarded, warn_lost
from stepsplit.collectors.run_spec import Mesh, ModelSpec, RunSpec, Training, write_run_json

_LATE_RANKS_S = 10.0
MeshLike = Mesh | Mapping[str, int] | Any


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
    record_shapes: bool = False,
    profile_memory: bool = False,
    with_stack: bool = False,
) -> "ProfiledRun":
    """A recording of `active` steps into the folder `out`, after `wait` + `warmup` steps.

        with profile_run("runs/exp1", mesh={"pp": 2, "tp": 2}) as run:
            for batch in data:
                train(batch)
                run.step()

    Begin after init_process_group. mesh: a Mesh, {axis: size} outermost first, or the
    DeviceMesh of all ranks. Every rank records itself, without a collective; whatever fails is lost
    with a warning and breaks no training. A rank's older files in the folder are removed. At the
    end rank 0 waits up to 10 s for ranks that did not tell where they are. torch has one profiler
    a process: start no other in between.
    """
    settings: dict[str, Any] = {
        "schedule": torch.profiler.schedule(wait=wait, warmup=warmup, active=active, repeat=1),
        "record_shapes": record_shapes,
        "profile_memory": profile_memory,
        "with_stack": with_stack,
    }
    return ProfiledRun(Path(out), name or Path(out).resolve().name, mesh, model, training, settings)


class ProfiledRun:
    """A recording under way: call step() at the end of each training step."""

    def __init__(
        self,
        folder: Path,
        name: str,
        mesh: MeshLike,
        model: ModelSpec | None,
        training: Training | None,
        settings: dict[str, Any],
    ) -> None:
        self._folder = folder
        self._name = name
        self._mesh = mesh
        self._model = model
        self._training = training
        self._settings = settings
        self._recorded = False
        self._started_unix_ns = 0
        self._ranks_written = 0
        self._rank, self._world_size, self._backend = 0, 1, "none"
        self._told: presence.Presence | None = None
        self._profiler: Any | None = None
        self._annotations = ExitStack()

    def __enter__(self) -> Self:
        self._rank, self._world_size, self._backend = presence.job()
        if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
            warn_lost(self._rank, "faithful times: TORCH_DISTRIBUTED_DEBUG=DETAIL adds collectives")
        with guarded(self._rank, "its place in run.json"):
            self._told = presence.presence()
            presence.publish(self._name, self._told)
        with guarded(self._rank, "its trace"):
            self._start()
        return self

    def step(self) -> None:
        """Ends a training step. After the last active one the files of the rank are written."""
        if self._profiler is None:
            return
        stepped = False
        with guarded(self._rank, "its trace"):
            self._profiler.step()
            stepped = True
        if self._recorded or not stepped:
            self._stop()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        unfinished = self._profiler is not None
        self._stop()
        if unfinished and not self._recorded and error is None:
            warn_lost(self._rank, "its trace: the run ended before the first active step")
        with guarded(self._rank, "run.json"):
            self._write_run(_LATE_RANKS_S if error is None else 0.0)

    def _start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        # An older recording of this rank must not pass for this one.
        for path in (trace_path(self._folder, self._rank), flight_path(self._folder, self._rank)):
            path.unlink(missing_ok=True)
        if torch.autograd._profiler_enabled():
            raise RuntimeError("another torch.profiler is running, and there can be only one")
        self._started_unix_ns = time.time_ns()
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        profiler = torch.profiler.profile(
            activities=activities, on_trace_ready=self._write, **self._settings
        )
        self._annotations.enter_context(annotations())
        profiler.start()
        self._profiler = profiler

    def _stop(self) -> None:
        profiler, self._profiler = self._profiler, None
        self._annotations.close()
        if profiler is not None:
            with guarded(self._rank, "its trace"):
                profiler.stop()

    def _write(self, profiler: Any) -> None:
        self._recorded = True
        with guarded(self._rank, "its trace"):
            write_trace(profiler, self._folder, self._rank)
        with guarded(self._rank, "its Flight Recorder dump"):
            write_flight(self._folder, self._rank, self._started_unix_ns)
        # A first run.json beside the traces, in case the job is killed before the end.
        with guarded(self._rank, "run.json"):
            self._write_run(0.0)

    def _write_run(self, timeout_s: float) -> None:
        """Rank 0 writes what is known of the ranks, again only where more have become known."""
        if self._rank != 0 or self._told is None or self._ranks_written == self._world_size:
            return
        told = presence.collect(self._name, self._told, self._world_size, timeout_s)
        if len(told) > self._ranks_written:
            write_run_json(self._folder, self._spec(told))
            self._ranks_written = len(told)

    def _spec(self, told: tuple[presence.Presence, ...]) -> RunSpec:
        return RunSpec(
            name=self._name,
            world_size=self._world_size,
            backend=self._backend,
            mesh=_mesh(self._mesh, self._world_size),
            model=self._model,
            training=self._training,
            ranks=tuple(each.rank for each in told),
            groups=presence.merged_groups(told),
            versions=presence.versions(),
        )


def trace_path(folder: Path, rank: int) -> Path:
    """Where a rank's trace goes."""
    return folder / f"rank{rank}_trace.json.gz"


def write_trace(profiler: Any, folder: Path, rank: int) -> Path:
    """The rank's Chrome trace, whole or not at all."""
    path = trace_path(folder, rank)
    draft = folder / f".{os.getpid()}.{path.name}"
    try:
        profiler.export_chrome_trace(str(draft))
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return path


def _mesh(given: MeshLike, world_size: int) -> Mesh | None:
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
