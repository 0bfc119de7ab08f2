"""Files of runs in a folder and in remote storage: complete, durable, fetched if missing."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from report_builders import analysis
from store_builders import claimed, known_analysis, queued, state

from stepsplit.analyzer.analysis import Analysis
from stepsplit.analyzer.errors import DataError, UsageError
from stepsplit.analyzer.readers.workers import Progress
from stepsplit.dashboard.store.ingest import process_job
from stepsplit.dashboard.store.store import Store


@pytest.fixture(params=["folder", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "folder":
        yield str(tmp_path / "artifacts")
        return
    name = uuid.uuid4().hex
    yield f"memory://{name}"
    fsspec.filesystem("memory").store.clear()


def _open(place: str, tmp_path: Path, machine: str) -> Store:
    return Store.open(f"sqlite:///{tmp_path}/runs.db", place, tmp_path / machine)


def test_another_machine_reads_and_removes_an_imported_run(place: str, tmp_path: Path) -> None:
    made = analysis()
    here, there = _open(place, tmp_path, "here"), _open(place, tmp_path, "there")

    run_id = here.import_report("demo", made.report, made.tables)

    assert there.load_report(run_id) == made.report
    tables = there.load_tables(run_id)
    assert tables is not None and (tables.boxes.dur_ns == made.tables.boxes.dur_ns).all()
    assert there.delete(run_id)
    with pytest.raises(DataError):
        _open(place, tmp_path, "third").load_report(run_id)


def test_a_worker_elsewhere_sees_the_uploads(place: str, tmp_path: Path) -> None:
    here, there = _open(place, tmp_path, "here"), _open(place, tmp_path, "there")
    run_id = queued(here, **{"exp1/rank0": b"a" * 3_000_000, "exp1/deep/rank1": b"b"})
    seen: dict[str, int] = {}

    def analyze(folder: Path, progress: Progress) -> Analysis:
        files = [path for path in folder.rglob("*") if path.is_file()]
        seen.update({str(path.relative_to(folder)): path.stat().st_size for path in files})
        return analysis()

    assert process_job(there, claimed(there), analyze) == "done"

    assert seen == {"exp1/rank0": 3_000_000, "exp1/deep/rank1": 1}
    assert state(here, run_id) == ("done", None)
    assert here.load_report(run_id) == analysis().report
    if place.startswith("memory"):
        assert not (tmp_path / "there" / run_id / "input").exists()


def test_results_are_read_from_the_copy_once_it_is_here(tmp_path: Path) -> None:
    place = f"memory://{uuid.uuid4().hex}"
    here, there = _open(place, tmp_path, "here"), _open(place, tmp_path, "there")
    run_id = queued(here)
    process_job(here, claimed(here), known_analysis)
    there.load_report(run_id)

    fsspec.filesystem("memory").store.clear()

    assert there.load_report(run_id) == analysis().report
    assert there.load_tables(run_id) is not None


def test_deleted_tables_are_none(tmp_path: Path) -> None:
    made = analysis()
    store = _open(str(tmp_path / "artifacts"), tmp_path, "here")
    run_id = store.import_report("demo", made.report, made.tables)
    for path in (store.find_folder(run_id) / "tables").iterdir():
        path.unlink()

    assert store.load_tables(run_id) is None


@pytest.mark.parametrize("place", ["nosuch://bucket/x", "/proc/nowhere"])
def test_an_unusable_location_is_a_one_line_error(place: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="choose another --artifacts"):
        _open(place, tmp_path, "here")
