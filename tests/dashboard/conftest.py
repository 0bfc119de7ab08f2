"""What the tests of the dashboard share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.browser_builders import running_chromium
from support.databases import make_sqlite

from stepsplit.dashboard.store.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """An empty store."""
    opened = Store.open(make_sqlite(tmp_path / "runs.db"), tmp_path / "artifacts")
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with running_chromium() as browser:
        yield browser


@pytest.fixture
def browser(chromium: Any) -> Iterator[Any]:
    """The browser, with nothing of the test before."""
    yield chromium
    for context in chromium.contexts:
        context.close()
