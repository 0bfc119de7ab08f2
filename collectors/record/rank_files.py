"""The files of one rank, written raw within a step and packed in the background."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stepsplit.collectors.formats.file_names import (
    build_flight_path,
    build_raw_path,
    build_record_path,
    build_trace_path,
)
from stepsplit.collectors.guard import forget_full_folder, warn_lost, warn_on_failure
from stepsplit.collectors.probes.flight_recorder import dump_flight_json
from stepsplit.collectors.record.pack import (
    check_complete,
    drop,
    name_activations,
    name_raw,
    remove_scratch,
)
from stepsplit.collectors.record.packer import MemoryDevice, Packer, PackTask
from stepsplit.collectors.record.scratch_disk import choose_raw_folder
from stepsplit.collectors.safe_io.atomic_file import PRIVATE, make_owner_folder


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
                trace = build_trace_path(self._folder, self._rank)
                with _open_raw(trace) as raw:
                    profiler.export_chrome_trace(str(raw))
                    shorten_trace_name(raw, name_raw(trace).name)
                files.append(_name_whole(raw, trace))
        has_trace = bool(files)
        with warn_on_failure(self._rank, "its Flight Recorder dump"):
            dump = dump_flight_json(self._rank, since_unix_ns)
            if dump is not None:
                flight = build_flight_path(self._folder, self._rank)
                with _open_raw(flight) as raw:
                    raw.write_bytes(dump)
                files.append(_name_whole(raw, flight))
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
            # The last one: the events before could have such a text in their names.
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
