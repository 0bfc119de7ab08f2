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
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from threading import BoundedSemaphore, Thread, Timer
from typing import TYPE_CHECKING, Any

from stepsplit.analyzer.errors import StepsplitError, UsageError
from stepsplit.analyzer.model.config_decode import TomlTable
from stepsplit.analyzer.model.config_file import decode_job
from stepsplit.analyzer.model.predict import predict, read_hardware_rates
from stepsplit.analyzer.model.prediction import Prediction, prediction_from_json, prediction_to_json

if TYPE_CHECKING:
    from stepsplit.analyzer.model.plan_space import Plan

MAX_SECONDS = 5
"""Of processor time. A prediction takes some milliseconds after 0.2 s of imports, the longest
pipeline two seconds."""

MAX_WALL_SECONDS = 2 * MAX_SECONDS
"""The process shares its processors, so that the clock alone would refuse jobs on a loaded host."""

MAX_MEMORY_BYTES = 512 << 20
"""A prediction takes 20 MiB, the longest pipeline some 200."""

MAX_AT_ONCE = 2
"""Predictions of one server process at the same time."""

_COMMAND = (sys.executable, "-P", "-m", "stepsplit.analyzer.model.prediction_process")

_SLOTS = BoundedSemaphore(MAX_AT_ONCE)


class NoPrediction(StepsplitError):
    """A prediction exceeds a limit; is_busy: too many others run, and it may work in a second."""

    def __init__(self, message: str, is_busy: bool = False) -> None:
        super().__init__(message)
        self.is_busy = is_busy


@dataclass(frozen=True, slots=True)
class Answer:
    """The prediction of a job and the plan for its GPUs; plan_error if no layout is possible."""

    prediction: Prediction
    plan: Plan | None
    plan_error: str


def predict_in_process(
    tables: Mapping[str, Mapping[str, object]], where: str, with_plan: bool
) -> Answer:
    """Predict the job of these tables, and plan its layout for as many GPUs if with_plan is set.

    where is the name of the job in errors. Raises NoPrediction for what takes too much time or
    memory, or if MAX_AT_ONCE predictions run, and StepsplitError for an invalid job.
    """
    if not _SLOTS.acquire(blocking=False):
        raise NoPrediction("the server is computing other predictions; try again", is_busy=True)
    try:
        status, output = _run({"where": where, "tables": tables, "with_plan": with_plan})
    finally:
        _SLOTS.release()
    if status in (-signal.SIGALRM, -signal.SIGXCPU, -signal.SIGKILL):
        command = "stepsplit plan" if with_plan else "stepsplit model"
        limit = f"{MAX_SECONDS} s of processor time or {MAX_WALL_SECONDS} s by the clock"
        raise NoPrediction(f"it takes more than {limit}; run {command} in a terminal")
    if status != 0:
        raise RuntimeError(f"the process of a prediction ended with status {status}")
    answer = json.loads(output)
    if "limit" in answer:
        raise NoPrediction(answer["limit"])
    if "error" in answer:
        raise UsageError(answer["error"])
    plan = None
    if answer["plan"] is not None:
        from stepsplit.analyzer.model.plan import from_json

        plan = from_json(answer["plan"])
    return Answer(prediction_from_json(answer["prediction"]), plan, answer["plan_error"])


def _run(request: Mapping[str, object]) -> tuple[int, bytes]:
    """The exit status and the output of the process."""
    with subprocess.Popen(_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        # It ends itself in time, unless it hangs before it can set its limits.
        timer = Timer(MAX_WALL_SECONDS + 1, process.kill)
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
    """Answer the request of the first line of standard input."""
    signal.alarm(MAX_WALL_SECONDS)
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_SECONDS, MAX_SECONDS))
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    request = json.loads(sys.stdin.buffer.readline())
    # The server holds the other end until it has the answer: no process outlives it.
    Thread(target=lambda: os._exit(os.read(0, 1) == b""), daemon=True).start()
    try:
        answer = _answer(request)
    except MemoryError:
        answer = {"limit": f"it takes more than {MAX_MEMORY_BYTES >> 20} MiB of memory"}
    except StepsplitError as error:
        answer = {"error": str(error)}
    sys.stdout.write(json.dumps(answer))
    sys.stdout.flush()
    os._exit(0)


def _answer(request: Mapping[str, Any]) -> dict[str, object]:
    table = TomlTable(request["where"], "", request["tables"])
    job = decode_job(table)
    rates = read_hardware_rates(table, job.hardware)
    prediction, planned, plan_error = predict(job, rates), None, ""
    if request["with_plan"]:
        # Imported here: most requests are for the prediction alone.
        from stepsplit.analyzer.model.plan import plan, to_json

        try:
            planned = to_json(plan(job, job.parallel.world_size, rates=rates))
        except StepsplitError as error:
            plan_error = str(error)
    return {
        "prediction": prediction_to_json(prediction),
        "plan": planned,
        "plan_error": plan_error,
    }


if __name__ == "__main__":
    main()
