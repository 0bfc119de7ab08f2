"""A worker: takes analyses from the queue, one after the other, and shows that it lives."""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from sqlalchemy.exc import SQLAlchemyError

from stepsplit.dashboard.store.analysis_of import AnalysisOf, analysis_of
from stepsplit.dashboard.store.ingest import ingest
from stepsplit.dashboard.store.jobs import LEASE_S, Job
from stepsplit.dashboard.store.store import Store

_LOG = logging.getLogger("stepsplit.jobs")
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


def work(store: Store, terms: Terms, analyze: AnalysisOf = analysis_of) -> None:
    """Does jobs until the parent is gone. A job under way when this is left by an exception, as by
    a signal, is queued again."""
    while terms.parent is None or os.getppid() == terms.parent:
        try:
            if not _one(store, terms, analyze):
                time.sleep(terms.poll_s)
        except SQLAlchemyError as error:
            # The job, if there was one, is taken up when its lease has run out.
            _LOG.error("the database is away: %s", str(error).splitlines()[0])
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
    _LOG.info("job", extra={"fields": told | {"seconds": round(time.monotonic() - begun, 3)}})
    return True


@contextmanager
def _heart(store: Store, job: Job, terms: Terms) -> Iterator[None]:
    """Prolongs the lease meanwhile, and ends this process when the job takes too long."""
    over = threading.Event()
    deadline = time.monotonic() + terms.limit_s
    pause = min(terms.lease_s / _BEATS_A_LEASE, terms.limit_s)

    def beat() -> None:
        while not over.wait(max(0.0, min(pause, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                _give_up(store, job, terms.limit_s)
            with suppress(SQLAlchemyError):
                store.jobs.beat(job, terms.lease_s)

    thread = threading.Thread(target=beat, name="heart", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _give_up(store: Store, job: Job, limit_s: float, end: Callable[[int], None] = os._exit) -> None:
    """Nothing in Python stops a thread that computes: the process goes, and what it started."""
    told = f"the analysis took over {limit_s / 60:g} minutes; upload fewer steps or ranks"
    with suppress(SQLAlchemyError):
        store.jobs.failed(job, told)
    for child in multiprocessing.active_children():
        child.kill()
    end(TOOK_TOO_LONG)
