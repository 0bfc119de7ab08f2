"""The sample recordings, each analyzed once in a process."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from stepsplit.analyzer import Report, analyze
from stepsplit.analyzer.report.io import read_report

SAMPLES = Path(__file__).parents[2] / "sample_traces"


@cache
def analyze_recording(folder: Path, job: str | None = None) -> Report:
    """The report of a recording that no test changes."""
    return analyze(folder, job=job)


def read_golden(name: str) -> Report:
    """The report next to a sample: tests/report/test_samples.py checks that it is what analyze
    returns."""
    return read_report(SAMPLES / name)
