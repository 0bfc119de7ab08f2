"""What an address says: which run, which step."""

from __future__ import annotations

import re
from typing import Literal
from urllib.parse import parse_qs

Chosen = int | Literal["all"] | None
_RUN = re.compile(r"/run/([0-9a-f]{8,32})/?")


def run_id_of(path: str) -> str | None:
    """The run that the path names; None on the list of runs."""
    found = _RUN.fullmatch(path)
    return found.group(1) if found else None


def step_of(search: str | None) -> Chosen:
    """The step of "?step=4", "all" for all steps, None where the address leaves it open."""
    values = parse_qs((search or "").lstrip("?")).get("step", [])
    value = values[0] if values else ""
    if value == "all":
        return "all"
    return int(value) if value.isascii() and value.isdigit() and len(value) < 12 else None


def search_of(step: int | None) -> str:
    """The search part of the address of a step; None is all steps."""
    return f"?step={'all' if step is None else step}"
