"""A prediction in a process of its own, within limits: for servers, whose requests choose the job.

The process is a fresh interpreter that imports only the model: a fork of a server with threads can
deadlock, and the server's own modules take a second to import.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from threading import BoundedSemaphore, Thread, Timer
from typing import TYPE_CHECKING, Any

from stepsplit.analyzer.errors import StepsplitError, UsageError
from stepsplit.analyzer.model.config_decode import TomlTable
from stepsplit.analyzer.model.config_file import decode_job
from stepsplit.analyzer.model.predict import predict, read_hardware_rates
from stepsplit.analyzer.model.prediction import Prediction, prediction_from_json, prediction_to_json
from stepsplit.collectors.safe_io.helper_process import (
    build_helper_command,
    build_helper_environment,
)

if TYPE_CHECKING:
    from stepsplit.analyzer.model.plan_space import Plan

MAX_SECONDS = 5
"""Of processor time. A prediction takes some milliseconds after 0.2 s of imports, the longest
pipeline two seconds."""

MAX_WALL_SECONDS = 4 * MAX_SECONDS
"""The process shares its processors, so that the clock alone would refuse jobs on a loaded host."""

MAX_MEMORY_BYTES = 512 << 20
"""A prediction takes 20 MiB, the longest pipeline some 200."""

MAX_AT_ONCE = 2
"""Predictions of one server process at the same time."""

MAX_PLAN_SECONDS, MAX_PLAN_WALL_SECONDS = 60, 120
"""Of the process that also plans: llama-3.1-8b takes 7 s on 8 GPUs, 40 s on 64 and 512. One of each
server process at the same time, apart from the predictions, so that pages keep threads."""

_COMMAND = build_helper_command("stepsplit.analyzer.model.prediction_process")

_SLOTS, _PLAN_SLOTS = BoundedSemaphore(MAX_AT_ONCE), BoundedSemaphore(1)


class NoPrediction(StepsplitError):
    """A prediction exceeds a limit; is_busy: too many others run, and it may work in a second."""

    def __init__(self, message: str, is_busy: bool = False) -> None:
        super().__init__(message)
        self.is_busy = is_busy


@dataclass(frozen=True, slots=True)
class Answer:
    """The prediction of a job and the plan for its GPUs; plan_error if no layout is possible, or if
    the search exceeds a limit."""

    prediction: Prediction
    plan: Plan | None
    plan_error: str


def predict_in_process(
    tables: Mapping[str, Mapping[str, object]], where: str, with_plan: bool
) -> Answer:
    """Predict the job of these tables, and plan its layout for as many GPUs if with_plan is set.

    where is the name of the job in errors. Raises NoPrediction for what takes too much time or
    memory, or if as many run as may, and StepsplitError for an invalid job.
    """
    slots, kind = (_PLAN_SLOTS, "plans") if with_plan else (_SLOTS, "predictions")
    if not slots.acquire(blocking=False):
        raise NoPrediction(f"the server is computing other {kind}; try again", is_busy=True)
    try:
        status, output = _run({"where": where, "tables": tables, "with_plan": with_plan})
    finally:
        slots.release()
    is_stopped = status in (-signal.SIGALRM, -signal.SIGXCPU, -signal.SIGKILL)
    # What is whole ends with a newline: the process may have been stopped while it wrote.
    first, *others = output.split(b"\n")[:-1] or [b""]
    if not first and is_stopped:
        limit = f"{MAX_SECONDS} s of processor time or {MAX_WALL_SECONDS} s by the clock"
        raise NoPrediction(f"it takes more than {limit}; run stepsplit model in a terminal")
    if status != 0 and not is_stopped:
        raise RuntimeError(f"the process of a prediction ended with status {status}")
    answer = json.loads(first)
    if "limit" in answer:
        raise NoPrediction(answer["limit"])
    if "error" in answer:
        raise UsageError(answer["error"])
    prediction = prediction_from_json(answer["prediction"])
    if not with_plan:
        return Answer(prediction, None, "")
    if not others:
        limit = f"{MAX_PLAN_SECONDS} s of processor time or {MAX_PLAN_WALL_SECONDS} s by the clock"
        error = f"the search takes more than {limit}; run stepsplit plan in a terminal"
        return Answer(prediction, None, error)
    planned = json.loads(others[0])
    if "plan" not in planned:
        return Answer(prediction, None, planned.get("limit") or planned["error"])
    from stepsplit.analyzer.model.plan import from_json

    return Answer(prediction, from_json(planned["plan"]), "")


def _run(request: Mapping[str, object]) -> tuple[int, bytes]:
    """The exit status and the output of the process."""
    with subprocess.Popen(
        _COMMAND,
        env=build_helper_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        # It ends itself in time, unless it hangs before it can set its limits.
        wall_s = MAX_PLAN_WALL_SECONDS if request["with_plan"] else MAX_WALL_SECONDS
        timer = Timer(wall_s + 1, process.kill)
        timer.start()
        try:
            with suppress(BrokenPipeError):
                process.stdin.write(json.dumps(request).encode() + b"\n")
                process.stdin.flush()
            output = process.stdout.read()
            return process.wait(), output
        finally:
            timer.cancel()
            process.kill()


# The process.


def main() -> None:
    """Answer the request of the first line of standard input: a line for the prediction, and one
    for the plan."""
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    _limit_time(MAX_SECONDS, MAX_WALL_SECONDS)
    request = json.loads(sys.stdin.buffer.readline())
    # The server holds the other end until it has the answer: no process outlives it.
    Thread(target=lambda: os._exit(os.read(0, 1) == b""), daemon=True).start()
    if _write_answer(_predict, request) and request["with_plan"]:
        _limit_time(MAX_PLAN_SECONDS, MAX_PLAN_WALL_SECONDS)
        _write_answer(_plan, request)
    os._exit(0)


def _limit_time(cpu_s: int, wall_s: int) -> None:
    signal.alarm(wall_s)
    # The soft limit, which ends the process too: a hard one could not be raised for the plan.
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _write_answer(
    compute: Callable[[Mapping[str, Any]], dict[str, object]], request: Mapping[str, Any]
) -> bool:
    """Writes what is computed, or why not. Returns whether it was."""
    try:
        answer, is_done = compute(request), True
    except MemoryError:
        memory = f"it takes more than {MAX_MEMORY_BYTES >> 20} MiB of memory"
        answer, is_done = {"limit": memory}, False
    except StepsplitError as error:
        answer, is_done = {"error": str(error)}, False
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    return is_done


def _predict(request: Mapping[str, Any]) -> dict[str, object]:
    table = TomlTable(request["where"], "", request["tables"])
    job = decode_job(table)
    rates = read_hardware_rates(table, job.hardware)
    return {"prediction": prediction_to_json(predict(job, rates))}


def _plan(request: Mapping[str, Any]) -> dict[str, object]:
    # Imported here: most requests are for the prediction alone.
    from stepsplit.analyzer.model.plan import plan, to_json

    table = TomlTable(request["where"], "", request["tables"])
    job = decode_job(table)
    rates = read_hardware_rates(table, job.hardware)
    return {"plan": to_json(plan(job, job.parallel.world_size, rates=rates))}


if __name__ == "__main__":
    main()
