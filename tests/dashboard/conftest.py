"""What the tests of the dashboard share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient
from support.browser_builders import running_chromium
from support.databases import make_sqlite

from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.server import create_server
from stepsplit.dashboard.web.uploads import Limits


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """An empty store."""
    opened = Store.open(make_sqlite(tmp_path / "runs.db"), tmp_path / "artifacts")
    yield opened
    opened.close()


@pytest.fixture
def client(store: Store) -> FlaskClient:
    """A client of a dashboard without logins, on a machine whose disk may be nearly full."""
    return create_server(store, limits=Limits(spare_bytes=0)).test_client()


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
