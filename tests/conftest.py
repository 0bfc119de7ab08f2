"""Options of this suite."""

from __future__ import annotations

import pytest
from ground_truth import SEED


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the samples' reports")


def pytest_report_header() -> str:
    return f"simulated jobs: seed {SEED} (STEPSPLIT_SEED={SEED} repeats them)"


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes what the user has cached."""
    monkeypatch.setenv("STEPSPLIT_CACHE", str(tmp_path_factory.mktemp("cache")))
