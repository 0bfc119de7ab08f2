"""The bar of the critical path draws the average step's path once, part by part."""

from __future__ import annotations

import msgspec
import pytest
from support.report_builders import MS, analysis

from stepsplit.analyzer.report.diagnosis_rows import PathPart
from stepsplit.analyzer.report.path_shares import PathShare, compute_path_shares
from stepsplit.analyzer.report.report import Report
from stepsplit.dashboard.figures.run import draw_critical_path

EVIL = '<a href="javascript:alert(1)">tp</a>'


def along(*parts: PathPart) -> Report:
    return msgspec.structs.replace(analysis().report, critical_path=parts)


def test_a_share_is_the_mean_over_the_steps_of_a_bucket_and_axis() -> None:
    report = along(
        PathPart(4, 0, "compute", None, 50 * MS),
        PathPart(4, 1, "collective", "tp", 10 * MS),
        PathPart(5, 1, "compute", None, 30 * MS),
        PathPart(5, 1, "collective", "dp_shard", 10 * MS),
    )

    assert compute_path_shares(report) == (
        PathShare("compute", None, 40 * MS, 0.8, ((0, 0.625), (1, 0.375)), 0),
        PathShare("collective", "tp", 5 * MS, 0.1, ((1, 1.0),), 0),
        PathShare("collective", "dp_shard", 5 * MS, 0.1, ((1, 1.0),), 0),
    )


def test_the_three_ranks_with_most_are_named_and_the_others_counted() -> None:
    ranks = (40, 5, 30, 15, 10)
    report = along(*(PathPart(4, rank, "idle", None, ns) for rank, ns in enumerate(ranks)))

    (share,) = compute_path_shares(report)

    assert share.ranks_text == "rank 0 40.0 %, rank 2 30.0 %, rank 3 15.0 %, 2 more"


def test_the_bar_is_as_long_as_the_average_path() -> None:
    report = analysis().report

    figure = draw_critical_path(report)

    paths = [one.end_ns - one.start_ns for one in report.path_steps]
    drawn = sum(sum(trace.x) for trace in figure.data)
    assert drawn == pytest.approx(sum(paths) / len(paths) / MS)
    names = [trace.name for trace in figure.data]
    assert names == ["compute", "collective", "p2p", "bubble", "idle"]


def test_parts_with_room_are_labeled_with_their_axis() -> None:
    compute, collective, p2p, *_ = draw_critical_path(analysis().report).data

    assert list(compute.text) == ["82.9 %"]
    assert list(collective.text) == ["tp 12.0 %"]
    assert list(p2p.text) == [""]
    assert p2p.customdata[0] == "<b>p2p on pp</b> 2.89 ms (2.0 % of the path)<br>rank 2 100.0 %"


def test_an_axis_with_markup_in_its_name_is_text() -> None:
    text = str(draw_critical_path(along(PathPart(4, 0, "collective", EVIL, MS))).to_json())

    assert "<a" not in text and "\\u003ca" not in text
    assert "&lt;a" in text or "\\u0026lt;a" in text


def test_no_path_is_a_blank_figure() -> None:
    assert not draw_critical_path(along()).data
