"""Addresses of pages: the page, the run and the choices made on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlencode


@dataclass(frozen=True, slots=True)
class AddressQuery:
    """The query parameters of a URL; invalid values count as absent."""

    values: Mapping[str, str] = field(default_factory=dict)

    def parse_int(self, name: str) -> int | None:
        """The parameter as a non-negative integer; None if absent or invalid."""
        value = self.values.get(name, "")
        return int(value) if value.isascii() and value.isdigit() and len(value) < 12 else None

    def find_text(self, name: str) -> str | None:
        """The parameter as text; None if absent or empty."""
        return self.values.get(name) or None


@dataclass(frozen=True, slots=True)
class Address:
    """A page: the key of a RunPage with a run id, or of a StorePage with ""; item is the name of
    the one thing that a StorePage shows, such as a watched run."""

    page: str
    run_id: str
    chosen: AddressQuery
    item: str = ""


def build_page_url(run_id: str, page: str = "", **chosen: object) -> str:
    """The URL of a run's page, by default the first, with the selected options."""
    return f"/run/{run_id}" + (f"/{page}" if page else "") + format_query(chosen)


def format_query(chosen: Mapping[str, object]) -> str:
    """The URL query of the selected options, leaving out empty ones."""
    values = {name: str(value) for name, value in chosen.items() if value not in (None, "")}
    return f"?{urlencode(values, safe=',')}" if values else ""
