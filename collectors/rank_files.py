"""The files of one rank: written raw within a step, packed beside the training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stepsplit.collectors.flight import flight_json
from stepsplit.collectors.guard import guarded, warn_lost
from stepsplit.collectors.pack import drop
from stepsplit.collectors.packing import Packed, Packer
from stepsplit.collectors.paths import flight_path, raw_path, record_path, trace_path


class RankFiles:
    """A rank's trace and Flight Recorder dump in the folder of a recording."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._packer = Packer()

    def clear(self) -> None:
        """Makes the folder, without an older recording of this rank: it must not pass for this."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for place in (trace_path, flight_path, record_path):
            place(self._folder, self._rank).unlink(missing_ok=True)
        for draft in self._folder.glob(f".rank{self._rank}_*"):
            draft.unlink(missing_ok=True)

    def write(self, profiler: Any, since_unix_ns: int, thin: bool) -> None:
        """Writes what the profiler (None: there is none) and the Flight Recorder hold."""
        files: list[Packed] = []
        if profiler is not None:
            with guarded(self._rank, "its trace"):
                files.append(self._raw_trace(profiler))
        with guarded(self._rank, "its Flight Recorder dump"):
            files += self._raw_flight(since_unix_ns)
        with guarded(self._rank, "its packed files"):
            self._packer.pack(files, thin)

    def wait(self) -> None:
        """Waits for the packing, but not for ever."""
        if not self._packer.wait():
            warn_lost(self._rank, "nothing yet, but its files are still being packed")

    def _raw_trace(self, profiler: Any) -> Packed:
        out = trace_path(self._folder, self._rank)
        with _raw(out) as raw:
            profiler.export_chrome_trace(str(raw))
        return Packed(raw, out)

    def _raw_flight(self, since_unix_ns: int) -> list[Packed]:
        dump = flight_json(self._rank, since_unix_ns)
        if dump is None:
            return []
        out = flight_path(self._folder, self._rank)
        with _raw(out) as raw:
            raw.write_bytes(dump)
        return [Packed(raw, out)]


@contextmanager
def _raw(out: Path) -> Iterator[Path]:
    """The raw file of one to be packed; where it cannot be written nothing of it stays."""
    raw = raw_path(out)
    try:
        yield raw
    except BaseException:
        drop(raw)
        raise
