"""The exported HTML page: complete report, no external resources, escaped names."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest
from support.report_builders import analysis

from stepsplit.analyzer.report.report import Host, Report
from stepsplit.analyzer.units import format_milliseconds
from stepsplit.dashboard import cli
from stepsplit.dashboard.pages.components import View
from stepsplit.dashboard.web.html_export import export_html

SAMPLES = Path(__file__).parents[2] / "sample_traces"
EVIL = "</script><script>alert(1)</script><a href='javascript:alert(1)'>x</a>"


def data(page: str, name: str) -> object:
    found = re.search(rf'<script type="application/json" id="{name}">(.*?)</script>', page, re.S)
    assert found is not None
    return json.loads(found.group(1))


def page_of(report: Report) -> str:
    return export_html(View(report.run.name, report, analysis().tables, "abcdef012345"))


def outside_of_scripts(page: str) -> str:
    return re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.S)


def test_it_holds_the_reports_numbers_figures_and_timeline() -> None:
    report = analysis().report
    page = page_of(report)
    text = outside_of_scripts(page)
    for words in (
        "gpt-pp2-tp2",
        format_milliseconds(15_000_000),
        "GEMMs 13 % slower",
        "Pipeline",
        "41.2 %",
    ):
        assert words in text
    figures = data(page, "figures")
    assert isinstance(figures, list)
    assert len(figures) == text.count('class="figure"') >= 6
    timeline = data(page, "timeline-data")
    assert isinstance(timeline, dict)
    assert [row["rank"] for row in timeline["window"]["rows"]][:1] == [0]


def test_it_loads_no_resources_and_has_no_links() -> None:
    text = outside_of_scripts(page_of(analysis().report))
    assert "default-src 'none'" in text
    assert not re.search(r"""(?:src|href)\s*=\s*["']""", text)


def test_names_from_files_are_text() -> None:
    report = analysis().report
    run = msgspec.structs.replace(report.run, name=EVIL, hosts=(Host(EVIL, (0, 1, 2, 3)),))
    group = msgspec.structs.replace(report.groups[0], description=EVIL)
    found = msgspec.structs.replace(report.findings[0], message=EVIL)
    page = page_of(
        msgspec.structs.replace(
            report, run=run, groups=(group, *report.groups[1:]), findings=(found,)
        )
    )
    assert "<script>alert" not in page
    assert "<a href" not in outside_of_scripts(page)
    data(page, "figures")
    data(page, "timeline-data")


def test_without_tables_there_is_no_timeline() -> None:
    report = analysis().report
    page = export_html(View("gone", report, None))
    assert data(page, "timeline-data") is None
    assert "upload the recording again" in outside_of_scripts(page)


def test_analyze_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.html"
    assert cli.run(["analyze", str(SAMPLES / "pp2_m2"), "--html", str(file)]) == 0
    assert "pp2_m2" in outside_of_scripts(file.read_text())
    assert cli.run(["analyze", str(SAMPLES / "pp2_m2"), "--html", str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
