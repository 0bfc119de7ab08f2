"""The public API of the recorder: profile_run."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from stepsplit.collectors.formats.run_spec import ModelSpec, Training
from stepsplit.collectors.guard import is_forked_child, warn_on_failure
from stepsplit.collectors.job.launcher import count_restarts
from stepsplit.collectors.job.process_groups import read_job
from stepsplit.collectors.probes.launch_times import UNKNOWN_LAUNCH, LaunchTimes, read_process_start
from stepsplit.collectors.probes.optimizers import ResumedSteps
from stepsplit.collectors.probes.spans import watch_spans
from stepsplit.collectors.record.active_recording import ActiveRecording
from stepsplit.collectors.record.log_to import RecordingLogger, SinkName, parse_sinks
from stepsplit.collectors.record.plan import RecordPlan
from stepsplit.collectors.record.user_spec import MeshLike, UserSpec, convert_mesh
from stepsplit.collectors.watch.plan import DEFAULT_BUDGET, WatchPlan
from stepsplit.collectors.watch.sampler import Sampler, start_sampler


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
    every: int | None = None,
    budget: float = DEFAULT_BUDGET,
    log_to: str | Sequence[str] | None = None,
    modules: bool | None = None,
    role: str = "",
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
        every: Steps between samples of two, in `out`/samples, until the job ends. Default: None.
        budget: Part of the training time that these may cost, else they get rarer. Default: 0.005.
        log_to: Tools to log its numbers to, such as "wandb" (docs/integrations.md). Default: None.
        modules: Whether to name the model's modules in the first recorded step. Default: None, in
            the last one where that takes at most 2 % of it (docs/recording.md).
        role: What this rank does in a job of several roles, such as "rollout" and "trainer": its
            files are in `out`/role, and it is shown as rollout/0. Default: "", the only role.

    Returns:
        A ProfiledRun to use as a context manager, or with start() and stop().

    Raises:
        ValueError: If a number of steps is too low, or `budget`, `ranks`, `role` or
            `log_to` invalid, or `role` given with `every`.

    Examples:
        with profile_run("runs/exp1", mesh={"pp": 2, "tp": 2}) as run:
            for batch in data:
                train(batch)
                run.step()
    """
    folder = Path(out).absolute()  # the script may change its own
    title = name or folder.resolve().name
    if role and every is not None:
        raise ValueError("role: not with every; record each role by itself")
    details = (ranks, record_shapes, profile_memory, with_stack)
    plan = RecordPlan(
        str(folder / role),
        title,
        wait + warmup,
        active,
        warmup,
        *details,
        modules=modules,
        role=role,
    )
    watch = None if every is None else WatchPlan(plan.out, title, every, budget=budget)
    return ProfiledRun(plan, mesh, model, training, watch, parse_sinks(log_to, watch is not None))


class ProfiledRun:
    """A recording in progress, returned by profile_run.

    Use it as a context manager, or call start() and stop(). Call step() at the end of each training
    step. No method raises: a failure of the recorder is reported as a warning.

    Args:
        plan: The steps and ranks to record and the output folder, as profile_run builds it.
        mesh: Parallel layout: a Mesh, {axis: size}, or torch's DeviceMesh. Default: None, unknown.
        model: Shape of the model. Default: None, unknown.
        training: Batch sizes, dtype and framework. Default: None, unknown.
        watch: Samples to take instead of one recording. Default: None.
        sinks: Tools to log the recording to, as profile_run parses them. Default: none.

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
        watch: WatchPlan | None = None,
        sinks: Sequence[SinkName] = (),
    ) -> None:
        self._plan, self._mesh = plan, mesh
        self._watch, self._sinks = watch, sinks
        self._logger: RecordingLogger | None = None
        self._sampler: Sampler | None = None
        self._model, self._training = model, training
        self._recording: ActiveRecording | None = None
        self._resumed: ResumedSteps | None = None
        self._step, self._pid = 0, 0
        self._launch = UNKNOWN_LAUNCH

    def start(self, steps_before: int | None = None) -> Self:
        """Begins the recording; call before the first step.

        Args:
            steps_before: Steps that a resumed job has done before; the recording numbers its
                steps from there. Default: None, from the state of the first optimizer that steps.

        Returns:
            This object.
        """
        self._pid = os.getpid()
        mesh = convert_mesh(self._mesh, read_job()[1])
        self._resumed = ResumedSteps(steps_before)
        if self._watch is not None:
            self._launch = LaunchTimes(read_process_start())
            watch_spans()
            return self
        user_spec = UserSpec(mesh, self._model, self._training)
        self._recording = ActiveRecording(
            self._plan,
            user_spec,
            keep_earlier=count_restarts() > 0,
            read_steps_before=self._resumed.read,
        )
        self._recording.begin(0)
        rank, world_size, _ = read_job()
        if self._sinks and rank == 0:
            self._logger = RecordingLogger(Path(self._plan.out), world_size, self._sinks)
        return self

    def step(
        self,
        *,
        tokens: Any = None,
        samples: Any = None,
        flops: Any = None,
        origin: str = "run.step",
    ) -> None:
        """Marks the end of a training step.

        After the last recorded step it writes the files of this rank. In a forked child it does
        nothing. With the work of the step, ranks and steps are compared by time per unit of work:
        a rank with more tokens has more work, and is not slow.

        Args:
            tokens: The tokens that this rank processed in the step, with padding if it computes
                that too: a number, or a tensor of one element, which is read when the recording
                ends. Default: None, unknown.
            samples: The samples, likewise. Default: None, unknown.
            flops: The FLOPs of this rank, likewise. Default: None, unknown.
            origin: Who counted, for the report. Default: "run.step".

        Examples:
            run.step(tokens=batch["input_ids"].numel())
        """
        if is_forked_child(self._pid):
            return
        if self._recording is not None:
            counts = {"tokens": tokens, "samples": samples, "flops": flops}
            self._recording.add_work(self._step, origin, counts)
            self._recording.end_step(self._step)
            if self._logger is not None:
                self._logger.step(self._recording.is_complete)
        elif self._watch is not None:
            if self._sampler is None and self._resumed is not None:
                # A watch begins with the first step: before it, the steps of an earlier process
                # are not known.
                with warn_on_failure(read_job()[0], "its watch"):
                    before = self._resumed.find(self._step + 1)
                    launch = replace(self._launch, first_step_unix_ns=time.time_ns())
                    self._sampler = start_sampler(self._watch, self._mesh, before, launch)
                self._resumed = None
            if self._sampler is not None:
                self._sampler.end_step(self._step)
        self._step += 1

    def stop(self, failed: bool = False) -> None:
        """Ends the recording and keeps the steps recorded so far.

        Args:
            failed: Whether the training failed; then rank 0 does not wait for other ranks.
                Default: False.
        """
        if is_forked_child(self._pid):
            return
        recording, self._recording = self._recording, None
        if self._resumed is not None:
            self._resumed.close()
        if recording is not None:
            recording.close(failed)
            if self._logger is not None:
                self._logger.close(recording.has_steps, failed)
        self._watch, sampler, self._sampler = None, self._sampler, None
        if sampler is not None:
            sampler.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.stop(failed=error is not None)
