"""The recordings that a server of tools may read: below its folders, and the runs of its store."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.readers.compression import is_url
from stepsplit.analyzer.report.io import (
    REPORT_NAME,
    TABLES_NAME,
    is_analyzed,
    is_report,
    load_tables,
    read_report,
)
from stepsplit.collectors.formats.file_names import is_recorded_name, is_trace_name
from stepsplit.collectors.safe_io.regular_file import describe_special, leads_outside
from stepsplit.dashboard.agents.answers import mark_recorded

if TYPE_CHECKING:
    from stepsplit.analyzer.diagnose.hang.result import Hang
    from stepsplit.analyzer.report.report import Report
    from stepsplit.analyzer.report.tables import Tables
    from stepsplit.dashboard.store.store import Store

RUN = "run:"
"""Begins the name of a run of the store."""

_CACHED = 4
"""Analyses that are kept: an agent asks several questions of one recording."""

_MAX_FILES = 20_000
"""Files of one recording; a folder with more is the home of many."""

# user/project/experiment/run is four; a home directory has many more folders than recordings.
_MAX_DEPTH, _MAX_LISTED = 4, 1_000

_MAY_BE_RECORDED = re.compile(r".*\d.*\.json(\.(gz|zst|xz|bz2))?|.*_\d+|.*\d\.(pkl|pickle)")
"""Names with a number, as the traces of ranks and the dumps of the Flight Recorder have them."""


@dataclass(frozen=True, slots=True)
class OpenedRun:
    """A recording or run with its report.

    Attributes:
        name: as it was asked for.
        report: its report.
        load_tables: reads or computes its tables; None if only the report was kept.
        path: its place; None for a run of a store, whose traces are not read again.
    """

    name: str
    report: Report
    load_tables: Callable[[], Tables | None]
    path: Path | None


@dataclass(frozen=True, slots=True)
class ListedRun:
    """A recording or run as it is listed; kind is a text of ours."""

    name: str
    kind: str
    title: str = ""


@dataclass(frozen=True)
class Recordings:
    """What may be read.

    Attributes:
        roots: folders; paths are taken relative to each, and lead nowhere else.
        store: a store of runs; None without one.
    """

    roots: tuple[Path, ...] = ()
    store: Store | None = None
    _opened: dict[object, OpenedRun] = field(default_factory=dict)
    # One analysis at a time, and none twice: agents ask in parallel.
    _lock: threading.RLock = field(default_factory=threading.RLock)

    # Places.

    def find_path(self, name: str) -> Path:
        """The place below a root. Raises UsageError for any other, and for what is not a regular
        file or folder; it does not say whether there is something outside."""
        if is_url(name):
            raise UsageError(f"{mark_recorded(name)} is a URL; only paths are read here")
        for root in self.roots:
            base = Path(os.path.realpath(root))
            try:
                # Links are followed first, and what they lead to is judged.
                place = Path(os.path.realpath(base / name, strict=True))
            except (OSError, ValueError):
                continue
            # Silent: to say that something is there would answer a question that was not allowed.
            if not place.is_relative_to(base):
                continue
            if problem := describe_special(place):
                raise UsageError(f"{mark_recorded(name)} is {problem}; name a file or a folder")
            # The files of a folder are read with it, and those next to a file: a link that leads
            # out of the root would show what lies outside.
            folder = place if place.is_dir() else place.parent
            walked = folder.rglob("*") if place.is_dir() else folder.iterdir()
            for number, path in enumerate(walked, 1):
                if leads_outside(path, base):
                    inner = mark_recorded(path.relative_to(base).as_posix())
                    raise UsageError(
                        f"{mark_recorded(name)}: {inner} is a link that leads out of the folders"
                        " that this server reads; remove it"
                    )
                if number > _MAX_FILES:
                    raise UsageError(
                        f"{mark_recorded(name)} has more than {_MAX_FILES:,} files; name one"
                        " recording"
                    )
            return place
        where = ", ".join(mark_recorded(str(root)) for root in self.roots) or "no folder"
        raise UsageError(
            f"{mark_recorded(name)}: nothing of this name below the folders that this server reads"
            f" ({where}); the tool recordings lists what there is"
        )

    def find_job(self, name: str) -> Path:
        """The place of a job.toml, whose own references stay below the roots too."""
        from stepsplit.analyzer.model.config_decode import read_table
        from stepsplit.analyzer.model.config_file import list_referenced_files

        path = self.find_path(name)
        if not path.is_file():
            raise UsageError(f"{mark_recorded(name)} is a folder; name a job.toml")
        for reference in list_referenced_files(read_table(path)):
            self.find_path(str(path.parent / reference))
        return path

    # Runs and recordings.

    def list_runs(self) -> list[ListedRun]:
        """The runs of the store, newest first, then the recordings below the roots."""
        listed = []
        if self.store is not None:
            for run in self.store.list_runs():
                roles = [run.name_role(number) for number in range(len(run.roles))]
                kind = "hang" if run.is_hang else f"run, {run.state}"
                own = [one for one in roles if one is not None]
                for one in own or [run]:
                    listed.append(ListedRun(f"{RUN}{one.id}", kind, one.name))
        for root in self.roots:
            base = Path(os.path.realpath(root))
            for found in _walk_recordings(base, base, 0):
                if len(listed) >= _MAX_LISTED:
                    return listed
                listed.append(found)
        return listed

    def open(self, name: str) -> OpenedRun:
        """The recording or run, analyzed unless it has a report. Raises StepsplitError."""
        with self._lock:
            if name.startswith(RUN):
                run_id, store = name.removeprefix(RUN), self.store
                run = None if store is None else store.find_run_or_role(run_id)
                if store is None or run is None:
                    no_run = "no such run; the tool recordings lists them"
                    raise UsageError(f"{mark_recorded(name)}: {no_run}")
                if run.is_hang:
                    problem = "has Flight Recorder dumps and no traces; use the tool hang"
                    raise UsageError(f"{name} {problem}")
                if run.has_roles:
                    raise UsageError(f"{name} has several roles; name one, such as {name}.0")
                if run.state != "done":
                    why = f": {mark_recorded(run.error)}" if run.error else ""
                    raise UsageError(f"{name} is {run.state}{why}; it has no report")
                report = store.load_report(run_id)
                return OpenedRun(name, report, lambda: store.load_tables(run_id), None)
            path = self.find_path(name)
            # What changes when a file of the recording does.
            files = sorted(path.rglob("*")) if path.is_dir() else [path]
            stats = [(str(file), file.lstat()) for file in files]
            key = tuple((file, one.st_mtime_ns, one.st_size) for file, one in stats)
            # Taken out and put back at the end: the first one is that which was not asked for
            # longest.
            found = self._opened.pop(key, None) or _open_path(name, path)
            self._opened[key] = found
            while len(self._opened) > _CACHED:
                self._opened.pop(next(iter(self._opened)))
            return found

    def open_hang(self, name: str) -> Hang:
        """What the calls of a job hung at. Raises StepsplitError."""
        from stepsplit.analyzer.diagnose.hang.find import read_calls

        if not name.startswith(RUN):
            return read_calls([self.find_path(name)])
        run_id, store = name.removeprefix(RUN), self.store
        run = None if store is None else store.find_run(run_id)
        if store is None or run is None or not run.is_hang:
            raise UsageError(f"{mark_recorded(name)}: no such run with Flight Recorder dumps alone")
        return store.load_hang(run_id)


def _walk_recordings(folder: Path, base: Path, depth: int) -> Iterator[ListedRun]:
    """The recordings in the folder and below, which links do not lead to."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    files = [one.name for one in entries if one.is_file(follow_symlinks=False)]
    traces = sum(is_trace_name(name) for name in files)
    place = folder.relative_to(base).as_posix()
    if REPORT_NAME in files:
        yield ListedRun(place, f"report, and {_count(traces, 'trace')}" if traces else "report")
    elif traces or any(is_recorded_name(name) for name in files):
        yield ListedRun(place, f"recording with {_count(traces, 'trace')}")
    elif depth < _MAX_DEPTH:
        # Files are known by their content when they are read; these may as well be something else.
        if others := sum(_MAY_BE_RECORDED.fullmatch(name) is not None for name in files):
            files_of = _count(others, "file")
            yield ListedRun(place, f"{files_of} that may be traces or dumps of ranks")
        for entry in entries:
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                yield from _walk_recordings(Path(entry.path), base, depth + 1)


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"


def _open_path(name: str, path: Path) -> OpenedRun:
    from stepsplit.analyzer.analysis import Analysis, examine_or_find_hang

    def analyze() -> Analysis:
        analysis = examine_or_find_hang([path])
        if not isinstance(analysis, Analysis):
            raise UsageError(
                f"{mark_recorded(name)} has Flight Recorder dumps and no traces; use the tool hang"
            )
        return analysis

    if is_report(path):
        return OpenedRun(name, read_report(path), lambda: _load_tables(path.parent), path)
    if not is_analyzed(path):
        analysis = analyze()
        return OpenedRun(name, analysis.report, lambda: analysis.tables, path)
    # A list, as the function below fills it once.
    kept: list[Tables | None] = []

    def load() -> Tables | None:
        if not kept:
            # Tables that were deleted are computed again if the traces are still there.
            has_traces = any(is_trace_name(file.name) for file in path.iterdir())
            tables = _load_tables(path)
            kept.append(analyze().tables if tables is None and has_traces else tables)
        return kept[0]

    return OpenedRun(name, read_report(path), load, path)


def _load_tables(folder: Path) -> Tables | None:
    tables = folder / TABLES_NAME
    return load_tables(tables) if tables.is_dir() else None
