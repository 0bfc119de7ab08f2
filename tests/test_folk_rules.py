"""Rules of thumb: complete, cited, and in the product's own words."""

from __future__ import annotations

from collections import Counter

from stepsplit.analyzer.model.explain.folk import Folk, folk_rules

FORMULAS = {
    "", "collective.ring", "collective.tree", "dp.messages", "flops.mfu", "link.nic",
    "link.nvlink", "memory.activations", "memory.in_flight", "memory.states", "parameters.stage",
    "pipeline.bubble", "recompute.full", "tp.messages", "zero.messages",
}  # fmt: skip


def test_a_rule_says_what_people_repeat_and_what_holds() -> None:
    found = {rule.id: rule for rule in folk_rules()}
    assert found["hdr-400"] == Folk(
        id="hdr-400",
        rule="HDR InfiniBand has 400 Gb/s",
        verdict="wrong",
        reference="HDR has 200, NDR 400",
        citation="stas00/ml-engineering, network/README.md",
        formula="link.nic",
    )


def test_there_are_59_rules_and_each_has_a_verdict() -> None:
    verdicts = Counter(rule.verdict for rule in folk_rules())
    assert verdicts == {"right": 13, "wrong": 18, "half": 22, "unit": 6}


def test_every_rule_is_cited_and_stands_beside_a_known_formula() -> None:
    for rule in folk_rules():
        assert rule.rule and rule.reference and rule.citation
        assert rule.formula in FORMULAS
