"""Real trainings with a rank made late on purpose: what is measured is what was injected."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

from stepsplit.analyzer import Report, analyze
from stepsplit.collectors.demo.arguments import DemoArgs
from stepsplit.collectors.demo.launch import launch_workload

LATE_MS = 400
pytestmark = [pytest.mark.slow, pytest.mark.alone]


def recorded(folder: Path, parallel: str, kind: str, microbatches: int) -> Report:
    recipe = DemoArgs(
        steps=8, active=4, microbatches=microbatches,
        slow_rank=1, slow_ms=LATE_MS, slow_kind=kind,
    )  # fmt: skip
    return analyze(launch_workload(parallel, folder / "run", recipe).out)


def median_ns(report: Report, rank: int, bucket: str) -> float:
    return median(getattr(row, f"{bucket}_ns") for row in report.steps if row.rank == rank)


@pytest.mark.parametrize(("kind", "cause"), [("sleep", "host"), ("compute", "imbalance")])
def test_the_others_skew_is_the_delay_and_the_late_rank_is_blamed(
    tmp_path: Path, kind: str, cause: str
) -> None:
    """The rank that computes longer runs more of the same operations than its peer."""
    report = recorded(tmp_path, "dp=2", kind, 1)
    assert 0.6 * LATE_MS * 1e6 < median_ns(report, 0, "skew") < 1.4 * LATE_MS * 1e6
    assert median_ns(report, 1, "skew") < 0.2 * LATE_MS * 1e6
    assert (report.blame[0].rank, report.blame[0].cause) == (1, cause)


def test_a_slow_stage_puts_the_other_into_the_bubble_beyond_the_schedules_own(
    tmp_path: Path,
) -> None:
    report = recorded(tmp_path, "pp=2", "compute", 4)
    assert median_ns(report, 0, "bubble") > 0.6 * LATE_MS * 1e6
    blamed = [row for row in report.blame if row.rank is not None]
    assert (blamed[0].rank, blamed[0].cause) == (1, "imbalance")
    assert report.pipeline is not None
    assert report.pipeline.stages[0].bubble_ns > report.pipeline.stages[1].bubble_ns
