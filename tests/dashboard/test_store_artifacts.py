"""Files of runs in a folder and in remote storage: complete, durable, fetched if missing."""

from __future__ import annotations

import multiprocessing
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from support.report_builders import analysis
from support.store_builders import claimed, known_analysis, queued, state, uploaded

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


class _BoundFiles(LocalFileSystem):
    """As the file systems of clouds: usable only in the process that has made it."""

    protocol = "bound"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.owner = os.getpid()

    def find(self, path: str, *args: Any, **options: Any) -> Any:
        """All files below. Raises RuntimeError in another process."""
        if os.getpid() != self.owner:
            raise RuntimeError("this class is not fork-safe")
        return super().find(path, *args, **options)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("bound://")))


def test_a_forked_process_opens_remote_artifacts_again(tmp_path: Path) -> None:
    fsspec.register_implementation("bound", _BoundFiles, clobber=True)
    store = Store.open(
        f"sqlite:///{tmp_path}/runs.db", f"bound://{tmp_path}/remote", tmp_path / "a"
    )
    run_id = uploaded(store)

    def fetch() -> None:
        store.reconnect()
        assert (store.artifacts.fetch_uploads(run_id) / "rank0").read_bytes() == b"trace"

    process = multiprocessing.get_context("fork").Process(target=fetch)
    process.start()
    process.join()

    assert process.exitcode == 0


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
