"""Ingest: workers that analyze uploaded recordings from the queue."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from sqlalchemy.exc import SQLAlchemyError

from stepsplit.analyzer.analysis import Analysis, examine, examine_with_inferred_job
from stepsplit.analyzer.errors import DataError, StepsplitError
from stepsplit.analyzer.model.config_decode import read_table
from stepsplit.analyzer.model.hardware_config import list_referenced_files
from stepsplit.analyzer.readers.kernel_rules import BUILT_IN
from stepsplit.analyzer.readers.workers import Progress
from stepsplit.dashboard.store.artifacts import INPUT_NAME
from stepsplit.dashboard.store.runs import LEASE_S, AnalysisJob
from stepsplit.dashboard.store.store import Store

# A worker: runs queued analyses one after the other and renews its lease meanwhile.

_JOBS_LOG = logging.getLogger("stepsplit.jobs")

_RENEWALS_PER_LEASE = 4

EXIT_TIMEOUT = 75
"""Exit status of a worker whose analysis exceeded the time limit."""


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Options of a worker. parent: pid of the process whose end stops the worker after its job;
    None for never."""

    name: str
    limit_s: float = 3_600.0
    lease_s: float = LEASE_S
    poll_s: float = 0.5
    parent: int | None = None


def analyze_upload(folder: Path, progress: Progress) -> Analysis:
    """Analyzes the uploaded folder, with a model comparison if the config is known from a job.toml
    in it or from the recording. Raises StepsplitError."""
    job_file = find_job_file(folder)
    if job_file is None:
        return examine_with_inferred_job([folder], 1, progress)
    _check_named_files(job_file, folder)
    return examine([folder], 1, progress, BUILT_IN, job_file)


def run_worker(
    store: Store, options: WorkerOptions, analyze: AnalyzeFunction = analyze_upload
) -> None:
    """Runs jobs until the parent process ends. On an exception, such as a signal, the current job
    is queued again."""
    while options.parent is None or os.getppid() == options.parent:
        try:
            if not _run_next_job(store, options, analyze):
                time.sleep(options.poll_s)
        except SQLAlchemyError as error:
            # A current job is claimed again after its lease expires.
            _JOBS_LOG.error("the database is unavailable: %s", str(error).splitlines()[0])
            time.sleep(10 * options.poll_s)


def _run_next_job(store: Store, options: WorkerOptions, analyze: AnalyzeFunction) -> bool:
    """Runs the next job; False if the queue is empty."""
    job = store.jobs.claim(options.name, options.lease_s)
    if job is None:
        return False
    begun = time.monotonic()
    try:
        with _keep_lease(store, job, options):
            outcome = process_job(store, job, analyze)
    except SQLAlchemyError:
        raise
    except BaseException:
        store.jobs.put_back(job)
        raise
    fields = {"run": job.run_id, "ended": outcome, "attempt": job.attempt, "worker": options.name}
    seconds = round(time.monotonic() - begun, 3)
    _JOBS_LOG.info("job", extra={"fields": fields | {"seconds": seconds}})
    return True


@contextmanager
def _keep_lease(store: Store, job: AnalysisJob, options: WorkerOptions) -> Iterator[None]:
    """Renews the lease in a thread, and ends this process if the job exceeds the time limit."""
    over = threading.Event()
    deadline = time.monotonic() + options.limit_s
    pause = min(options.lease_s / _RENEWALS_PER_LEASE, options.limit_s)

    def extend_lease() -> None:
        while not over.wait(max(0.0, min(pause, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                _give_up_work(store, job, options.limit_s)
            with suppress(SQLAlchemyError):
                store.jobs.extend_lease(job, options.lease_s)

    thread = threading.Thread(target=extend_lease, name="heart", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _give_up_work(
    store: Store, job: AnalysisJob, limit_s: float, end: Callable[[int], None] = os._exit
) -> None:
    """Fails the job and ends this process with its children, as threads cannot be stopped."""
    message = f"the analysis took over {limit_s / 60:g} minutes; upload fewer steps or ranks"
    with suppress(SQLAlchemyError):
        store.jobs.fail(job, message)
    for child in multiprocessing.active_children():
        child.kill()
    end(EXIT_TIMEOUT)


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
                self._handle_exit(slot)
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
        command = [sys.executable, "-m", "stepsplit.dashboard", "worker", "--name", slot.name]
        command += ["--parent", str(os.getpid()), *self._options]
        # By environment: the URL may contain a password, and command lines are public.
        env = {**os.environ, **build_worker_environment(self._store)}
        slot.process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, start_new_session=True
        )

    def _handle_exit(self, slot: _WorkerSlot) -> None:
        assert slot.process is not None
        status, lived = slot.process.returncode, time.monotonic() - slot.begun
        _WORKERS_LOG.warning("worker %s ended (%s); starting another", slot.name, status)
        self._clear(slot)
        slot.pause_s = 0.5 if lived > _MAX_PAUSE_S else min(2 * slot.pause_s, _MAX_PAUSE_S)
        slot.due = time.monotonic() + slot.pause_s

    def _clear(self, slot: _WorkerSlot) -> None:
        """Kills the worker and its child processes, and frees its jobs."""
        assert slot.process is not None
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(slot.process.pid, signal.SIGKILL)
        slot.process.wait()
        slot.process = None
        with suppress(SQLAlchemyError):
            self._store.jobs.release_worker(slot.name)


def build_worker_environment(store: Store) -> dict[str, str]:
    """The environment variables that locate the store for a worker process."""
    return {"STEPSPLIT_STORE": store.url, "STEPSPLIT_ARTIFACTS": store.artifacts.url}


# One job: from uploaded files to a report.

_LOG = logging.getLogger(__name__)

_PROGRESS_INTERVAL_S = 1.0

_READING_SHARE = 0.9
"""Share of the progress for reading; the rest cannot be subdivided."""


def process_job(store: Store, job: AnalysisJob, analyze: AnalyzeFunction) -> str:
    """Runs the job. Returns "done", "failed", or "lost" if the run was deleted or another worker
    has taken the job. Raises SQLAlchemyError if the database is unavailable."""
    try:
        analysis = _analyze_uploads(store, job, analyze)
        store.artifacts.save(job.run_id, analysis.report, analysis.tables)
        is_owner = store.jobs.complete(job, analysis.report)
        outcome = "done"
    except StepsplitError as error:
        is_owner = store.jobs.fail(job, _strip_folder(store, job, error))
        outcome = "failed"
    except SQLAlchemyError:
        raise
    except Exception as error:  # noqa: BLE001 - shown to the uploader; details are in the log
        # A bug in stepsplit: without this the page would show "running" forever.
        _LOG.exception("the analysis of run %s crashed", job.run_id)
        message = f"internal error: {type(error).__name__}; see the worker's log"
        is_owner = store.jobs.fail(job, message)
        outcome = "failed"
    _clean_up(store, job, is_owner)
    return outcome if is_owner else "lost"


def _analyze_uploads(store: Store, job: AnalysisJob, analyze: AnalyzeFunction) -> Analysis:
    uploads = store.artifacts.fetch_uploads(job.run_id)

    def notify(share: float, note: str) -> None:
        with suppress(SQLAlchemyError):
            store.jobs.record_progress(job, share, note)

    return analyze(uploads, throttle_progress(notify))


def throttle_progress(
    notify: Callable[[float, str], object], now: Callable[[], float] = time.monotonic
) -> Progress:
    """A progress callback (bytes done, total bytes) that forwards at most once per second."""
    last = -_PROGRESS_INTERVAL_S

    def report_progress(done_bytes: int, all_bytes: int) -> None:
        nonlocal last
        at = now()
        finished = done_bytes >= all_bytes
        if finished or at - last >= _PROGRESS_INTERVAL_S:
            last = at
            note = "splitting steps" if finished else "reading"
            notify(_READING_SHARE * done_bytes / max(all_bytes, 1), note)

    return report_progress


def _strip_folder(store: Store, job: AnalysisJob, error: StepsplitError) -> str:
    # The uploader knows the files by their upload names, without the server's folder.
    folder = str(store.artifacts.find_folder(job.run_id) / INPUT_NAME)
    return str(error).replace(f"{folder}/", "").replace(folder, "the upload")


def _clean_up(store: Store, job: AnalysisJob, is_owner: bool) -> None:
    store.artifacts.drop_uploads(job.run_id)
    if not is_owner and store.find_run(job.run_id) is None:
        store.artifacts.remove(job.run_id)


# The job file of an upload.

JOB_FILES = ("job.toml", "run.toml")
"""File names of a job config in an upload; the second one is used by older recordings."""

AnalyzeFunction = Callable[[Path, Progress], Analysis]


def find_job_file(folder: Path) -> Path | None:
    """The job.toml (else run.toml) nearest to the top of the folder; None without either."""
    for name in JOB_FILES:
        paths = sorted(folder.rglob(name), key=lambda path: (len(path.parts), path))
        if paths:
            return paths[0]
    return None


def _check_named_files(job_file: Path, folder: Path) -> None:
    """Raises DataError if the job file refers to files outside of the upload."""
    root = folder.resolve()
    for name in list_referenced_files(read_table(job_file)):
        if not (job_file.parent / name).resolve().is_relative_to(root):
            problem = f"refers to {name}, which is not in the upload"
            raise DataError(job_file, problem, "upload that file too, and use a relative path")


# Logs of the server and its workers: text, or one JSON object per line.

LogFormat = Literal["text", "json"]


class JsonFormatter(logging.Formatter):
    """One JSON object per record, with the record's extra fields."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as a JSON line. Records must not contain secrets in their fields."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def set_up_logs(form: LogFormat) -> None:
    """Sends logs to standard error: JSON lines, or text with warnings and errors only."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else logging.Formatter("%(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("stepsplit").setLevel(logging.INFO if form == "json" else logging.WARNING)
