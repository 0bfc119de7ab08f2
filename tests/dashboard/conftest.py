"""What the tests of the dashboard share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from stepsplit.dashboard.store.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """An empty store."""
    opened = Store.open(f"sqlite:///{tmp_path}/runs.db", tmp_path / "artifacts")
    yield opened
    opened.close()
