"""Watches a training for as long as it runs: step times of each rank, and a sample now and then."""

from __future__ import annotations

import json
import math
import os
import queue
import socket
import threading
import time
from collections import deque
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from stepsplit.collectors.gpu import read_versions
from stepsplit.collectors.guard import warn, warn_on_failure
from stepsplit.collectors.job_info import (
    RankDescription,
    SharedValues,
    describe_rank,
    list_groups,
    read_job,
)
from stepsplit.collectors.launcher import count_restarts
from stepsplit.collectors.optimizers import LocalTimes
from stepsplit.collectors.pack import check_complete, drop, name_raw
from stepsplit.collectors.rank_files import shorten_trace_name
from stepsplit.collectors.rank_record import (
    RankRecord,
    StepTimes,
    build_raw_path,
    build_trace_path,
    write_record,
)
from stepsplit.collectors.record import RecordPlan
from stepsplit.collectors.run_spec import PRIVATE, GroupInfo, Mesh, make_owner_folder
from stepsplit.collectors.trace_window import (
    BUFFERS_FULL,
    PreparedProfilers,
    ProfilerInUseError,
    TraceWindow,
    can_detach,
    notice_captures,
    release_profiler,
)
from stepsplit.collectors.watch_notes import (
    SAMPLES,
    Note,
    NoteFile,
    RankDropped,
    RankEnded,
    RankStarted,
    RankWindow,
    SampleReport,
    parse_report,
    take_capture_request,
)
from stepsplit.collectors.watch_plan import (
    WINDOW_STEPS,
    BudgetController,
    FirstSampleRise,
    NextSample,
    StepRing,
    WatchPlan,
    choose_pivot,
    compute_cost_ns,
    list_cross,
    parse_next_sample,
)

# One sample on one rank.


@dataclass(slots=True)
class ActiveSample:
    """The sample in progress: its profiler, and the times of the steps around it.

    window: None if this rank is not sampled, or its profiler has ended. groups and times are kept
    for the record, which is written by the background thread.
    """

    plan: NextSample
    number: int
    folder: Path
    is_sampled: bool
    before_ns: tuple[int, ...]
    unix_ns: int = 0
    window: TraceWindow | None = None
    under_ns: list[int] = field(default_factory=list)
    after_ns: list[int] = field(default_factory=list)
    own_ns: int = 0
    no_data: str = ""
    is_fault: bool = False
    groups: tuple[GroupInfo, ...] = ()
    has_trace: bool = False


class Sampler:
    """Watches this rank. Call end_step(step) at the end of every step, then close().

    No method raises, issues a collective, or waits for another rank: a failure is one line, and
    ends the watch of this rank. Steps are counted from the start of the process; steps_before is
    added to them in what is written.
    """

    def __init__(self, plan: WatchPlan, mesh: Mesh | None = None, steps_before: int = 0) -> None:
        notice_captures()
        self._plan = replace(plan, incarnation=plan.incarnation + count_restarts())
        self._mesh, self._steps_before = mesh, steps_before
        self._folder = Path(plan.out)
        self.rank, self._world_size, _ = read_job()
        self._ring = StepRing(self.rank)
        self._local = LocalTimes()
        self._last_ns: int | None = None
        self._sample: ActiveSample | None = None
        self._prepared = PreparedProfilers()
        self._is_over = False
        self._rise = FirstSampleRise() if self.rank == 0 else None
        self._link = _WatchThread(
            self._plan, mesh, self.rank, self._world_size, steps_before, self._rise
        )
        self._link.start()

    def end_step(self, step: int) -> None:
        """Ends step `step`; begins, continues or ends a sample."""
        if self._is_over:
            return
        now = time.perf_counter_ns()
        took, self._last_ns = now - (self._last_ns or now), now
        self._is_over = True
        with warn_on_failure(self.rank, "the rest of its watch"):
            self._link.done = step + 1
            local_ns = self._local.begin_step()
            if self._sample is None:
                self._add_to_ring(step, took, local_ns)
                self._begin_due_sample(step + 1)
            else:
                self._continue_sample(self._sample, step, took, local_ns)
            self._is_over = False

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
            threading.Thread(target=close, args=(window,), name="stepsplit-leave").start()

    def _end(self, reason: str) -> None:
        self._is_over = True
        sample, self._sample = self._sample, None
        if sample is not None:
            self._abandon(sample, reason)
            self._report(sample)
        self._prepared.close()
        self._local.close()

    def _add_to_ring(self, step: int, took_ns: int, local_ns: int) -> None:
        if not took_ns:
            return
        if self._rise is not None:
            self._rise.add(took_ns)
        window = self._ring.add(self._steps_before + step, took_ns, local_ns)
        self._link.recent_ns = tuple(self._ring.recent_ns)
        if window is not None:
            self._link.notes.put(window)

    def _begin_due_sample(self, next_step: int) -> None:
        due, plan = self._link.next_sample, self._plan
        if due is None or next_step < due.step - plan.warmup:
            return
        self._link.next_sample = None
        number = self._steps_before + due.step
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
        if next_step > due.step - plan.warmup:
            sample.no_data = f"this rank heard of it late, after step {next_step - 1}"
        elif sample.is_sampled:
            self._open_window(sample)
            if self._rise is not None:
                self._rise.begin_sample()
        self._begin_step(sample, next_step)

    def _is_sampled(self, due: NextSample) -> bool:
        if due.pivot is None or self._mesh is None:
            return True
        return self.rank in list_cross(self._mesh, due.pivot)

    def _open_window(self, sample: ActiveSample) -> None:
        plan = RecordPlan(
            out=str(sample.folder),
            name=self._plan.name,
            first=sample.plan.step,
            steps=self._plan.steps,
            warmup=self._plan.warmup,
        )
        sample.window = TraceWindow(
            plan,
            sample.plan.step,
            lambda: self._abandon(sample, "the script's own torch.profiler was started"),
            self._prepared.is_any_waiting,
        )

    def _begin_step(self, sample: ActiveSample, step: int) -> None:
        if sample.window is None:
            return
        begin = time.perf_counter_ns()
        try:
            sample.window.begin_step(step, self._steps_before + step)
        except ProfilerInUseError as error:
            self._abandon(sample, str(error))
        except Exception as error:  # noqa: BLE001 - no user code runs in here
            is_ours = "another recording" in str(error)
            self._abandon(sample, str(error) or type(error).__name__, is_fault=not is_ours)
        sample.own_ns += time.perf_counter_ns() - begin

    def _continue_sample(
        self, sample: ActiveSample, step: int, took_ns: int, local_ns: int
    ) -> None:
        first, last = sample.plan.step, sample.plan.step + self._plan.steps - 1
        if step > last + 1:
            sample.after_ns.append(took_ns)
            self._add_to_ring(step, took_ns, local_ns)
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


# The background thread of a rank: its files, and the agreement on the next sample.

_NEXT = "watch/next"

_FIRST_STEP = 20
"""No sample begins before so many steps of a process have been timed."""

_FIRST_STEP_IF_ATTACHED, _FIRST_STEP_S = 100, 120.0
"""Where the profiler stays attached, the first sample waits for so many steps, with which those
after it are compared, but not longer than this."""

_RANKS_A_SECOND = 500
"""How many ranks may ask the store in a second: it is one process for the whole job."""

_LATE_REPORT_S = 30.0
"""How long rank 0 waits for the reports of the other ranks."""

_END_S = 2.0


class _WatchThread:
    """Announces samples on rank 0 and hears of them on all ranks; writes notes and records.

    done, recent_ns: set by the training thread, which fills rise. next_sample: taken by it.
    """

    def __init__(
        self,
        plan: WatchPlan,
        mesh: Mesh | None,
        rank: int,
        world_size: int,
        steps_before: int,
        rise: FirstSampleRise | None,
    ) -> None:
        self._plan, self._mesh, self._rank = plan, mesh, rank
        self._world_size, self._steps_before = world_size, steps_before
        self._rise = rise
        self._poll_s = min(30.0, max(0.25, world_size / _RANKS_A_SECOND))
        self.done = 0
        self.recent_ns: tuple[int, ...] = ()
        self.next_sample: NextSample | None = None
        self.notes: queue.SimpleQueue[Note] = queue.SimpleQueue()
        self.records: queue.SimpleQueue[ActiveSample] = queue.SimpleQueue()
        self._reports: queue.SimpleQueue[SampleReport] = queue.SimpleQueue()
        self._controller = BudgetController(plan)
        self._heard = 0
        self._values: SharedValues | None = None
        self._description: RankDescription | None = None
        self._traces: deque[tuple[Path, int]] = deque()
        self._begin_s = time.monotonic()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stepsplit-watch", daemon=True)

    def start(self) -> None:
        """Begins."""
        self._thread.start()

    def report(self, report: SampleReport) -> None:
        """Notes a sample whose following steps have been timed."""
        self._reports.put(report)
        self.notes.put(replace(report, before_ns=(), after_ns=()))

    def close(self, window: RankWindow | None) -> None:
        """Writes what is left, within a limited time."""
        if window is not None:
            self.notes.put(window)
        step = self._steps_before + self.done
        self.notes.put(RankEnded(self._rank, step, time.time_ns()))
        self._closing.set()
        self._thread.join(_END_S)

    def _run(self) -> None:
        with warn_on_failure(self._rank, "what it notes of its steps and samples"):
            self.notes.put(
                RankStarted(
                    rank=self._rank,
                    world_size=self._world_size,
                    host=socket.gethostname(),
                    pid=os.getpid(),
                    incarnation=self._plan.incarnation,
                    budget=self._plan.budget,
                    unix_ns=time.time_ns(),
                )
            )
            file = NoteFile(Path(self._plan.out), self._rank)
            has_samples = True
            while not self._closing.wait(self._poll_s):
                has_samples = has_samples and self._try_to_agree()
                self._write(file)
            self._write(file)

    def _try_to_agree(self) -> bool:
        """Whether samples go on; without the store, step times still do."""
        try:
            return self._agree()
        except Exception as error:  # noqa: BLE001 - no user code runs in here
            if not self._closing.is_set():
                self._end_samples(f"the job's store failed: {str(error).splitlines()[0][:200]}")
            return False

    def _write(self, file: NoteFile) -> None:
        for sample in _drain(self.records):
            with warn_on_failure(self._rank, "the record of a sample"):
                self._write_record(sample)
        notes = _drain(self.notes)
        if notes:
            with warn_on_failure(self._rank, "notes of its steps"):
                file.write(notes)

    def _write_record(self, sample: ActiveSample) -> None:
        if self._description is None:
            self._description = describe_rank()
        write_record(
            sample.folder,
            RankRecord(
                run=self._plan.name,
                rank=self._description.rank,
                world_size=self._world_size,
                backend=read_job()[2],
                groups=sample.groups,
                versions=read_versions(),
                machine=self._description.machine,
                first_step=sample.number,
                steps=StepTimes(sample.before_ns, tuple(sample.under_ns[self._plan.warmup :])),
                steps_before=self._steps_before,
                end_step=sample.number + self._plan.steps,
            ),
        )
        self._drop_oldest_traces(name_raw(build_trace_path(sample.folder, self._rank)))

    def _drop_oldest_traces(self, newest: Path) -> None:
        """Keeps the traces of this rank within the plan's bound if they are not reduced."""
        self._traces.append((newest, newest.stat().st_size))
        dropped = 0
        while len(self._traces) > 1 and sum(size for _, size in self._traces) > (
            self._plan.keep_bytes
        ):
            path, _ = self._traces.popleft()
            if path.exists():
                path.unlink(missing_ok=True)
                dropped += 1
        if dropped:
            self.notes.put(RankDropped(self._rank, dropped, time.time_ns()))

    # The agreement.

    def _agree(self) -> bool:
        """One turn: publishes or hears of the next sample. Returns whether there may be more."""
        if self._world_size > 1 and self._values is None:
            self._values = SharedValues()
        if self._rank == 0:
            return self._lead()
        for own in _drain(self._reports):
            if self._values is not None and own.is_sampled:
                self._values.write(f"watch/report/{self._rank}", json.dumps(asdict(own)))
        text = self._values.read(_NEXT) if self._values is not None else None
        due = None if text is None else parse_next_sample(text)
        if due is not None and due.incarnation == self._plan.incarnation:
            if due.ended:
                return False
            if due.number > self._heard:
                self._heard, self.next_sample = due.number, due
        return True

    def _lead(self) -> bool:
        """Rank 0: announces the first sample, and after each one the next."""
        recent = self.recent_ns
        if len(recent) < WINDOW_STEPS or self.done < self._find_first_step():
            return True
        if self._rise is not None and not can_detach() and (risen := self._rise.describe()):
            self._end_samples(risen)
            return False
        if not self._heard:
            self._announce(self.done, median(recent))
            return True
        if self._may_replace_next(median(recent)) and take_capture_request(Path(self._plan.out)):
            self._announce(self.done, median(recent), is_capture=True)
            return True
        for own in _drain(self._reports):
            reason = self._controller.add(own, self._collect_reports(own))
            if reason:
                self._end_samples(reason)
                return False
            first = own.step - self._steps_before
            step_ns = median(recent)
            self._announce(first + self._controller.compute_interval(step_ns), step_ns)
        return True

    def _find_first_step(self) -> int:
        """The step from which on there may be a sample."""
        is_long = time.monotonic() - self._begin_s > _FIRST_STEP_S
        return _FIRST_STEP if can_detach() or is_long else _FIRST_STEP_IF_ATTACHED

    def _announce(self, step: int, step_ns: float, is_capture: bool = False) -> None:
        """Publishes the next sample, so far ahead that every rank will have heard of it.

        is_capture: of all ranks.
        """
        mesh = None if is_capture else self._mesh
        self._heard += 1
        due = NextSample(
            number=self._heard,
            step=max(step, self.done + self._compute_lead(step_ns)),
            incarnation=self._plan.incarnation,
            pivot=None if mesh is None else choose_pivot(mesh, self._heard - 1),
            interval_steps=self._controller.compute_interval(step_ns),
            overhead=self._controller.measure_overhead(),
            is_capture=is_capture,
        )
        if self._values is not None:
            self._values.write(_NEXT, due.format_json())
        self.next_sample = due

    def _compute_lead(self, step_ns: float) -> int:
        """The steps in which every rank hears of a sample."""
        return math.ceil((2 * self._poll_s + 0.5) * 1e9 / step_ns) + self._plan.warmup + 3

    def _may_replace_next(self, step_ns: float) -> bool:
        """Whether the announced sample is so far ahead that all ranks will hear of another."""
        due = self.next_sample
        return due is not None and due.step > self.done + 2 * self._compute_lead(step_ns)

    def _collect_reports(self, own: SampleReport) -> list[SampleReport]:
        """The reports of the other sampled ranks that come in time."""
        if self._values is None:
            return []
        ranks = set(range(self._world_size))
        if self._mesh is not None and own.pivot is not None:
            ranks = set(list_cross(self._mesh, own.pivot))
        found: dict[int, SampleReport] = {}
        deadline = time.monotonic() + _LATE_REPORT_S
        while (missing := ranks - {0} - set(found)) and time.monotonic() < deadline:
            for rank in missing:
                text = self._values.read(f"watch/report/{rank}")
                report = None if text is None else parse_report(text)
                is_same = report is not None and report.number == own.number
                if report is not None and is_same and report.incarnation == own.incarnation:
                    found[rank] = report
            if self._closing.wait(self._poll_s):
                break
        return list(found.values())

    def _end_samples(self, reason: str) -> None:
        """Ends the samples with one line; step times go on."""
        self.notes.put(
            RankEnded(self._rank, self._steps_before + self.done, time.time_ns(), reason)
        )
        if self._rank == 0:
            warn(f"no more samples: {reason}; step times are watched on")
            if self._values is not None:
                due = NextSample(self._heard + 1, 0, self._plan.incarnation, ended=reason)
                self._values.write(_NEXT, due.format_json())


def _drain(items: queue.SimpleQueue[Any]) -> list[Any]:
    found = []
    while True:
        try:
            found.append(items.get_nowait())
        except queue.Empty:
            return found
