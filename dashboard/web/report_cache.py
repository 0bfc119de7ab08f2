"""Cache of reports and tables of finished runs, which never change."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Generic, TypeVar

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.report.tables import Tables
from stepsplit.dashboard.pages.components import View
from stepsplit.dashboard.pages.timeline import TimelineView
from stepsplit.dashboard.store.runs import RunRow
from stepsplit.dashboard.store.store import Store

_RUNS = 8

_Value = TypeVar("_Value")


class _Slot(Generic[_Value]):
    """A value that is being computed or is available."""

    def __init__(self) -> None:
        self.lock, self.made = Lock(), list[_Value]()


class Kept(Generic[_Value]):
    """An LRU cache that computes each value once, also under concurrent requests."""

    def __init__(self, most: int) -> None:
        self._most, self._lock = most, Lock()
        self._slots: OrderedDict[object, _Slot[_Value]] = OrderedDict()

    def get(self, key: object, make: Callable[[], _Value]) -> _Value:
        """The cached value of the key, computed by `make` if missing; exceptions are not cached."""
        slot = self._slot(key)
        with slot.lock:
            if not slot.made:
                slot.made.append(make())
            return slot.made[0]

    def _slot(self, key: object) -> _Slot[_Value]:
        with self._lock:
            slot = self._slots.setdefault(key, _Slot())
            self._slots.move_to_end(key)
            while len(self._slots) > self._most:
                self._slots.popitem(last=False)
            return slot


class Loaded:
    """Reports, tables and timelines of a store's finished runs."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._views: Kept[View] = Kept(_RUNS)
        self._scenes: Kept[TimelineView] = Kept(_RUNS)

    def view(self, run: RunRow) -> View:
        """The report and tables of a finished run. Raises DataError."""
        return self._views.get((run.id, run.name), lambda: self._read(run))

    def finished(self, run_id: str) -> View:
        """The finished run of that id. Raises DataError if there is none."""
        run = self._store.run(run_id)
        if run is None or run.state != "done":
            raise DataError(run_id, "no finished run has this id", "choose a run from the list")
        return self.view(run)

    def scene(self, run_id: str) -> TimelineView:
        """The timeline of a finished run. Raises DataError if it is missing."""
        view = self.finished(run_id)
        return self._scenes.get(run_id, lambda: TimelineView(view.report, tables_of(view)))

    def _read(self, run: RunRow) -> View:
        return View(run.name, self._store.report(run.id), self._store.tables(run.id), run.id)


def tables_of(view: View) -> Tables:
    """The tables of a run. Raises DataError if they were deleted."""
    if view.tables is None:
        raise DataError(view.name, "its tables were deleted", "upload the recording again")
    return view.tables
