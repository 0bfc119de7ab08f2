"""The agent in every process of a job under `stepsplit record`: counts steps, takes requests."""

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
    agents,
    answer_line,
    ask_record,
    ask_status,
    asked,
    identity,
    job_name,
    read_line,
    socket_path,
)
from stepsplit.collectors.guard import guarded
from stepsplit.collectors.nccl import cut, keep_small, log_path
from stepsplit.collectors.optimizers import Listener, call, listen
from stepsplit.collectors.record import PLAN_VARIABLE, RecordPlan, parse_plan

if TYPE_CHECKING:
    from stepsplit.collectors.profiler import ActiveRecording


# What runs in every process of a job that was started to be recorded: next to nothing.
#
# It waits for torch's optimizers to be imported, and counts their steps. Only a process that
# steps is a rank; there the agent records as its plan says, or listens for an attach.


class Agent:
    """The agent of this process; plan.first None: it stands by."""

    def __init__(self, plan: RecordPlan) -> None:
        self._plan: RecordPlan | None = plan if plan.first is not None else None
        self._counter = StepCounter(self._ended)
        self._times: deque[int] = deque(maxlen=16)
        self._recording: ActiveRecording | None = None
        self._pid = 0
        self._log: Path | None = None

    def install(self) -> None:
        """Sees to it that steps are counted as soon as there can be any."""
        when_imported("torch.optim.optimizer", self._counter.install)

    def _ended(self, step: int) -> None:
        """Runs on the training's own thread, at the end of each step."""
        self._times.append(time.perf_counter_ns())
        if not self._pid:
            self._listen()
        if self._recording is not None:
            self._recording.after(step)
            if self._recording.over:
                self._close()
        elif self._plan is not None and step + 1 >= self._begins(self._plan):
            self._begin(step + 1)

    @staticmethod
    def _begins(plan: RecordPlan) -> int:
        """The step before which a recording begins: some are timed before the profiler warms up."""
        return max(1, (plan.first or 0) - plan.warmup - MARGIN_STEPS)

    def _begin(self, next_step: int) -> None:
        plan, self._plan = self._plan, None
        if plan is not None:
            with guarded(identity().rank, "the recording"):
                # Only now: the optimizers were imported by a torch that was itself half imported.
                from stepsplit.collectors.profiler import ActiveRecording, Stated

                self._recording = ActiveRecording(plan, Stated())
                self._recording.begin(next_step)

    def _close(self) -> None:
        recording, self._recording = self._recording, None
        if recording is not None:
            # Other ranks may take their time: what waits for them must not hold up the training.
            threading.Thread(target=recording.close, name="stepsplit-close").start()

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.close()
        with guarded(identity().rank, "its socket"):
            socket_path(self._pid).unlink(missing_ok=True)
        if self._log is not None:
            cut(self._log)

    def _listen(self) -> None:
        self._pid = os.getpid()
        # What this rank starts is no rank of the job, even if it trains.
        started = os.environ.pop(PLAN_VARIABLE, None) is not None
        self._log = log_path(os.environ, self._pid) if started else None
        atexit.register(self._at_exit)
        with guarded(identity().rank, "its socket: it cannot be attached to"):
            path = socket_path(self._pid)
            path.unlink(missing_ok=True)
            server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            server.bind(str(path))
            server.listen(4)
            threading.Thread(
                target=self._serve, args=(server,), name="stepsplit-agent", daemon=True
            ).start()
            relay_plans()
            if self._log is not None:
                keep_small(self._log)

    def _serve(self, server: socket.socket) -> None:
        while True:
            connection, _ = server.accept()
            with connection, guarded(identity().rank, "a word with an attach"):
                connection.settimeout(2.0)
                connection.sendall(answer_line(self._answer(read_line(connection))))

    def _answer(self, line: bytes) -> Status | AgentAnswer:
        question = asked(line)
        plan = question.plan
        if plan is None:
            return self._status()
        done = self._counter.steps
        if self._recording is not None or self._plan is not None:
            return AgentAnswer(False, done, "it is being recorded")
        if done + 1 > (plan.first or 0) - plan.warmup:
            return AgentAnswer(False, done, f"step {plan.first} is too near: {done} have ended")
        self._plan = plan
        if not question.relayed:
            hand_on(plan)
        return AgentAnswer(True, done)

    def _status(self) -> Status:
        who, times = identity(), list(self._times)
        gaps = [later - earlier for earlier, later in pairwise(times)]
        return Status(
            pid=os.getpid(),
            rank=who.rank,
            world_size=who.world_size,
            local_world_size=who.local_world_size,
            host=socket.gethostname(),
            job=job_name(),
            steps=self._counter.steps,
            step_ns=min(gaps, default=0),
            busy=self._recording is not None or self._plan is not None,
        )


# Counts optimizer steps from the hooks that torch calls around every optimizer's step.

SUCCESSION = 16
"""An optimizer that has stepped so often without the leader leads: the leader is gone."""


class StepCounter:
    """Calls `ended(step)` at the end of each training step, counted from 0.

    A step ends with the first optimizer seen, its leader; with the outermost one where optimizers
    wrap each other. What a launcher or a data loader runs never steps.
    """

    def __init__(self, ended: Callable[[int], None]) -> None:
        self._ended = ended
        self._running: list[Any] = []
        self._leader: int | None = None
        self._others: Counter[int] = Counter()
        self.steps = 0
        """Steps that have ended."""

    def install(self) -> None:
        """Hooks into every optimizer of the process."""
        listener = Listener(self._before, self._after)
        listen(listener)
        enclose_engines(listener)

    def _before(self, optimizer: Any) -> None:
        if self._running and not _steps_now(self._running[0]):
            # It began and never ended: it has raised, and may be replaced.
            self._running.clear()
            self._leader = None
        self._running.append(optimizer)

    def _after(self, optimizer: Any) -> None:
        running = self._running
        while running and running.pop() is not optimizer:
            pass
        if not running and self._leads(id(optimizer)):
            self._others.clear()
            self.steps += 1
            self._ended(self.steps - 1)

    def _leads(self, optimizer: int) -> bool:
        self._others[optimizer] += 1
        if self._leader is None or self._others[optimizer] >= SUCCESSION:
            self._leader = optimizer
        return optimizer == self._leader


def _steps_now(optimizer: Any) -> bool:
    """Whether a call of one of the optimizer's own methods, or around it, has not returned yet."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        first = frame.f_code.co_varnames[:1]
        if first and frame.f_locals.get(first[0]) is optimizer and first[0] != "optimizer":
            return True
        frame = frame.f_back
    return False


# DeepSpeed's engine as what steps: its inner optimizers step once for each group of parameters.

_ENGINE = "deepspeed.runtime.engine"


def enclose_engines(listener: Listener) -> None:
    """The listener hears of each engine's step as of an optimizer around the engine's own."""
    when_imported(_ENGINE, lambda: _enclose(listener))


def _enclose(listener: Listener) -> None:
    kind: Any = getattr(sys.modules[_ENGINE], "DeepSpeedEngine", None)
    original = getattr(kind, "_take_model_step", None)
    if original is None:
        return

    @functools.wraps(original)
    def step(engine: Any, *args: Any, **kwargs: Any) -> Any:
        call(listener, listener.before, engine)
        result = original(engine, *args, **kwargs)
        call(listener, listener.after, engine)
        return result

    kind._take_model_step = step


# Hands a plan on to the hosts that an attach cannot reach, through the store of the job.

_FOREVER_S = 1e9


def several_hosts() -> bool:
    """Whether the job has ranks on other hosts."""
    who = identity()
    return who.local_world_size < who.world_size


def hand_on(asked: RecordPlan) -> None:
    """Leaves the plan for the other hosts, from one rank of this one."""
    if several_hosts() and identity().local_rank == 0:
        with guarded(identity().rank, "the other hosts: they do not hear of the attach"):
            from stepsplit.collectors import job_info

            job_info.tell(f"attach/{job_info.next_number('attach')}", asked.text())


def relay_plans() -> None:
    """Listens, from one rank a host, for what is handed on, and asks the ranks of this host."""
    if several_hosts() and identity().local_rank == 0:
        threading.Thread(target=_relay, name="stepsplit-relay", daemon=True).start()


def _relay() -> None:
    with guarded(identity().rank, "the relay: attach to each host by itself"):
        from stepsplit.collectors import job_info

        for number in count(1):
            word = job_info.heard(f"attach/{number}", _FOREVER_S, POLL_S)
            if word is None:
                return
            _tell_ranks(parse_plan(word))


def _tell_ranks(asked: RecordPlan) -> None:
    """Those that were reached by the attach itself refuse: they are busy."""
    for pid in agents():
        status = ask_status(pid)
        if status is not None and status.job == job_name():
            ask_record(pid, asked, relayed=True)
