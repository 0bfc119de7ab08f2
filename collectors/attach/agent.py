"""The agent in every process under `stepsplit record`: counts steps and answers requests."""

from __future__ import annotations

import atexit
import faulthandler
import functools
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import count, pairwise
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from stepsplit.collectors.attach import protocol
from stepsplit.collectors.attach.imports import when_imported
from stepsplit.collectors.guard import is_forked_child, warn_on_failure
from stepsplit.collectors.launcher import read_identity, read_job_name
from stepsplit.collectors.nccl import build_log_path, limit_log_size, read_flight_json, truncate_log
from stepsplit.collectors.optimizers import (
    Listener,
    add_listener,
    call_listener,
    count_optimizer_steps,
)
from stepsplit.collectors.private_folder import open_private
from stepsplit.collectors.rank_record import (
    ENDED,
    RAISED,
    RUNNING,
    STEPS_TIMED_BEFORE,
    CodeFrame,
    Look,
    RankState,
)
from stepsplit.collectors.record import (
    PLAN_VARIABLE,
    RecordPlan,
    build_kineto_environment,
    parse_plan,
)
from stepsplit.collectors.run_spec import GroupInfo
from stepsplit.collectors.watch_plan import WATCH_VARIABLE, WatchPlan, read_watch_plan

if TYPE_CHECKING:
    from stepsplit.collectors.profiler import ActiveRecording
    from stepsplit.collectors.watch import Sampler


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
        self._steps_before = 0
        self._log: Path | None = None
        self._observer = SelfObserver()
        self._watchdog = StackWatchdog(self._describe_for_watchdog)

    def install(self) -> None:
        """Starts to count steps once torch's optimizers are imported."""
        self._watchdog.install()
        when_imported("torch.optim.optimizer", self._counter.install)
        when_imported("torch.optim.optimizer", _configure_kineto)
        when_joined(self._handle_join)

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
        if step == _UNSTEADY_STEPS:
            self._steps_before = self._counter.read_steps_before(step + 1)
        if step >= _UNSTEADY_STEPS and self._watch is not None:
            self._begin_watch(self._watch)
        if self._sampler is not None:
            self._sampler.end_step(step)
            self._end_watch_if_requested(self._sampler)
        if self._recording is not None:
            self._recording.end_step(step)
            if self._recording.over:
                self._close()
        if self._early is not None:
            self._end_early_step(self._early, step)
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
            from stepsplit.collectors.profiler import ActiveRecording, UserSpec
            from stepsplit.collectors.rank_files import RankFiles
            from stepsplit.collectors.trace_window import can_detach

            if can_detach() and not RankFiles(Path(plan.out), rank).has_trace():
                self._early = ActiveRecording(
                    replace(plan, first=1, steps=steps, warmup=0),
                    UserSpec(),
                    provisional=True,
                    keep_earlier=True,
                    read_steps_before=self._counter.read_steps_before,
                )
                self._early.begin(1)

    def _end_early_step(self, early: ActiveRecording, step: int) -> None:
        """Drops the early recording with the first step of the plan, which all ranks share."""
        early.end_step(step)
        if step == self._first:
            self._early = None
            early.discard()

    def _begin(self, next_step: int) -> None:
        # An earlier recording may still time the steps after it.
        self._close()
        plan, self._plan = self._plan, None
        if plan is not None:
            with warn_on_failure(read_identity().rank, "the recording"):
                # Import only now: at install, torch itself was only partly imported.
                from stepsplit.collectors.profiler import ActiveRecording, state_mesh

                self._recording = ActiveRecording(
                    plan,
                    state_mesh(plan.mesh),
                    keep_earlier=True,
                    read_steps_before=self._counter.read_steps_before,
                )
                self._recording.begin(next_step, self._list_step_times(next_step))

    def _begin_watch(self, plan: WatchPlan) -> None:
        """Begins to sample this rank for as long as it runs, or until an attach ends it."""
        self._watch, self._ends_watch = None, False
        with warn_on_failure(read_identity().rank, "its watch"):
            from stepsplit.collectors.profiler import start_sampler

            self._sampler = start_sampler(plan, plan.mesh, self._steps_before)

    def _end_watch_if_requested(self, sampler: Sampler) -> None:
        if self._ends_watch:
            self._sampler, self._ends_watch = None, False
            sampler.leave()

    def _answer_watch(self, plan: WatchPlan | None) -> protocol.AgentAnswer:
        done, is_watched = self._counter.steps, self._sampler is not None or self._watch is not None
        if plan is None:
            self._watch, self._ends_watch = None, self._sampler is not None
            return protocol.AgentAnswer(True, done)
        if is_watched:
            return protocol.AgentAnswer(False, done, "it is already watched")
        self._watch = plan
        return protocol.AgentAnswer(True, done)

    def _list_step_times(self, next_step: int) -> list[int]:
        """The times of the last steps, without the first ones of the job."""
        times_ns = [later - earlier for earlier, later in pairwise(self._times)]
        return times_ns[max(0, _UNSTEADY_STEPS - (next_step - len(times_ns))) :]

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
            protocol.leave_state(self._observer.describe_end(self._counter.steps))
            for path in protocol.find_files(self._pid):
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
            protocol.remove_old_states()
            protocol.leave_state(self._observer.describe_loss())
            path = protocol.build_socket_path(self._pid)
            server = protocol.listen(path)
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
                server.settimeout(_EXISTS_S)
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    # The folder ends with the user's last login, and /tmp is cleaned up by age.
                    if not self._is_over and not path.exists():
                        path = protocol.build_socket_path(self._pid)
                        server.close()
                        server = protocol.listen(path)
                        protocol.leave_state(self._observer.describe_loss())
                    continue
                with connection, warn_on_failure(read_identity().rank, "a request of an attach"):
                    self._serve_request(connection)

    def _serve_request(self, connection: socket.socket) -> None:
        if not protocol.is_of_this_user(connection):
            return
        # Others who only try whether this socket is in use send nothing.
        if line := protocol.read_line(connection):
            connection.settimeout(protocol.TIMEOUT_S)
            connection.sendall(protocol.format_answer(self._answer(line)))

    def _answer(self, line: bytes) -> protocol.Status | protocol.AgentAnswer | protocol.LookAnswer:
        question = protocol.parse_request(line)
        plan = question.plan
        if question.look:
            return self._look(question.flight)
        if question.watch is not None or question.ends_watch:
            return self._answer_watch(question.watch)
        if plan is None:
            return self._build_status()
        done = self._counter.steps
        if self._is_busy():
            return protocol.AgentAnswer(False, done, "it is already being recorded")
        if done + 1 > (plan.first or 0) - plan.warmup:
            return protocol.AgentAnswer(
                False, done, f"step {plan.first} is too soon: {done} steps have ended"
            )
        if not question.relayed and (refusal := claim_recording(plan, done)):
            return protocol.AgentAnswer(False, done, refusal)
        self._plan = plan
        if not question.relayed:
            publish_plan(plan)
        return protocol.AgentAnswer(True, done)

    def _is_busy(self) -> bool:
        recording = self._recording
        return self._plan is not None or (recording is not None and recording.is_recording)

    def _look(self, flight: bool) -> protocol.LookAnswer:
        state = self._observer.describe(self._counter.steps, self._list_recent_times())
        return protocol.LookAnswer(state, read_flight_json() if flight else "")

    def _describe_for_watchdog(self) -> protocol.WatchLine:
        return protocol.WatchLine(
            main_thread=threading.main_thread().ident or 0,
            at_unix_ns=time.time_ns(),
            steps=self._counter.steps,
            since_step_ns=self._observer.measure_since_step_ns(),
        )

    def _list_recent_times(self) -> list[int]:
        return [later - earlier for earlier, later in pairwise(list(self._times))]

    def _build_status(self) -> protocol.Status:
        own_identity, gaps = read_identity(), self._list_recent_times()
        return protocol.Status(
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
            steps_before=self._steps_before,
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


# Counts optimizer steps from the hooks that torch calls around every optimizer's step.

LEADER_CHANGE_STEPS = 16
"""After this many steps without the leading optimizer another one becomes the leader."""


class StepCounter:
    """Calls `ended(step)` at the end of each training step, counted from 0.

    A step ends when the leader has stepped: the first optimizer that stepped, or the outermost one
    if optimizers wrap each other.
    """

    def __init__(self, on_step_end: Callable[[int], None]) -> None:
        self._handle_step_end = on_step_end
        self._running: list[Any] = []
        self._leader: int | None = None
        self._others: Counter[int] = Counter()
        self._stepped: Any = None
        self.steps = 0
        """Number of steps that have ended."""

    def install(self) -> None:
        """Hooks into every optimizer of the process."""
        listener = Listener(self._enter_step, self._exit_step)
        add_listener(listener)
        wrap_engines(listener)

    def read_steps_before(self, steps_ended: int) -> int:
        """The steps of a resumed job before this process, by its optimizer; 0 if unknown.

        Call it within `ended`.
        """
        count = None if self._stepped is None else count_optimizer_steps(self._stepped)
        return 0 if count is None else max(0, count - steps_ended)

    def _enter_step(self, optimizer: Any) -> None:
        if self._running and not _is_stepping(self._running[0]):
            # It began and never ended, so it has raised and may be replaced.
            self._running.clear()
            self._leader = None
        self._running.append(optimizer)

    def _exit_step(self, optimizer: Any) -> None:
        running = self._running
        while running and running.pop() is not optimizer:
            pass
        if not running and self._is_leader(id(optimizer)):
            self._others.clear()
            self.steps += 1
            self._stepped = optimizer
            try:
                self._handle_step_end(self.steps - 1)
            finally:
                # Not kept, as the script may drop it.
                self._stepped = None

    def _is_leader(self, optimizer: int) -> bool:
        self._others[optimizer] += 1
        if self._leader is None or self._others[optimizer] >= LEADER_CHANGE_STEPS:
            self._leader = optimizer
        return optimizer == self._leader


def _is_stepping(optimizer: Any) -> bool:
    """Whether a method of the optimizer is on the call stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        first = frame.f_code.co_varnames[:1]
        if first and frame.f_locals.get(first[0]) is optimizer and first[0] != "optimizer":
            return True
        frame = frame.f_back
    return False


# DeepSpeed: the engine counts as the optimizer, since its inner ones step per parameter group.

_ENGINE = "deepspeed.runtime.engine"


def wrap_engines(listener: Listener) -> None:
    """Reports each step of a DeepSpeed engine to the listener, as an outer optimizer."""
    when_imported(_ENGINE, lambda: _wrap_engine(listener))


def _wrap_engine(listener: Listener) -> None:
    engine_type: Any = getattr(sys.modules[_ENGINE], "DeepSpeedEngine", None)
    original = getattr(engine_type, "_take_model_step", None)
    if original is None:
        return

    @functools.wraps(original)
    def step(engine: Any, *args: Any, **kwargs: Any) -> Any:
        call_listener(listener, listener.before, engine)
        result = original(engine, *args, **kwargs)
        call_listener(listener, listener.after, engine)
        return result

    engine_type._take_model_step = step


# Forwards a plan through the job's store to the hosts that an attach cannot reach.

_FOREVER_S = 1e9


def has_several_hosts() -> bool:
    """Whether the job has ranks on other hosts."""
    own_identity = read_identity()
    return own_identity.local_world_size < own_identity.world_size


def claim_recording(plan: RecordPlan, done: int) -> str:
    """Claims the next recording for all hosts of the job; why it is refused, or "".

    Attaches on two hosts at the same moment would otherwise each win the ranks of their host.
    """
    if not has_several_hosts():
        return ""

    from stepsplit.collectors import job_info

    own = plan.format_json()
    winner = job_info.claim_value("attach/claim", own, lambda text: _is_over(text, done))
    if winner == own:
        return ""
    other = parse_plan(winner)
    first = other.first or 0
    return f"an attach on another host records steps {first} to {first + other.steps - 1}"


def _is_over(claimed: str, done: int) -> bool:
    plan = parse_plan(claimed)
    return done >= (plan.first or 0) + plan.steps


def publish_plan(plan: RecordPlan) -> None:
    """Publishes the plan for the other hosts, from one rank of this host."""
    if has_several_hosts() and read_identity().local_rank == 0:
        with warn_on_failure(
            read_identity().rank, "the other hosts, which do not get the attach request"
        ):
            from stepsplit.collectors import job_info

            job_info.set_store_value(
                f"attach/{job_info.increment_counter('attach')}", plan.format_json()
            )


def forward_plans() -> None:
    """Waits on one rank per host for published plans, and passes them to the host's ranks."""
    if has_several_hosts() and read_identity().local_rank == 0:
        threading.Thread(
            target=_forward_published_plans, name="stepsplit-relay", daemon=True
        ).start()


def _forward_published_plans() -> None:
    with warn_on_failure(read_identity().rank, "the relay; attach to each host separately"):
        from stepsplit.collectors import job_info

        for number in count(1):
            text = job_info.wait_for_value(f"attach/{number}", _FOREVER_S, protocol.POLL_S)
            if text is None:
                return
            _ask_ranks(parse_plan(text))


def _ask_ranks(plan: RecordPlan) -> None:
    """Asks the ranks of this host to record; ranks that already have the plan refuse as busy."""
    for pid in protocol.list_agents():
        status = protocol.ask_status(pid)
        if status is not None and status.job == read_job_name():
            protocol.ask_record(pid, plan, relayed=True)


# Looks at this process from the agent's thread: Python stack, number of calls, exception.

MAX_FRAMES = 64

_MAX_ERROR = 500


class SelfObserver:
    """Describes this process; it only reads, and never waits for another thread or rank."""

    def __init__(self) -> None:
        self._joined_s = time.monotonic()
        self._last_step_s: float | None = None
        self._place = (0, 1)

    def note_join(self) -> None:
        """Notes that this process is a rank from now on."""
        self._joined_s = time.monotonic()

    def note_step_end(self) -> None:
        """Notes the time at which a step has ended."""
        self._last_step_s = time.monotonic()

    def measure_since_step_ns(self) -> int:
        """The time since the last step ended, or since this process joined the job."""
        since = self._joined_s if self._last_step_s is None else self._last_step_s
        return int((time.monotonic() - since) * 1e9)

    def describe(self, steps: int, step_times_ns: Sequence[int]) -> RankState:
        """The state of this process, with one look."""
        self._place = _read_place()
        error, error_stack = _read_exception()
        look = Look(
            at_unix_ns=time.time_ns(),
            steps=steps,
            since_step_ns=self.measure_since_step_ns(),
            calls=_count_calls(),
            stack=read_main_stack(),
            busy_ns=_read_main_busy_ns(),
            io_bytes=_read_io_bytes(),
        )
        return replace(
            self._build_state(RAISED if error else RUNNING),
            step_ns=max(step_times_ns, default=0),
            looks=(look,),
            groups=_list_groups(),
            error=error,
            error_stack=error_stack,
        )

    def describe_loss(self) -> RankState:
        """What is to be read of this process if it ends without a chance to say so."""
        self._place = _read_place()
        return self._build_state(ENDED)

    def describe_end(self, steps: int) -> RankState:
        """The state of this process at its end, when its process groups may be gone."""
        error, error_stack = _read_exception()
        return replace(
            self._build_state(ENDED),
            looks=(Look(time.time_ns(), steps, self.measure_since_step_ns(), 0, ()),),
            error=error,
            error_stack=error_stack,
        )

    def _build_state(self, condition: str) -> RankState:
        """The state of this process without looks, at the place that was read last."""
        rank, world_size = self._place
        return RankState(
            rank=rank,
            world_size=world_size,
            host=socket.gethostname(),
            pid=os.getpid(),
            job=read_job_name(),
            condition=condition,
        )


# Stacks that can be read while a thread holds Python's lock.

WATCHDOG_S, _ARM_S = 8.0, 2.0
"""The lock held for longer than the first is taken for a hang; how often that is postponed."""


class StackWatchdog:
    """Has faulthandler write the stacks to a file if this class cannot run for a while.

    faulthandler has one such watchdog per process: once the script uses it, ours ends. A process
    that was frozen as a whole (a debugger, SIGSTOP) may write its stacks too, when it goes on. It
    rests while the process forks: at its end a child would wait for a thread that it does not have.
    """

    def __init__(self, describe: Callable[[], protocol.WatchLine]) -> None:
        self._describe = describe
        self._ended = threading.Event()
        self._arm = faulthandler.dump_traceback_later
        self._cancel = faulthandler.cancel_dump_traceback_later
        self._thread: threading.Thread | None = None
        self._file: Any = None
        self._arming = threading.Lock()

    def install(self) -> None:
        """Notices from now on if the script uses faulthandler's watchdog itself."""
        for name in ("dump_traceback_later", "cancel_dump_traceback_later"):
            setattr(faulthandler, name, self._wrap(getattr(faulthandler, name)))
        os.register_at_fork(
            before=self._rest, after_in_parent=self._go_on, after_in_child=self._end_in_child
        )

    def start(self) -> None:
        """Watches from now on, from a thread of its own."""
        if not self._ended.is_set():
            name = "stepsplit-watchdog"
            self._thread = threading.Thread(target=self._watch, name=name, daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Ends the watch and removes its file."""
        is_ours = self._file is not None and not self._ended.is_set()
        self._ended.set()
        if self._thread is not None:
            self._thread.join(1.0)
        if is_ours:
            self._cancel()
        with suppress(OSError):
            protocol.build_stack_path(os.getpid()).unlink(missing_ok=True)

    def _rest(self) -> None:
        self._arming.acquire()
        if self._file is not None and not self._ended.is_set():
            self._cancel()

    def _go_on(self) -> None:
        self._arm_unless_ended()
        self._arming.release()

    def _end_in_child(self) -> None:
        # The locks of the parent's threads stay locked. A child of a launcher may be a rank.
        has_ended = self._thread is not None or self._ended.is_set()
        self._ended, self._arming = threading.Event(), threading.Lock()
        if has_ended:
            self._ended.set()
        self._thread = None

    def _arm_unless_ended(self) -> None:
        if self._file is not None and not self._ended.is_set():
            self._arm(WATCHDOG_S, file=self._file)

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def used_by_script(*args: Any, **kwargs: Any) -> Any:
            self._ended.set()
            return original(*args, **kwargs)

        return used_by_script

    def _watch(self) -> None:
        what = "its stacks while Python's lock is held"
        path = protocol.build_stack_path(os.getpid())
        rank = read_identity().rank
        with warn_on_failure(rank, what), open(path, "w+", opener=open_private) as self._file:
            while not self._ended.is_set():
                self._file.seek(0)
                self._file.truncate()
                self._file.write(json.dumps(asdict(self._describe())) + "\n")
                self._file.flush()
                with self._arming:
                    self._arm_unless_ended()
                self._ended.wait(_ARM_S)


def read_main_stack() -> tuple[CodeFrame, ...]:
    """The stack of the main thread, innermost frame first."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    frames: list[CodeFrame] = []
    while frame is not None and len(frames) < MAX_FRAMES:
        code = frame.f_code
        frames.append(CodeFrame(code.co_name, code.co_filename, frame.f_lineno or 0))
        frame = frame.f_back
    return tuple(frames)


def _read_main_busy_ns() -> int:
    """Time in which the main thread has run or, on a crowded machine, has waited for a CPU."""
    with suppress(OSError, ValueError):
        # The main thread has the number of the process.
        fields = Path(f"/proc/self/task/{os.getpid()}/schedstat").read_text().split()
        return int(fields[0]) + int(fields[1])
    with suppress(OSError, AttributeError):
        clock = time.pthread_getcpuclockid(threading.main_thread().ident or 0)
        return time.clock_gettime_ns(clock)
    return 0


def _read_io_bytes() -> int:
    """What this process has read and written; 0 if the system does not count it."""
    with suppress(OSError, ValueError):
        lines = Path("/proc/self/io").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))
    return 0


def _read_exception() -> tuple[str, tuple[CodeFrame, ...]]:
    """The exception that ended the main thread; "" if none has."""
    error: BaseException | None = getattr(sys, "last_value", None)
    if error is None:
        return "", ()
    lines = traceback.format_exception_only(type(error), error)
    text = lines[-1].strip()[:_MAX_ERROR] if lines else type(error).__name__
    return text, _list_frames(error.__traceback__)


def _list_frames(trace: TracebackType | None) -> tuple[CodeFrame, ...]:
    frames = traceback.extract_tb(trace)[-MAX_FRAMES:]
    return tuple(CodeFrame(one.name, one.filename, one.lineno or 0) for one in reversed(frames))


def _has_process_group() -> bool:
    """Whether torch.distributed is imported and initialized; imports nothing."""
    module = sys.modules.get("torch.distributed.distributed_c10d")
    return module is not None and bool(module.is_initialized())


def _read_place() -> tuple[int, int]:
    place = read_identity()
    if not _has_process_group():
        return place.rank, place.world_size
    from stepsplit.collectors import job_info

    rank, world_size, _ = job_info.read_job()
    return rank, world_size


def _list_groups() -> tuple[GroupInfo, ...]:
    if not _has_process_group():
        return ()
    from stepsplit.collectors import job_info

    return job_info.list_groups()


def _count_calls() -> int:
    """The collectives that this rank has called in all groups, by their sequence numbers."""
    if not _has_process_group():
        return 0
    from stepsplit.collectors import job_info

    return job_info.count_calls()


# The moment at which a process becomes a rank.

_C10D = "torch.distributed.distributed_c10d"


def when_joined(then: Callable[[], None]) -> None:
    """Calls `then` each time this process has initialized its process group."""
    when_imported(_C10D, lambda: _wrap_initialization(then))


def _wrap_initialization(then: Callable[[], None]) -> None:
    """Wraps init_process_group, from which every launcher's ranks begin."""
    module = sys.modules[_C10D]
    original = getattr(module, "init_process_group", None)
    if original is None:
        return

    @functools.wraps(original)
    def init_process_group(*args: object, **kwargs: object) -> object:
        result = original(*args, **kwargs)
        then()
        return result

    for place in (module, sys.modules.get("torch.distributed")):
        if getattr(place, "init_process_group", None) is original:
            place.init_process_group = init_process_group  # type: ignore[union-attr]
