"""Each planted bug contradicts the truth of some scenario: a test that it turns red."""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzz.planted_bugs import BUGS, Bug
from support.ground_truth import SEED, Trial, check, trial

from stepsplit.analyzer import analyze

pytestmark = pytest.mark.seeded
QUICK = ("skew and bubble swapped", "waiting is transfer", "overlap counted twice")
SLOW_IN_TURN = (
    pytest.mark.slow, pytest.mark.in_turn("analyzer/diagnose", "analyzer/split"),
)  # fmt: skip


@pytest.mark.parametrize(
    "bug",
    [pytest.param(b, id=b.name, marks=() if b.name in QUICK else SLOW_IN_TURN) for b in BUGS],
)
def test_a_planted_bug_is_found(bug: Bug, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = trial(bug.scenario(SEED), tmp_path)
    check(right)
    bug.plant(monkeypatch)
    with pytest.raises(AssertionError):
        check(Trial(right.scenario, right.run, analyze(tmp_path)))
