"""Recordings of many ranks keep their events on disk, and their report is the same."""

from __future__ import annotations

import gc
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from benchmarks.fleet import Fleet, run_fleet, write_fleet

from stepsplit.analyzer import RankTrace
from stepsplit.analyzer.analysis import examine
from stepsplit.analyzer.readers import event_store, workers
from stepsplit.analyzer.readers.recording import read_recording
from stepsplit.analyzer.readers.reduction import reduce_recording
from stepsplit.analyzer.report.io import save

SAMPLES = Path(__file__).parents[2] / "sample_traces"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "fleet"
    write_fleet(run_fleet(Fleet(pp=2, dp=1, microbatches=2, layers=1, slow_ranks={5: 1.3})), folder)
    return folder


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files, for recordings of any size: small ones are stored too."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(event_store, "LEAST_BYTES", 0)
    monkeypatch.setattr(event_store, "LEAST_FILES", 1)
    monkeypatch.setattr(event_store, "MAPPED_BYTES", 1 << 16)
    return folder


def save_analysis(recording: Path, folder: Path, processes: int = 1) -> dict[str, bytes]:
    """The content of the saved files of a recording's analysis, by name."""
    analysis = examine([recording], processes)
    save(folder, analysis.report, analysis.tables)
    return read_files(folder)


def read_files(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def in_memory(fleet: Path) -> dict[str, bytes]:
    """The analysis of the fleet with its events in memory; made before the thresholds change."""
    return save_analysis(fleet, fleet.parent / "in_memory")


def list_stores(temporary: Path) -> list[Path]:
    return sorted(temporary.glob("stepsplit-events-*"))


def test_the_report_of_a_stored_fleet_is_the_same_to_the_byte(
    fleet: Path, tmp_path: Path, in_memory: dict[str, bytes], temporary: Path
) -> None:
    assert {"report.json", "tables/slices.parquet"} <= in_memory.keys()
    assert save_analysis(fleet, tmp_path / "stored") == in_memory
    gc.collect()
    assert not list_stores(temporary)


def test_worker_processes_write_into_the_same_store(
    fleet: Path,
    tmp_path: Path,
    in_memory: dict[str, bytes],
    temporary: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workers, "LEAST_BYTES", 0)
    recording = read_recording([fleet], 2)
    [store] = list_stores(temporary)
    assert len(list(store.glob("*.columns"))) == 2
    del recording
    assert save_analysis(fleet, tmp_path / "stored", 2) == in_memory


def test_rank_tables_are_stored_as_well(
    fleet: Path, tmp_path: Path, in_memory: dict[str, bytes], temporary: Path
) -> None:
    reduce_recording([fleet], tmp_path / "tables")
    stored = save_analysis(tmp_path / "tables", tmp_path / "stored")
    assert stored == in_memory


@pytest.mark.parametrize("name", ["dp4", "pp2_m8"])
def test_the_report_of_a_stored_sample_is_the_same_to_the_byte(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    in_memory = save_analysis(SAMPLES / name, tmp_path / "in_memory")
    request.getfixturevalue("temporary")
    assert save_analysis(SAMPLES / name, tmp_path / "stored") == in_memory


def test_traces_outlive_their_recording(fleet: Path, temporary: Path) -> None:
    trace: RankTrace = read_recording([fleet]).traces[3]
    gc.collect()
    assert len(list_stores(temporary)) == 1
    assert len(trace.events.start_ns) == len(trace.events) > 0
    assert (trace.events.ends_of(trace.kinds.computes) > 0).all()


def test_events_that_the_disk_does_not_hold_stay_in_memory(
    fleet: Path, tmp_path: Path, in_memory: dict[str, bytes], temporary: Path
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    try:
        analysis = examine([fleet])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    [file] = list_stores(temporary)[0].glob("*.columns")
    assert 0 < file.stat().st_size <= 200_000
    save(tmp_path / "stored", analysis.report, analysis.tables)
    assert read_files(tmp_path / "stored") == in_memory


_HELD_ANALYSIS = """
import sys, time
from stepsplit.analyzer import analysis
from stepsplit.analyzer.readers import event_store
from stepsplit.dashboard import cli

def hold(*_):
    print("read", flush=True)
    time.sleep(60)

event_store.LEAST_BYTES = 0
event_store.LEAST_FILES = 1
analysis.split_recording = hold
cli.main()
"""


@contextmanager
def hold_analysis(recording: Path, temporary: Path) -> Iterator[subprocess.Popen[str]]:
    """`stepsplit analyze` of a recording, in a process that has stored its events and waits."""
    command = [sys.executable, "-c", _HELD_ANALYSIS, "analyze", str(recording)]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "read\n"
            yield process
        finally:
            process.kill()


def test_a_cancelled_analysis_removes_its_store(tmp_path: Path) -> None:
    with hold_analysis(SAMPLES / "dp4", tmp_path) as process:
        assert len(list_stores(tmp_path)) == 1
        process.terminate()
        assert process.wait(20) == 128 + signal.SIGTERM
        assert process.stderr is not None
        assert process.stderr.read() == ""
    assert not list_stores(tmp_path)


@pytest.mark.slow
@pytest.mark.in_turn("analyzer/readers/event_store.py")
def test_the_store_of_a_killed_process_is_removed_by_the_next(
    temporary: Path, in_memory: dict[str, bytes], fleet: Path, tmp_path: Path
) -> None:
    with hold_analysis(SAMPLES / "dp4", temporary) as living:
        with hold_analysis(SAMPLES / "dp4", temporary):
            assert len(list_stores(temporary)) == 2
        assert len(list_stores(temporary)) == 2
        assert save_analysis(fleet, tmp_path / "stored") == in_memory
        gc.collect()
        [kept] = list_stores(temporary)
        assert living.poll() is None
    event_store.EventStore()
    assert not kept.exists()


def test_stores_that_others_may_have_planted_are_neither_opened_nor_removed(
    temporary: Path, tmp_path: Path
) -> None:
    temporary.chmod(0o1777)
    (mine := tmp_path / "mine").mkdir(mode=0o700)
    (mine / "in_use").touch()
    for name in ("pipe", "link", "lock-by-link", "open-to-all", *["theirs"] * (not os.geteuid())):
        place = temporary / f"stepsplit-events-{name}"
        if name == "link":
            place.symlink_to(mine)
            continue
        place.mkdir(mode=0o700)
        if name == "pipe":
            os.mkfifo(place / "in_use")
        elif name == "lock-by-link":
            (place / "in_use").symlink_to(mine / "in_use")
        else:
            (place / "in_use").touch()
        if name == "open-to-all":
            place.chmod(0o777)
        if name == "theirs":
            os.chown(place, 65534, 65534)
    planted = sorted(temporary.rglob("*"))

    store = event_store.EventStore()

    assert [path for path in planted if not os.path.lexists(path)] == []
    assert (mine / "in_use").exists()
    assert Path(store.path).stat().st_mode & 0o777 == 0o700


def test_columns_are_not_appended_through_a_link(
    tmp_path: Path, fleet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "target").write_bytes(b"mine")
    store = event_store.EventStore()
    Path(store.path, f"{os.getpid()}.columns").symlink_to(tmp_path / "target")
    [trace, *_] = read_recording([fleet]).traces

    assert event_store.store_events(store.path, trace.events) is trace.events
    assert (tmp_path / "target").read_bytes() == b"mine"
