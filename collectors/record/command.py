"""stepsplit record: runs a command with the agent in all of its processes; the training script is
not modified.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from stepsplit.collectors.formats.file_names import find_free_folder, list_recorded
from stepsplit.collectors.formats.rank_record import WHY_UNNAMED, RankRecord
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
    out = Path(plan.out)
    make_folder(out)
    try:
        return run_command(command, out, build_environment(os.environ, plan, nccl))
    except CollectError:
        remove_if_empty(out, plan.role)
        raise


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

    def terminate(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)

    # SIGINT reaches the command directly, as the signals of a script do.
    with _handle_signals({signal.SIGINT: signal.SIG_IGN, signal.SIGTERM: terminate}):
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


HOOK_LIMIT_S = 30 * 60
"""A finish hook that takes longer is ended: until then the job holds all of its nodes."""
_HOOK_END_S = 10
"""What it has after a signal, before the next; Slurm kills all 30 s (KillWait) after SIGTERM."""
_HOOK_POLL_S = 0.1


def run_finish_hook(words: Sequence[str], folder: Path) -> None:
    """Runs a command of the user's with the recording's folder as its last argument, by no shell.
    Whatever becomes of it is a warning at most, and it ends within HOOK_LIMIT_S."""
    until_s = time.monotonic() + HOOK_LIMIT_S
    kept = f"the recording is in {folder}"
    hook: subprocess.Popen[bytes] | None = None
    stopped_by: signal.Signals | None = None

    def signal_all(number: int) -> None:
        if hook is not None:
            with suppress(ProcessLookupError):
                os.killpg(hook.pid, number)

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal until_s, stopped_by
        stopped_by = signal.Signals(number)
        signal_all(number)
        until_s = min(until_s, time.monotonic() + _HOOK_END_S)

    # Before the hook is started, so that no signal is lost. The hook inherits that those of the
    # script are ignored, which Slurm sends to all processes of a step.
    with _handle_signals({signal.SIGINT: stop, signal.SIGTERM: stop}):
        try:
            # In a session of its own, so that what it has started ends with it. It then has no
            # terminal, and what would wait there for a password fails.
            hook = subprocess.Popen(
                [*words, str(folder)], stdin=subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:
            warn(f"--finish-hook: {words[0]}: {error.strerror}; is it on PATH?; {kept}")
            return
        if stopped_by is not None:
            signal_all(stopped_by)
        while hook.poll() is None and time.monotonic() < until_s:
            time.sleep(_HOOK_POLL_S)
        if hook.returncode is None:
            signal_all(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                hook.wait(_HOOK_END_S)
            signal_all(signal.SIGKILL)
            # A file system that hangs keeps it even then: it is not waited for.
            with suppress(subprocess.TimeoutExpired):
                hook.wait(1)
            ended = f"ended, as it took longer than {HOOK_LIMIT_S / 60:g} minutes"
            if stopped_by is not None:
                ended = f"killed, as it went on after {stopped_by.name}"
            warn(f"--finish-hook {words[0]}: {ended}; {kept}")
            return
    if status := hook.returncode:
        how = name_signal(-status) if status < 0 else f"exit status {status}"
        warn(f"--finish-hook {words[0]}: {how}; {kept}")


def describe_recorded(ranks: int, folder: Path, which: str = "") -> str:
    """What a recording says at its end; which steps it has, if they are not those asked for."""
    counted = f"{ranks} rank{'s' * (ranks != 1)}{which}"
    return f"recorded {counted}; analyze with: stepsplit analyze {shlex.quote(str(folder))}"


def describe_module_names(records: Sequence[RankRecord]) -> str:
    """Where the modules are named in a recording, or why not; "" if neither was decided."""
    decided = [each.module_names for each in records if each.module_names is not None]
    named = [each for each in decided if each.step is not None]
    if named:
        which = "" if len(named) == len(decided) else f" of {len(named)} of {len(decided)} ranks"
        shares = [each.cost_ns / each.step_ns for each in named if each.cost_ns and each.step_ns]
        # A name is taken to cost what it does at worst.
        cost = f", which takes up to {max(shares):.1%} of it" if shares else ""
        return f"modules are named in step {named[0].step}{which}{cost}"
    if not decided:
        return ""
    # All ranks run the same model; where their reasons differ, one of them is enough to know.
    return f"modules are not named: {WHY_UNNAMED.get(decided[0].why or '', 'for a reason unknown')}"


def remove_if_empty(folder: Path, role: str = "") -> None:
    """Removes the folder if nothing was written to it, and `runs` if that was the first one; that
    of a role, and then the one that the roles share."""
    # Another rank's `record` may already have removed it.
    with suppress(OSError):
        (folder / "nccl").rmdir()
    with suppress(OSError):
        folder.rmdir()
        if folder.parent.name == _RUNS:
            folder.parent.rmdir()
    if role and not folder.exists():
        remove_if_empty(folder.parent)


def choose_out(existing: Mapping[str, str], verb: str = "record") -> Path:
    """The next free folder, such as runs/record; if each rank runs the verb, one for the job."""
    if is_rank(existing):
        return Path(_RUNS).absolute() / f"job-{existing.get('SLURM_JOB_ID', verb)}"
    return find_free_folder(Path(_RUNS).absolute() / verb)


_RUNS = "runs"


_Handler = Callable[[int, FrameType | None], None] | signal.Handlers
_OF_THE_SCRIPT = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a training script may handle, such as those before the end of its time in Slurm."""


@contextmanager
def _handle_signals(handlers: Mapping[signal.Signals, _Handler]) -> Iterator[None]:
    """Handles these signals, and ignores those of a training script: they reach it directly, from
    the terminal or as Slurm signals all processes of a task, and must not end this process before
    it."""
    ignored = dict.fromkeys(_OF_THE_SCRIPT, signal.SIG_IGN)
    earlier = {
        number: signal.signal(number, handler)
        for number, handler in {**ignored, **handlers}.items()
    }
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


@contextmanager
def interrupt_on_signals() -> Iterator[None]:
    """Raises KeyboardInterrupt with the signal's name on SIGINT and SIGTERM: what is done after the
    training ends, and its status is still returned."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(name_signal(number))

    with _handle_signals({signal.SIGINT: interrupt, signal.SIGTERM: interrupt}):
        yield


def name_signal(number: int) -> str:
    """SIGKILL for 9; real-time signals but the first and the last have no names."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
