"""A report in a notebook."""

from __future__ import annotations

import re

import msgspec
import pandas as pd
import pytest
from generate.docs_frames import FRAMES, PAGE, build_page
from support.planted_text import PLANTED, plant_where_accepted
from support.report_builders import analysis
from support.samples import SAMPLES, read_golden

from stepsplit.analyzer import BUCKETS, Report
from stepsplit.analyzer.report.io import from_json, to_json
from stepsplit.analyzer.report.report import Host, Run

NAMES = sorted(path.name for path in SAMPLES.iterdir() if path.is_dir())


def test_the_buckets_of_every_row_of_the_report_add_up_to_its_step() -> None:
    for row in analysis().report.steps:
        assert sum(getattr(row, f"{bucket}_ns") for bucket in BUCKETS) == row.step_ns


# Tables.


def test_every_tuple_of_rows_has_a_frame() -> None:
    fields = {one.name: one.type for one in msgspec.structs.fields(Report)}
    rows = {name for name, kind in fields.items() if "tuple[" in str(kind)}

    assert rows == set(FRAMES)


@pytest.mark.parametrize("name", NAMES)
def test_frames_have_every_row_and_the_same_types(name: str) -> None:
    report, empty = read_golden(name), Report(run=EMPTY)
    for frame in FRAMES:
        found: pd.DataFrame = getattr(report, f"{frame}_frame")()
        none: pd.DataFrame = getattr(empty, f"{frame}_frame")()
        assert len(found) == len(getattr(report, frame) or ()) and len(none) == 0
        assert [*found.dtypes.items()] == [*none.dtypes.items()], frame


EMPTY = Run("empty", 1, (), (Host("unknown", ()),), None, "cpu", None, None, None, None, "0")


def test_a_frame_keeps_whole_nanoseconds_and_what_is_unknown() -> None:
    report = read_golden("built_tp_pp_dp_slow_rank")
    steps, blame, findings = report.steps_frame(), report.blame_frame(), report.findings_frame()

    assert steps["step_ns"].dtype == "int64" and steps["kind"].dtype == "string"
    assert steps[[f"{one}_ns" for one in BUCKETS]].sum(axis=1).equals(steps["step_ns"])
    assert blame["rank"].isna().sum() == sum(row.rank is None for row in report.blame) > 0
    first = report.findings[0]
    assert first.basis is not None
    assert findings["basis_kind"][0] == first.basis.kind
    assert findings["basis_spread_ns"][0] == first.basis.spread_ns


def test_the_page_of_the_frames_is_of_today() -> None:
    assert PAGE.read_text() == build_page(), "python -m generate.docs_frames rewrites it"


# How a notebook shows a report.


def test_a_report_shows_itself_as_a_bar_findings_and_a_table() -> None:
    report = read_golden("built_tp_pp_dp_slow_rank")
    page = report._repr_html_()

    assert page.count("<tr") == 1 + len(BUCKETS)
    assert "step 60.91 ms, mean over ranks and 4 full steps" in page
    shares = [float(one) for one in re.findall(r"width: ([0-9.]+)%", page)]
    assert sum(shares) == pytest.approx(100, abs=0.1)
    assert "12.7 ms: rank 3 is a straggler" in page and "<script" not in page


def test_what_a_recording_lacks_is_shown_and_no_step_is_said() -> None:
    assert "no step in the recording" in Report(run=EMPTY)._repr_html_()


def test_a_strangers_names_are_text() -> None:
    text = plant_where_accepted(to_json(read_golden("tp2_pp2")), from_json)
    page = from_json(text)._repr_html_()

    assert PLANTED not in page and "\x1b" not in page
    attack = msgspec.structs.replace(EMPTY, name="<img src=x onerror=alert(1)>")
    assert "<img" not in msgspec.structs.replace(read_golden("dp4"), run=attack)._repr_html_()
