"""Watches a training for as long as it runs: step times of each rank, and a sample now and then."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from stepsplit.collectors.formats.file_names import build_raw_path, build_trace_path
from stepsplit.collectors.formats.run_spec import Mesh
from stepsplit.collectors.formats.watch_notes import (
    LEFT,
    SAMPLES,
    WINDOW_STEPS,
    RankEnded,
    SampleReport,
)
from stepsplit.collectors.guard import warn_on_failure
from stepsplit.collectors.job.launcher import count_restarts
from stepsplit.collectors.job.process_groups import list_groups, read_job
from stepsplit.collectors.probes.launch_times import UNKNOWN_LAUNCH, LaunchTimes
from stepsplit.collectors.probes.local_times import LocalTimes
from stepsplit.collectors.probes.spans import SPANS
from stepsplit.collectors.record.pack import check_complete, drop, name_raw
from stepsplit.collectors.record.plan import RecordPlan
from stepsplit.collectors.record.rank_files import shorten_trace_name
from stepsplit.collectors.record.trace_window import (
    BUFFERS_FULL,
    PreparedProfilers,
    ProfilerInUseError,
    TraceWindow,
    notice_captures,
    release_profiler,
)
from stepsplit.collectors.record.user_spec import MeshLike, convert_mesh
from stepsplit.collectors.safe_io.atomic_file import PRIVATE, make_owner_folder
from stepsplit.collectors.watch.background import WatchThread
from stepsplit.collectors.watch.budget import FirstSampleRise, compute_cost_ns
from stepsplit.collectors.watch.plan import WatchPlan
from stepsplit.collectors.watch.samples import ActiveSample, NextSample, list_cross
from stepsplit.collectors.watch.step_windows import StepRing


class Sampler:
    """Watches this rank. Call end_step(step) at the end of every step, then close().

    No method raises, issues a collective, or waits for another rank: a failure is one line, and
    ends the watch of this rank. Steps are counted from the start of the process; steps_before is
    added to them in what is written; None if unknown. launch: the moments of the rank's start;
    those of a job that was attached to are not asked for.
    """

    def __init__(
        self,
        plan: WatchPlan,
        mesh: Mesh | None = None,
        steps_before: int | None = 0,
        launch: LaunchTimes = UNKNOWN_LAUNCH,
    ) -> None:
        notice_captures()
        self._plan = replace(plan, incarnation=plan.incarnation + count_restarts())
        self._mesh, self._steps_before = mesh, steps_before or 0
        self._folder = Path(plan.out)
        self.rank, self._world_size, _ = read_job()
        self._ring = StepRing(self.rank)
        self._local = LocalTimes()
        self._last_ns: int | None = None
        self._sample: ActiveSample | None = None
        self._prepared = PreparedProfilers()
        self._is_over = False
        self._rise = FirstSampleRise() if self.rank == 0 else None
        self._link = WatchThread(
            self._plan, mesh, self.rank, self._world_size, self._steps_before, self._rise,
            launch, steps_before is not None,
        )  # fmt: skip
        self._link.start()

    def end_step(self, step: int) -> None:
        """Ends step `step`; begins, continues or ends a sample."""
        if self._is_over:
            return
        now, unix_ns = time.perf_counter_ns(), time.time_ns()
        took, self._last_ns = now - (self._last_ns or now), now
        SPANS.end_step()
        self._is_over = True
        # Each function more costs a step some microseconds: its code has left the caches since.
        try:
            self._link.end_step(step, now, unix_ns)
            local_ns = self._local.begin_step()
            if self._sample is None:
                self._add_to_ring(step, unix_ns, took, local_ns)
                if self._link.next_sample is not None:
                    self._begin_due_sample(self._link.next_sample, step + 1)
            else:
                self._continue_sample(self._sample, step, unix_ns, took, local_ns)
            self._is_over = False
        except Exception as error:
            with warn_on_failure(self.rank, "the rest of its watch"):
                raise error

    def close(self) -> None:
        """Ends the watch with the training; a sample in progress is lost."""
        with warn_on_failure(self.rank, "the end of its watch"):
            self._end("the training ended within the sample")
            self._link.close(self._ring.close())

    def leave(self) -> None:
        """Ends the watch while the training goes on, which does not wait for the last notes."""
        with warn_on_failure(self.rank, "the end of its watch"):
            self._end("the watch ended within the sample")
            close, window = self._link.close, self._ring.close()
            # Else the end of the notes is taken for that of the rank.
            step = self._steps_before + self._link.done
            self._link.notes.put(RankEnded(self.rank, step, time.time_ns(), LEFT))
            threading.Thread(target=close, args=(window,), name="stepsplit-leave").start()

    def _end(self, reason: str) -> None:
        self._is_over = True
        sample, self._sample = self._sample, None
        if sample is not None:
            self._abandon(sample, reason)
            self._report(sample)
        self._prepared.close()
        self._local.close()

    def _add_to_ring(self, step: int, unix_ns: int, took_ns: int, local_ns: int) -> None:
        if not took_ns:
            return
        if self._rise is not None:
            self._rise.add(took_ns)
        window = self._ring.add(self._steps_before + step, unix_ns, took_ns, local_ns)
        self._link.recent_ns = tuple(self._ring.recent_ns)
        if window is not None:
            self._link.notes.put(window)

    def _begin_due_sample(self, due: NextSample, next_step: int) -> None:
        plan = self._plan
        if next_step < due.step - plan.warmup:
            return
        self._link.next_sample = None
        number = self._steps_before + due.step
        # A job that was started again may sample the same step again.
        name = f"{number}-{plan.incarnation}" if plan.incarnation else str(number)
        sample = ActiveSample(
            plan=due,
            number=number,
            folder=self._folder / SAMPLES / name,
            is_sampled=self._is_sampled(due),
            before_ns=tuple(self._ring.recent_ns),
            unix_ns=time.time_ns(),
        )
        self._sample = sample
        # The other ranks have begun: a sample with another first step would not be of the same
        # steps.
        if next_step > due.step - plan.warmup:
            sample.no_data = f"this rank heard of it late, after step {next_step - 1}"
        elif sample.is_sampled:
            sample.window = TraceWindow(
                RecordPlan(
                    out=str(sample.folder),
                    name=plan.name,
                    first=due.step,
                    steps=plan.steps,
                    warmup=plan.warmup,
                ),
                due.step,
                lambda: self._abandon(sample, "the script's own torch.profiler was started"),
                self._prepared.is_any_waiting,
            )
            if self._rise is not None:
                self._rise.begin_sample()
        self._begin_step(sample, next_step)

    def _is_sampled(self, due: NextSample) -> bool:
        if due.pivot is None or self._mesh is None:
            return True
        return self.rank in list_cross(self._mesh, due.pivot)

    def _begin_step(self, sample: ActiveSample, step: int) -> None:
        if sample.window is None:
            return
        begin = time.perf_counter_ns()
        try:
            sample.window.begin_step(step, self._steps_before + step)
        except ProfilerInUseError as error:
            self._abandon(sample, str(error))
        except Exception as error:  # noqa: BLE001 - no user code runs in here
            # A recording on request takes the profiler for a while; that is no fault of the
            # samples.
            is_ours = "another recording" in str(error)
            self._abandon(sample, str(error) or type(error).__name__, is_fault=not is_ours)
        sample.own_ns += time.perf_counter_ns() - begin

    def _continue_sample(
        self, sample: ActiveSample, step: int, unix_ns: int, took_ns: int, local_ns: int
    ) -> None:
        first, last = sample.plan.step, sample.plan.step + self._plan.steps - 1
        if step > last + 1:
            # The steps after a sample are ordinary ones again, and the comparison with those before
            # it.
            sample.after_ns.append(took_ns)
            self._add_to_ring(step, unix_ns, took_ns, local_ns)
            if len(sample.after_ns) >= WINDOW_STEPS:
                self._sample = None
                self._report(sample)
            return
        sample.under_ns.append(took_ns)
        if sample.window is not None:
            sample.window.end_step(step)
            if step >= last:
                self._write_sample(sample)
        if first - self._plan.warmup <= step < last:
            self._begin_step(sample, step + 1)

    def _write_sample(self, sample: ActiveSample) -> None:
        """Stops the profiler and writes its raw trace; the record is written in the background."""
        window, sample.window = sample.window, None
        begin, profiler = time.perf_counter_ns(), None
        try:
            profiler = window.end() if window is not None else None
            if profiler is None or (window is not None and window.device_stopped):
                raise RuntimeError("no step was recorded" if profiler is None else BUFFERS_FULL)
            sample.groups = list_groups()
            self._export(profiler, sample.folder)
            sample.has_trace = True
        except Exception as error:  # noqa: BLE001 - no user code runs in here
            self._abandon(sample, str(error) or type(error).__name__, is_fault=True)
        finally:
            release_profiler(profiler)
            sample.own_ns += time.perf_counter_ns() - begin
        if sample.has_trace:
            self._link.records.put(sample)

    def _export(self, profiler: Any, folder: Path) -> None:
        make_owner_folder(folder)
        out = build_trace_path(folder, self.rank)
        raw = build_raw_path(out)
        try:
            profiler.export_chrome_trace(str(raw))
            check_complete(raw)
            raw.chmod(PRIVATE)
            shorten_trace_name(raw, name_raw(out).name)
            raw.replace(name_raw(out))
        finally:
            drop(raw)

    def _abandon(self, sample: ActiveSample, reason: str, is_fault: bool = False) -> None:
        """Gives the sample up on this rank: no data, with the reason."""
        if not sample.has_trace:
            sample.no_data, sample.is_fault = sample.no_data or reason, is_fault
        window, sample.window = sample.window, None
        if window is not None:
            with warn_on_failure(self.rank, "a sample"):
                release_profiler(window.end())

    def _report(self, sample: ActiveSample) -> None:
        self._link.report(
            SampleReport(
                number=sample.plan.number,
                incarnation=self._plan.incarnation,
                rank=self.rank,
                step=sample.number,
                steps=self._plan.steps,
                unix_ns=sample.unix_ns,
                pivot=sample.plan.pivot,
                folder=sample.folder.name,
                is_sampled=sample.is_sampled,
                no_data=sample.no_data,
                is_fault=sample.is_fault,
                cost_ns=compute_cost_ns(sample.before_ns, sample.under_ns, sample.own_ns),
                before_ns=sample.before_ns,
                after_ns=tuple(sample.after_ns),
                interval_steps=sample.plan.interval_steps,
                overhead=sample.plan.overhead,
                is_capture=sample.plan.is_capture,
            )
        )


def start_sampler(
    plan: WatchPlan,
    mesh: MeshLike,
    steps_before: int | None,
    launch: LaunchTimes = UNKNOWN_LAUNCH,
) -> Sampler:
    """Begins to watch this rank; without a mesh, all ranks are sampled."""
    known_mesh = convert_mesh(None if mesh == "" else mesh, read_job()[1])
    return Sampler(plan, known_mesh, steps_before, launch)
