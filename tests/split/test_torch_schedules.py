"""Schedules of torch's own pipelines, with and without the marks that torch writes around them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from stepsplit.analyzer import analyze

JOBS = Path(__file__).parent.parent / "collector_jobs"


@pytest.mark.slow
@pytest.mark.in_turn("analyzer/split")
@pytest.mark.parametrize(
    ("torch_name", "name"),
    [("Schedule1F1B", "1f1b"), ("ScheduleInterleaved1F1B", "interleaved")],
)
def test_messages_show_the_schedule_that_marks_name(
    torch_name: str, name: str, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    marked, bare = tmp_path / "marked", tmp_path / "bare"
    marked.mkdir()
    bare.mkdir()
    command = [sys.executable, JOBS / "four_ranks.py", JOBS / "pipelined.py", torch_name, marked]
    subprocess.run(list(map(str, command)), check=True, timeout=300, capture_output=True)
    for path in marked.iterdir():
        body = json.loads(path.read_text())
        marks = ("PP:", "Forward ", "Backward ")
        kept = [one for one in body["traceEvents"] if not one.get("name", "").startswith(marks)]
        (bare / path.name).write_text(json.dumps(body | {"traceEvents": kept}))
    with_marks, without = (analyze(folder).pipeline for folder in (marked, bare))
    assert with_marks is not None
    assert without is not None
    assert (with_marks.schedule, without.schedule) == (name, name)
    assert (with_marks.microbatches, without.microbatches) == (8, 8)
    assert without.bubble_fraction == pytest.approx(with_marks.bubble_fraction, abs=0.1)
