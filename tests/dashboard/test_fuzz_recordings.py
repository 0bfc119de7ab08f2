"""Fuzzing of the whole: mutated recordings through every command, page and export."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from fuzz.recordings import Fuzzer

MUTANTS = int(os.environ.get("STEPSPLIT_MUTANTS") or 120)
PARTS = 4


@pytest.mark.slow
@pytest.mark.in_turn(
    "analyzer/readers", "analyzer/split", "analyzer/diagnose", "analyzer/report",
    "dashboard/commands", "collectors/formats",
)  # fmt: skip
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(PARTS))
def test_a_mutated_recording_is_analyzed_or_refused_in_one_line(
    part: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Any other exception than a StepsplitError is a failure; every report can be read back."""
    fuzzer, first = Fuzzer(tmp_path), 77_000_000 + part * MUTANTS // PARTS

    outcomes = []
    for seed in range(first, first + MUTANTS // PARTS):
        outcomes.append(fuzzer.run(seed))
        capsys.readouterr()
    fuzzer.close()

    assert [one for one in outcomes if one.failure] == []
    statuses = sum((one.done for one in outcomes), Counter[str]())
    assert statuses["upload done"] > statuses["upload failed"]
