"""The cache of parsed traces: used while valid, rebuilt when stale, never trusted."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from support.builders import COMM_STREAM, GpuTrace
from support.reading import on_disk

from stepsplit.analyzer import KinetoFile
from stepsplit.analyzer.readers.kineto import cache, reader
from stepsplit.analyzer.readers.kineto.reader import read_cached
from stepsplit.analyzer.readers.kineto.trace_file import read_kineto


@pytest.fixture(autouse=True)
def small_files_too(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each test has a cache of its own, which keeps files of any size."""
    monkeypatch.setenv("STEPSPLIT_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(reader, "LEAST_CACHED_BYTES", 0)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    trace = GpuTrace(3, 8, groups=[("0", "tp", range(8))])
    trace.step(1, 0, 10).kernel("gemm", 0, 5, grid=[64, 1, 1]).all_reduce(5, 9)
    trace.wait_for_event(7, trace.record_event(6), on_stream=COMM_STREAM)
    return trace.write(tmp_path)


def same(one: KinetoFile, other: KinetoFile) -> bool:
    a, b = one.rows, other.rows
    columns = ("start_ns", "dur_ns", "category", "name_id", "lane", "correlation")
    waits = ("correlation", "stream", "on_stream", "recorded")
    return (
        all(np.array_equal(getattr(a.events, c), getattr(b.events, c)) for c in columns)
        and one.calls is not None
        and other.calls is not None
        and (one.calls.groups, one.calls.largest) == (other.calls.groups, other.calls.largest)
        and (a.events.names, a.events.lanes) == (b.events.names, b.events.lanes)
        and a.noted_row.tolist() == b.noted_row.tolist()
        and (a.noted_args, a.t0_unix_ns, a.counts) == (b.noted_args, b.t0_unix_ns, b.counts)
        and (one.header, one.notes) == (other.header, other.notes)
        and shapes_of(one) == shapes_of(other)
        and len(one.waits) == 1
        and all(np.array_equal(getattr(one.waits, c), getattr(other.waits, c)) for c in waits)
    )


def shapes_of(file: KinetoFile) -> list[tuple[int, str]]:
    shapes = file.rows.shapes
    return [
        (event, shapes.texts[text])
        for event, text in zip(shapes.event.tolist(), shapes.text_id.tolist(), strict=True)
    ]


def recalled(file: Path) -> KinetoFile | None:
    return cache.load(on_disk(file), file)


def cached_file() -> Path:
    folder = cache.cache_folder()
    assert folder is not None
    [found] = folder.glob("*.parquet")
    return found


def test_a_cached_trace_equals_the_read_one(file: Path) -> None:
    assert recalled(file) is None
    read = read_cached(on_disk(file))
    found = recalled(file)
    assert read is not None
    assert found is not None
    assert same(read, found)


def test_changed_content_is_read_again(file: Path) -> None:
    read_cached(on_disk(file))
    before = file.stat()
    GpuTrace(3, 8).step(1, 0, 10).kernel("gemm", 0, 6).write(file.parent)
    assert recalled(file) is None
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert recalled(file) is None
    read = read_cached(on_disk(file))
    assert read is not None
    assert read.rows.events.dur_ns.tolist()[-1] == 6_000


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "other"])
def test_a_damaged_cache_is_ignored(file: Path, damage: str) -> None:
    fresh = read_kineto(on_disk(file))
    read_cached(on_disk(file))
    cached = cached_file()
    whole = cached.read_bytes()
    flipped = bytearray(whole)
    flipped[40] ^= 0xFF
    new = {"cut": whole[:-20], "flip": bytes(flipped), "empty": b"", "other": b"PAR1 no PAR1"}
    cached.write_bytes(new[damage])
    assert recalled(file) is None
    read = read_cached(on_disk(file))
    assert read is not None
    assert fresh is not None
    assert same(read, fresh)
    assert recalled(file) is not None


def test_a_newer_reader_reads_again(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_cached(on_disk(file))
    monkeypatch.setattr(cache, "READER", "stepsplit.events/next")
    assert recalled(file) is None


def test_nothing_is_cached_if_the_user_disables_it(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPSPLIT_CACHE", "off")
    assert read_cached(on_disk(file)) is not None
    assert recalled(file) is None


def test_a_read_only_folder_only_disables_the_cache(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in the way").write_text("")
    monkeypatch.setenv("STEPSPLIT_CACHE", str(tmp_path / "in the way" / "cache"))
    assert read_cached(on_disk(file)) is not None


def test_the_oldest_entries_are_removed_when_the_folder_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [GpuTrace(rank).kernel("gemm", 0, 5).write(tmp_path) for rank in range(3)]
    for age, file in enumerate(files):
        read_cached(on_disk(file))
        os.utime(_newest(), (age, age))
    monkeypatch.setattr(cache, "MOST_BYTES", 2 * _newest().stat().st_size)
    extra = GpuTrace(9).kernel("gemm", 0, 5).write(tmp_path)
    read_cached(on_disk(extra))
    assert [recalled(file) is not None for file in [*files, extra]] == [False, False, True, True]


def _newest() -> Path:
    folder = cache.cache_folder()
    assert folder is not None
    return max(folder.glob("*.parquet"), key=lambda file: file.stat().st_mtime_ns)


def test_a_cache_that_others_may_write_is_not_read_and_its_links_are_not_written(
    file: Path, tmp_path: Path
) -> None:
    assert read_cached(on_disk(file)) is not None
    folder, name = _newest().parent, _newest().name
    (target := tmp_path / "target").write_text("mine")
    folder.chmod(0o777)
    _newest().unlink()
    (folder / name).symlink_to(target)

    assert recalled(file) is None
    assert read_cached(on_disk(file)) is not None

    assert target.read_text() == "mine"
    own = folder / f"stepsplit-{os.geteuid()}"
    assert (own / name).is_file() and own.stat().st_mode & 0o777 == 0o700
    assert recalled(file) is not None
    # One that is in the way of that, too, only disables the cache.
    own.chmod(0o777)
    assert recalled(file) is None
