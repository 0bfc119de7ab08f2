"""Compresses the raw files of a rank to .gz in a separate process, off the training's path.

python pack.py [--thin] [--memory cpu|device] RAW OUT [RAW OUT ...]

Needs only the standard library and four files of this package, which it runs by their paths, so
that it starts quickly in any Python. It runs at the lowest priority, at most two at a time on a
host, outlives the rank that started it, and writes its output atomically. A raw file is removed
once its packed file is there. Asked to end (SIGTERM), it moves the raw files that are left to
their own names instead, such as rank0_trace.json for rank0_trace.json.gz: nothing that is whole is
lost. With --memory it also measures the activations in a trace and writes them to a hidden file,
for the rank.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gzip
import os
import runpy
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING or __package__:
    from stepsplit.collectors.record.trace_events import Thinning, measure_activations, scan_events
    from stepsplit.collectors.safe_io.atomic_file import make_owner_folder, whole_file
    from stepsplit.collectors.safe_io.private_folder import make_meeting_folder, open_private
    from stepsplit.collectors.safe_io.safe_text import escape_controls
else:

    def _load(file: str) -> dict[str, Any]:
        return runpy.run_path(str(Path(__file__).parents[1] / file))

    _events, _atomic = _load("record/trace_events.py"), _load("safe_io/atomic_file.py")
    Thinning, scan_events = _events["Thinning"], _events["scan_events"]
    measure_activations = _events["measure_activations"]
    make_owner_folder, whole_file = _atomic["make_owner_folder"], _atomic["whole_file"]
    _private = _load("safe_io/private_folder.py")
    make_meeting_folder, open_private = _private["make_meeting_folder"], _private["open_private"]
    escape_controls = _load("safe_io/safe_text.py")["escape_controls"]

# zlib's default: higher levels take much longer, and make traces hardly smaller.
_LEVEL = 6
_CHUNK = 1 << 20
# A complete trace ends with brackets and white space.
_TAIL = 64


def main(arguments: list[str]) -> int:
    """Packs the given files at the lowest priority; returns 1 if one could not be packed."""
    with contextlib.suppress(OSError):
        os.nice(19)
    # Ctrl-C in a terminal is meant for the training; its recording must still be written.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _raise_stopped)
    thin = arguments[:1] == ["--thin"]
    rest = arguments[thin:]
    memory = rest[1] if rest[:1] == ["--memory"] else None
    paths = [Path(argument) for argument in rest[2 if memory else 0 :]]
    waiting = list(zip(paths[::2], paths[1::2], strict=True))
    try:
        with take_turn():
            return pack_all(waiting, thin, memory)
    except _Stopped:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return keep_all(waiting)


def pack_all(
    waiting: list[tuple[Path, Path]], thin: bool = False, memory: str | None = None
) -> int:
    """Packs the (raw, out) files and removes each from the list; returns 1 if one was not packed.

    A raw file that cannot be packed is kept under its own name, with a line on stderr.
    """
    status = 0
    while waiting:
        raw, out = waiting[0]
        try:
            if memory is not None and "_trace" in out.name:
                write_activations(raw, out, memory)
            pack(raw, out, thin)
            drop(raw)
            remove_scratch(raw, out)
        except (OSError, ValueError) as error:
            status = _report_failure(raw, out, error)
        del waiting[0]
    return status


def pack(raw: Path, out: Path, thin: bool = False) -> None:
    """Writes the raw JSON as a .gz atomically: write, fsync, rename.

    thin: keep only the trace events that the time split needs. Raises OSError, and ValueError for a
    truncated raw file.
    """
    check_complete(raw)
    # The file stays open: it may get its own name meanwhile.
    with raw.open("rb") as source:
        parts = _read_thinned(source) if thin and "_trace" in out.name else _read_stripped(source)
        # mtime 0: the same content gives the same file.
        with whole_file(out) as file, gzip.GzipFile("", "wb", _LEVEL, file, mtime=0) as packed:
            for part in parts:
                packed.write(part)


_LEAST_FREE_BYTES = 64 * 1024
"""With less space the profiler cannot have written a trace."""


def check_complete(raw: Path) -> None:
    """Raises ValueError if the file is truncated or not there: the profiler does not report a full
    disk. Raises OSError if the disk is full and the file is not there."""
    if not raw.exists():
        if shutil.disk_usage(raw.parent).free < _LEAST_FREE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(raw))
        raise ValueError("the profiler could not write it; is a limit of file sizes set?")
    with raw.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - _TAIL))
        if not file.read().rstrip().endswith((b"}", b"]")):
            raise ValueError("the file is truncated; is the disk full?")


def drop(raw: Path) -> None:
    """Deletes the raw file, and the temporary file of an interrupted profiler export."""
    for path in (raw, raw.with_name(f"{raw.name}.tmp")):
        path.unlink(missing_ok=True)


# A raw file that is not packed keeps its content under its own name.


def name_raw(out: Path) -> Path:
    """The name of a whole raw file next to its packed one: without .gz."""
    return out.with_name(out.name.removesuffix(".gz"))


def keep_all(files: list[tuple[Path, Path]]) -> int:
    """Moves the (raw, out) files that are left to their own names; returns 1 if one was lost."""
    status = 0
    for raw, out in files:
        # It was packed just before the signal.
        if out.exists() and not raw.exists():
            continue
        try:
            check_complete(raw)
            keep(raw, out)
        except (OSError, ValueError) as error:
            status = _report_failure(raw, out, error)
    return status


def keep(raw: Path, out: Path) -> None:
    """Moves the raw file to its own name, by a copy from another disk. Raises OSError."""
    target = name_raw(out)
    if raw == target:
        return
    make_owner_folder(target.parent)
    try:
        raw.replace(target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        with raw.open("rb") as source, whole_file(target) as file:
            shutil.copyfileobj(source, file, _CHUNK)
        drop(raw)
    remove_scratch(raw, out)


def remove_scratch(raw: Path, out: Path) -> None:
    """Removes the raw file's own folder once it is empty."""
    if raw.parent != out.parent:
        with contextlib.suppress(OSError):
            raw.parent.rmdir()


def _report_failure(raw: Path, out: Path, error: Exception) -> int:
    """Keeps a whole raw file where it can, deletes a truncated one, and says so on stderr."""
    reason = getattr(error, "strerror", None) or str(error)
    with contextlib.suppress(OSError, ValueError):
        check_complete(raw)
        with contextlib.suppress(OSError):
            keep(raw, out)
            raw = name_raw(out)
        _warn(f"{out.name} is not packed: {reason}; kept {raw}")
        return 1
    with contextlib.suppress(OSError):
        drop(raw)
    _warn(f"lost {out}: {reason}")
    return 1


def _warn(text: str) -> None:
    sys.stderr.write(f"stepsplit: {escape_controls(text)}\n")


class _Stopped(BaseException):
    """The process was asked to end."""


def _raise_stopped(number: int, frame: FrameType | None) -> None:
    raise _Stopped


# At most two packings at a time on a host: they must not take the cores or memory of the training.

MOST_AT_ONCE = 2
# Packing takes seconds to minutes.
_RETRY_S = 0.2


@contextlib.contextmanager
def take_turn() -> Iterator[None]:
    """Waits until fewer than two other processes of this user on this host hold a turn.

    A turn ends with its process. Without a private folder for the locks there is no limit: another
    user could hold them for ever.
    """
    with contextlib.ExitStack() as stack:
        locks: list[BinaryIO] = []
        with contextlib.suppress(OSError):
            place = make_meeting_folder(local=True)
            for number in range(MOST_AT_ONCE):
                path = place / f"pack{number}.lock"
                locks.append(stack.enter_context(open(path, "ab", opener=open_private)))
        while locks and not any(map(_is_free, locks)):
            time.sleep(_RETRY_S)
        yield


def _is_free(file: BinaryIO) -> bool:
    try:
        return try_lock(file)
    except OSError:
        # This file system has no locks, so there is no limit.
        return True


def try_lock(file: BinaryIO) -> bool:
    """Locks the file until it is closed; false if another process has done so. Raises OSError."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read_stripped(file: BinaryIO) -> Iterator[bytes]:
    """The file without indentation; a line break is never inside a JSON string."""
    file.seek(0)
    while lines := file.readlines(_CHUNK):
        yield b"".join([line.strip() for line in lines])


def _read_thinned(file: BinaryIO) -> Iterator[bytes]:
    """The trace without the ops nested in an op that contains no communication.

    The times of compute do not change; the inner structure of an op is lost. Reads the file twice,
    and keeps about 20 bytes of each event in memory. A file with an invalid event is not thinned.
    """
    thinning = Thinning()
    try:
        begin, end = scan_events(file, thinning.add)
    except (ValueError, KeyError, TypeError) as error:
        _warn(f"a trace is packed in full instead of thin: {error!r}")
        yield from _read_stripped(file)
        return
    # By copying bytes, so that what is kept is exactly what the profiler wrote.
    yield from _read_range(file, 0, begin)
    separator = b""
    for first, last in thinning.list_kept_ranges():
        yield separator
        yield from _read_range(file, first, last)
        separator = b","
    yield from _read_range(file, end, None)


def _read_range(file: BinaryIO, begin: int, end: int | None) -> Iterator[bytes]:
    file.seek(begin)
    left = sys.maxsize if end is None else end - begin
    while left and (piece := file.read(min(_CHUNK, left))):
        left -= len(piece)
        yield piece


# Activations: the peak of the allocations in a step.


def name_activations(out: Path) -> Path:
    """The hidden file with the activations that were measured in a trace."""
    return out.with_name(f".{out.name.removesuffix('.json.gz')}_activations")


def write_activations(raw: Path, out: Path, device: str) -> None:
    """Measures the activations and writes them; without memory events there is no file."""
    with raw.open("rb") as file, contextlib.suppress(ValueError, KeyError, TypeError):
        activations_bytes = measure_activations(file, device)
        if activations_bytes is not None:
            with whole_file(name_activations(out)) as result:
                result.write(str(activations_bytes).encode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
