"""Budgets as people write them."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path

import pytest

from stepsplit.analyzer import DataError, UsageError
from stepsplit.analyzer.analysis import DEFAULT_BUDGETS
from stepsplit.analyzer.regression.checks import Budget, keep_last, parse_budget, parse_budgets


@pytest.mark.parametrize(
    ("rule", "budget"),
    [
        ("exposed_comm:5%", Budget("exposed_comm", "5%", "baseline", ratio=0.05)),
        (" step : 3 % ", Budget("step", "3 %", "baseline", ratio=0.03)),
        ("exposed_comm:2pt", Budget("exposed_comm", "2pt", "baseline", amount=0.02)),
        ("step:2.5ms", Budget("step", "2.5ms", "baseline", amount=2.5e6)),
        ("bubble:10%,1pt", Budget("bubble", "10%,1pt", "baseline", ratio=0.1, amount=0.01)),
        ("peak_memory:1GiB", Budget("peak_memory", "1GiB", "baseline", amount=2.0**30)),
        ("busbw.tp.all_reduce:5GB/s",
         Budget("busbw.tp.all_reduce", "5GB/s", "baseline", amount=5e9)),
        ("calls:exact", Budget("calls", "exact", "baseline")),
        ("calls.tp:4", Budget("calls.tp", "4", "baseline", amount=4.0)),
        ("calls.dp:4", Budget("calls.dp_replicate", "4", "baseline", amount=4.0)),
        ("busbw.fsdp.all_gather:5GB/s",
         Budget("busbw.dp_shard.all_gather", "5GB/s", "baseline", amount=5e9)),
        ("exposed_comm:<=10%", Budget("exposed_comm", "<=10%", "limit", amount=0.1)),
        ("mfu:>=40%", Budget("mfu", ">=40%", "limit", amount=0.4)),
        ("step:<=1.2s", Budget("step", "<=1.2s", "limit", amount=1.2e9)),
        ("step:model+20%", Budget("step", "model+20%", "model", ratio=0.2)),
        ("mfu:model-10%", Budget("mfu", "model-10%", "model", ratio=0.1)),
    ],
)  # fmt: skip
def test_a_rule(rule: str, budget: Budget) -> None:
    assert parse_budget(rule) == budget


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("exposed_comm", "has no limit; write for example exposed_comm:5%"),
        ("exposed:5%", "unknown metric 'exposed'; use one of step, mean_step, exposed_comm"),
        ("step.tp:5%", "unknown metric 'step.tp'"),
        ("busbw.tp.all_reduce.x:5%", "unknown metric"),
        ("step:exact", "step is a measured metric and cannot be exact"),
        ("step:5", "invalid limit '5'; write 5%, 5%,1pt or <=10%"),
        ("step:2pt", "invalid limit '2pt'"),
        ("step:-5%", "invalid limit '-5%'"),
        ("step:nan%", "invalid limit"),
        ("step:>=5ms", "invalid limit"),
        ("mfu:<=5%", "write 5%, 5%,1pt or >=10%"),
        ("step:model+x", "invalid limit"),
        ("step:", "invalid limit"),
        ("step:5%,", "invalid limit"),
    ],
)
def test_an_invalid_rule_is_reported_in_one_line(rule: str, words: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_budget(rule)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_files_and_rules_together_the_last_counts(tmp_path: Path) -> None:
    file = tmp_path / "ci:budgets.toml"
    file.write_text('[budgets]\nexposed_comm = "5%"\n"busbw.tp.all_reduce" = "10%"\n')
    found = {budget.metric: budget.text for budget in parse_budgets([str(file), "exposed_comm:7%"])}
    assert found == {"exposed_comm": "7%", "busbw.tp.all_reduce": "10%"}
    assert [budget.metric for budget in parse_budgets(DEFAULT_BUDGETS)] == [
        "calls", "bytes", "exposed_comm", "bubble",
    ]  # fmt: skip


def test_of_budgets_of_one_metric_the_last_is_kept() -> None:
    rules = ["exposed_comm:5%", "calls.dp:4", "exposed_comm:7%", "calls.dp_replicate:exact"]
    found = {budget.metric: budget.text for budget in keep_last(map(parse_budget, rules))}
    assert found == {"exposed_comm": "7%", "calls.dp_replicate": "exact"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[budget]\nstep = '5%'", "has no table [budgets]"),
        ("[budgets]\nstep = 5", "the limit of step must be a string"),
        ("[budgets]\nstep = 'five'", "invalid limit 'five'"),
        ("[budgets", "not valid TOML"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "budgets.toml"
    file.write_text(text)
    with pytest.raises(DataError, match=r"budgets\.toml") as error:
        parse_budgets([str(file)])
    assert words in str(error.value)
    with pytest.raises(UsageError, match="pass a TOML file or a rule"):
        parse_budgets([str(tmp_path / "absent.toml")])


def test_a_budget_is_a_plain_tuple() -> None:
    assert astuple(parse_budget("step:5%,3ms")) == ("step", "5%,3ms", "baseline", 0.05, 3e6)
