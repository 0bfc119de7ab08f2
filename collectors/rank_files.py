"""The files of a rank: written raw within a step, packed in the background, gathered later."""

from __future__ import annotations

import contextlib
import filecmp
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepsplit.collectors import pack
from stepsplit.collectors.guard import CollectError, warn_lost, warn_on_failure
from stepsplit.collectors.nccl import dump_flight_json
from stepsplit.collectors.pack import drop
from stepsplit.collectors.rank_record import (
    RankRecord,
    build_flight_path,
    build_raw_path,
    build_record_path,
    build_spec,
    build_trace_path,
    read_record,
)
from stepsplit.collectors.run_spec import RunSpec, from_json, replace_whole, write_run_json

# Packs raw files in a separate process, so that no training step waits for gzip.

PACK_TIMEOUT_S = 60.0
"""How long the end of a job waits for its files to be packed; packing continues after that."""


@dataclass(frozen=True, slots=True)
class PackTask:
    """A raw file and its packed output."""

    raw: Path
    out: Path


class Packer:
    """The packing processes of one recording."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []

    def pack(self, files: list[PackTask], thin: bool = False) -> None:
        """Packs the files in a new process; in this one if it cannot be started."""
        arguments = ["--thin"] * thin + [str(p) for each in files for p in (each.raw, each.out)]
        if not files:
            return
        # -I -S: a folder on PYTHONPATH must not start another agent in the new process.
        command = [sys.executable, "-I", "-S", str(Path(pack.__file__)), *arguments]
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # A signal to the job's process group must not interrupt the packing.
                start_new_session=True,
            )
        except OSError:
            pack.pack_all(arguments)
            return
        self._processes.append(process)

    def wait(self, timeout_s: float = PACK_TIMEOUT_S) -> bool:
        """Waits at most `timeout_s`; returns whether all files are packed."""
        deadline = time.monotonic() + timeout_s
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        self._processes = [each for each in self._processes if each.poll() is None]
        return not self._processes


# The files of one rank.


class RankFiles:
    """A rank's trace and Flight Recorder dump in the folder of a recording."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._packer = Packer()

    def clear(self) -> None:
        """Creates the folder and removes the files of an earlier recording of this rank."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for place in (build_trace_path, build_flight_path, build_record_path):
            place(self._folder, self._rank).unlink(missing_ok=True)
        for draft in self._folder.glob(f".rank{self._rank}_*"):
            draft.unlink(missing_ok=True)

    def write(self, profiler: Any, since_unix_ns: int, thin: bool) -> None:
        """Writes the profiler's trace (None: no trace) and the Flight Recorder dump."""
        files: list[PackTask] = []
        if profiler is not None:
            with warn_on_failure(self._rank, "its trace"):
                files.append(self._write_raw_trace(profiler))
        with warn_on_failure(self._rank, "its Flight Recorder dump"):
            files += self._write_raw_flight(since_unix_ns)
        with warn_on_failure(self._rank, "its packed files"):
            self._packer.pack(files, thin)

    def wait(self) -> None:
        """Waits a limited time for the packing, and warns if it has not ended."""
        if not self._packer.wait():
            warn_lost(self._rank, "no data so far, but its files are still being packed")

    def _write_raw_trace(self, profiler: Any) -> PackTask:
        out = build_trace_path(self._folder, self._rank)
        with _open_raw(out) as raw:
            profiler.export_chrome_trace(str(raw))
        return PackTask(raw, out)

    def _write_raw_flight(self, since_unix_ns: int) -> list[PackTask]:
        dump = dump_flight_json(self._rank, since_unix_ns)
        if dump is None:
            return []
        out = build_flight_path(self._folder, self._rank)
        with _open_raw(out) as raw:
            raw.write_bytes(dump)
        return [PackTask(raw, out)]


@contextmanager
def _open_raw(out: Path) -> Iterator[Path]:
    """Yields the path of the raw file for `out`; deletes it if writing fails."""
    raw = build_raw_path(out)
    try:
        yield raw
    except BaseException:
        drop(raw)
        raise


# Merges the folders of several hosts into one recording, with a run.json of all ranks.


@dataclass(frozen=True, slots=True)
class GatherResult:
    """The merged recording; missing: ranks of the job without a record."""

    out: Path
    ranks: tuple[int, ...]
    missing: tuple[int, ...]


def gather(folders: Sequence[Path], out: Path) -> GatherResult:
    """Copies the files of all folders to `out` and writes run.json from the ranks' records.

    Raises CollectError if a folder is missing, no folder has a record, or two folders have
    different files of the same name, which means that they belong to different runs.
    """
    for folder in folders:
        if not folder.is_dir():
            raise CollectError(f"{folder}: no such folder; give the folders that the ranks wrote")
    for folder in folders:
        if folder.resolve() != out.resolve():
            _copy_files(folder, out)
    records = _read_records(out)
    if not records:
        raise CollectError(f"{out}: no rank*_record.json; give the folders that the ranks wrote")
    write_run_json(out, build_spec(records, _read_spec(out)))
    ranks = tuple(record.rank.rank for record in records)
    return GatherResult(out, ranks, tuple(sorted(set(range(records[0].world_size)) - set(ranks))))


def _read_records(folder: Path) -> tuple[RankRecord, ...]:
    """The records in the folder, sorted by rank. Raises CollectError if one is invalid."""
    records = []
    for path in folder.glob("rank*_record.json"):
        try:
            records.append(read_record(path.read_bytes()))
        except ValueError as error:
            raise CollectError(f"{path}: {error}; remove it") from None
    return tuple(sorted(records, key=lambda record: record.rank.rank))


def _copy_files(folder: Path, out: Path) -> None:
    for path in _list_files(folder):
        target = out / path.relative_to(folder)
        if target.name == "run.json" and target.exists():
            continue
        if target.exists() and not filecmp.cmp(path, target, shallow=False):
            raise CollectError(
                f"{target} exists and {path} differs from it; are they from the same run?"
            )
        if not target.exists():
            with replace_whole(target) as draft:
                shutil.copy2(path, draft)


def _list_files(folder: Path) -> Iterable[Path]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return (path for path in files if not path.name.startswith("."))


def _read_spec(folder: Path) -> RunSpec | None:
    try:
        return from_json((folder / "run.json").read_bytes())
    except (OSError, ValueError):
        return None
