"""The background thread of a watched rank: its files, and the agreement on the next sample."""

from __future__ import annotations

import json
import math
import os
import queue
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from stepsplit.collectors.formats.file_names import build_trace_path
from stepsplit.collectors.formats.rank_record import RankRecord, StepTimes, write_record
from stepsplit.collectors.formats.run_spec import Mesh
from stepsplit.collectors.formats.step_memory import StepMemory
from stepsplit.collectors.formats.watch_notes import (
    WINDOW_STEPS,
    Beat,
    BeatFile,
    Note,
    NoteFile,
    RankDropped,
    RankEnded,
    RankSpan,
    RankStarted,
    RankWindow,
    SampleReport,
    parse_report,
    take_capture_request,
)
from stepsplit.collectors.guard import warn, warn_on_failure
from stepsplit.collectors.job.job_store import SharedValues
from stepsplit.collectors.job.process_groups import read_job
from stepsplit.collectors.job.rank_description import RankDescription, describe_rank
from stepsplit.collectors.probes.launch_times import LaunchTimes
from stepsplit.collectors.probes.spans import SPANS
from stepsplit.collectors.probes.versions import read_versions
from stepsplit.collectors.record.pack import name_raw
from stepsplit.collectors.record.trace_window import can_detach
from stepsplit.collectors.watch.budget import BudgetController, FirstSampleRise
from stepsplit.collectors.watch.plan import WatchPlan
from stepsplit.collectors.watch.samples import (
    ActiveSample,
    NextSample,
    choose_pivot,
    list_cross,
    parse_next_sample,
)

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

# The thread writes its last notes; the end of the training does not wait for a disk that hangs.
_END_S = 2.0


class WatchThread:
    """Announces samples on rank 0 and hears of them on all ranks; writes notes and records.

    done, last_ns: by end_step(). recent_ns: set by the training thread, which fills rise.
    next_sample: taken by it.
    """

    def __init__(
        self,
        plan: WatchPlan,
        mesh: Mesh | None,
        rank: int,
        world_size: int,
        steps_before: int,
        rise: FirstSampleRise | None,
        launch: LaunchTimes,
        knows_steps_before: bool,
    ) -> None:
        self._plan, self._mesh, self._rank = plan, mesh, rank
        self._world_size, self._steps_before = world_size, steps_before
        self._rise, self._launch, self._knows_steps_before = rise, launch, knows_steps_before
        # A quarter of a second in small jobs, in large ones as seldom as the store can answer all.
        self._poll_s = min(30.0, max(0.25, world_size / _RANKS_A_SECOND))
        self.done = 0
        self.last_ns = time.perf_counter_ns()
        self.recent_ns: tuple[int, ...] = ()
        self.next_sample: NextSample | None = None
        self.notes: queue.SimpleQueue[Note] = queue.SimpleQueue()
        self.records: queue.SimpleQueue[ActiveSample] = queue.SimpleQueue()
        self._reports: queue.SimpleQueue[SampleReport] = queue.SimpleQueue()
        self._controller = BudgetController(plan)
        self._heard = 0
        self._values: SharedValues | None = None
        self._description: RankDescription | None = None
        self._beats: BeatFile | None = None
        self._is_beat_lost = False
        self._step_memory: StepMemory | None = None
        # Some containers forbid it: then a kill is known to a poll of this thread.
        with suppress(OSError, AttributeError):
            self._step_memory = StepMemory(rank, plan.incarnation)
        self._traces: deque[tuple[Path, int]] = deque()
        self._begin_s = time.monotonic()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stepsplit-watch", daemon=True)

    def start(self) -> None:
        """Begins."""
        self._thread.start()

    def end_step(self, step: int, now_ns: int, unix_ns: int) -> None:
        """Notes when a step of this process has ended, by the clock that is never set and in ns
        since 1970."""
        self.done, self.last_ns = step + 1, now_ns
        if self._step_memory is not None:
            self._step_memory.write(self._steps_before + step, unix_ns)

    def report(self, report: SampleReport) -> None:
        """Notes a sample whose following steps have been timed."""
        self._reports.put(report)
        self.notes.put(replace(report, before_ns=(), after_ns=()))

    def close(self, window: RankWindow | None) -> None:
        """Writes what is left, within a limited time."""
        if window is not None:
            self.notes.put(window)
        step = self._steps_before + self.done
        with warn_on_failure(self._rank, "its last evaluation"):
            SPANS.close()
        self.notes.put(RankEnded(self._rank, step, time.time_ns()))
        self._closing.set()
        self._thread.join(_END_S)
        if self._step_memory is not None:
            self._step_memory.close()

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
                    **asdict(self._launch),
                    steps_before=self._steps_before if self._knows_steps_before else None,
                    step_descriptor=self._step_memory.descriptor if self._step_memory else -1,
                )
            )
            folder = Path(self._plan.out)
            file = NoteFile(folder, self._rank)
            has_samples = True
            while not self._closing.wait(self._poll_s):
                has_samples = has_samples and self._try_to_agree()
                self._write(file)
                self._beat()
            self._write(file)
            self._beat()
        if self._beats is not None:
            self._beats.close()

    def _beat(self) -> None:
        """Writes the newest step that has ended, which tells a kill from a hang: 64 bytes at
        each poll, in place. A failure is said once, and tried again."""
        is_lost, self._is_beat_lost = self._is_beat_lost, True
        with suppress(Exception) if is_lost else warn_on_failure(self._rank, "its newest step"):
            if self._beats is None:
                folder = Path(self._plan.out)
                self._beats = BeatFile(folder, self._rank, self._plan.incarnation)
            done, since_ns = self.done, time.perf_counter_ns() - self.last_ns
            now = time.time_ns()
            self._beats.write(Beat(self._steps_before + done - 1, now - since_ns, now))
            self._is_beat_lost = False

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
        for span in SPANS.take():
            self.notes.put(RankSpan(self._rank, span.mark, span.begin_unix_ns, span.end_unix_ns))
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
        # The rank says so: a page that has no numbers of these samples can then tell why.
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
            # The key keeps its value: the same sample is read at each turn until the next one is
            # announced.
            if due.number > self._heard:
                self._heard, self.next_sample = due.number, due
        return True

    def _lead(self) -> bool:
        """Rank 0: announces the first sample, and after each one the next."""
        recent = self.recent_ns
        # Where the profiler stays attached, the steps before the first sample are all that later
        # ones can be compared with.
        is_long = time.monotonic() - self._begin_s > _FIRST_STEP_S
        first_step = _FIRST_STEP if can_detach() or is_long else _FIRST_STEP_IF_ATTACHED
        if len(recent) < WINDOW_STEPS or self.done < first_step:
            return True
        if self._rise is not None and not can_detach() and (risen := self._rise.describe()):
            self._end_samples(risen)
            return False
        if not self._heard:
            self._announce(self.done, median(recent))
            return True
        # A capture on request replaces the next sample, if all ranks will hear of another in time.
        due, lead = self.next_sample, self._compute_lead(median(recent))
        may_replace = due is not None and due.step > self.done + 2 * lead
        if may_replace and take_capture_request(Path(self._plan.out)):
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

    def _collect_reports(self, own: SampleReport) -> list[SampleReport]:
        """The reports of the other sampled ranks that come in time."""
        if self._values is None:
            return []
        ranks = set(range(self._world_size))
        if self._mesh is not None and own.pivot is not None:
            ranks = set(list_cross(self._mesh, own.pivot))
        found: dict[int, SampleReport] = {}
        deadline = time.monotonic() + _LATE_REPORT_S
        # A rank that heard too late, or whose sample failed, reports too; one that has died does
        # not, and is not waited for longer than this.
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
