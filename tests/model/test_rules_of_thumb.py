"""Rules of thumb are complete and cited."""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter

from stepsplit.analyzer import model
from stepsplit.analyzer.model.formulas import CheckedRule, Formula, read_checked_rules


def test_a_rule_has_its_verdict_reference_and_formulas() -> None:
    found = {rule.id: rule for rule in read_checked_rules()}
    assert found["hdr-400"] == CheckedRule(
        id="hdr-400",
        rule="HDR InfiniBand has 400 Gb/s",
        verdict="wrong",
        reference="HDR has 200, NDR 400",
        citation="stas00/ml-engineering, network/README.md",
        formulas=("link.nic",),
        when={"hardware.inter.name": ["ib-hdr-200"]},
    )


def test_there_are_59_rules_and_each_has_a_verdict() -> None:
    verdicts = Counter(rule.verdict for rule in read_checked_rules())
    assert verdicts == {"right": 13, "wrong": 18, "half": 22, "unit": 6}


def test_every_rule_is_cited() -> None:
    for rule in read_checked_rules():
        assert rule.rule and rule.reference and rule.citation


def test_the_formulas_of_every_rule_exist() -> None:
    ids = {formula.id for formula in formulas().values()}
    assert [rule.id for rule in read_checked_rules() if not ids.issuperset(rule.formulas)] == []


def test_no_two_formulas_share_an_id() -> None:
    ids = Counter(formula.id for formula in formulas().values())
    assert {name: count for name, count in ids.items() if count > 1} == {}


def formulas() -> dict[int, Formula]:
    """Every Formula that a module of the model has, alone or in a dict, by its identity."""
    found: dict[int, Formula] = {}
    for module in pkgutil.walk_packages(model.__path__, f"{model.__name__}."):
        for value in vars(importlib.import_module(module.name)).values():
            each = value.values() if isinstance(value, dict) else (value,)
            found.update({id(one): one for one in each if isinstance(one, Formula)})
    return found
