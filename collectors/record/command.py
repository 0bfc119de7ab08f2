"""stepsplit record: runs a command with the agent in all of its processes; the training script is
not modified.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from stepsplit.collectors.formats.file_names import find_free_folder, list_recorded
from stepsplit.collectors.guard import CollectError, warn
from stepsplit.collectors.job.launcher import is_rank
from stepsplit.collectors.record.environment import NcclLogs, build_environment
from stepsplit.collectors.record.plan import RecordPlan
from stepsplit.collectors.safe_io.atomic_file import make_owner_folder


def record(command: Sequence[str], plan: RecordPlan, nccl: NcclLogs) -> int:
    """Runs the command with each rank recorded as planned, and returns its exit status.

    A negative status is the signal that killed the command. Raises CollectError if the command
    cannot be started or the folder cannot be written.
    """
    make_folder(Path(plan.out))
    return run_command(command, Path(plan.out), build_environment(os.environ, plan, nccl))


def make_folder(out: Path) -> None:
    """Creates the folder of a recording. Raises CollectError."""
    try:
        # The folder keeps what NCCL writes in it under the job's umask.
        make_owner_folder(out / "nccl")
    except OSError as error:
        raise CollectError(f"{out}: {error.strerror}; choose another --out") from None


def run_command(
    command: Sequence[str],
    out: Path,
    variables: Mapping[str, str],
    note_begin: Callable[[], None] = lambda: None,
) -> int:
    """Runs the command with these environment variables, and returns its exit status; note_begin is
    called once it runs. Raises CollectError, and leaves no new folder, if it cannot be started."""
    try:
        process = subprocess.Popen(command, env=dict(os.environ) | dict(variables))
    except OSError as error:
        remove_if_empty(out)
        raise CollectError(f"{command[0]}: {error.strerror}; is it on PATH?") from None
    with _forward_signals(process):
        note_begin()
        return process.wait()


def check_out(folder: Path, overwrite: bool) -> None:
    """Removes an earlier recording from the folder, with what was analyzed of it, or raises
    CollectError if it may not."""
    recorded = list_recorded(folder)
    if not recorded:
        return
    if not overwrite:
        raise CollectError(
            f"{folder} has a recording: choose another --out, or replace it with --overwrite"
        )
    for path in (*recorded, folder / REPORT_FILE):
        path.unlink(missing_ok=True)
    for name in OVERWRITTEN_FOLDERS:
        shutil.rmtree(folder / name, ignore_errors=True)


REPORT_FILE, OVERWRITTEN_FOLDERS = "report.json", ("nccl", "memory", "tables")
"""What --overwrite replaces besides the files of the ranks."""


def run_finish_hook(words: Sequence[str], folder: Path) -> None:
    """Runs a command of the user's with the recording's folder as its last argument, by no shell.
    Whatever becomes of it is a warning at most."""
    try:
        status = run_command([*words, str(folder)], folder, {})
    except CollectError as error:
        warn(f"--finish-hook: {error}; the recording is in {folder}")
        return
    if status:
        ended = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        warn(f"--finish-hook {words[0]}: {ended}; the recording is in {folder}")


def describe_recorded(ranks: int, folder: Path, which: str = "") -> str:
    """What a recording says at its end; which steps it has, if they are not those asked for."""
    counted = f"{ranks} rank{'s' * (ranks != 1)}{which}"
    return f"recorded {counted}; analyze with: stepsplit analyze {shlex.quote(str(folder))}"


def remove_if_empty(folder: Path) -> None:
    """Removes the folder if nothing was written to it, and `runs` if that was the first one."""
    # Another rank's `record` may already have removed it.
    with suppress(OSError):
        (folder / "nccl").rmdir()
    with suppress(OSError):
        folder.rmdir()
        if folder.parent.name == _RUNS:
            folder.parent.rmdir()


def choose_out(existing: Mapping[str, str], verb: str = "record") -> Path:
    """The next free folder, such as runs/record; if each rank runs the verb, one for the job."""
    if is_rank(existing):
        return Path(_RUNS).absolute() / f"job-{existing.get('SLURM_JOB_ID', verb)}"
    return find_free_folder(Path(_RUNS).absolute() / verb)


_RUNS = "runs"


_OF_THE_SCRIPT = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a training script may handle, such as those before the end of its time in Slurm."""


@contextmanager
def _forward_signals(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Forwards SIGTERM to the command. The others reach it directly, from the terminal or as Slurm
    signals all processes of a task, and must not end this process before it."""

    def terminate(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)

    handlers = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),
        signal.SIGTERM: signal.signal(signal.SIGTERM, terminate),
        **{number: signal.signal(number, signal.SIG_IGN) for number in _OF_THE_SCRIPT},
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
