"""The check on real trainings: passes without a change, names the cause of a regression."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import pytest
from support.gate_runs import STRAGGLER, record

pytest.importorskip("torch")

from stepsplit.analyzer import CheckResult
from stepsplit.analyzer.analysis import DEFAULT_BUDGETS, read_run_metrics
from stepsplit.analyzer.regression.checks import parse_budgets
from stepsplit.analyzer.regression.judge import check_candidate
from stepsplit.analyzer.regression.metrics import RunMetrics

pytestmark = [
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.in_turn("analyzer/regression", "collectors", "analyzer/split"),
    pytest.mark.timeout(900),
]

BUDGETS = parse_budgets(DEFAULT_BUDGETS)
PAIRS, SIDE = 20, 3
MOST_ALARMS = 1


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> list[RunMetrics]:
    """Six runs of the demo as it is: twenty ways to hold three against the other three."""
    folder = tmp_path_factory.mktemp("quiet")
    return [fact for i in range(2 * SIDE) for fact in read_run_metrics(record(folder / f"run{i}"))]


def test_of_twenty_pairs_without_a_change_at_most_one_alarms(quiet: list[RunMetrics]) -> None:
    pairs = list(combinations(range(len(quiet)), SIDE))
    assert len(pairs) == PAIRS
    answers = [
        check_candidate([quiet[i] for i in own], _others(quiet, own), BUDGETS).answer
        for own in pairs
    ]
    assert answers.count("regressed") <= MOST_ALARMS, answers


def _others(quiet: Sequence[RunMetrics], own: Sequence[int]) -> list[RunMetrics]:
    return [run for i, run in enumerate(quiet) if i not in own]


def judged(quiet: Sequence[RunMetrics], candidate: Sequence[RunMetrics]) -> CheckResult:
    found = check_candidate(candidate, quiet, BUDGETS)
    assert found.answer == "regressed", found
    return found


def test_an_all_reduce_more_in_each_layer_is_found_in_one_run(
    quiet: list[RunMetrics], tmp_path: Path
) -> None:
    own = read_run_metrics(record(tmp_path / "own", "extra_all_reduce"))
    cause = judged(quiet, own).causes[0]
    # Two layers, two microbatches, two ranks.
    assert cause.message.startswith(
        "dp_replicate all_reduce: +8 calls per step (baseline: none; candidate: 8 of"
    )
    assert (cause.axis, cause.op, cause.group) == ("dp_replicate", "all_reduce", (0, 1))


def test_a_halved_bucket_is_found_in_one_run(quiet: list[RunMetrics], tmp_path: Path) -> None:
    own = read_run_metrics(record(tmp_path / "own", "halved_bucket"))
    found = judged(quiet, own)
    assert next(one.metric for one in found.gated if one.answer == "regressed") == "calls"
    assert found.causes[0].message.endswith("same bytes in smaller messages")


def test_a_straggler_is_found_and_named(quiet: list[RunMetrics], tmp_path: Path) -> None:
    made = [record(tmp_path / f"own{i}", recipe=STRAGGLER) for i in range(SIDE)]
    found = judged(quiet, [fact for one in made for fact in read_run_metrics(one)])
    assert [one.metric for one in found.gated if one.answer == "regressed"] == ["exposed_comm"]
    cause = found.causes[0]
    assert (cause.bucket, cause.axis, cause.rank) == ("skew", "dp_replicate", STRAGGLER.slow_rank)
