"""Memory of the analysis of many ranks, in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.fleet import Fleet, run_fleet, write_fleet
from benchmarks.resident import peak_private_until_the_end

MOST_BYTES_A_RANK = 2_000_000
"""Of 21,000 events: the graph and the split, and the buffers in use at the peak."""


def measure_peak_bytes(dp: int, folder: Path) -> int:
    """The most private memory of an analysis of 32 ranks for each replica."""
    write_fleet(run_fleet(Fleet(pp=4, dp=dp)), folder)
    code = "import sys; from stepsplit.analyzer import analyze; analyze(sys.argv[1])"
    with subprocess.Popen([sys.executable, "-c", code, str(folder)]) as process:
        peak = peak_private_until_the_end(process)
    assert process.returncode == 0
    return peak


@pytest.mark.slow
@pytest.mark.in_turn("analyzer/readers", "analyzer/split", "analyzer/analysis.py")
def test_memory_grows_little_with_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPSPLIT_CACHE", "off")
    small, large = (measure_peak_bytes(dp, tmp_path / str(dp)) for dp in (2, 6))
    assert large - small < 128 * MOST_BYTES_A_RANK
