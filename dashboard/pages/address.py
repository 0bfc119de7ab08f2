"""Addresses of pages: the page, the run and the choices made on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from urllib.parse import urlencode

_LAST_UNIX_S = int(datetime(2262, 1, 1, tzinfo=UTC).timestamp())
"""Databases hold times in ns since 1970 in 63 bits: until April 2262."""


@dataclass(frozen=True, slots=True)
class AddressQuery:
    """The query parameters of a URL; invalid values count as absent."""

    values: Mapping[str, str] = field(default_factory=dict)

    def parse_int(self, name: str) -> int | None:
        """The parameter as a non-negative integer; None if absent or invalid."""
        value = self.values.get(name, "")
        return int(value) if value.isascii() and value.isdigit() and len(value) < 12 else None

    def parse_time_s(self, name: str) -> int | None:
        """The parameter, such as 2026-11-29 03:00 of UTC, in s since 1970; None if absent or
        invalid, and the end of 2261 if it is later."""
        try:
            at = datetime.fromisoformat(self.values.get(name, "").strip())
        except ValueError:
            return None
        at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
        # No date could be shown of others.
        return min(int(at.timestamp()), _LAST_UNIX_S) if 1971 <= at.year <= 9998 else None

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


def format_time(unix_s: float) -> str:
    """As AddressQuery.parse_time_s reads it, in whole minutes."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M")


def format_query(chosen: Mapping[str, object]) -> str:
    """The URL query of the selected options, leaving out empty ones."""
    values = {name: str(value) for name, value in chosen.items() if value not in (None, "")}
    return f"?{urlencode(values, safe=',:')}" if values else ""
