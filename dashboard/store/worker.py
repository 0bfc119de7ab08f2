"""Workers: each runs queued analyses one after the other, in a process of its own."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from sqlalchemy.exc import SQLAlchemyError

from stepsplit.analyzer.units import format_memory_size, format_size
from stepsplit.collectors.safe_io.helper_process import (
    build_helper_command,
    build_helper_environment,
)
from stepsplit.dashboard.store.analysis_queue import LEASE_S, AnalysisJob
from stepsplit.dashboard.store.ingest import AnalyzeFunction, analyze_upload, clean_up, process_job
from stepsplit.dashboard.store.store import Store

# A worker: runs queued analyses one after the other, each in a process of its own.

_JOBS_LOG = logging.getLogger("stepsplit.jobs")

_RENEWALS_PER_LEASE = 4


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Options of a worker.

    limit_s, memory_bytes: what one analysis may take. parent: pid of the process whose end stops
    the worker after its job; None for never.
    """

    name: str
    limit_s: float = 3_600.0
    memory_bytes: int = 1 << 40
    lease_s: float = LEASE_S
    poll_s: float = 0.5
    parent: int | None = None


def run_worker(
    store: Store, options: WorkerOptions, analyze: AnalyzeFunction = analyze_upload
) -> None:
    """Runs jobs until the parent process ends. On an exception, such as a signal, the current job
    is queued again. Main thread only."""
    is_complete = False
    while options.parent is None or os.getppid() == options.parent:
        try:
            if not _run_next_job(store, options, analyze):
                # Runs of an earlier stepsplit, one at a time so that uploads do not wait.
                is_complete = is_complete or not store.complete_next_run()
                if is_complete:
                    time.sleep(options.poll_s)
        except SQLAlchemyError as error:
            # A current job is claimed again after its lease expires.
            _log_unavailable(error)
            time.sleep(10 * options.poll_s)


def _log_unavailable(error: SQLAlchemyError) -> None:
    _JOBS_LOG.error("the database is unavailable: %s", str(error).splitlines()[0])


def _run_next_job(store: Store, options: WorkerOptions, analyze: AnalyzeFunction) -> bool:
    """Runs the next job; False if the queue is empty."""
    job = store.jobs.claim(options.name, options.lease_s)
    if job is None:
        return False
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="stepsplit-") as folder:
        process = _start_analysis(store, job, analyze, Path(folder))
        try:
            outcome = _watch_analysis(store, job, options, process)
        except BaseException:
            _kill(process)
            store.jobs.put_back(job)
            raise
    fields = {"run": job.run_id, "ended": outcome, "attempt": job.attempt, "worker": options.name}
    seconds = round(time.monotonic() - begun, 3)
    _JOBS_LOG.info("job", extra={"fields": fields | {"seconds": seconds}})
    return True


# The process of one analysis: it can be stopped at any time, and its end harms nothing else.

_OUTCOMES = ("done", "failed", "lost", "unavailable")
"""Results of an analysis; the exit status of its process is the index."""

_WATCH_S = 0.2

_PR_SET_PDEATHSIG = 1


def _start_analysis(
    store: Store, job: AnalysisJob, analyze: AnalyzeFunction, folder: Path
) -> BaseProcess:
    # fork: what the worker has imported need not be imported for each job.
    context = multiprocessing.get_context("fork")
    arguments = (store, job, analyze, folder, os.getpid())
    process = context.Process(target=_run_in_process, args=arguments, name="analysis")
    process.start()
    return process


def _run_in_process(
    store: Store, job: AnalysisJob, analyze: AnalyzeFunction, folder: Path, parent: int
) -> None:
    """Runs the job in this process, with its temporary files in the folder."""
    # The worker decides what a signal to both of them means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent(parent, signal.SIGKILL)
    tempfile.tempdir = str(folder)
    store.reconnect()
    try:
        outcome = process_job(store, job, analyze)
    except SQLAlchemyError as error:
        _log_unavailable(error)
        outcome = "unavailable"
    raise SystemExit(_OUTCOMES.index(outcome))


def end_with_parent(parent: int, number: signal.Signals) -> None:
    """Has this process sent the signal when its parent, which has this pid, ends (on Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:
            raise SystemExit(0)


def _watch_analysis(
    store: Store, job: AnalysisJob, options: WorkerOptions, process: BaseProcess
) -> str:
    """Renews the lease until the process ends, and stops it if it exceeds a limit."""
    begun = renewed = time.monotonic()
    while process.exitcode is None:
        process.join(_WATCH_S)
        now = time.monotonic()
        excess = None
        if now - begun > options.limit_s:
            excess, option = f"took longer than {options.limit_s / 60:g} minutes", "--limit"
        elif process.pid and measure_memory_bytes(process.pid) > options.memory_bytes:
            most = format_memory_size(options.memory_bytes)
            excess, option = f"needed more than {most} of memory", "--memory"
        if excess is not None and process.exitcode is None:
            _kill(process)
            stored = store.files.sum_size(job.run_id)
            number = f"{stored.files} file{'' if stored.files == 1 else 's'}"
            upload = f"{number}, {format_size(stored.bytes)}"
            hint = f"upload fewer steps or ranks, or raise {option}"
            is_owner = store.jobs.fail(job, f"the analysis {excess} ({upload}); {hint}")
            clean_up(store, job, is_owner)
            return "failed"
        if now - renewed > options.lease_s / _RENEWALS_PER_LEASE:
            renewed = now
            with suppress(SQLAlchemyError):
                store.jobs.extend_lease(job, options.lease_s)
    if process.exitcode in range(len(_OUTCOMES)):
        return _OUTCOMES[process.exitcode]
    # Such as by the kernel when memory is short: tried again, or failed after the last attempt.
    store.jobs.release_worker(options.name)
    return "crashed"


def _kill(process: BaseProcess) -> None:
    process.kill()
    process.join()


_MEMORY_LINE = re.compile(r"^(?:RssAnon|RssShmem|VmSwap):\s*(\d+) kB$", re.MULTILINE)


def measure_memory_bytes(pid: int) -> int:
    """Memory that only the end of the process frees, also where it is swapped out; 0 without
    /proc."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return 1024 * sum(int(kib) for kib in _MEMORY_LINE.findall(status))


_MEMORY_SHARE = 0.75

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def choose_memory_bytes(workers: int) -> int:
    """The default limit of an analysis: three quarters of this machine's memory, or of its
    container's, divided by the number of workers."""
    bytes_of_all = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):
        bytes_of_all = min(bytes_of_all, int(_CGROUP_LIMIT.read_text()))
    return int(_MEMORY_SHARE * bytes_of_all / max(workers, 1))


# The worker processes of a dashboard: start, watch, restart, stop.

_WORKERS_LOG = logging.getLogger("stepsplit.jobs")

_STOP_TIMEOUT_S = 10.0

_MAX_PAUSE_S = 60.0


@dataclass(slots=True)
class _WorkerSlot:
    """A slot for one worker process; the restart pause doubles after a short-lived worker."""

    name: str = ""
    process: subprocess.Popen[bytes] | None = None
    begun: float = 0.0
    due: float = 0.0
    pause_s: float = 0.5


class Workers:
    """A fixed number of worker processes. Not thread-safe."""

    def __init__(self, store: Store, number: int, options: tuple[str, ...] = ()) -> None:
        self._store, self._options = store, options
        self._places = [_WorkerSlot() for _ in range(number)]

    def watch(self) -> None:
        """Starts due workers, and frees the jobs of dead ones. Call it often."""
        for slot in self._places:
            if slot.process is not None and slot.process.poll() is not None:
                lived_s = time.monotonic() - slot.begun
                status = slot.process.returncode
                _WORKERS_LOG.warning("worker %s ended (%s); starting another", slot.name, status)
                self._clear(slot)
                long_lived = lived_s > _MAX_PAUSE_S
                slot.pause_s = 0.5 if long_lived else min(2 * slot.pause_s, _MAX_PAUSE_S)
                slot.due = time.monotonic() + slot.pause_s
            if slot.process is None and time.monotonic() >= slot.due:
                self._start(slot)

    def stop(self) -> None:
        """Stops all workers; their jobs are queued again."""
        running = [(p, p.process) for p in self._places if p.process is not None]
        for _, process in running:
            process.terminate()
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        for slot, process in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
            self._clear(slot)

    def _start(self, slot: _WorkerSlot) -> None:
        slot.name, slot.begun = f"{os.uname().nodename}-{uuid.uuid4().hex[:8]}", time.monotonic()
        command = build_helper_command("stepsplit.dashboard", "worker", "--name", slot.name)
        command += ["--parent", str(os.getpid()), *self._options]
        # By environment: the URL may contain a password, and command lines are public.
        places = {"STEPSPLIT_STORE": self._store.url}
        places["STEPSPLIT_ARTIFACTS"] = self._store.artifacts.url
        env = build_helper_environment(places)
        slot.process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, start_new_session=True
        )

    def _clear(self, slot: _WorkerSlot) -> None:
        """Kills the worker and its child processes, and frees its jobs."""
        assert slot.process is not None
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(slot.process.pid, signal.SIGKILL)
        slot.process.wait()
        slot.process = None
        with suppress(SQLAlchemyError):
            self._store.jobs.release_worker(slot.name)
