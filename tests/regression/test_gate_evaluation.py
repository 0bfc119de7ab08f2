"""The check on a real training that evaluates in every fourth step: a slower evaluation is named as
that kind of step, and an equal one raises no alarm."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.gate_runs import run_ranks

pytest.importorskip("torch")

from stepsplit.analyzer.analysis import read_run_metrics
from stepsplit.analyzer.regression.checks import parse_budgets
from stepsplit.analyzer.regression.judge import check_candidate
from stepsplit.analyzer.regression.metrics import RunMetrics

pytestmark = [
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.in_turn("analyzer/regression", "analyzer/split"),
    pytest.mark.timeout(900),
]

SIDE, STEPS, EVERY, FIRST = 3, 12, 4, 3
BUDGETS = parse_budgets(["step:25%"])


def record(folder: Path, forwards: int) -> list[RunMetrics]:
    """The metrics of one run whose evaluations have so many forwards."""
    arguments = map(str, (STEPS, EVERY, forwards, 1, FIRST))
    run_ranks("evaluating.py", str(folder), *arguments)
    return list(read_run_metrics(folder))


def test_a_slower_evaluation_is_named_and_an_equal_one_is_not(tmp_path: Path) -> None:
    baseline, equal, slower = (
        [fact for i in range(SIDE) for fact in record(tmp_path / f"{side}{i}", forwards)]
        for side, forwards in (("baseline", 10), ("equal", 10), ("slower", 30))
    )
    assert check_candidate(equal, baseline, BUDGETS).answer != "regressed"
    found = check_candidate(slower, baseline, BUDGETS)
    answers = {one.metric: one.answer for one in found.gated}
    # Three noisy runs a side may leave the other steps undecided; they must not be called slower.
    assert answers["step"] != "regressed"
    assert answers["step.other"] == "regressed"
    (kind,) = [one.kind for one in found.gated if one.metric == "step.other"]
    assert f"every {EVERY}th step" in kind
