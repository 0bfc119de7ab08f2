"""Options of this suite."""

from __future__ import annotations

import pytest
from databases import database_url, postgres  # noqa: F401
from ground_truth import SEED
from turns import in_turn


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite the samples' reports and tests/golden"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the tests marked in_turn a fifth runs each time."""
    marked = [item for item in items if item.get_closest_marker("in_turn")]
    chosen = set(in_turn([item.nodeid for item in marked])) if len(marked) > 5 else None
    if chosen is None:
        return
    left = [item for item in marked if item.nodeid not in chosen]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in left]


def pytest_report_header() -> str:
    return f"simulated jobs: seed {SEED} (STEPSPLIT_SEED={SEED} repeats them)"


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes what the user has cached."""
    monkeypatch.setenv("STEPSPLIT_CACHE", str(tmp_path_factory.mktemp("cache")))
