"""What an address says: which page, of which run, and what is chosen on it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, urlencode

RUN_PAGES = ("overview", "timeline", "pipeline", "collectives", "compute", "memory", "model")
_RUN = re.compile(rf"/run/([0-9a-f]{{8,32}})(?:/({'|'.join(RUN_PAGES[1:])}))?/?")
_OTHERS = {"": "runs", "/": "runs", "/compare": "compare", "/history": "history"}


@dataclass(frozen=True, slots=True)
class Chosen:
    """What the search part of an address says, by name; what is odd in it counts as absent."""

    values: Mapping[str, str] = field(default_factory=dict)

    def whole(self, name: str) -> int | None:
        """The whole number of that name."""
        value = self.values.get(name, "")
        return int(value) if value.isascii() and value.isdigit() and len(value) < 12 else None

    def text(self, name: str) -> str | None:
        """The word of that name."""
        return self.values.get(name) or None


@dataclass(frozen=True, slots=True)
class Address:
    """A page: one of RUN_PAGES with its run's id, or "runs", "compare" or "history" with ""."""

    page: str
    run_id: str
    chosen: Chosen


def address_of(path: str | None, search: str | None) -> Address | None:
    """The page that a path and its search part name, None where there is no such page."""
    chosen = Chosen(dict(parse_qsl((search or "").lstrip("?"), max_num_fields=64)))
    found = _RUN.fullmatch(path or "")
    if found:
        return Address(found.group(2) or RUN_PAGES[0], found.group(1), chosen)
    page = _OTHERS.get(path or "")
    return None if page is None else Address(page, "", chosen)


def page_url(run_id: str, page: str = RUN_PAGES[0], **chosen: object) -> str:
    """The address of a run's page with what is chosen on it."""
    path = f"/run/{run_id}" + ("" if page == RUN_PAGES[0] else f"/{page}")
    return path + search_of(chosen)


def search_of(chosen: Mapping[str, object]) -> str:
    """The search part for what is chosen; None is left out."""
    kept = {name: str(value) for name, value in chosen.items() if value not in (None, "")}
    return f"?{urlencode(kept)}" if kept else ""
