"""Gains against simulated jobs of others: each also ran without its cause, which is the truth."""

from __future__ import annotations

import json

import pytest
from required import SHARED_TRACES, absent

from stepsplit.analyzer import analyze

CAUSES = SHARED_TRACES.parent / "repro" / "causes"


@pytest.mark.parametrize(
    ("job", "code", "ranks"),
    [
        ("dp16_slow_rank", "slow_rank", (5,)),
        ("tp2_pp2_dp4_slow_rank", "slow_rank", (5,)),
        ("tp4_pp2_dp2_slow_link", "slow_link", (4, 5, 6, 7)),
        ("fsdp8_slow_rank", "slow_rank", (5,)),
    ],
)
def test_the_first_finding_is_the_cause_and_its_gain_is_true(
    job: str, code: str, ranks: tuple[int, ...]
) -> None:
    if not CAUSES.exists():
        absent("traces", f"{CAUSES.name} is not next to the project")
    truth = json.loads((CAUSES / job / "truth.json").read_text())
    first = analyze(CAUSES / job / "with").findings[0]
    assert (first.code, first.ranks) == (code, ranks)
    assert first.gain_ns == pytest.approx(1e6 * truth["gain_ms"], rel=0.05)


@pytest.mark.parametrize(
    "job", ["tp2_pp2_dp4_slow_rank", "tp4_pp2_dp2_slow_link", "fsdp8_slow_rank"]
)
def test_the_same_job_without_the_cause_has_no_finding(job: str) -> None:
    if not CAUSES.exists():
        absent("traces", f"{CAUSES.name} is not next to the project")
    assert analyze(CAUSES / job / "without").findings == ()
