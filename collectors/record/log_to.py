"""Logs the numbers of a recording to other tools, such as TensorBoard and W&B.

The recording is analyzed beside the training, on rank 0's host, by a process of the lowest
priority: python -m stepsplit.collectors.record.log_to FOLDER WORLD_SIZE SINK...
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepsplit.collectors.guard import warn, warn_on_failure
from stepsplit.collectors.safe_io.helper_process import (
    build_helper_command,
    build_helper_environment,
)

if TYPE_CHECKING:
    import subprocess

# What the user writes to name a tool.

STEP = "stepsplit/step"
"""The step of a point, where a tracker has no field of its own for it."""

EXAMPLES = {
    "tensorboard": "tensorboard:DIR",
    "wandb": "wandb[:[ENTITY/]PROJECT[/RUN]]",
    "mlflow": "mlflow[:URL]",
    "otlp": "otlp[:URL]",
    "json": "json:FILE",
}
"""How each kind of sink is written."""

_NEED_PLACE = ("tensorboard", "json")


@dataclass(frozen=True, slots=True)
class SinkName:
    """A tool that takes numbers: its kind, a key of EXAMPLES, and the place in it or ""."""

    kind: str
    place: str = ""

    def __str__(self) -> str:
        return f"{self.kind}:{self.place}" if self.place else self.kind


def parse_sink(text: str) -> SinkName:
    """Parses KIND or KIND:PLACE. Raises ValueError, with what there is."""
    kind, _, place = text.partition(":")
    if kind not in EXAMPLES:
        raise ValueError(f"{text!r} is not one of {', '.join(EXAMPLES.values())}")
    if not place and kind in _NEED_PLACE:
        raise ValueError(f"{text!r} has no place; write {EXAMPLES[kind]}")
    return SinkName(kind, place)


def parse_sinks(
    given: str | Sequence[str] | None, has_samples: bool = False
) -> tuple[SinkName, ...]:
    """Parses log_to of profile_run; has_samples: with `every`. Raises ValueError."""
    texts = [given] if isinstance(given, str) else list(given or ())
    if has_samples and texts:
        raise ValueError("log_to is for one recording; instead of every, use stepsplit watch")
    try:
        return tuple(parse_sink(text) for text in texts)
    except ValueError as error:
        raise ValueError(f"log_to: {error}") from None


# On rank 0 of the training.

RUN_TIMEOUT_S = 30.0
"""How long the end of the recording waits for numbers that the training's W&B run is to log."""

_STARTED: list[subprocess.Popen[bytes]] = []
"""Processes that go on by themselves; without a reference Python would warn of each."""


class RecordingLogger:
    """Logs one recording. Call step() in each step, then close().

    No method raises. Everything but "wandb" without a run is done by the other process. A run of
    W&B has one writer, which is this process; so its numbers are logged here, with the next log of
    the training.
    """

    def __init__(self, folder: Path, world_size: int, sinks: Sequence[SinkName]) -> None:
        self._folder, self._world_size = folder, world_size
        self._sinks = [sink for sink in sinks if sink != _OWN_RUN]
        self._has_own_run = _OWN_RUN in sinks
        self._process: subprocess.Popen[bytes] | None = None
        self._scalars: Path | None = None
        self._is_started = False

    def step(self, is_recorded: bool) -> None:
        """Starts the analysis once the files of this rank are written, and logs what it finds."""
        if not self._is_started:
            if is_recorded:
                self._start()
        elif self._scalars is not None:
            self._log_to_own_run()

    def close(self, is_recorded: bool, failed: bool = False) -> None:
        """Waits a limited time for numbers that are to be logged here, unless it has failed."""
        if is_recorded and not self._is_started:
            self._start()
        if self._scalars is None or self._process is None:
            return
        if not failed:
            from subprocess import TimeoutExpired

            with suppress(TimeoutExpired):
                self._process.wait(RUN_TIMEOUT_S)
        self._log_to_own_run()
        if self._scalars is not None:
            warn(f"the analysis for W&B has not ended: {self._explain_later()}")
            self._scalars = None

    def _start(self) -> None:
        self._is_started = True
        with warn_on_failure(0, "the log of its numbers"):
            sinks = [str(sink) for sink in self._sinks]
            if self._has_own_run and _find_own_run() is None:
                warn(f"no W&B run is active on rank 0: {self._explain_later()}")
            elif self._has_own_run:
                handle, path = tempfile.mkstemp(prefix="stepsplit-", suffix=".jsonl")
                os.close(handle)
                self._scalars = Path(path)
                sinks.append(f"json:{path}")
            if sinks:
                self._process = _start_analysis(self._folder, self._world_size, sinks)

    def _log_to_own_run(self) -> None:
        path, process = self._scalars, self._process
        if path is None or process is None or process.poll() is None:
            return
        self._scalars = None
        with warn_on_failure(0, "its numbers for W&B"):
            lines = path.read_text().splitlines()
            path.unlink()
            run = _find_own_run()
            if run is not None:
                for line in lines:
                    log_to_run(run, json.loads(line))

    def _explain_later(self) -> str:
        return f"log it with: stepsplit analyze {self._folder} --log-to wandb:PROJECT/RUN"


_OWN_RUN = SinkName("wandb")


def _find_own_run() -> Any:
    """The W&B run of this process; None if there is none, or W&B is not imported."""
    return getattr(sys.modules.get("wandb"), "run", None)


def log_to_run(run: Any, values: dict[str, Any]) -> None:
    """Logs a line of the sink json to a W&B run, with the next log of its owner.

    A log with commit or with a step would advance the counter of the run, and W&B drops what its
    owner then logs with a smaller step.
    """
    run.define_metric("stepsplit/*", step_metric=STEP)
    run.log({k: v for k, v in values.items() if k.startswith("stepsplit/")}, commit=False)


def _start_analysis(folder: Path, world_size: int, sinks: Sequence[str]) -> subprocess.Popen[bytes]:
    import subprocess

    environment = build_helper_environment({"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"})
    run = getattr(sys.modules.get("mlflow"), "active_run", lambda: None)()
    if run is not None:
        environment.setdefault("MLFLOW_RUN_ID", str(run.info.run_id))
    process = subprocess.Popen(
        build_helper_command(
            "stepsplit.collectors.record.log_to", str(folder), str(world_size), *sinks
        ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env=environment,
        # A signal to the job's process group must not end it.
        start_new_session=True,
    )
    _STARTED.append(process)
    return process


# The process beside the training.

LATE_RANKS_TIMEOUT_S = 60.0
"""How long it waits for the files of the other ranks, which may be on another host."""

_POLL_S = 0.5


def main(arguments: Sequence[str]) -> None:
    """Waits for the files of all ranks, then becomes `stepsplit analyze`."""
    folder, world_size, sinks = Path(arguments[0]), int(arguments[1]), arguments[2:]
    give_way()
    deadline = time.monotonic() + LATE_RANKS_TIMEOUT_S
    while not has_all_files(folder, world_size) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    options = [word for sink in sinks for word in ("--log-to", sink)]
    command = build_helper_command("stepsplit.dashboard", "analyze", str(folder), "--workers", "1")
    os.execv(command[0], [*command, *options])


def has_all_files(folder: Path, world_size: int) -> bool:
    """Whether each rank has written its record, and no trace is still to be packed."""
    records = list(folder.glob("rank*_record.json"))
    return len(records) >= world_size and not list(folder.glob("rank*_trace.json"))


def give_way() -> None:
    """Has the process run only when a core is free, on one core."""
    with suppress(OSError, AttributeError):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    with suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with suppress(OSError):
        os.nice(19)


if __name__ == "__main__":
    main(sys.argv[1:])
