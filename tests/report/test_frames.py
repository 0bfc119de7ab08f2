"""A report in a notebook."""

from __future__ import annotations

from support.report_builders import analysis

from stepsplit.analyzer import BUCKETS
from stepsplit.analyzer.report import report as frames


def test_frames_hold_the_rows_of_the_report() -> None:
    report = analysis().report
    steps = frames.build_step_frame(report)
    buckets = [f"{bucket}_ns" for bucket in BUCKETS]
    assert len(steps) == len(report.steps)
    assert (steps[buckets].sum(axis=1) == steps["step_ns"]).all()
    assert frames.build_exposed_frame(report)["skew_ns"].sum() == sum(
        row.skew_ns for row in report.exposed
    )


def test_a_report_shows_itself_as_a_table_with_units() -> None:
    page = analysis().report._repr_html_()
    assert page.count("<tr") == 2 + len(BUCKETS)
    assert " ms" in page
    assert " %" in page
