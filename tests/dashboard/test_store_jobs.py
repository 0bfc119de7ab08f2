"""The queue: one worker has a job at a time, and no job is ever lost or done by two."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from support.report_builders import analysis
from support.store_builders import claimed, found, known_analysis, queued, state

from stepsplit.analyzer.analysis import Analysis
from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.readers.workers import Progress
from stepsplit.dashboard.store.ingest import process_job, throttle_progress
from stepsplit.dashboard.store.store import Store

SPENT = (
    "the analysis crashed 3 times without an error message, perhaps out of memory; "
    "upload fewer ranks or steps"
)


@pytest.fixture
def store(database_url: str, tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(database_url, tmp_path / "artifacts")
    yield opened
    opened.close()


def test_the_oldest_job_is_next(store: Store) -> None:
    first, second = queued(store), queued(store)

    jobs = [claimed(store, "w1"), claimed(store, "w2")]

    assert [(job.run_id, job.worker, job.attempt) for job in jobs] == [
        (first, "w1", 1),
        (second, "w2", 1),
    ]
    assert store.jobs.claim("w3") is None
    assert state(store, first) == ("running", None)


def test_a_report_that_cannot_be_read_back_is_not_done(store: Store) -> None:
    """The device is an object, as a reader may have let it pass."""
    run_id = queued(store)

    def analyze(folder: Path, progress: Progress) -> Analysis:
        report = analysis().report
        odd = msgspec.structs.replace(report.run, device={"a": 1})
        return Analysis(msgspec.structs.replace(report, run=odd), analysis().tables)

    assert process_job(store, claimed(store), analyze) == "failed"

    assert state(store, run_id)[1] == (
        "report.json: cannot be read back: not a stepsplit report (Expected `str`, got `object` -"
        " at `$.run.device`); please report it as a bug, with the recording"
    )
    assert not (store.find_folder(run_id) / "report.json").exists()


def test_of_many_workers_one_gets_a_job(store: Store) -> None:
    runs = {queued(store) for _ in range(6)}

    with ThreadPoolExecutor(12) as pool:
        jobs = list(pool.map(store.jobs.claim, [f"w{n}" for n in range(12)]))
    got = [job.run_id for job in jobs if job is not None]
    while job := store.jobs.claim("last"):
        got.append(job.run_id)

    assert sorted(got) == sorted(runs)


def test_an_expired_job_is_claimed_again_and_its_late_result_refused(store: Store) -> None:
    run_id = queued(store)
    silent = claimed(store, "silent", lease_s=-1)

    taken = claimed(store, "other")

    assert (taken.run_id, taken.attempt) == (run_id, 2)
    assert not store.jobs.extend_lease(silent) and not store.jobs.complete(
        silent, analysis().report
    )
    assert state(store, run_id) == ("running", None)
    assert store.jobs.extend_lease(taken) and store.jobs.complete(taken, analysis().report)
    assert state(store, run_id) == ("done", None)


def test_after_three_attempts_a_job_fails_and_says_so(store: Store) -> None:
    run_id = queued(store)
    for attempt in (1, 2, 3):
        assert claimed(store, lease_s=-1).attempt == attempt

    assert store.jobs.claim("w") is None

    assert state(store, run_id) == ("failed", SPENT)


def test_a_dead_workers_jobs_are_free_at_once(store: Store) -> None:
    run_id = queued(store)
    for _ in range(2):
        claimed(store, "dead")
        store.jobs.release_worker("dead")
        assert state(store, run_id) == ("queued", None)
    claimed(store, "dead")

    store.jobs.release_worker("dead")

    assert state(store, run_id) == ("failed", SPENT)


def test_returning_a_job_does_not_count_as_an_attempt(store: Store) -> None:
    run_id = queued(store)

    assert store.jobs.put_back(claimed(store))

    assert state(store, run_id) == ("queued", None)
    assert claimed(store).attempt == 1


def test_progress_is_shown_while_it_runs(store: Store) -> None:
    run_id = queued(store)
    job = claimed(store)

    assert store.jobs.record_progress(job, 1.5, "reading\nfiles")

    run = found(store, run_id)
    assert (run.progress, run.progress_note, run.pending) == (1.0, "reading files", True)
    store.jobs.complete(job, analysis().report)
    assert found(store, run_id).progress is None


def test_progress_is_reported_at_most_once_per_second() -> None:
    notes: list[tuple[float, str]] = []
    clock = iter([0.0, 0.5, 1.0, 1.1])
    progress = throttle_progress(
        lambda share, note: notes.append((share, note)), lambda: next(clock)
    )

    for done in (10, 20, 30, 100):
        progress(done, 100)

    assert notes == [
        (pytest.approx(0.09), "reading"),
        (pytest.approx(0.27), "reading"),
        (0.9, "splitting steps"),
    ]


def test_ingest_analyzes_what_was_uploaded(store: Store) -> None:
    seen: list[Path] = []

    def analyze(folder: Path, progress: Progress) -> Analysis:
        seen.append(folder)
        progress(1, 2)
        return analysis()

    run_id = queued(store)

    assert process_job(store, claimed(store), analyze) == "done"
    assert seen == [store.find_folder(run_id) / "input"]
    assert store.load_report(run_id) == analysis().report


def test_bad_data_fails_the_run_with_the_uploaded_file_name(store: Store) -> None:
    def analyze(folder: Path, progress: Progress) -> Analysis:
        raise DataError(folder / "rank0.json", "the file is torn\0", "copy it again", rank=0)

    run_id = queued(store)

    assert process_job(store, claimed(store), analyze) == "failed"
    assert state(store, run_id) == (
        "failed",
        r"rank0.json (rank 0): the file is torn\x00; copy it again",
    )
    assert store.jobs.claim("w") is None


def test_a_bug_fails_the_run_and_is_logged(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    def analyze(folder: Path, progress: Progress) -> Analysis:
        raise ZeroDivisionError

    run_id = queued(store)

    assert process_job(store, claimed(store), analyze) == "failed"
    message = "internal error: ZeroDivisionError; see the worker's log"
    assert state(store, run_id) == ("failed", message)
    assert "ZeroDivisionError" in caplog.text


def test_a_run_removed_meanwhile_leaves_no_files(store: Store) -> None:
    run_id = queued(store)
    job = claimed(store)
    store.delete(run_id)

    assert process_job(store, job, known_analysis) == "lost"
    assert not store.find_folder(run_id).exists()
