"""Runs are added, move through their states, and keep their reports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from report_builders import analysis

from stepsplit.analyzer.analysis import Analysis
from stepsplit.analyzer.errors import DataError, StepsplitError, UsageError
from stepsplit.dashboard.store.ingest import Worker, ingest
from stepsplit.dashboard.store.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(f"sqlite:///{tmp_path}/deep/runs.db", tmp_path / "artifacts")
    yield opened
    opened.close()


def test_an_imported_report_comes_back_whole(store: Store) -> None:
    made = analysis()

    run_id = store.import_report("demo", made.report, made.tables)

    assert store.report(run_id) == made.report
    tables = store.tables(run_id)
    assert tables is not None and (tables.segments.dur_ns == made.tables.segments.dur_ns).all()
    run = store.run(run_id)
    assert run is not None and (run.name, run.state, run.error) == ("demo", "done", None)


def test_the_headline_is_the_median_of_full_steps(store: Store) -> None:
    made = analysis()

    run = store.run(store.import_report("demo", made.report, made.tables))

    assert run is not None and run.headline is not None
    numbers = run.headline
    assert (numbers.world_size, numbers.mesh, numbers.backend) == (4, "pp2 tp2", "nccl")
    assert (numbers.steps, numbers.warnings) == (4, 1)
    full = [row for row in made.report.steps if row.kind == "full"]
    assert numbers.middle is not None
    # Every rank's step is equally long, and four steps have two middles.
    steps = sorted(row.step_ns for row in full if row.rank == 0)
    assert numbers.middle.step_ns == (steps[1] + steps[2]) // 2
    assert sum(numbers.middle.shares) == pytest.approx(1)
    total = sum(row.step_ns for row in full)
    waits = sum(row.skew_ns + row.bubble_ns for row in full) / total
    assert numbers.middle.share("skew", "bubble") == pytest.approx(waits)


def test_a_report_without_steps_has_no_medians(store: Store) -> None:
    made = analysis()
    report = type(made.report)(run=made.report.run)

    run = store.run(store.import_report("empty", report, made.tables))

    assert run is not None and run.headline is not None
    assert (run.headline.middle, run.headline.steps) == (None, 0)


def test_runs_are_listed_newest_first(store: Store) -> None:
    first, second = store.add("first"), store.add("second")

    assert [run.id for run in store.runs()] == [second, first]
    assert store.run("0" * 12) is None


def test_a_queued_run_is_claimed_once(store: Store) -> None:
    run_id = store.add("run")

    assert not store.start(run_id)
    assert store.queue(run_id) and not store.queue(run_id)
    assert store.start(run_id) and not store.start(run_id)


def test_ingest_analyzes_what_was_uploaded(store: Store) -> None:
    seen: list[Path] = []

    def analyze(paths: Sequence[Path]) -> Analysis:
        seen.extend(paths)
        return analysis()

    run_id = _queued(store)
    ingest(store, run_id, analyze)

    assert seen == [store.folder(run_id) / "input"]
    assert _state(store, run_id) == ("done", None)


def test_bad_data_fails_the_run_in_the_uploaders_words(store: Store) -> None:
    def analyze(paths: Sequence[Path]) -> Analysis:
        raise DataError(paths[0] / "rank0.json", "the file is torn", "copy it again", rank=0)

    run_id = _queued(store)
    ingest(store, run_id, analyze)

    told = "rank0.json (rank 0): the file is torn; copy it again"
    assert _state(store, run_id) == ("failed", told)


def test_a_defect_fails_the_run_and_is_logged(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    def analyze(paths: Sequence[Path]) -> Analysis:
        raise ZeroDivisionError

    run_id = _queued(store)
    worker = Worker(store, analyze)
    worker.submit(run_id)
    worker.stop()

    told = "internal error: ZeroDivisionError; see the server's log"
    assert _state(store, run_id) == ("failed", told)
    assert "ZeroDivisionError" in caplog.text


def test_a_new_worker_takes_up_what_was_left(store: Store) -> None:
    half, queued, uploading = _queued(store), _queued(store), store.add("uploading")
    store.start(half)

    worker = Worker(store, analysis)
    worker.resume()
    worker._pool.shutdown(wait=True)

    states = [_state(store, run_id)[0] for run_id in (half, queued, uploading)]
    assert states == ["failed", "done", "failed"]


def test_an_id_never_leads_out_of_the_folder(store: Store) -> None:
    with pytest.raises(UsageError):
        store.folder("../../etc")


@pytest.mark.parametrize("url", ["nonsense", "nosuchdatabase://host/x", "sqlite:////proc/x/y.db"])
def test_a_store_that_cannot_be_opened_is_one_line(url: str, tmp_path: Path) -> None:
    with pytest.raises(StepsplitError) as caught:
        Store.open(url, tmp_path / "artifacts")
    assert "\n" not in str(caught.value)


def _queued(store: Store) -> str:
    run_id = store.add("run")
    store.queue(run_id)
    return run_id


def _state(store: Store, run_id: str) -> tuple[str, str | None]:
    run = store.run(run_id)
    assert run is not None
    return run.state, run.error
