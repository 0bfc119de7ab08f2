"""A report in a notebook."""

from __future__ import annotations

from support.report_builders import analysis

from stepsplit.analyzer import BUCKETS


def test_the_buckets_of_every_row_of_the_report_add_up_to_its_step() -> None:
    for row in analysis().report.steps:
        assert sum(getattr(row, f"{bucket}_ns") for bucket in BUCKETS) == row.step_ns


def test_a_report_shows_itself_as_a_table_with_units() -> None:
    page = analysis().report._repr_html_()
    assert page.count("<tr") == 2 + len(BUCKETS)
    assert " ms" in page
    assert " %" in page
