"""Ingest: workers that analyze uploaded recordings from the queue."""

from __future__ import annotations

import ctypes
import json
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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Literal

from msgspec import structs
from sqlalchemy.exc import SQLAlchemyError

from stepsplit.analyzer.analysis import Analysis, examine_with_inferred_job
from stepsplit.analyzer.errors import DataError, StepsplitError
from stepsplit.analyzer.readers.workers import Progress
from stepsplit.analyzer.report.report import Report
from stepsplit.analyzer.units import format_memory_size, format_size
from stepsplit.collectors.formats.run_spec import MESH_FILE, Mesh
from stepsplit.collectors.safe_io.helper_process import (
    build_helper_command,
    build_helper_environment,
)
from stepsplit.collectors.safe_io.regular_file import read_regular
from stepsplit.collectors.safe_io.safe_text import SafeStream, escape_controls, escape_json
from stepsplit.dashboard.store.artifacts import (
    INPUT_NAME,
    JOB_BYTES,
    check_named_files,
    complete_job,
    find_job_file,
    list_unused_files,
)
from stepsplit.dashboard.store.runs import LEASE_S, AnalysisJob
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


def analyze_upload(folder: Path, progress: Progress) -> Analysis:
    """Analyzes the uploaded folder, with a model comparison if the config is known from a job.toml
    in it or from the recording, and with the mesh that a mesh.txt in it states. Raises
    StepsplitError."""
    job_file, mesh = find_job_file(folder), read_mesh_file(folder)
    if job_file is not None:
        check_named_files(job_file, folder)
    made = examine_with_inferred_job([folder], 1, progress, mesh, job_file)
    warnings = (*made.report.warnings, *list_unused_files(folder, job_file))
    draft = made.job_draft
    if draft is not None and job_file is not None:
        text = complete_job(job_file.read_bytes(), draft.text.encode())
        draft = replace(draft, text=text.decode())
    return replace(made, report=structs.replace(made.report, warnings=warnings), job_draft=draft)


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
                is_complete = is_complete or not store.fill_next_job()
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
        excess = _find_excess(options, now - begun, process)
        if excess is not None and process.exitcode is None:
            _kill(process)
            _clean_up(store, job, store.jobs.fail(job, _describe_excess(store, job, *excess)))
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


def _find_excess(
    options: WorkerOptions, seconds: float, process: BaseProcess
) -> tuple[str, str] | None:
    """Which limit the analysis exceeds, and the option that raises it; None within the limits."""
    if seconds > options.limit_s:
        return f"took longer than {options.limit_s / 60:g} minutes", "--limit"
    if process.pid is not None and measure_memory_bytes(process.pid) > options.memory_bytes:
        return f"needed more than {format_memory_size(options.memory_bytes)} of memory", "--memory"
    return None


def _describe_excess(store: Store, job: AnalysisJob, what: str, option: str) -> str:
    """The error of a run: what was exceeded, by how large an upload, and what to do."""
    stored = store.files.sum_size(job.run_id)
    number = f"{stored.files} file{'' if stored.files == 1 else 's'}"
    size = f"{number}, {format_size(stored.bytes)}"
    return f"the analysis {what} ({size}); upload fewer steps or ranks, or raise {option}"


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
        command = build_helper_command("stepsplit.dashboard", "worker", "--name", slot.name)
        command += ["--parent", str(os.getpid()), *self._options]
        # By environment: the URL may contain a password, and command lines are public.
        env = build_helper_environment(build_worker_environment(self._store))
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
        report = _strip_folder_of_texts(store, job, analysis.report)
        store.artifacts.save(job.run_id, report, analysis.tables)
        if analysis.job_draft is not None:
            store.artifacts.save_job(job.run_id, analysis.job_draft.text.encode())
        is_owner = store.jobs.complete(job, report)
        outcome = "done"
    except StepsplitError as error:
        _keep_uploaded_job(store, job)
        is_owner = store.jobs.fail(job, _strip_folder(store, job, str(error)))
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


def _strip_folder(store: Store, job: AnalysisJob, message: str) -> str:
    # The uploader knows the files by their upload names, without the server's folder.
    folder = str(store.artifacts.find_folder(job.run_id) / INPUT_NAME)
    return message.replace(f"{folder}/", "").replace(folder, "the upload")


def _strip_folder_of_texts(store: Store, job: AnalysisJob, report: Report) -> Report:
    """The report with warnings and caveats that name files as they were uploaded."""
    warnings = tuple(
        structs.replace(one, message=_strip_folder(store, job, one.message))
        for one in report.warnings
    )
    gap = report.gap
    if gap is not None:
        gap = structs.replace(gap, notes=tuple(_strip_folder(store, job, n) for n in gap.notes))
    return structs.replace(report, warnings=warnings, gap=gap)


def _keep_uploaded_job(store: Store, job: AnalysisJob) -> None:
    """Stores the job.toml of a run that cannot be analyzed, so that its form can correct it."""
    with suppress(StepsplitError, OSError):
        job_file = find_job_file(store.artifacts.fetch_uploads(job.run_id))
        if job_file is not None and job_file.stat().st_size <= JOB_BYTES:
            store.artifacts.save_job(job.run_id, job_file.read_bytes())


def _clean_up(store: Store, job: AnalysisJob, is_owner: bool) -> None:
    store.artifacts.drop_uploads(job.run_id)
    if not is_owner and store.find_run(job.run_id) is None:
        store.artifacts.remove(job.run_id)


# The mesh of an upload.

AnalyzeFunction = Callable[[Path, Progress], Analysis]


def read_mesh_file(folder: Path) -> Mesh | None:
    """The mesh in the folder's mesh.txt, such as pp=2,dp=2,tp=2; None without it. Raises
    DataError."""
    path = folder / MESH_FILE
    try:
        return Mesh.parse(read_regular(path).decode().strip())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(path, str(error), "upload it again, or without the mesh") from None


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
        return escape_json(json.dumps(line, ensure_ascii=False))


class _TextFormatter(logging.Formatter):
    """The message on one line, and the traceback of an exception below it."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return escape_controls(super().formatMessage(record))


def set_up_logs(form: LogFormat) -> None:
    """Sends logs to standard error: JSON lines, or text with warnings and errors only."""
    handler = logging.StreamHandler(SafeStream(sys.stderr))
    handler.setFormatter(JsonFormatter() if form == "json" else _TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("stepsplit").setLevel(logging.INFO if form == "json" else logging.WARNING)
