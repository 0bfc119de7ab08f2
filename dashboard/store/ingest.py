"""From uploaded files to a report: one job of the queue, from its claim to its end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress

from sqlalchemy.exc import SQLAlchemyError

from stepsplit.analyzer.analysis import Analysis
from stepsplit.analyzer.errors import StepsplitError
from stepsplit.analyzer.readers.workers import Progress
from stepsplit.dashboard.store.analysis_of import AnalysisOf
from stepsplit.dashboard.store.artifacts import INPUT_NAME
from stepsplit.dashboard.store.jobs import Job
from stepsplit.dashboard.store.store import Store

_LOG = logging.getLogger(__name__)
_TELL_EVERY_S = 1.0
_READING = 0.9
"""How much of the progress is reading; what is after it cannot be told in parts."""


def ingest(store: Store, job: Job, analyze: AnalysisOf) -> str:
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


def _analyzed(store: Store, job: Job, analyze: AnalysisOf) -> Analysis:
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


def _in_uploaders_words(store: Store, job: Job, error: StepsplitError) -> str:
    # The uploader knows the files by the names that they were sent under.
    folder = str(store.artifacts.folder(job.run_id) / INPUT_NAME)
    return str(error).replace(f"{folder}/", "").replace(folder, "the upload")


def _tidy(store: Store, job: Job, held: bool) -> None:
    store.artifacts.analyzed(job.run_id)
    if not held and store.run(job.run_id) is None:
        store.artifacts.remove(job.run_id)
