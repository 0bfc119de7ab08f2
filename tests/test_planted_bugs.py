"""Each planted bug contradicts the truth of some scenario: a test that it turns red."""

from __future__ import annotations

from pathlib import Path

import pytest
from ground_truth import SEED, check, trial
from planted_bugs import BUGS, Bug


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "right").mkdir()
    (tmp_path / "wrong").mkdir()
    scenario = bug.scenario(SEED)
    check(trial(scenario, tmp_path / "right"))
    bug.plant(monkeypatch)
    with pytest.raises(AssertionError):
        check(trial(scenario, tmp_path / "wrong"))
