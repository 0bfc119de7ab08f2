"""The benchmark of the readers runs and tells of everyone; only it judges how fast they are."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "benchmarks" / "readers.py"
ALWAYS = (
    "json.load",
    "json.load, two files in turn",
    "stepsplit, one worker",
    "stepsplit, one worker, writes its cache",
    "stepsplit, two workers",
    "stepsplit, two workers, two files",
    "stepsplit, one process: first open",
    "stepsplit, one process: second open",
    "stepsplit, one process: third open",
    "stepsplit, one worker, .gz",
    "floor: read and skip",
    "floor, .gz: unpack and skip",
)
ONE_FILE = (
    "json",
    "one_worker",
    "one_worker_first_open",
    "two_workers",
    "opened_again_2",
    "one_worker_gz",
)


@pytest.mark.slow
def test_a_quick_run_prints_a_row_for_everyone(tmp_path: Path) -> None:
    out = tmp_path / "numbers.json"
    command = [sys.executable, str(PROGRAM), "--quick", "--repeat", "1", "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    printed = [line.split("|")[1].strip() for line in done.stdout.splitlines() if "|" in line]
    expected = {*ALWAYS, *(["HTA, Trace.load_traces"] if find_spec("hta") else [])}
    assert set(printed[2:]) == expected
    rows = json.loads(out.read_text())["rows"]
    assert {row["title"] for row in rows} == expected
    assert all(seconds > 0 for row in rows for seconds in row["seconds"])
    assert len({row["events"] for row in rows if row["key"] in ONE_FILE}) == 1
