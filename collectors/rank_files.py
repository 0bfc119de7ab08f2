"""The files of a rank: written raw within a step, packed in the background, gathered later."""

from __future__ import annotations

import atexit
import contextlib
import errno
import filecmp
import json
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from stepsplit.collectors import pack
from stepsplit.collectors.guard import (
    CollectError,
    forget_full_folder,
    warn,
    warn_lost,
    warn_on_failure,
)
from stepsplit.collectors.helper_process import PYTHON
from stepsplit.collectors.launcher import read_identity
from stepsplit.collectors.nccl import dump_flight_json
from stepsplit.collectors.pack import (
    check_complete,
    drop,
    name_activations,
    name_raw,
    remove_scratch,
)
from stepsplit.collectors.private_folder import make_scratch_folder
from stepsplit.collectors.rank_record import (
    RankRecord,
    build_flight_path,
    build_raw_path,
    build_record_path,
    build_spec,
    build_trace_path,
    read_record,
)
from stepsplit.collectors.regular_file import leads_outside, read_regular
from stepsplit.collectors.run_spec import (
    PRIVATE,
    RUN_FILE,
    RunSpec,
    from_json,
    make_owner_folder,
    replace_whole,
    write_run_json,
)

# Packs raw files in a separate process, so that no training step waits for gzip.

PACK_TIMEOUT_S = 60.0
"""How long the end of a job waits for its files to be packed."""

_KEEP_TIMEOUT_S = 60.0
"""How long it then waits until the raw files have their own names, copied from another disk."""


MemoryDevice = Literal["cpu", "device"]


@dataclass(frozen=True, slots=True)
class PackTask:
    """A raw file and its packed output."""

    raw: Path
    out: Path


class Packer:
    """The packing processes of one recording."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []

    def pack(
        self, files: list[PackTask], thin: bool = False, memory: MemoryDevice | None = None
    ) -> None:
        """Packs the files in a new process; if none can be started, keeps the raw files.

        memory: also measures the activations on that device.
        """
        if not files:
            return
        arguments = ["--thin"] * thin + (["--memory", memory] if memory else [])
        arguments += [str(path) for each in files for path in (each.raw, each.out)]
        # -I -S: a folder on PYTHONPATH must not start another agent in the new process.
        command = [*PYTHON, "-I", "-S", str(Path(pack.__file__)), *arguments]
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # A signal to the job's process group must not interrupt the packing.
                start_new_session=True,
            )
        except OSError:
            # Neither gzip nor a copy to another disk may hold up the training.
            kept = [(each.raw, each.out) for each in files]
            threading.Thread(target=pack.keep_all, args=(kept,), name="stepsplit-keep").start()
            return
        if not self._processes:
            atexit.register(self.finish)
        self._processes.append(process)

    def wait(self, timeout_s: float = PACK_TIMEOUT_S) -> bool:
        """Waits at most `timeout_s`; returns whether all files are packed."""
        deadline = time.monotonic() + timeout_s
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        self._processes = [each for each in self._processes if each.poll() is None]
        if not self._processes:
            atexit.unregister(self.finish)
        return not self._processes

    def finish(self, timeout_s: float = PACK_TIMEOUT_S) -> None:
        """Packs what can be packed in time, and gives the other raw files their own names.

        For the end of the process: under Slurm and Kubernetes the packing processes die with it.
        """
        if self.wait(timeout_s):
            return
        for process in self._processes:
            process.terminate()
        self.wait(_KEEP_TIMEOUT_S)


# The files of one rank.


class RankFiles:
    """A rank's trace and Flight Recorder dump in the folder of a recording."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._packer = Packer()

    def make_folder(self) -> None:
        """Creates the folder and removes what an interrupted recording has left half written."""
        forget_full_folder(self._folder)
        make_owner_folder(self._folder)
        for draft in self._folder.glob(f".rank{self._rank}_*"):
            draft.unlink(missing_ok=True)

    def has_trace(self) -> bool:
        """Whether this rank has a trace, perhaps of an attempt before a restart."""
        path = build_trace_path(self._folder, self._rank)
        return path.exists() or name_raw(path).exists()

    def clear(self) -> None:
        """Removes the files of an earlier recording of this rank."""
        for place in (build_trace_path, build_flight_path, build_record_path):
            path = place(self._folder, self._rank)
            path.unlink(missing_ok=True)
            name_raw(path).unlink(missing_ok=True)

    def write(
        self, profiler: Any, since_unix_ns: int, thin: bool, memory: MemoryDevice | None = None
    ) -> bool:
        """Writes the profiler's trace (None: no trace) and the Flight Recorder dump.

        memory: also measures the activations on that device; see read_activations. Returns whether
        there is a trace. The raw files are whole when this returns, and keep their content under
        their own names whatever ends the job afterwards.
        """
        files: list[PackTask] = []
        if profiler is not None:
            with warn_on_failure(self._rank, "its trace"):
                files.append(self._write_raw_trace(profiler))
        has_trace = bool(files)
        with warn_on_failure(self._rank, "its Flight Recorder dump"):
            files += self._write_raw_flight(since_unix_ns)
        with warn_on_failure(self._rank, "its packed files"):
            self._packer.pack(files, thin, memory)
        return has_trace

    def wait(self) -> None:
        """Waits a limited time for the packing, and warns if it has not ended."""
        if not self._packer.wait():
            warn_lost(self._rank, "no data so far, but its files are still being packed")

    def read_activations(self) -> int | None:
        """The activations in the trace, once; None if they are not measured, or not yet."""
        path = name_activations(build_trace_path(self._folder, self._rank))
        try:
            activations_bytes = int(path.read_text())
            path.unlink()
        except (OSError, ValueError):
            return None
        return activations_bytes

    def _write_raw_trace(self, profiler: Any) -> PackTask:
        out = build_trace_path(self._folder, self._rank)
        with _open_raw(out) as raw:
            profiler.export_chrome_trace(str(raw))
            shorten_trace_name(raw, name_raw(out).name)
        return _name_whole(raw, out)

    def _write_raw_flight(self, since_unix_ns: int) -> list[PackTask]:
        dump = dump_flight_json(self._rank, since_unix_ns)
        if dump is None:
            return []
        out = build_flight_path(self._folder, self._rank)
        with _open_raw(out) as raw:
            raw.write_bytes(dump)
        return [_name_whole(raw, out)]


_TRACE_NAME = re.compile(rb'("traceName"\s*:\s*)"(?:[^"\\]|\\.)*"')

_TAIL_BYTES = 64 << 10
"""More than what Kineto writes after the events of a trace."""


def shorten_trace_name(raw: Path, name: str) -> None:
    """Replaces the absolute path of the file, which Kineto writes after the events, by the name."""
    with raw.open("r+b") as file:
        begin = max(file.seek(0, os.SEEK_END) - _TAIL_BYTES, 0)
        file.seek(begin)
        tail = file.read()
        matches = list(_TRACE_NAME.finditer(tail))
        if matches:
            last = matches[-1]
            file.seek(begin + last.start())
            file.write(last[1] + json.dumps(name).encode() + tail[last.end() :])
            file.truncate()


@contextmanager
def _open_raw(out: Path) -> Iterator[Path]:
    """Yields the hidden path of the raw file for `out`; deletes it if it is not written whole.

    Raises OSError (ENOSPC) if the disk is full, which the profiler does not report.
    """
    raw = build_raw_path(choose_raw_folder(out.parent) / out.name)
    try:
        yield raw
        check_complete(raw)
        raw.chmod(PRIVATE)
    except BaseException as error:
        # Ask before the partial file is deleted.
        full = isinstance(error, Exception) and _is_full(raw.parent)
        drop(raw)
        remove_scratch(raw, out)
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(raw)) from error
        raise


_FULL_BYTES = 1 << 20
"""A failed export on a disk with less free space is attributed to the disk."""


def _is_full(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return shutil.disk_usage(folder).free < _FULL_BYTES
    return False


def _name_whole(raw: Path, out: Path) -> PackTask:
    """Gives the whole raw file its own name, in the folder that it was written to."""
    named = name_raw(raw.with_name(out.name))
    raw.replace(named)
    return PackTask(named, out)


# Where raw files are written: next to the packed ones, but not on a shared file system.

SCRATCH_VARIABLES = ("STEPSPLIT_SCRATCH", "SLURM_TMPDIR", "TMPDIR")
"""Environment variables that name a folder on a disk of this host, the first one first."""

MIN_FREE_BYTES = 4 << 30
"""Free space that a scratch disk needs for each rank of this host."""

MOUNTS = Path("/proc/self/mountinfo")

_SHARED = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "gfs2", "glusterfs", "gpfs", "lustre", "nfs", "nfs4"}
    | {"ocfs2", "orangefs", "panfs", "pvfs2", "smb3", "vastnfs", "virtiofs", "wekafs"}
)
_LOCAL_FUSE = ("fuse.fuse-overlayfs", "fuse.squashfuse", "fuseblk")
DISKS = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "xfs", "zfs"})
"""File systems on a disk of the host."""


def choose_raw_folder(out: Path) -> Path:
    """The folder for the raw files of a recording in `out`; a new private one if it is another.

    A raw trace is about ten times as large as the packed one, and all ranks write theirs at once,
    within a step: too much for a shared file system. It is `out` all the same if no scratch folder
    will do. /tmp will only on a disk: in memory or in a container's own file system it may take
    what the training needs.
    """
    if not is_shared(read_file_system(out)):
        return out
    named = [Path(os.environ[name]) for name in SCRATCH_VARIABLES if os.environ.get(name)]
    candidates = [folder for folder in named if not is_shared(read_file_system(folder))]
    if read_file_system(Path("/tmp")) in DISKS:
        candidates.append(Path("/tmp"))
    for folder in filter(_has_space, candidates):
        # The profiler opens its file by the path: only the folder keeps links of others out of it.
        is_ours = str(folder) == os.environ.get("STEPSPLIT_SCRATCH", "").rstrip("/")
        with contextlib.suppress(OSError):
            return make_scratch_folder(folder, f"stepsplit-{out.name}-", named=is_ours)
    return out


def read_file_system(path: Path) -> str:
    """The type of the file system that holds the path, such as "ext4"; "" if it is not known."""
    place, longest, kind = os.path.realpath(path), "", ""
    try:
        lines = MOUNTS.read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        head, _, tail = line.partition(" - ")
        mount = head.split()[4].replace("\\040", " ")
        if len(mount) >= len(longest) and f"{place}/".startswith(f"{mount.rstrip('/')}/"):
            longest, kind = mount, tail.split()[0]
    return kind


def is_shared(file_system: str) -> bool:
    """Whether other hosts write to a file system of this type too."""
    is_fuse = file_system.startswith("fuse") and file_system not in _LOCAL_FUSE
    return file_system in _SHARED or is_fuse


def _has_space(folder: Path) -> bool:
    try:
        free_bytes = shutil.disk_usage(folder).free
    except OSError:
        return False
    return free_bytes >= MIN_FREE_BYTES * read_identity().local_world_size


# Merges the folders of several hosts into one recording, with a run.json of all ranks.


@dataclass(frozen=True, slots=True)
class GatherResult:
    """The merged recording; missing: ranks of the job without a record."""

    out: Path
    ranks: tuple[int, ...]
    missing: tuple[int, ...]


def gather(folders: Sequence[Path], out: Path) -> GatherResult:
    """Copies the files of all folders to `out` and writes run.json from the ranks' records.

    Raises CollectError if a folder is missing, no folder has a record, two folders have different
    files of the same name, which means that they belong to different runs, or `out` cannot be
    written; then what was copied is removed.
    """
    for folder in folders:
        if not folder.is_dir():
            raise CollectError(f"{folder}: no such folder; give the folders that the ranks wrote")
    copies = _plan_copies([one for one in folders if one.resolve() != out.resolve()], out)
    new = [
        source
        for target, source in copies.items()
        if target.parent == out and target.match(_RECORDS)
    ]
    records = _read_records([*out.glob(_RECORDS), *new])
    if not records:
        raise CollectError(f"{out}: no {_RECORDS}; give the folders that the ranks wrote")
    try:
        for target, source in copies.items():
            with replace_whole(target) as draft:
                shutil.copy2(source, draft)
        write_run_json(out, build_spec(records, _read_spec(out)))
    except OSError as error:
        _remove_copies(copies, out)
        raise CollectError(f"{out}: {error.strerror}; nothing is left there") from None
    ranks = tuple(record.rank.rank for record in records)
    return GatherResult(out, ranks, tuple(sorted(set(range(records[0].world_size)) - set(ranks))))


def _remove_copies(targets: Iterable[Path], out: Path) -> None:
    """Removes these files, and the folders that are empty without them."""
    folders = {out}
    for target in targets:
        target.unlink(missing_ok=True)
        folders |= {each for each in target.parents if each.is_relative_to(out)}
    for folder in sorted(folders, key=lambda each: -len(each.parts)):
        with contextlib.suppress(OSError):
            folder.rmdir()


_RECORDS = "rank*_record.json"


def _read_records(paths: Iterable[Path]) -> tuple[RankRecord, ...]:
    """The records in these files, sorted by rank. Raises CollectError if one is invalid."""
    records = []
    for path in paths:
        try:
            records.append(read_record(read_regular(path)))
        except ValueError as error:
            raise CollectError(f"{path}: {error}; remove it") from None
    return tuple(sorted(records, key=lambda record: record.rank.rank))


def _plan_copies(folders: Iterable[Path], out: Path) -> dict[Path, Path]:
    """The file in `out` -> its source. Raises CollectError before anything is copied if two files
    of the same name differ."""
    copies: dict[Path, Path] = {}
    for folder in folders:
        for path in _list_files(folder):
            target = out / path.relative_to(folder)
            known = copies.get(target, target)
            if not known.exists():
                copies[target] = path
            elif target.name != RUN_FILE and not filecmp.cmp(path, known, shallow=False):
                raise CollectError(
                    f"{known} exists and {path} differs from it; are they from the same run?"
                )
    return copies


def _list_files(folder: Path) -> Iterable[Path]:
    for path in sorted(folder.rglob("*")):
        if leads_outside(path, folder):
            warn(f"{path} is not copied: it is a link out of the folder")
        elif path.is_file() and not path.name.startswith("."):
            yield path


def _read_spec(folder: Path) -> RunSpec | None:
    try:
        return from_json(read_regular(folder / RUN_FILE))
    except (OSError, ValueError):
        return None
