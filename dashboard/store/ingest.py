"""From uploaded files to a report, in a thread of the server."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

from stepsplit.analyzer.analysis import Analysis
from stepsplit.analyzer.errors import StepsplitError
from stepsplit.dashboard.store.artifacts import INPUT_NAME
from stepsplit.dashboard.store.store import Store

_LOG = logging.getLogger(__name__)


Analyze = Callable[[Sequence[Path]], Analysis]


def ingest(store: Store, run_id: str, analyze: Analyze) -> None:
    """Analyzes the uploads of a queued run: afterwards it is done, or failed with one line."""
    if not store.start(run_id):
        return
    uploads = store.folder(run_id) / INPUT_NAME
    try:
        analysis = analyze([uploads])
    except StepsplitError as error:
        # The uploader knows the files by the names that they were sent under.
        store.fail(
            run_id, str(error).replace(f"{uploads}/", "").replace(str(uploads), "the upload")
        )
        return
    store.save(run_id, analysis.report, analysis.tables)
    store.finish(run_id, analysis.report)


class Worker:
    """Analyzes uploads one after the other, so that a request returns at once."""

    def __init__(self, store: Store, analyze: Analyze) -> None:
        self._store, self._analyze = store, analyze
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ingest")

    def submit(self, run_id: str) -> None:
        """Takes a queued run."""
        future = self._pool.submit(ingest, self._store, run_id, self._analyze)
        future.add_done_callback(partial(self._close, run_id))

    def resume(self) -> None:
        """Takes up what an earlier server left: queued runs again, half analyzed ones as failed."""
        for run in reversed(self._store.runs()):
            if run.state == "running":
                self._store.fail(run.id, "the server stopped during the analysis; upload it again")
            elif run.state == "uploading":
                self._store.fail(run.id, "the server stopped during the upload; upload it again")
            elif run.state == "queued":
                self.submit(run.id)

    def stop(self) -> None:
        """Waits for the analysis under way; queued runs stay queued."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _close(self, run_id: str, future: Future[None]) -> None:
        if future.cancelled():
            return
        error = future.exception()
        if error is None:
            return
        # A defect of ours: the page must not say "running" for ever.
        _LOG.error("the analysis of run %s broke", run_id, exc_info=error)
        self._store.fail(run_id, f"internal error: {type(error).__name__}; see the server's log")
