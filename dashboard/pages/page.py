"""What a page is: its place in a menu, what it is built from, and what it gives.

A page is one module of this folder with one entry: a RunPage listed in run_pages.py, or a StorePage
listed in store_pages.py. What serves, exports or links pages asks the entry, and never which it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from dash import dcc, html
from dash.development.base_component import Component

from stepsplit.analyzer.report.report import Report
from stepsplit.dashboard.pages.address import Address, AddressQuery
from stepsplit.dashboard.pages.components import View, build_empty_card
from stepsplit.dashboard.pages.run_actions import RunRights
from stepsplit.dashboard.store.run_row import RunRow

if TYPE_CHECKING:
    # The HTML export builds pages without a database.
    from stepsplit.dashboard.store.store import Store


@dataclass(frozen=True, slots=True)
class RunPage:
    """A page of a finished run.

    Attributes:
        key: The last part of its address, /run/ID/KEY, and in capitals its tab. The first page of
            the list is at /run/ID.
        build: Its components, of the run and of what the address chooses.
        needs_tables: Whether it shows more than the report. The tables of many ranks take a second
            to read.
        predicts: Whether it asks for a prediction, of which only a few run at a time.
        chapter: Its heading in the HTML export, "" for none; None if it is not in the export.
        has_data: Whether the export has anything to show of it.
        loads_charts: Whether the script of the charts is loaded while its content is made, since
            it has charts of nearly every run. For those of other pages Dash loads it afterwards.
    """

    key: str
    build: Callable[[View, AddressQuery], list[Component]]
    needs_tables: bool = False
    predicts: bool = False
    chapter: str | None = None
    has_data: Callable[[Report], bool] = lambda _: True
    loads_charts: bool = False


@dataclass(frozen=True, slots=True)
class PageRequest:
    """What a page of the store is built from.

    Attributes:
        store: The store.
        load_report: Loads a finished run without its tables, cached. Raises DataError.
        address: Its address, with the name of what it shows and the choices.
        rights: What the user may do.
        has_login: Whether the user has logged in, as on a server that asks for it.
        mark: The fingerprint of what the browser shows of a live page; None if it shows nothing.
    """

    store: Store
    load_report: Callable[[RunRow], View]
    address: Address
    rights: RunRights
    has_login: bool = True
    mark: str | None = None


@dataclass(frozen=True, slots=True)
class PageContent:
    """A page's components in Dash's format. Pending pages are polled, and redrawn when their
    fingerprint changes."""

    children: Any
    pending: bool = False
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class StorePage:
    """A page of what the store has, in the menu at the top.

    Attributes:
        title: Its text in the menu.
        path: Its address.
        build: Its content; None if what the address names does not exist.
        build_live: What is drawn again while the page is open; None if it has not changed since
            the mark. Only for pages that update by themselves.
        is_item: Whether a text may follow the path, as the name of one thing. None if nothing may.
        has_item: Whether the store has the thing of this name.
        takes_uploads: Whether it has the zone where recordings are dropped.
        needs_admin: Whether it is for admins only; others do not see it in the menu.
        loads_charts: Whether the script of the charts is loaded while its content is made, for
            an address that names or chooses something to show.
        charts: The ids of charts on which a click opens a run.
        find_run: That run, of the name and of what was clicked on; None without one. Raises
            ValueError.
    """

    title: str
    path: str
    build: Callable[[PageRequest], PageContent | None]
    build_live: Callable[[PageRequest], PageContent | None] | None = None
    is_item: Callable[[str], bool] | None = None
    has_item: Callable[[Store, str], bool] = lambda _, name: not name
    takes_uploads: bool = False
    needs_admin: bool = False
    loads_charts: bool = False
    charts: tuple[str, ...] = ()
    find_run: Callable[[Store, str, object], str | None] = lambda *_: None

    @property
    def key(self) -> str:
        """Its name in addresses."""
        return self.title.lower()


TICK_MS = 10_000


def build_live_frame(content: Component, mark: str) -> html.Div:
    """The content with a clock; assets/watch.js stops it while the page is not visible."""
    return html.Div(
        [
            dcc.Interval(id="watch-tick", interval=TICK_MS),
            dcc.Store(id="watch-mark", data=mark),
            html.Div(content, id="watch-live"),
        ]
    )


ODD_DATA = (
    "Its data is of a kind that this page does not expect; the server's log names the error. Please"
    " report it with the recording."
)


def build_problem(title: str, problem: str, detail: str) -> html.Div:
    """A page in place of one that cannot be shown."""
    return html.Div([html.H1(title), build_empty_card(problem, detail)])


def compute_fingerprint(shown: object) -> str:
    """Changes with what is shown."""
    return sha256(repr(shown).encode()).hexdigest()[:16]
