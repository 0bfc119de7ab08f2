"""Ingest: workers that take uploaded files from the queue and make reports of them."""

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

from stepsplit.analyzer.analysis import Analysis, examine, examine_as_told
from stepsplit.analyzer.errors import DataError, StepsplitError
from stepsplit.analyzer.model.config_decode import read_table
from stepsplit.analyzer.model.hardware_config import named_files
from stepsplit.analyzer.readers.kernel_rules import BUILT_IN
from stepsplit.analyzer.readers.workers import Progress
from stepsplit.dashboard.store.artifacts import INPUT_NAME
from stepsplit.dashboard.store.runs import LEASE_S, AnalysisJob
from stepsplit.dashboard.store.store import Store

# A worker: takes analyses from the queue, one after the other, and shows that it lives.

_JOBS_LOG = logging.getLogger("stepsplit.jobs")

_BEATS_A_LEASE = 4

TOOK_TOO_LONG = 75
"""How the process exits when an analysis is over the time limit."""


@dataclass(frozen=True, slots=True)
class Terms:
    """How a worker works. parent: the process with which it ends, after its job; None for never."""

    name: str
    limit_s: float = 3_600.0
    lease_s: float = LEASE_S
    poll_s: float = 0.5
    parent: int | None = None


def analysis_of(folder: Path, progress: Progress) -> Analysis:
    """The analysis of the uploaded folder, held against the model where what ran is known: by a
    job.toml in it, or by the recording itself. Raises StepsplitError."""
    stated = find_job_file(folder)
    if stated is None:
        return examine_as_told([folder], 1, progress)
    _check_places(stated, folder)
    return examine([folder], 1, progress, BUILT_IN, stated)


def work(store: Store, terms: Terms, analyze: AnalysisOf = analysis_of) -> None:
    """Does jobs until the parent is gone. A job under way when this is left by an exception, as by
    a signal, is queued again."""
    while terms.parent is None or os.getppid() == terms.parent:
        try:
            if not _one(store, terms, analyze):
                time.sleep(terms.poll_s)
        except SQLAlchemyError as error:
            # The job, if there was one, is taken up when its lease has run out.
            _JOBS_LOG.error("the database is away: %s", str(error).splitlines()[0])
            time.sleep(10 * terms.poll_s)


def _one(store: Store, terms: Terms, analyze: AnalysisOf) -> bool:
    """Whether there was a job."""
    job = store.jobs.claim(terms.name, terms.lease_s)
    if job is None:
        return False
    begun = time.monotonic()
    try:
        with _heart(store, job, terms):
            ended = ingest(store, job, analyze)
    except SQLAlchemyError:
        raise
    except BaseException:
        store.jobs.put_back(job)
        raise
    told = {"run": job.run_id, "ended": ended, "attempt": job.attempt, "worker": terms.name}
    _JOBS_LOG.info("job", extra={"fields": told | {"seconds": round(time.monotonic() - begun, 3)}})
    return True


@contextmanager
def _heart(store: Store, job: AnalysisJob, terms: Terms) -> Iterator[None]:
    """Prolongs the lease meanwhile, and ends this process when the job takes too long."""
    over = threading.Event()
    deadline = time.monotonic() + terms.limit_s
    pause = min(terms.lease_s / _BEATS_A_LEASE, terms.limit_s)

    def beat() -> None:
        while not over.wait(max(0.0, min(pause, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                _give_up_work(store, job, terms.limit_s)
            with suppress(SQLAlchemyError):
                store.jobs.beat(job, terms.lease_s)

    thread = threading.Thread(target=beat, name="heart", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _give_up_work(
    store: Store, job: AnalysisJob, limit_s: float, end: Callable[[int], None] = os._exit
) -> None:
    """Nothing in Python stops a thread that computes: the process goes, and what it started."""
    told = f"the analysis took over {limit_s / 60:g} minutes; upload fewer steps or ranks"
    with suppress(SQLAlchemyError):
        store.jobs.failed(job, told)
    for child in multiprocessing.active_children():
        child.kill()
    end(TOOK_TOO_LONG)


# The worker processes of a dashboard: started, watched, started again, ended.

_WORKERS_LOG = logging.getLogger("stepsplit.jobs")

_PATIENCE_S = 10.0

_LONGEST_PAUSE_S = 60.0


@dataclass(slots=True)
class _Place:
    """One worker at a time; after a short life the next one waits twice as long."""

    name: str = ""
    process: subprocess.Popen[bytes] | None = None
    begun: float = 0.0
    due: float = 0.0
    pause_s: float = 0.5


class Workers:
    """So many worker processes on the store. All calls come from one thread."""

    def __init__(self, store: Store, number: int, options: tuple[str, ...] = ()) -> None:
        self._store, self._options = store, options
        self._places = [_Place() for _ in range(number)]

    def watch(self) -> None:
        """Starts what is due, and frees the jobs of those that died. Call it often."""
        for place in self._places:
            if place.process is not None and place.process.poll() is not None:
                self._died(place)
            if place.process is None and time.monotonic() >= place.due:
                self._start(place)

    def stop(self) -> None:
        """Ends them all; what they were at is queued again."""
        running = [(p, p.process) for p in self._places if p.process is not None]
        for _, process in running:
            process.terminate()
        deadline = time.monotonic() + _PATIENCE_S
        for place, process in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
            self._clear(place)

    def _start(self, place: _Place) -> None:
        place.name, place.begun = f"{os.uname().nodename}-{uuid.uuid4().hex[:8]}", time.monotonic()
        command = [sys.executable, "-m", "stepsplit.dashboard", "worker", "--name", place.name]
        command += ["--parent", str(os.getpid()), *self._options]
        # By the environment: a URL may hold a password, and everybody may list processes.
        env = {**os.environ, **worker_environment(self._store)}
        place.process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, start_new_session=True
        )

    def _died(self, place: _Place) -> None:
        assert place.process is not None
        status, lived = place.process.returncode, time.monotonic() - place.begun
        _WORKERS_LOG.warning("worker %s ended (%s); starting another", place.name, status)
        self._clear(place)
        place.pause_s = (
            0.5 if lived > _LONGEST_PAUSE_S else min(2 * place.pause_s, _LONGEST_PAUSE_S)
        )
        place.due = time.monotonic() + place.pause_s

    def _clear(self, place: _Place) -> None:
        """Ends what the worker leaves behind: itself, the processes that it started, its jobs."""
        assert place.process is not None
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(place.process.pid, signal.SIGKILL)
        place.process.wait()
        place.process = None
        with suppress(SQLAlchemyError):
            self._store.jobs.free(place.name)


def worker_environment(store: Store) -> dict[str, str]:
    """What tells a worker process where the store is."""
    return {"STEPSPLIT_STORE": store.url, "STEPSPLIT_ARTIFACTS": store.artifacts.url}


# From uploaded files to a report: one job of the queue, from its claim to its end.

_LOG = logging.getLogger(__name__)

_TELL_EVERY_S = 1.0

_READING = 0.9
"""How much of the progress is reading; what is after it cannot be told in parts."""


def ingest(store: Store, job: AnalysisJob, analyze: AnalysisOf) -> str:
    """Does the job, and says how it ended: "done", "failed", or "lost" where the run was removed or
    another worker has the job. Raises SQLAlchemyError where the database is away."""
    try:
        analysis = _analyzed(store, job, analyze)
        store.artifacts.save(job.run_id, analysis.report, analysis.tables)
        held = store.jobs.done(job, analysis.report)
        ended = "done"
    except StepsplitError as error:
        held = store.jobs.failed(job, _in_uploaders_words(store, job, error))
        ended = "failed"
    except SQLAlchemyError:
        raise
    except Exception as error:  # noqa: BLE001 - told to the uploader, and the log has the rest
        # A defect of ours: the page must not say "running" for ever.
        _LOG.exception("the analysis of run %s broke", job.run_id)
        told = f"internal error: {type(error).__name__}; see the worker's log"
        held = store.jobs.failed(job, told)
        ended = "failed"
    _tidy(store, job, held)
    return ended if held else "lost"


def _analyzed(store: Store, job: AnalysisJob, analyze: AnalysisOf) -> Analysis:
    uploads = store.artifacts.uploads(job.run_id)

    def tell(share: float, note: str) -> None:
        with suppress(SQLAlchemyError):
            store.jobs.tell(job, share, note)

    return analyze(uploads, reporting(tell))


def reporting(
    tell: Callable[[float, str], object], now: Callable[[], float] = time.monotonic
) -> Progress:
    """What a reader calls, (bytes done, bytes in all); passes it on at most once a second."""
    last = -_TELL_EVERY_S

    def progress(done_bytes: int, all_bytes: int) -> None:
        nonlocal last
        at = now()
        finished = done_bytes >= all_bytes
        if finished or at - last >= _TELL_EVERY_S:
            last = at
            note = "splitting steps" if finished else "reading"
            tell(_READING * done_bytes / max(all_bytes, 1), note)

    return progress


def _in_uploaders_words(store: Store, job: AnalysisJob, error: StepsplitError) -> str:
    # The uploader knows the files by the names that they were sent under.
    folder = str(store.artifacts.folder(job.run_id) / INPUT_NAME)
    return str(error).replace(f"{folder}/", "").replace(folder, "the upload")


def _tidy(store: Store, job: AnalysisJob, held: bool) -> None:
    store.artifacts.analyzed(job.run_id)
    if not held and store.run(job.run_id) is None:
        store.artifacts.remove(job.run_id)


# What the analyzer makes of an upload.

JOB_FILES = ("job.toml", "run.toml")
"""Names of a job's file in an upload; the second is that of older recordings."""

AnalysisOf = Callable[[Path, Progress], Analysis]


def find_job_file(folder: Path) -> Path | None:
    """The job.toml nearest to the top, or else the run.toml; None without either."""
    for name in JOB_FILES:
        found = sorted(folder.rglob(name), key=lambda path: (len(path.parts), path))
        if found:
            return found[0]
    return None


def _check_places(job_file: Path, folder: Path) -> None:
    """An upload names files of its own, never the server's. Raises DataError."""
    root = folder.resolve()
    for name in named_files(read_table(job_file)):
        if not (job_file.parent / name).resolve().is_relative_to(root):
            problem = f"names {name}, which is not in the upload"
            raise DataError(job_file, problem, "upload that file too, and name it from here")


# What a server and its workers log: quiet text for people, or a JSON object a line.

LogFormat = Literal["text", "json"]


class JsonLines(logging.Formatter):
    """One JSON object a record; a record's fields are beside what every line has."""

    def format(self, record: logging.LogRecord) -> str:
        """The line. Nothing that lets somebody in is ever among a record's fields."""
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
    """From now on this process logs to standard error: as text only what went wrong."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else logging.Formatter("%(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("stepsplit").setLevel(logging.INFO if form == "json" else logging.WARNING)
