"""The agent in every process under `stepsplit record`: counts steps and answers requests."""

from __future__ import annotations

import atexit
import functools
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from stepsplit.collectors.attach import left_states, messages, sockets, stacks
from stepsplit.collectors.guard import is_forked_child, warn_on_failure
from stepsplit.collectors.job.launcher import read_identity, read_job_name
from stepsplit.collectors.probes.flight_recorder import read_flight_json
from stepsplit.collectors.probes.imports import when_imported
from stepsplit.collectors.probes.launch_times import UNKNOWN_LAUNCH, LaunchTimes, read_process_start
from stepsplit.collectors.probes.nccl_log import build_log_path, limit_log_size, truncate_log
from stepsplit.collectors.probes.spans import SPANS, mark, watch_spans
from stepsplit.collectors.record.environment import build_kineto_environment
from stepsplit.collectors.record.plan import PLAN_VARIABLE, RecordPlan
from stepsplit.collectors.watch.plan import WATCH_VARIABLE, read_watch_plan

if TYPE_CHECKING:
    from stepsplit.collectors.record.active_recording import ActiveRecording
    from stepsplit.collectors.watch.sampler import Sampler
from stepsplit.collectors.attach.observer import SelfObserver
from stepsplit.collectors.attach.relay import claim_recording, forward_plans, publish_plan
from stepsplit.collectors.attach.stacks import StackWatchdog
from stepsplit.collectors.attach.step_counter import StepCounter

STEPS_TIMED_BEFORE = 6
"""Steps that are timed before the warmup: the steps after it may be slower, as CUPTI stays."""


# The agent runs in every process of a recorded job, so it does as little as possible: it waits
# until torch's optimizers are imported and counts their steps. Only a process that steps is a
# rank; there the agent records by its plan, or listens for an attach.


class Agent:
    """The agent of this process; it is on standby if plan.first is None."""

    def __init__(self, plan: RecordPlan) -> None:
        self._plan: RecordPlan | None = plan if plan.first is not None else None
        self._first = plan.first
        self._counter = StepCounter(self._handle_step_end)
        self._times: deque[int] = deque(maxlen=16)
        self._recording: ActiveRecording | None = None
        self._early: ActiveRecording | None = None
        self._watch = read_watch_plan(os.environ)
        self._sampler: Sampler | None = None
        self._ends_watch = False
        self._pid = 0
        self._is_over = False
        self._steps_before: int | None = None
        self._launch = UNKNOWN_LAUNCH
        self._log: Path | None = None
        self._observer = SelfObserver()
        self._watchdog = StackWatchdog(self._describe_for_watchdog)

    def install(self) -> None:
        """Starts to count steps once torch's optimizers are imported."""
        self._watchdog.install()
        if self._watch is not None:
            self._launch = LaunchTimes(read_process_start(), time.time_ns())
            watch_spans()
        when_imported("torch.optim.optimizer", self._counter.install)
        when_imported("torch.optim.optimizer", _configure_kineto)
        when_imported(_C10D, lambda: _wrap_initialization(self._handle_join))

    def _handle_join(self) -> None:
        """Runs when the process group is initialized: a job may hang before its first step."""
        with warn_on_failure(read_identity().rank, "its place in the job"):
            self._observer.note_join()
        if not self._pid:
            self._listen()

    def _handle_step_end(self, step: int) -> None:
        """Runs on the training thread at the end of each step; not in a forked child, which is no
        rank of the job even if it trains."""
        if is_forked_child(self._pid):
            return
        self._times.append(time.perf_counter_ns())
        self._observer.note_step_end()
        if not self._pid:
            self._listen()
        if step == 0 and self._launch.torch_unix_ns:
            self._launch = replace(self._launch, first_step_unix_ns=time.time_ns())
        if step == _UNSTEADY_STEPS:
            self._steps_before = self._counter.find_steps_before(step + 1)
        if self._sampler is None:
            SPANS.end_step()
        # Steps before are not like those to come: they allocate, compile and load.
        if step >= _UNSTEADY_STEPS and self._watch is not None:
            # This rank is sampled for as long as it runs, or until an attach ends that.
            plan, self._watch, self._ends_watch = self._watch, None, False
            # The begin of the watch takes up to a second on busy cores: no stall of the job's own.
            with mark("other"), warn_on_failure(read_identity().rank, "its watch"):
                from stepsplit.collectors.watch.sampler import start_sampler

                self._sampler = start_sampler(plan, plan.mesh, self._steps_before, self._launch)
        if self._sampler is not None:
            self._sampler.end_step(step)
            if self._ends_watch:
                sampler, self._sampler, self._ends_watch = self._sampler, None, False
                sampler.leave()
        if self._recording is not None:
            self._recording.end_step(step)
            if self._recording.over:
                self._close()
        if self._early is not None:
            self._early.end_step(step)
            if step == self._first:
                # All ranks share the first step of the plan: from there on, its steps are kept.
                early, self._early = self._early, None
                early.discard()
        if self._plan is not None and step + 1 >= self._compute_begin_step(self._plan):
            self._begin(step + 1)
        elif self._plan is not None and step == 0:
            self._begin_early(self._plan)

    @staticmethod
    def _compute_begin_step(plan: RecordPlan) -> int:
        """The step before which the recording begins; some steps are timed before the warmup."""
        earliest = (plan.first or 0) - plan.warmup
        return max(1, _count_early_steps(plan) + 2, earliest - STEPS_TIMED_BEFORE)

    def _begin_early(self, plan: RecordPlan) -> None:
        """Records the first steps, which are kept if the job ends before those of the plan.

        Not after a restart: they would replace what the attempt before has recorded.
        """
        steps, rank = _count_early_steps(plan), read_identity().rank
        if not steps:
            return
        with warn_on_failure(rank, "the first steps"):
            from stepsplit.collectors.record.active_recording import ActiveRecording
            from stepsplit.collectors.record.rank_files import RankFiles
            from stepsplit.collectors.record.trace_window import can_detach
            from stepsplit.collectors.record.user_spec import UserSpec

            if can_detach() and not RankFiles(Path(plan.out), rank).has_trace():
                self._early = ActiveRecording(
                    replace(plan, first=1, steps=steps, warmup=0),
                    UserSpec(),
                    provisional=True,
                    keep_earlier=True,
                    read_steps_before=self._counter.read_steps_before,
                )
                self._early.begin(1)

    def _begin(self, next_step: int) -> None:
        # An earlier recording may still time the steps after it.
        self._close()
        plan, self._plan = self._plan, None
        if plan is not None:
            with warn_on_failure(read_identity().rank, "the recording"):
                # Import only now: at install, torch itself was only partly imported.
                from stepsplit.collectors.record.active_recording import ActiveRecording
                from stepsplit.collectors.record.user_spec import state_mesh

                self._recording = ActiveRecording(
                    plan,
                    state_mesh(plan.mesh),
                    keep_earlier=True,
                    read_steps_before=self._counter.read_steps_before,
                )
                # The times of the last steps, without the first ones of the job.
                times_ns = self._list_recent_times()
                unsteady = max(0, _UNSTEADY_STEPS - (next_step - len(times_ns)))
                self._recording.begin(next_step, times_ns[unsteady:])

    def _close(self) -> None:
        recording, self._recording = self._recording, None
        if recording is not None:
            # close() waits for other ranks, which must not block the training.
            threading.Thread(target=recording.close, name="stepsplit-close").start()

    def _close_at_exit(self) -> None:
        if is_forked_child(self._pid):
            return
        recording, self._recording = self._recording, None
        early, self._early = self._early, None
        # The job has ended before the steps of its plan: the first steps are all that there is.
        if early is not None and early.has_steps:
            if recording is not None:
                recording.discard()
            early.close()
        else:
            # A profiler that still runs when the interpreter ends crashes it.
            if early is not None:
                early.discard()
            if recording is not None:
                recording.close()
        sampler, self._sampler = self._sampler, None
        if sampler is not None:
            sampler.close()
        self._is_over = True
        with warn_on_failure(read_identity().rank, "its socket"):
            self._watchdog.stop()
            left_states.leave_state(self._observer.describe_end(self._counter.steps))
            for path in sockets.find_files(self._pid):
                path.unlink(missing_ok=True)
        if self._log is not None:
            truncate_log(self._log)

    def _listen(self) -> None:
        self._pid = os.getpid()
        # A child process of this rank is not a rank of the job, even if it trains.
        started = os.environ.pop(PLAN_VARIABLE, None) is not None
        os.environ.pop(WATCH_VARIABLE, None)
        self._log = build_log_path(os.environ, self._pid) if started else None
        atexit.register(self._close_at_exit)
        with warn_on_failure(read_identity().rank, "its socket, so attach cannot reach it"):
            left_states.remove_old_states()
            left_states.leave_state(self._observer.describe_loss())
            path = sockets.build_socket_path(self._pid)
            server = sockets.listen(path)
            threading.Thread(
                target=self._serve, args=(server, path), name="stepsplit-agent", daemon=True
            ).start()
            forward_plans()
            self._watchdog.start()
            if self._log is not None:
                limit_log_size(self._log)

    def _serve(self, server: socket.socket, path: Path) -> None:
        with warn_on_failure(read_identity().rank, "its socket, so attach cannot reach it"):
            while True:
                # At each turn, since an answer sets timeouts too and the server may be a new one.
                server.settimeout(_EXISTS_S)
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    # The folder ends with the user's last login, and /tmp is cleaned up by age.
                    if not self._is_over and not path.exists():
                        path = sockets.build_socket_path(self._pid)
                        server.close()
                        server = sockets.listen(path)
                        left_states.leave_state(self._observer.describe_loss())
                    continue
                with connection, warn_on_failure(read_identity().rank, "a request of an attach"):
                    if not sockets.is_of_this_user(connection):
                        continue
                    # Others who only try whether this socket is in use send nothing.
                    if line := messages.read_line(connection):
                        connection.settimeout(messages.TIMEOUT_S)
                        connection.sendall(messages.format_answer(self._answer(line)))

    def _answer(self, line: bytes) -> messages.Status | messages.AgentAnswer | messages.LookAnswer:
        question = messages.parse_request(line)
        plan = question.plan
        done = self._counter.steps
        if question.look:
            return self._look(question.flight)
        if question.watch is not None:
            if self._sampler is not None or self._watch is not None:
                return messages.AgentAnswer(False, done, "it is already watched")
            # Of the time before nothing is known, so that its ledger begins here.
            self._watch, self._launch = question.watch, UNKNOWN_LAUNCH
            watch_spans()
            return messages.AgentAnswer(True, done)
        if question.ends_watch:
            # The sampler is left at the end of a step, by the thread that steps.
            self._watch, self._ends_watch = None, self._sampler is not None
            return messages.AgentAnswer(True, done)
        if plan is None:
            return self._build_status()
        if self._is_busy():
            return messages.AgentAnswer(False, done, "it is already being recorded")
        if done + 1 > (plan.first or 0) - plan.warmup:
            return messages.AgentAnswer(
                False, done, f"step {plan.first} is too soon: {done} steps have ended"
            )
        if not question.relayed and (refusal := claim_recording(plan, done)):
            return messages.AgentAnswer(False, done, refusal)
        self._plan = plan
        if not question.relayed:
            publish_plan(plan)
        return messages.AgentAnswer(True, done)

    def _is_busy(self) -> bool:
        recording = self._recording
        return self._plan is not None or (recording is not None and recording.is_recording)

    def _look(self, flight: bool) -> messages.LookAnswer:
        state = self._observer.describe(self._counter.steps, self._list_recent_times())
        return messages.LookAnswer(state, read_flight_json() if flight else "")

    def _describe_for_watchdog(self) -> stacks.WatchLine:
        return stacks.WatchLine(
            main_thread=threading.main_thread().ident or 0,
            at_unix_ns=time.time_ns(),
            steps=self._counter.steps,
            since_step_ns=self._observer.measure_since_step_ns(),
        )

    def _list_recent_times(self) -> list[int]:
        return [later - earlier for earlier, later in pairwise(list(self._times))]

    def _build_status(self) -> messages.Status:
        own_identity, gaps = read_identity(), self._list_recent_times()
        return messages.Status(
            pid=os.getpid(),
            rank=own_identity.rank,
            world_size=own_identity.world_size,
            local_world_size=own_identity.local_world_size,
            host=socket.gethostname(),
            job=read_job_name(),
            steps=self._counter.steps,
            step_ns=min(gaps, default=0),
            busy=self._is_busy(),
            since_step_ns=self._observer.measure_since_step_ns(),
            longest_step_ns=max(gaps, default=0),
            steps_before=self._steps_before or 0,
        )


_EXISTS_S = 15.0
"""How often an agent without requests looks whether its socket is still there."""

EARLY_STEPS = 3
"""Steps recorded at the begin of a job, which may be shorter than its plan expects."""

_MIN_TIMED_BEFORE = 4
"""Steps that are still timed without the profiler between those steps and the plan's."""


def _count_early_steps(plan: RecordPlan) -> int:
    """Steps 1, 2, ... to record early; none if the plan's own steps follow at once."""
    earliest = (plan.first or 0) - plan.warmup
    room = earliest - 2 - _MIN_TIMED_BEFORE
    return min(plan.steps, EARLY_STEPS, max(room, 1)) if earliest > 2 else 0


_UNSTEADY_STEPS = 3
"""The first steps of a job compile and allocate."""


def _configure_kineto() -> None:
    """Sets Kineto's variables while torch is imported: no thread reads the environment yet."""
    cuda = getattr(sys.modules.get("torch.version"), "cuda", None)
    if cuda:
        os.environ.update(build_kineto_environment(os.environ, cuda))


# The moment at which a process becomes a rank.

_C10D = "torch.distributed.distributed_c10d"


def _wrap_initialization(then: Callable[[], None]) -> None:
    """Wraps init_process_group, from which every launcher's ranks begin."""
    module = sys.modules[_C10D]
    original = getattr(module, "init_process_group", None)
    if original is None:
        return

    @functools.wraps(original)
    def init_process_group(*args: object, **kwargs: object) -> object:
        with mark("process_group"):
            result = original(*args, **kwargs)
        # On busy cores it takes up to 0.2 s, as the agent begins to listen: no start-up of the job.
        with mark("other"):
            then()
        return result

    for place in (module, sys.modules.get("torch.distributed")):
        if getattr(place, "init_process_group", None) is original:
            place.init_process_group = init_process_group  # type: ignore[union-attr]
