"""Runs are added, keep their reports, are renamed and removed, in every kind of database."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy
from sqlalchemy import insert, select
from sqlalchemy.pool import Pool
from support.report_builders import analysis
from support.store_builders import found, queued, state, uploaded

from stepsplit.analyzer.buckets import Split
from stepsplit.analyzer.errors import StepsplitError, UsageError
from stepsplit.analyzer.report.report import MemoryRow
from stepsplit.dashboard.store import database, runs
from stepsplit.dashboard.store.metrics import METRIC_NAMES, CheckRow, RankRow
from stepsplit.dashboard.store.run_row import Tag
from stepsplit.dashboard.store.schema import DELETED, VERDICTS
from stepsplit.dashboard.store.store import FileRow, Store, StoredSize

MS = 1_000_000


@pytest.fixture
def store(database_url: str, tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(database_url, tmp_path / "artifacts")
    yield opened
    opened.close()


def test_an_imported_report_comes_back_whole(store: Store) -> None:
    made = analysis()

    run_id = store.import_report("demo", made.report, made.tables, [Tag("branch", "main")])

    assert store.load_report(run_id) == made.report
    tables = store.load_tables(run_id)
    assert tables is not None and (tables.segments.dur_ns == made.tables.segments.dur_ns).all()
    run = found(store, run_id)
    assert (run.name, run.state, run.error) == ("demo", "done", None)
    assert (run.tags, run.progress) == ((Tag("branch", "main"),), None)


def test_the_headline_is_the_median_of_full_steps(store: Store) -> None:
    made = analysis()

    numbers = found(store, store.import_report("demo", made.report, made.tables)).headline

    assert numbers is not None
    assert (numbers.world_size, numbers.mesh, numbers.backend) == (4, "pp2 tp2", "nccl")
    assert (numbers.steps, numbers.warnings) == (4, 1)
    assert (numbers.bubble_fraction, numbers.mfu) == (0.214, 0.412)
    full = [row for row in made.report.steps if row.kind == "full"]
    assert numbers.median_step is not None
    # Every rank's step is equally long, and four steps have two middles.
    steps = sorted(row.step_ns for row in full if row.rank == 0)
    assert numbers.median_step.step_ns == (steps[1] + steps[2]) // 2
    assert sum(numbers.median_step.shares) == pytest.approx(1)
    total = sum(row.step_ns for row in full)
    waits = sum(row.skew_ns + row.bubble_ns for row in full) / total
    assert numbers.median_step.sum_share("skew", "bubble") == pytest.approx(waits)


def test_a_report_without_steps_has_no_medians(store: Store) -> None:
    made = analysis()
    report = type(made.report)(run=made.report.run)

    run_id = store.import_report("empty", report, made.tables)

    numbers = found(store, run_id).headline
    assert numbers is not None
    assert (numbers.median_step, numbers.steps) == (None, 0)
    assert (store.numbers.read_ranks(run_id), store.numbers.read_history("step_ns")) == ((), ())


def test_metrics_make_a_history_over_runs(store: Store) -> None:
    made = analysis()
    peaks = tuple(MemoryRow(rank, peak, *[None] * 7) for rank, peak in ((0, 5), (1, 9), (2, None)))
    full = type(made.report)(**{**_fields(made.report), "memory": peaks})

    first = store.import_report("first", made.report, made.tables)
    second = store.import_report("second", full, made.tables)

    assert [(p.run_id, p.value) for p in store.numbers.read_history("mfu")] == [
        (first, 0.412),
        (second, 0.412),
    ]
    assert [(p.name, p.value) for p in store.numbers.read_history("peak_memory_bytes")] == [
        ("second", 9.0)
    ]
    kept = {name for name in METRIC_NAMES if store.numbers.read_history(name)}
    assert kept == set(METRIC_NAMES)


def test_every_rank_has_its_row(store: Store) -> None:
    made = analysis()

    ranks = store.numbers.read_ranks(store.import_report("demo", made.report, made.tables))

    assert [(row.rank, row.host) for row in ranks] == [
        (0, "node01"), (1, "node01"), (2, "node02"), (3, "node02"),
    ]  # fmt: skip
    assert ranks[0] == RankRow(
        0,
        "node01",
        144_890_000,
        Split(94_843_000, 9_870_000, 2_400_000, 987_000, 31_397_000, 2 * MS, 3 * MS),
    )


def test_runs_are_listed_newest_first(store: Store) -> None:
    first, second = store.add("first"), store.add("second")

    assert [run.id for run in store.list_runs()] == [second, first]
    assert store.find_run("0" * 12) is None


def test_untrusted_text_fits_every_database(store: Store) -> None:
    run_id = store.add("a\0\x1bb\n" + "x" * 300, [Tag("k" * 99, "\udcff")])

    run = found(store, run_id)

    assert run.name == r"a\x00\x1bb " + "x" * 188 + "…"
    assert run.tags == (Tag("k" * 63 + "…", r"\udcff"),)


def test_a_removed_run_leaves_nothing(store: Store, tmp_path: Path) -> None:
    made = analysis()
    kept, gone = uploaded(store), store.import_report("x", made.report, made.tables)
    running = queued(store)

    assert store.delete(gone) and store.delete(running) and not store.delete(gone)

    assert [run.id for run in store.list_runs()] == [kept]
    assert store.numbers.read_history("mfu") == ()
    assert store.jobs.claim("w") is None
    assert [path.name for path in (tmp_path / "artifacts").iterdir()] == [kept]


def test_the_last_check_result_is_kept_until_the_run_is_deleted(store: Store) -> None:
    other, judged = store.add("other"), store.add("judged")
    store.verdicts.record(judged, "inconclusive", "too few runs")

    store.verdicts.record(judged, "regressed", "step +12.3 %\0\n" + "x" * 600)

    kept = CheckRow("regressed", r"step +12.3 %\x00 " + "x" * 482 + "…")
    assert found(store, judged).verdict == kept
    assert {run.id: run.verdict for run in store.list_runs()} == {judged: kept, other: None}
    assert store.delete(judged)
    with store._database.begin_read() as connection:
        assert connection.execute(select(VERDICTS)).all() == []


def test_leftover_files_of_deleted_runs_are_swept(store: Store) -> None:
    gone, kept = uploaded(store), uploaded(store)
    with store._database.begin_write() as connection:
        runs.remove_run(connection, gone)
    assert store.find_folder(gone).exists()

    store.sweep()

    assert (store.find_folder(gone).exists(), store.find_folder(kept).exists()) == (False, True)
    with store._database.begin_read() as connection:
        assert runs.list_removed_runs(connection) == []


def test_a_run_waits_until_its_files_are_complete(store: Store) -> None:
    run_id = store.add("run")
    assert not store.queue(run_id)

    assert store.files.begin_upload(run_id, FileRow("rank0", 0, False))
    assert not store.queue(run_id)
    store.files.write(run_id, FileRow("rank0", 7, True))

    assert store.files.sum_size(run_id) == StoredSize(1, 7)
    assert store.queue(run_id) and not store.queue(run_id)
    assert state(store, run_id) == ("queued", None)
    assert not store.files.begin_upload(run_id, FileRow("late", 0, False))


def test_tokens_are_valid_until_revoked(store: Store) -> None:
    assert not store.tokens.has_active()
    secret = store.tokens.create("ci").secret
    (token,) = store.tokens.list_tokens()
    assert (token.name, token.last_used_unix_ns, token.revoked) == ("ci", None, False)

    assert store.tokens.verify(secret) and not store.tokens.verify(secret + "x")
    assert secret.startswith("sst_") and store.tokens.has_active()
    assert store.tokens.list_tokens()[0].last_used_unix_ns is not None

    assert store.tokens.revoke(token.id) and not store.tokens.revoke("unknown")
    assert not store.tokens.verify(secret) and not store.tokens.has_active()


def test_the_store_counts_runs_jobs_and_bytes(store: Store) -> None:
    store.add("uploading")
    queued(store, rank0=b"12345")

    counts = store.count_contents()

    assert (counts.runs, counts.jobs) == ({"uploading": 1, "queued": 1}, {"queued": 1})
    assert counts.upload_bytes == 5 and 0 < counts.oldest_queued_s < 60
    assert store.is_ready()


def test_writers_of_one_process_wait_their_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight writes of 50 ms take longer than SQLite itself lets one of them wait."""
    monkeypatch.setattr(database, "_WAIT_MS", 200)
    opened = database.open_database(f"sqlite:///{tmp_path}/runs.db")

    def write(number: int) -> None:
        with opened.begin_write() as connection:
            connection.execute(insert(DELETED).values(run_id=f"{number:012x}"))
            time.sleep(0.05)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))

    with opened.begin_read() as connection:
        assert len(connection.execute(select(DELETED)).all()) == 8
    opened.close()


def test_an_id_cannot_escape_the_folder(store: Store) -> None:
    with pytest.raises(UsageError):
        store.find_folder("../../etc")


@pytest.mark.parametrize(
    "url",
    [
        "nonsense",
        "nosuchdatabase://host/x",
        "sqlite:////proc/x/y.db",
        "postgresql://me:secret@127.0.0.1:1/x",
    ],
)
def test_an_unusable_store_is_a_one_line_error(url: str, tmp_path: Path) -> None:
    with pytest.raises(StepsplitError) as caught:
        Store.open(url, tmp_path / "artifacts")
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


def _fields(report: object) -> dict[str, object]:
    return {name: getattr(report, name) for name in type(report).__struct_fields__}  # type: ignore[attr-defined]


def test_a_store_that_is_dropped_closes_its_connections(tmp_path: Path) -> None:
    closed: list[object] = []

    def note(connection: object, _: object) -> None:
        closed.append(connection)

    sqlalchemy.event.listen(Pool, "close", note)
    try:
        store = Store.open(f"sqlite:///{tmp_path}/own.db", tmp_path / "artifacts")
        del store
        gc.collect()
    finally:
        sqlalchemy.event.remove(Pool, "close", note)
    assert closed
