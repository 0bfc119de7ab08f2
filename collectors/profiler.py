"""The one-line recorder: torch.profiler and what else is known of some steps of a job."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from stepsplit.collectors.mesh_like import MeshLike, mesh_of
from stepsplit.collectors.plan import Plan
from stepsplit.collectors.presence import job
from stepsplit.collectors.recording import Recording
from stepsplit.collectors.run_file import Stated
from stepsplit.collectors.run_spec import ModelSpec, Training


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
    plan = Plan(
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
        plan: Plan,
        mesh: MeshLike = None,
        model: ModelSpec | None = None,
        training: Training | None = None,
    ) -> None:
        self._plan, self._mesh = plan, mesh
        self._model, self._training = model, training
        self._recording: Recording | None = None
        self._step = 0

    def start(self) -> Self:
        """Begins; the next step is number 0."""
        mesh = mesh_of(self._mesh, job()[1])
        self._recording = Recording(self._plan, Stated(mesh, self._model, self._training))
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
