"""pytest's fixture comm_budget, there wherever stepsplit is installed.

    def test_step(comm_budget):
        with comm_budget("exposed_comm:10%,1pt", "calls:exact") as run:
            for _ in range(run.total_steps):
                train_step()
                run.step()

One process, or one a rank under torchrun. Several blocks are several runs. After the test its runs
are held against comm_budgets/ beside the test's file: regressed fails the test, inconclusive skips
it. Nothing of stepsplit is imported before a test asks for the fixture.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from stepsplit.dashboard.comm_budget import CommBudget

FOLDER = "comm_budgets"
_ODD = re.compile(r"[^A-Za-z0-9._\[\]-]+")
_BUDGET = pytest.StashKey["CommBudget"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """--stepsplit-update and --stepsplit-strict."""
    group = parser.getgroup("stepsplit", "budgets of communication")
    update = "make the runs of comm_budget tests their new baselines"
    group.addoption("--stepsplit-update", action="store_true", help=update)
    strict = "fail tests whose runs are too noisy to tell, instead of skipping them"
    group.addoption("--stepsplit-strict", action="store_true", help=strict)


@pytest.fixture
def comm_budget(request: pytest.FixtureRequest, tmp_path: Path) -> CommBudget:
    """Records blocks of the test; after it they are held against their budgets."""
    from stepsplit.dashboard.comm_budget import CommBudget

    node = request.node
    name = _ODD.sub("-", f"{node.path.stem}.{node.name}")
    budget = CommBudget(node.path.parent / FOLDER / f"{name}.json", tmp_path)
    node.stash[_BUDGET] = budget
    return budget


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Judges the runs of the test as a part of it, so that a regression is its failure."""
    try:
        yield
    except BaseException:
        if budget := _recorded(item):
            budget.give_up()
        raise
    if budget := _recorded(item):
        _judge(budget, item.config)


def _recorded(item: pytest.Item) -> CommBudget | None:
    """The test's budget, None where it recorded nothing."""
    budget = item.stash.get(_BUDGET, None)
    return budget if budget is not None and budget.recordings else None


def _judge(budget: CommBudget, config: pytest.Config) -> None:
    __tracebackhide__ = True
    found = budget.outcome(config.getoption("stepsplit_update"))
    strict = config.getoption("stepsplit_strict")
    if found.answer in ("regressed", "error") or (found.answer == "inconclusive" and strict):
        pytest.fail(found.words, pytrace=False)
    if found.answer == "inconclusive":
        pytest.skip(found.words)
