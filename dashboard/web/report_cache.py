"""Cache of reports and tables of finished runs; another analysis of a run makes new ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import Lock
from typing import Generic, TypeVar

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.report.report import Report
from stepsplit.analyzer.report.roles import RoleJob
from stepsplit.analyzer.report.tables import Tables
from stepsplit.dashboard.pages.components import View
from stepsplit.dashboard.pages.timeline import TimelineView
from stepsplit.dashboard.store.run_row import RunRow
from stepsplit.dashboard.store.store import Store

_CACHED_RUNS = 8

_CACHED_REPORTS = 16

_Value = TypeVar("_Value")


class _Slot(Generic[_Value]):
    """A value that is being computed or is available."""

    def __init__(self) -> None:
        self.lock, self.made = Lock(), list[_Value]()


class LruCache(Generic[_Value]):
    """An LRU cache that computes each value once, also under concurrent requests."""

    def __init__(self, max_size: int) -> None:
        self._most, self._lock = max_size, Lock()
        self._slots: OrderedDict[object, _Slot[_Value]] = OrderedDict()

    def get(self, key: object, make: Callable[[], _Value]) -> _Value:
        """The cached value of the key, computed by `make` if missing; exceptions are not cached."""
        with self._lock:
            slot = self._slots.setdefault(key, _Slot())
            self._slots.move_to_end(key)
            while len(self._slots) > self._most:
                self._slots.popitem(last=False)
        # Outside of the lock of the cache: a report that takes seconds holds up only those who want
        # the same one.
        with slot.lock:
            if not slot.made:
                slot.made.append(make())
            return slot.made[0]

    def find(self, key: object) -> _Value | None:
        """The cached value of the key; None if it is missing or still being computed."""
        with self._lock:
            slot = self._slots.get(key)
            return slot.made[0] if slot is not None and slot.made else None


class ReportCache:
    """Reports, tables and timelines of a store's finished runs."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._views: LruCache[View] = LruCache(_CACHED_RUNS)
        self._scenes: LruCache[TimelineView] = LruCache(_CACHED_RUNS)
        self._reports: LruCache[Report] = LruCache(_CACHED_REPORTS)

    def load_view(self, run: RunRow) -> View:
        """The report and tables of a finished run. Raises DataError."""
        return self._views.get((run.id, run.name, run.queued_unix_ns), lambda: self._read(run))

    def load_report_view(self, run: RunRow) -> View:
        """The report of a finished run without its tables. Raises DataError."""
        key = (run.id, run.queued_unix_ns)
        with self._hide_folder():
            report = self._reports.get(key, lambda: self._store.load_report(run.id))
        return View(run.name, report, None, run.id, is_role=run.is_role)

    def load_roles(self, run_id: str) -> tuple[RunRow, RoleJob] | None:
        """The run of that id and what its roles do; None if it is no job of several roles. Raises
        DataError."""
        run = self._store.find_run(run_id)
        if run is None or not run.has_roles:
            return None
        return run, self._store.load_roles(run.id)

    def load_finished_run(self, run_id: str) -> View:
        """The finished run of that id. Raises DataError if there is none."""
        return self.load_view(self._find_finished(run_id))

    def load_timeline(self, run_id: str) -> TimelineView:
        """The timeline of a finished run. Raises DataError if it is missing."""
        run = self._find_finished(run_id)
        view = self.load_view(run)
        return self._scenes.get(
            (run_id, run.queued_unix_ns), lambda: TimelineView(view.report, require_tables(view))
        )

    def _find_finished(self, run_id: str) -> RunRow:
        run = self._store.find_run_or_role(run_id)
        if run is None or not run.has_report:
            raise DataError(run_id, "no finished run has this id", "choose a run from the list")
        return run

    def _read(self, run: RunRow) -> View:
        with self._hide_folder():
            return replace(self.load_report_view(run), tables=self._store.load_tables(run.id))

    @contextmanager
    def _hide_folder(self) -> Iterator[None]:
        """Errors name files below the folder of all runs: where it is concerns no client."""
        try:
            yield
        except DataError as error:
            folder = self._store.artifacts.folder

            def hide(text: str) -> str:
                return text.replace(f"{folder.absolute()}/", "").replace(f"{folder}/", "")

            raise DataError(
                hide(error.where), hide(error.problem), hide(error.hint), error.rank
            ) from None


def require_tables(view: View) -> Tables:
    """The tables of a run. Raises DataError if they were deleted."""
    if view.tables is None:
        raise DataError(view.name, "its tables were deleted", "upload the recording again")
    return view.tables
