"""Runs a command with the agent in all its processes: the script itself stays as it is."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from stepsplit.collectors.attach.protocol import SITE, is_rank
from stepsplit.collectors.guard import CollectError
from stepsplit.collectors.nccl import (
    inspector_environment,
    inspector_plugin,
    installed_version,
    log_environment,
)
from stepsplit.collectors.plan import PLAN_VARIABLE, Plan
from stepsplit.collectors.rank_record import fresh

NOT_FOUND = 127

_FLIGHT = {"TORCH_FR_BUFFER_SIZE": "20000"}


@dataclass(frozen=True, slots=True)
class NcclLogs:
    """What NCCL is asked for beside its startup: a line a call, its Inspector."""

    calls: bool = False
    inspector: bool = False


def record(command: Sequence[str], plan: Plan, nccl: NcclLogs = NcclLogs()) -> int:
    """Runs the command to its end, each rank of it recorded by the plan; its exit status.

    Raises CollectError where it cannot be started or the folder cannot be written.
    """
    out = Path(plan.out)
    try:
        (out / "nccl").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CollectError(f"{out}: {error.strerror}: name another --out") from None
    env = dict(os.environ) | environment(os.environ, plan, nccl)
    try:
        process = subprocess.Popen(command, env=env)
    except OSError as error:
        raise CollectError(f"{command[0]}: {error.strerror}: is it on PATH?") from None
    with _passed_on(process):
        status = process.wait()
    # Not empty where NCCL wrote; gone where another rank's `record` was quicker.
    with suppress(OSError):
        (out / "nccl").rmdir()
    return 128 - status if status < 0 else status


def environment(given: Mapping[str, str], plan: Plan, nccl: NcclLogs) -> dict[str, str]:
    """What is added to the environment of the job; what its user has set himself stays."""
    out, version = Path(plan.out), installed_version()
    wanted = _FLIGHT | log_environment(out, version, nccl.calls)
    if nccl.inspector:
        plugin = inspector_plugin(given)
        if plugin is None:
            raise CollectError("libnccl-profiler-inspector.so is not on LD_LIBRARY_PATH: add it")
        wanted |= inspector_environment(out, version, plugin)
    if "NCCL_DEBUG" in given:
        wanted = {name: value for name, value in wanted.items() if "NCCL_DEBUG" not in name}
    path = [str(SITE), *filter(None, given.get("PYTHONPATH", "").split(os.pathsep))]
    added = {name: value for name, value in wanted.items() if name not in given}
    return added | {PLAN_VARIABLE: plan.text(), "PYTHONPATH": os.pathsep.join(path)}


def default_out(given: Mapping[str, str]) -> Path:
    """runs/record, the next one that is free; the same for all ranks where each runs `record`."""
    if is_rank(given):
        return Path("runs").absolute() / f"job-{given.get('SLURM_JOB_ID', 'record')}"
    return fresh(Path("runs").absolute() / "record")


@contextmanager
def _passed_on(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Ctrl-C reaches the command by itself, from the terminal; what ends us is handed to it."""

    def terminate(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)

    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),
        signal.SIGTERM: signal.signal(signal.SIGTERM, terminate),
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
