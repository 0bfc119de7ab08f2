"""The pages of the menu at the top: their list, and which page an address names."""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, unquote

from dash import dcc, html

from stepsplit.dashboard.pages import access, compare, history, run_pages, runs, watch
from stepsplit.dashboard.pages.address import Address, AddressQuery
from stepsplit.dashboard.pages.page import StorePage
from stepsplit.dashboard.store.ids import RUN_OR_ROLE

STORE_PAGES: tuple[StorePage, ...] = (
    runs.PAGE, compare.PAGE, history.PAGE, watch.PAGE, access.PAGE,
)  # fmt: skip
"""In the order of the menu."""

_RUN = re.compile(rf"/run/(?P<run>{RUN_OR_ROLE})(?:/(?P<page>[^/]+))?/?")


def find_store_page(address: Address) -> StorePage:
    """The page of an address without a run."""
    return next(page for page in STORE_PAGES if page.key == address.page)


def parse_address(path: str | None, search: str | None) -> Address | None:
    """The page of a URL path and query; None if there is no such page."""
    try:
        chosen = AddressQuery(dict(parse_qsl((search or "").lstrip("?"), max_num_fields=64)))
    except ValueError:
        return None
    path = path or "/"
    # The first page has no key in its address, so that each page has one address.
    if found := _RUN.fullmatch(path):
        first, *others = run_pages.RUN_PAGES
        named = (
            [first]
            if found["page"] is None
            else [one for one in others if one.key == found["page"]]
        )
        return Address(named[0].key, found["run"], chosen) if named else None
    for page in STORE_PAGES:
        if path == page.path:
            return Address(page.key, "", chosen)
        if page.is_item is not None and path.startswith(f"{page.path}/"):
            item = unquote(path.removeprefix(f"{page.path}/")).rstrip("/")
            return Address(page.key, "", chosen, item) if page.is_item(item) else None
    return None


def build_missing_page() -> html.Div:
    """The page for an unknown URL."""
    back = dcc.Link("list of runs", href="/")
    return html.Div([html.H1("Page or run not found"), html.P(["See the ", back, "."])])
