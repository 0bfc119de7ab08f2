"""Options of this suite."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import is_hypothesis_test, seed, settings
from support.databases import bare_database_url, database_url, postgres  # noqa: F401
from support.ground_truth import SEED
from support.turns import describe_turn, is_in_part, select_in_turn

# Each process of the tests and each Python that they start would compile all modules anew: a minute
# for the tests alone.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

if "PYTEST_XDIST_WORKER" in os.environ:
    # Threads that wait by spinning slow down the other processes of tests. Read as torch is loaded.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

MOST_WORKERS = 4
# No limit of time for an example: the quick tier measures none. Without STEPSPLIT_SEED the examples
# are the same in every run.
settings.register_profile(
    "stepsplit", deadline=None, derandomize="STEPSPLIT_SEED" not in os.environ
)
settings.load_profile("stepsplit")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """The quick tier uses up to four processors; a few chosen files and slow tests run in one.

    PYTEST_XDIST_AUTO_NUM_WORKERS, which xdist reads, names another number."""
    if os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS"):
        return None
    chosen = config.option.keyword or not any(Path(one).is_dir() for one in config.args)
    if chosen or config.option.markexpr != "not slow":
        return 0
    return min(MOST_WORKERS, len(os.sched_getaffinity(0)))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite the samples' reports and tests/golden"
    )


def pytest_itemcollected(item: pytest.Item) -> None:
    """Hypothesis draws by STEPSPLIT_SEED too."""
    test = getattr(item, "obj", None)
    if is_hypothesis_test(test):
        item.add_marker("seeded")
        if "STEPSPLIT_SEED" in os.environ:
            seed(SEED)(test)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Files of another turn are not even imported."""
    is_test = collection_path.match("test_*.py")
    return True if is_test and not is_in_part(collection_path) else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Slow tests take turns, where whole folders of tests run."""
    if not any(Path(one).is_dir() for one in config.args):
        return
    chosen = select_in_turn(items)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What collecting makes lives until the end: 600,000 objects that each collection of garbage
    would go through again, 7 % of the processor time of the quick tier."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_report_header(config: pytest.Config) -> list[str]:
    lines = [f"simulated jobs: seed {SEED} (STEPSPLIT_SEED={SEED} repeats them)"]
    return lines if config.option.markexpr == "not slow" else [*lines, describe_turn()]


@pytest.fixture(scope="session", autouse=True)
def session_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or writes what the user has cached; all tests of a session share a folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STEPSPLIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield
