"""One rank's recording from its begin to its files, whoever counts the steps."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from stepsplit.collectors import presence
from stepsplit.collectors.clock import HostClock
from stepsplit.collectors.deferred import deferred_sigterm
from stepsplit.collectors.gpu import gpu_state
from stepsplit.collectors.guard import guarded, warn_lost
from stepsplit.collectors.memory import MemoryMeter
from stepsplit.collectors.plan import Detail, Plan, detail
from stepsplit.collectors.presence import Presence
from stepsplit.collectors.rank_files import RankFiles
from stepsplit.collectors.rank_record import GpuState, MemoryState, RankRecord, write_record
from stepsplit.collectors.run_file import RunFile, Stated
from stepsplit.collectors.step_times import StepClock
from stepsplit.collectors.trace_window import TraceWindow

LATE_RANKS_S = 10.0


class Recording:
    """One rank's share of a recording, by a plan that says when it begins.

    begin(), then after(step) at the end of every step, then close(). Whatever fails is lost with a
    warning: none of these raises or makes a collective, and only close() waits for others.
    """

    def __init__(self, plan: Plan, stated: Stated) -> None:
        self._plan, self._first = plan, plan.first or 0
        self._last = self._first + plan.steps - 1
        self._folder = Path(plan.out)
        self.rank, self._world_size, self._backend = presence.job()
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
            ranks = presence.groups()
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
            groups=presence.groups(),
            versions=presence.versions(),
            machine=told.machine,
            first_step=self._first,
            steps=self._times.times(),
            memory=self._memory,
            clocks=self._clock.probes() if self._clock else (),
            gpu=tuple(self._gpu),
        )
