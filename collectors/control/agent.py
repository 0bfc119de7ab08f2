"""What runs in every process of a job that was started to be recorded: next to nothing.

It waits for torch's optimizers to be imported, and counts their steps. Only a process that steps is
a rank; there the agent records as its plan says, or listens for an attach.
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
from collections import deque
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from stepsplit.collectors.control.identity import identity, job_name
from stepsplit.collectors.control.imports import when_imported
from stepsplit.collectors.control.relay import hand_on, relay_plans
from stepsplit.collectors.control.step_counter import StepCounter
from stepsplit.collectors.control.wire import (
    Answer,
    Status,
    answer_line,
    asked,
    read_line,
    socket_path,
)
from stepsplit.collectors.guard import guarded
from stepsplit.collectors.nccl_log import cut, keep_small, log_path
from stepsplit.collectors.plan import PLAN_VARIABLE, Plan

if TYPE_CHECKING:
    from stepsplit.collectors.recording import Recording

MARGIN_STEPS = 3
"""An attach names a step at least so far ahead, so that every rank hears of it in time."""


class Agent:
    """The agent of this process; plan.first None: it stands by."""

    def __init__(self, plan: Plan) -> None:
        self._plan: Plan | None = plan if plan.first is not None else None
        self._counter = StepCounter(self._ended)
        self._times: deque[int] = deque(maxlen=16)
        self._recording: Recording | None = None
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
    def _begins(plan: Plan) -> int:
        """The step before which a recording begins: some are timed before the profiler warms up."""
        return max(1, (plan.first or 0) - plan.warmup - MARGIN_STEPS)

    def _begin(self, next_step: int) -> None:
        plan, self._plan = self._plan, None
        if plan is not None:
            with guarded(identity().rank, "the recording"):
                # Only now: the optimizers were imported by a torch that was itself half imported.
                from stepsplit.collectors.recording import Recording
                from stepsplit.collectors.run_file import Stated

                self._recording = Recording(plan, Stated())
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

    def _answer(self, line: bytes) -> Status | Answer:
        question = asked(line)
        plan = question.plan
        if plan is None:
            return self._status()
        done = self._counter.steps
        if self._recording is not None or self._plan is not None:
            return Answer(False, done, "it is being recorded")
        if done + 1 > (plan.first or 0) - plan.warmup:
            return Answer(False, done, f"step {plan.first} is too near: {done} have ended")
        self._plan = plan
        if not question.relayed:
            hand_on(plan)
        return Answer(True, done)

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
