"""Waiting for what another process does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page


def until(true: Callable[[], object], within_s: float = 60.0, pause_s: float = 0.02) -> None:
    """Waits until it is true. Raises TimeoutError."""
    deadline = time.monotonic() + within_s
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"it did not come to that within {within_s:g} s: {true}")
        time.sleep(pause_s)


def until_on_page(page: Page, holds: Callable[[], object], within_s: float = 60.0) -> None:
    """Waits until it holds; the pages' policy forbids a browser's own waiting for an expression.
    Raises TimeoutError."""
    deadline = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the page did not come to that within {within_s:g} s")
        page.wait_for_timeout(100)


def list_addresses(page: Page) -> list[str]:
    """The addresses of the page from now on, a list that grows. The timeline replaces its address
    by what it shows as soon as it is drawn, often before a test looks at it."""
    addresses: list[str] = []
    page.on("framenavigated", lambda frame: addresses.append(frame.url))
    return addresses
