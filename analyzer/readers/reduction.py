"""A recording reduced to a table per rank, without its raw traces."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from stepsplit.analyzer.errors import UsageError, make_write_error, write
from stepsplit.analyzer.readers.kernel_rules import BUILT_IN
from stepsplit.analyzer.readers.recording import read_recording_files
from stepsplit.analyzer.readers.recording_files import SKIPPED, open_recording
from stepsplit.analyzer.readers.run_metadata import read_metadata
from stepsplit.analyzer.readers.workers import Progress, ignore_progress
from stepsplit.analyzer.trace import Note
from stepsplit.collectors.safe_io.atomic_file import PRIVATE


class Reduction(Struct, frozen=True):
    """The ranks whose tables were written, and the sizes of their traces and of the tables.

    skipped are notes on the files that were not read."""

    ranks: tuple[int, ...]
    raw_bytes: int
    table_bytes: int
    skipped: tuple[Note, ...] = ()


def reduce_recording(
    places: Sequence[str | Path],
    out: Path,
    workers: int = 1,
    progress: Progress = ignore_progress,
) -> Reduction:
    """Writes a table per rank, from which `analyze` makes the report that it makes of the traces.

    Each host can reduce the traces of its own ranks into one folder: files of the same ranks are
    replaced. run.json and the rank records are copied. Raises as read_recording, and UsageError if
    the folder cannot be written.
    """
    from stepsplit.analyzer.readers.rank_table import name_table, write_table

    check_outside(out, places)
    with open_recording(places) as files:
        recording = read_recording_files(files, workers, progress, BUILT_IN)
        copies, raw_bytes = {}, 0
        for kind, sources in files.by_kind.items():
            for source in sources:
                if kind.is_copied:
                    copies[source.inner.name] = read_metadata(source)
                if kind.is_raw:
                    with source.open_local() as path:
                        raw_bytes += path.stat().st_size
    table_bytes = 0
    for name, content in copies.items():
        # As private as the traces, of which the tables have the names.
        write(out / name, content, PRIVATE)
    for trace in recording.traces:
        path = out / name_table(trace.rank)
        try:
            write_table(path, trace)
        except OSError as error:
            raise make_write_error(path, error) from None
        table_bytes += path.stat().st_size
    ranks = tuple(trace.rank for trace in recording.traces)
    skipped = tuple(note for note in recording.notes if note.code == SKIPPED)
    return Reduction(ranks, raw_bytes, table_bytes, skipped)


def check_outside(out: Path, places: Sequence[str | Path]) -> None:
    """Raises UsageError if the folder is or lies in one of the places: with a second file of each
    rank, neither could be read."""
    whole = Path(os.path.realpath(out))
    for place in places:
        if Path(os.path.realpath(place)) in (whole, *whole.parents):
            raise UsageError(f"{out} is in the recording {place}; choose a folder outside of it")
