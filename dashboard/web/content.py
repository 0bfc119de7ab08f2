"""From an address to what the page shows, kept for those who look at the same."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import orjson
from dash import html
from plotly.io.json import to_json_plotly

from stepsplit.analyzer.errors import DataError
from stepsplit.dashboard.pages.address import Address, Chosen
from stepsplit.dashboard.pages.compare import compare_page
from stepsplit.dashboard.pages.history import history_page, metric_of
from stepsplit.dashboard.pages.parts import nothing
from stepsplit.dashboard.pages.run import missing_page, run_page, waiting_page
from stepsplit.dashboard.pages.runs import runs_page
from stepsplit.dashboard.store.store import RunRow, Store
from stepsplit.dashboard.web.loaded import Kept, Loaded

_PAGES = 64


@dataclass(frozen=True, slots=True)
class Content:
    """A page's components, as dash takes them. Pending pages are asked for again, and drawn again
    where their mark is another."""

    children: Any
    pending: bool = False
    mark: str = ""


class Contents:
    """The pages of a store. Those of finished runs are kept as the browser gets them."""

    def __init__(self, store: Store, loaded: Loaded) -> None:
        self._store, self._loaded = store, loaded
        self._kept: Kept[dict[str, Any]] = Kept(_PAGES)

    def of(self, address: Address | None) -> Content:
        """What the address shows."""
        if address is None:
            return Content(missing_page())
        match address.page:
            case "runs":
                rows = self._store.runs()
                pending = any(row.pending for row in rows)
                return Content(runs_page(rows, address.chosen), pending, _mark(rows))
            case "compare":
                return Content(self._compared(address.chosen))
            case "history":
                return Content(self._history(address.chosen))
        return self._run(address)

    def _run(self, address: Address) -> Content:
        run = self._store.run(address.run_id)
        if run is None:
            return Content(missing_page())
        if run.state != "done":
            return Content(waiting_page(run), run.state != "failed", _mark(run))
        try:
            return Content(self._kept.get(_key(address, run), lambda: self._made(run, address)))
        except DataError as error:
            return Content(html.Div([html.H1(run.name), nothing("It cannot be read", str(error))]))

    def _made(self, run: RunRow, address: Address) -> dict[str, Any]:
        """The page as plain values: to send it again costs little."""
        page = run_page(self._loaded.view(run), address)
        made: dict[str, Any] = orjson.loads(to_json_plotly(page, engine="orjson"))
        return made

    def _compared(self, chosen: Chosen) -> html.Div:
        runs = [self._store.run(chosen.text(side) or "") for side in ("baseline", "candidate")]
        done = [run for run in runs if run is not None and run.state == "done"]
        if len(done) < len(runs):
            told = "Choose two finished runs in the list, by the boxes before their names."
            return html.Div([html.H1("Compare"), nothing("Which two?", told)])
        try:
            baseline, candidate = (self._loaded.view(run) for run in done)
        except DataError as error:
            return html.Div([html.H1("Compare"), nothing("A run cannot be read", str(error))])
        return html.Div([html.H1("Compare"), *compare_page(baseline, candidate)])

    def _history(self, chosen: Chosen) -> html.Div:
        rows = {row.id: row for row in self._store.runs()}
        tags = sorted({f"{tag.key}={tag.value}" for row in rows.values() for tag in row.tags})
        points = self._store.numbers.history(metric_of(chosen))
        wanted = chosen.text("tag")
        own = [one for one in points if not wanted or wanted in _tags(rows.get(one.run_id))]
        return html.Div([html.H1("History"), *history_page(own, tags, chosen)])


def _mark(shown: object) -> str:
    return sha256(repr(shown).encode()).hexdigest()[:16]


def _key(address: Address, run: RunRow) -> tuple[object, ...]:
    return address.page, run.id, run.name, tuple(sorted(address.chosen.values.items()))


def _tags(run: RunRow | None) -> set[str]:
    return set() if run is None else {f"{tag.key}={tag.value}" for tag in run.tags}
