"""The agent in every process under `stepsplit record`: counts steps and answers requests."""

from __future__ import annotations

import atexit
import functools
import os
import socket
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from itertools import count, pairwise
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from stepsplit.collectors.attach.imports import when_imported
from stepsplit.collectors.attach.protocol import (
    MARGIN_STEPS,
    POLL_S,
    AgentAnswer,
    Status,
    ask_record,
    ask_status,
    build_socket_path,
    format_answer,
    list_agents,
    parse_request,
    read_identity,
    read_job_name,
    read_line,
)
from stepsplit.collectors.guard import warn_on_failure
from stepsplit.collectors.nccl import build_log_path, limit_log_size, truncate_log
from stepsplit.collectors.optimizers import Listener, add_listener, call_listener
from stepsplit.collectors.record import PLAN_VARIABLE, RecordPlan, parse_plan

if TYPE_CHECKING:
    from stepsplit.collectors.profiler import ActiveRecording


# The agent runs in every process of a recorded job, so it does as little as possible: it waits
# until torch's optimizers are imported and counts their steps. Only a process that steps is a
# rank; there the agent records by its plan, or listens for an attach.


class Agent:
    """The agent of this process; it is on standby if plan.first is None."""

    def __init__(self, plan: RecordPlan) -> None:
        self._plan: RecordPlan | None = plan if plan.first is not None else None
        self._counter = StepCounter(self._handle_step_end)
        self._times: deque[int] = deque(maxlen=16)
        self._recording: ActiveRecording | None = None
        self._pid = 0
        self._log: Path | None = None

    def install(self) -> None:
        """Starts to count steps once torch's optimizers are imported."""
        when_imported("torch.optim.optimizer", self._counter.install)

    def _handle_step_end(self, step: int) -> None:
        """Runs on the training thread at the end of each step."""
        self._times.append(time.perf_counter_ns())
        if not self._pid:
            self._listen()
        if self._recording is not None:
            self._recording.end_step(step)
            if self._recording.over:
                self._close()
        elif self._plan is not None and step + 1 >= self._compute_begin_step(self._plan):
            self._begin(step + 1)

    @staticmethod
    def _compute_begin_step(plan: RecordPlan) -> int:
        """The step before which the recording begins; some steps are timed before the warmup."""
        return max(1, (plan.first or 0) - plan.warmup - MARGIN_STEPS)

    def _begin(self, next_step: int) -> None:
        plan, self._plan = self._plan, None
        if plan is not None:
            with warn_on_failure(read_identity().rank, "the recording"):
                # Import only now: at install, torch itself was only partly imported.
                from stepsplit.collectors.profiler import ActiveRecording, UserSpec

                self._recording = ActiveRecording(plan, UserSpec())
                self._recording.begin(next_step)

    def _close(self) -> None:
        recording, self._recording = self._recording, None
        if recording is not None:
            # close() waits for other ranks, which must not block the training.
            threading.Thread(target=recording.close, name="stepsplit-close").start()

    def _close_at_exit(self) -> None:
        if os.getpid() != self._pid:
            return
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.close()
        with warn_on_failure(read_identity().rank, "its socket"):
            build_socket_path(self._pid).unlink(missing_ok=True)
        if self._log is not None:
            truncate_log(self._log)

    def _listen(self) -> None:
        self._pid = os.getpid()
        # A child process of this rank is not a rank of the job, even if it trains.
        started = os.environ.pop(PLAN_VARIABLE, None) is not None
        self._log = build_log_path(os.environ, self._pid) if started else None
        atexit.register(self._close_at_exit)
        with warn_on_failure(read_identity().rank, "its socket, so attach cannot reach it"):
            path = build_socket_path(self._pid)
            path.unlink(missing_ok=True)
            server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            server.bind(str(path))
            server.listen(4)
            threading.Thread(
                target=self._serve, args=(server,), name="stepsplit-agent", daemon=True
            ).start()
            forward_plans()
            if self._log is not None:
                limit_log_size(self._log)

    def _serve(self, server: socket.socket) -> None:
        while True:
            connection, _ = server.accept()
            with connection, warn_on_failure(read_identity().rank, "a request of an attach"):
                connection.settimeout(2.0)
                connection.sendall(format_answer(self._answer(read_line(connection))))

    def _answer(self, line: bytes) -> Status | AgentAnswer:
        question = parse_request(line)
        plan = question.plan
        if plan is None:
            return self._build_status()
        done = self._counter.steps
        if self._recording is not None or self._plan is not None:
            return AgentAnswer(False, done, "it is already being recorded")
        if done + 1 > (plan.first or 0) - plan.warmup:
            return AgentAnswer(
                False, done, f"step {plan.first} is too soon: {done} steps have ended"
            )
        self._plan = plan
        if not question.relayed:
            publish_plan(plan)
        return AgentAnswer(True, done)

    def _build_status(self) -> Status:
        own_identity, times = read_identity(), list(self._times)
        gaps = [later - earlier for earlier, later in pairwise(times)]
        return Status(
            pid=os.getpid(),
            rank=own_identity.rank,
            world_size=own_identity.world_size,
            local_world_size=own_identity.local_world_size,
            host=socket.gethostname(),
            job=read_job_name(),
            steps=self._counter.steps,
            step_ns=min(gaps, default=0),
            busy=self._recording is not None or self._plan is not None,
        )


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
        self.steps = 0
        """Number of steps that have ended."""

    def install(self) -> None:
        """Hooks into every optimizer of the process."""
        listener = Listener(self._enter_step, self._exit_step)
        add_listener(listener)
        wrap_engines(listener)

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
            self._handle_step_end(self.steps - 1)

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
            text = job_info.wait_for_value(f"attach/{number}", _FOREVER_S, POLL_S)
            if text is None:
                return
            _ask_ranks(parse_plan(text))


def _ask_ranks(plan: RecordPlan) -> None:
    """Asks the ranks of this host to record; ranks that already have the plan refuse as busy."""
    for pid in list_agents():
        status = ask_status(pid)
        if status is not None and status.job == read_job_name():
            ask_record(pid, plan, relayed=True)
