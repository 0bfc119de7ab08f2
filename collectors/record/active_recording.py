"""The recording of one rank, from its begin to its files; the caller counts the steps."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from stepsplit.collectors.formats.rank_record import (
    GpuState,
    HostSamples,
    MemoryState,
    ModuleNames,
    RankRecord,
    StepTimes,
    write_record,
)
from stepsplit.collectors.formats.run_spec import RUN_FILE, GroupInfo
from stepsplit.collectors.guard import (
    delay_sigterm,
    is_reported_full,
    warn,
    warn_lost,
    warn_on_failure,
)
from stepsplit.collectors.job.launcher import read_labels
from stepsplit.collectors.job.process_groups import list_groups, read_job
from stepsplit.collectors.job.rank_description import RankDescription
from stepsplit.collectors.probes.gpu import find_gpu_uuid, read_gpu
from stepsplit.collectors.probes.host_clock import HostClock
from stepsplit.collectors.probes.host_sampler import LOST_PLACES, HostSampler
from stepsplit.collectors.probes.memory import MemoryMeter
from stepsplit.collectors.probes.step_clock import GpuStepClock, StepClock
from stepsplit.collectors.probes.versions import read_max_connections, read_versions
from stepsplit.collectors.record.environment import build_kineto_environment
from stepsplit.collectors.record.packer import MemoryDevice
from stepsplit.collectors.record.plan import Detail, RecordPlan, choose_detail
from stepsplit.collectors.record.rank_files import RankFiles
from stepsplit.collectors.record.run_file import RunFile
from stepsplit.collectors.record.shared_window import SharedWindow
from stepsplit.collectors.record.step_work import WorkCounter
from stepsplit.collectors.record.trace_window import (
    BUFFERS_FULL,
    ProfilerInUseError,
    TraceWindow,
    release_profiler,
)
from stepsplit.collectors.record.user_spec import UserSpec

# The end of the training waits so long for the records of other ranks, as run.json needs them.
LATE_RANKS_TIMEOUT_S = 10.0

_MAX_RESTARTS = 5
"""How often a window without a step is tried again, after a profiler of the script interrupted."""


class ActiveRecording:
    """One rank's part of a recording, following a RecordPlan.

    Call begin(), then end_step(step) at the end of every step, then close(). A failure is reported
    as a warning: no method raises or issues a collective, and only close() waits for other ranks.

    provisional: the files are written by close() only, not if discard() is called before.
    keep_earlier: the rank's files in the folder are of an attempt before a restart, and stay until
    a step is recorded.
    read_steps_before: the steps that a resumed job had done before, given those that have ended
    since; called once, before the first recorded step.
    """

    def __init__(
        self,
        plan: RecordPlan,
        user_spec: UserSpec,
        provisional: bool = False,
        keep_earlier: bool = False,
        read_steps_before: Callable[[int], int] | None = None,
    ) -> None:
        self._plan, self._first = plan, plan.first or 0
        self._last = self._first + plan.steps - 1
        self._folder = Path(plan.out)
        self.rank, self._world_size, self._backend = read_job()
        self._files = RankFiles(self._folder, self.rank)
        self._run = RunFile(
            self._folder, plan.name, f"{plan.name}@{self._first}", user_spec, plan.role
        )
        self._provisional, self._is_held = provisional, False
        self._keep_earlier = keep_earlier
        self._in_use = False
        self._restarts = 0
        self._next_step = 0
        self._read_steps_before, self._steps_before = read_steps_before, 0
        self._held: Any = None
        self._groups: tuple[GroupInfo, ...] = ()
        self._description: RankDescription | None = None
        self._detail: Detail = "none"
        self._window: TraceWindow | SharedWindow | None = None
        self._meter: MemoryMeter | None = None
        self._memory: MemoryState | None = None
        self._sampler: HostSampler | None = None
        self._host = HostSamples()
        self._clock: HostClock | None = None
        self._gpu: list[GpuState] = []
        self._gpu_note = ""
        self._work = WorkCounter(self.rank)
        self._times = StepClock()
        self._gpu_times: GpuStepClock | None = GpuStepClock()
        self._began_unix_ns = time.time_ns()
        self._recording = self._recorded = False
        self._device_stopped_step: int | None = None
        self._end_step: int | None = None

    @property
    def is_recording(self) -> bool:
        """Whether the steps to record are still to come, or in progress."""
        return self._recording

    @property
    def has_steps(self) -> bool:
        """Whether a step was recorded."""
        return self._recorded or (self._window is not None and self._window.recorded > 0)

    @property
    def is_complete(self) -> bool:
        """Whether the steps are recorded, and their files written, perhaps not yet packed."""
        return self._recorded and not self._recording

    @property
    def over(self) -> bool:
        """Whether further steps add no information."""
        return not self._recording and (self._times.full or not self._recorded)

    def begin(self, next_step: int, earlier_ns: Sequence[int] = ()) -> None:
        """Begins before step `next_step`; call after init_process_group.

        earlier_ns: times of the steps before it, as far as known.
        """
        if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
            warn_lost(self.rank, "accurate times: TORCH_DISTRIBUTED_DEBUG=DETAIL adds collectives")
        if torch.version.cuda or torch.version.hip:
            # Under `record` they are set already, before the process has threads that read them.
            os.environ.update(build_kineto_environment(os.environ, torch.version.cuda))
        with warn_on_failure(self.rank, "its record"):
            self._description = self._run.describe()
        with warn_on_failure(self.rank, "its entry in run.json"):
            self._run.publish()
            self._clock = HostClock(self._plan.name, self.rank, socket.gethostname())
        with warn_on_failure(self.rank, "its trace"):
            self._files.make_folder()
            if not self._keep_earlier:
                self._files.clear()
            self._groups = list_groups()
            ranks, groups = self._plan.ranks, self._groups
            self._detail = choose_detail(ranks, self.rank, self._world_size, groups)
            if self._detail != "none":
                self._window = self._create_window()
                # With stacks the trace has every call, and would have the sampler's as well.
                if not self._plan.stacks:
                    with warn_on_failure(self.rank, LOST_PLACES):
                        self._sampler = HostSampler(self.rank)
            self._recording = True
            self._begin_step(next_step)
            self._times.start(earlier_ns)
            self._time_on_gpu("")
            return
        self._finish(complete=False)

    def end_step(self, step: int) -> None:
        """Ends step `step`; after the last step of the plan it writes the files."""
        kind = self._classify_step(step)
        self._times.step(kind)
        self._time_on_gpu(kind)
        if not self._recording:
            return
        continues = False
        with warn_on_failure(self.rank, "its trace"):
            if self._window is not None:
                self._window.end_step(step)
                self._check_device(step)
            continues = step < self._last or isinstance(self._window, SharedWindow)
            if continues:
                self._begin_step(step + 1)
                return
        self._finish(complete=not continues)

    def add_work(self, step: int, origin: str, counts: dict[str, Any]) -> None:
        """Notes what step `step`, which is about to end, processed; see WorkCounter."""
        if self._recording and step >= self._first and isinstance(self._window, TraceWindow):
            with warn_on_failure(self.rank, "the work of its steps"):
                self._work.add(step, origin, counts)

    def close(self, failed: bool = False) -> None:
        """Ends the recording with the job; waits a limited time for files still being written."""
        unfinished, self._provisional = self._recording, False
        # A scheduler ends a job by SIGTERM: what was recorded is written before it.
        with delay_sigterm():
            self._finish(complete=False)
            if self._is_held:
                self._write_files()
            self._write_record()
        has_earlier = self._keep_earlier and self._files.has_trace()
        # A script that has failed has said more already, and the trace of the attempt before is
        # there.
        if unfinished and not self._recorded and not failed and not has_earlier:
            warn_lost(self.rank, f"its trace: {self._explain_empty_trace()}")
        with warn_on_failure(self.rank, RUN_FILE):
            # Of a failed job the other ranks may not come any more.
            self._run.write(0.0 if failed else LATE_RANKS_TIMEOUT_S)
        self._files.wait()
        self._add_activations()

    def discard(self) -> None:
        """Ends the recording without its files, or drops those that are held back."""
        self._provisional = True
        self._finish(complete=False)
        release_profiler(self._held)
        self._held, self._is_held = None, False

    def _explain_empty_trace(self) -> str:
        if isinstance(self._window, SharedWindow):
            return "the script's own torch.profiler had not ended"
        if self._first != self._plan.first:
            return (
                "the script's own torch.profiler ran in the steps to record; --share copies its"
                " trace"
            )
        return "the run ended before the first recorded step"

    def _time_on_gpu(self, kind: str) -> None:
        """Ends a step on the GPU; if that fails once, the host's times are what there is."""
        clock, self._gpu_times = self._gpu_times, None
        if clock is not None:
            with warn_on_failure(self.rank, "the times of its steps on the GPU"):
                clock.step(kind)
                self._gpu_times = clock

    def _classify_step(self, step: int) -> str:
        """The field of StepTimes that the step counts in; "" if another profiler is running."""
        is_ours = self._recording and step >= self._first
        if not is_ours and torch.autograd._profiler_enabled():
            return ""
        if self._recorded or self._device_stopped_step is not None:
            return "after" if step > self._last + 1 else ""
        if self._in_use:
            return ""
        if step >= self._first:
            names = self._find_module_names()
            # The names take time that is not the profiler's.
            return "" if names and names.step == self._steps_before + step else "profiled"
        return "before" if 0 < step < self._first - self._plan.warmup else ""

    def _begin_step(self, step: int) -> None:
        self._next_step = step
        if step == self._first:
            self._begin_measuring(step)
        if self._window is None:
            return
        try:
            self._window.begin_step(step, self._steps_before + step)
        except ProfilerInUseError:
            if self._provisional:
                self._finish(complete=False)
                return
            self._in_use = True
            if self._plan.share:
                self._begin_measuring(step)
                self._share()
            else:
                self._postpone()
            return
        self._in_use = isinstance(self._window, SharedWindow)
        if step >= self._first and self._sampler is not None:
            with warn_on_failure(self.rank, LOST_PLACES):
                self._sampler.start()

    def _begin_measuring(self, step: int) -> None:
        """Reads what is to be known from the first recorded step on; does nothing afterwards."""
        if self._meter is not None:
            return
        self._files.clear()
        with warn_on_failure(self.rank, "the steps before its resumption"):
            self._steps_before = self._read_steps_before(step) if self._read_steps_before else 0
        with warn_on_failure(self.rank, "the clock of its GPU"):
            self._read_gpu()
        # A snapshot is written at once, so a recording that may be discarded has none.
        self._meter = MemoryMeter(self._plan.memory and not self._provisional, self.rank)

    def _create_window(self) -> TraceWindow:
        return TraceWindow(self._plan, self._first, self._give_way)

    def _postpone(self) -> None:
        """Moves the steps to record: the warmup begins at the next step at the earliest."""
        self._first = max(self._first, self._next_step + 1 + self._plan.warmup)
        self._last = self._first + self._plan.steps - 1
        self._window = self._create_window()

    def _share(self) -> None:
        """Takes the trace of the script's own profiler, which is warm or running or begins now."""
        self._stop_sampler()
        self._detail = "full"
        self._window = SharedWindow(self._finish_shared)

    def _finish_shared(self) -> None:
        """Writes the files once the script's profiler has ended."""
        window = self._window
        if isinstance(window, SharedWindow):
            first = self._next_step if window.first is None else window.first
            self._first, self._last = first, first + max(window.recorded, 1) - 1
            steps = f"steps {first} to {self._last} are" if window.recorded else "the trace is"
            warn(f"rank {self.rank}: {steps} those of the script's own torch.profiler (--share)")
        self._finish(complete=True)

    def _check_device(self, step: int) -> None:
        """Makes this step the last one if Kineto has stopped to record the GPU."""
        if self._window is None or not self._window.device_stopped:
            return
        if self._device_stopped_step is None:
            warn_lost(self.rank, f"its GPU data from step {step} on: {BUFFERS_FULL}")
            self._device_stopped_step = self._last = step

    def _give_way(self) -> None:
        """Ends the window because the script starts a profiler; without a step, tries again."""
        window = self._window
        if self._provisional or window is None:
            self._finish(complete=False)
        elif self._plan.share and not window.recorded:
            window.end()
            self._in_use = True
            self._share()
        elif not window.recorded and self._restarts < _MAX_RESTARTS:
            self._restarts += 1
            window.end()
            self._postpone()
        else:
            own = "the script's own torch.profiler was started"
            warn_lost(self.rank, f"its trace from step {self._next_step} on: {own}")
            self._finish(complete=False)

    def _finish(self, complete: bool) -> None:
        """Ends the window and writes the files; complete: all steps of the plan were recorded."""
        if not self._recording:
            return
        self._recording, window = False, self._window
        self._stop_sampler()
        with warn_on_failure(self.rank, "its trace"):
            self._held = None if window is None else window.end()
            self._end_step = None if window is None else self._first + window.recorded
            # The last records come when the profiler is stopped.
            self._check_device(self._first - 1 + (window.recorded if window else 0))
        self._recorded = self._held is not None or (complete and window is None)
        if isinstance(window, SharedWindow):
            # The script's profiler numbers its steps itself.
            self._end_step = None
        elif window is not None and self._recorded and self._first != self._plan.first:
            last = self._first + window.recorded - 1
            warn(
                f"rank {self.rank}: recorded steps {self._first} to {last}, instead of"
                f" {self._plan.first} on: the script's own torch.profiler ran"
            )
        # Again: groups may have been made since the begin, and their calls are in the trace.
        with warn_on_failure(self.rank, "its process groups"):
            self._groups = list_groups()
        meter, self._meter = self._meter, None
        if meter is not None:
            with warn_on_failure(self.rank, "its memory usage"):
                self._memory = meter.close(self._folder)
        with warn_on_failure(self.rank, "the clock of its GPU"):
            self._read_gpu()
        if not self._provisional:
            self._write_files()
            return
        self._is_held = self._recorded
        if self._is_held:
            with warn_on_failure(self.rank, RUN_FILE):
                self._run.run_within_step(self._run.collect)

    def _write_files(self) -> None:
        profiler, self._held, self._is_held = self._held, None, False
        thin = self._detail == "thin"
        device: MemoryDevice = "device" if torch.cuda.is_initialized() else "cpu"
        memory = device if self._plan.memory else None
        has_trace = self._recorded and self._files.write(
            profiler, self._began_unix_ns, thin, memory
        )
        release_profiler(profiler)
        self._detail = self._detail if has_trace else "none"
        self._write_record()
        # Write a first run.json now, in case the job is killed before its end or its threads run.
        with warn_on_failure(self.rank, RUN_FILE):
            self._run.write_first()
            self._run.run_within_step(self._run.write)

    def _stop_sampler(self) -> None:
        sampler, self._sampler = self._sampler, None
        if sampler is not None:
            with warn_on_failure(self.rank, LOST_PLACES):
                self._host = sampler.stop()

    def _add_activations(self) -> None:
        """Adds the activations, which are measured while the trace is packed, to the record."""
        activations_bytes = self._files.read_activations()
        if activations_bytes is not None:
            known = self._memory or MemoryState()
            self._memory = replace(known, activations_bytes=activations_bytes)
            self._write_record()

    def _read_gpu(self) -> None:
        """Reads clock and throttling in the background: NVML may take long to start."""
        uuid = find_gpu_uuid()
        if uuid is not None:
            threading.Thread(target=self._add_reading, args=(uuid,), name="stepsplit-gpu").start()

    def _add_reading(self, uuid: str) -> None:
        with warn_on_failure(self.rank, "the clock of its GPU"):
            read_versions()
            reading = read_gpu(uuid)
            self._gpu_note = reading.note
            if reading.state is not None:
                self._gpu.append(reading.state)

    def _write_record(self) -> None:
        worth_it = self._recorded or self._device_stopped_step is not None
        # What was reported lost stays so, also if the disk has space again for a small file.
        worth_it = worth_it and not is_reported_full(self._folder)
        if self._description is not None and worth_it:
            with warn_on_failure(self.rank, "its record"):
                write_record(self._folder, self._build_record(self._description))

    def _build_record(self, description: RankDescription) -> RankRecord:
        before, stopped, end = self._steps_before, self._device_stopped_step, self._end_step
        work = None
        # Without an end the marks of the trace are another profiler's, with numbers of its own.
        if end is not None:
            with warn_on_failure(self.rank, "the work of its steps"):
                work = self._work.collect(self._first, end - 1, before)
        return RankRecord(
            run=self._plan.name,
            rank=description.rank,
            world_size=self._world_size,
            backend=self._backend,
            detail=self._detail,
            groups=self._groups,
            versions=read_versions(),
            machine=description.machine,
            first_step=before + self._first,
            steps=self._collect_times(),
            memory=self._memory,
            clocks=self._clock.list_probes() if self._clock else (),
            gpu=tuple(self._gpu),
            device_stopped_step=None if stopped is None else before + stopped,
            gpu_note=self._gpu_note,
            host=self._host,
            steps_before=before,
            end_step=None if end is None else before + end,
            max_connections=read_max_connections(),
            work=work,
            role=self._plan.role,
            module_names=self._find_module_names(),
            labels=read_labels(),
        )

    def _find_module_names(self) -> ModuleNames | None:
        return self._window.module_names if isinstance(self._window, TraceWindow) else None

    def _collect_times(self) -> StepTimes:
        times, clock = self._times.collect_times(), self._gpu_times
        if clock is None:
            return times
        before, profiled, after = (clock.collect(k) for k in ("before", "profiled", "after"))
        return replace(times, gpu_before_ns=before, gpu_profiled_ns=profiled, gpu_after_ns=after)
