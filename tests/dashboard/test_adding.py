"""A page, a command and a sink are added by one module and one entry, as CONTRIBUTING.md says."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import click
import pytest
from dash import dcc, html
from support.page_text import find
from support.report_builders import analysis
from support.store_builders import ask_page

from stepsplit.collectors.record import log_to
from stepsplit.collectors.record.log_to import SinkKind
from stepsplit.dashboard import cli
from stepsplit.dashboard.commands import COMMANDS, CommandEntry
from stepsplit.dashboard.commands.common import print_line
from stepsplit.dashboard.pages import run_pages, store_pages
from stepsplit.dashboard.pages.page import PageContent, PageRequest, RunPage, StorePage
from stepsplit.dashboard.pages.run_pages import RUN_PAGES, build_run_page
from stepsplit.dashboard.pages.store_pages import STORE_PAGES, parse_address
from stepsplit.dashboard.sinks.scalars import ScalarPoint
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.html_export import export_html
from stepsplit.dashboard.web.page_builder import PageBuilder
from stepsplit.dashboard.web.report_cache import ReportCache
from stepsplit.dashboard.web.server import create_server

TRACES = Path(__file__).parents[2] / "sample_traces" / "tp2_pp2"


def test_a_page_of_a_run_is_an_entry(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = RunPage("ranks", lambda view, _: [html.P(f"{len(view.report.run.ranks)} ranks!")],
                  chapter="Ranks")  # fmt: skip
    monkeypatch.setattr(run_pages, "RUN_PAGES", (*RUN_PAGES, toy))
    run_id = store.import_report("a run", analysis().report, analysis().tables)
    cache = ReportCache(store)

    address, run = parse_address(f"/run/{run_id}/ranks", ""), store.find_run(run_id)
    shown = str(PageBuilder(store, cache).build_content(address).children)
    assert address is not None and run is not None
    tabs = list(find(build_run_page(cache.load_view(run), address, run), dcc.Link))
    exported = export_html(cache.load_view(run))

    assert "4 ranks!" in shown
    assert [(tab.children, tab.className) for tab in tabs][-1] == ("Ranks", "on")
    assert '<h2 class="chapter">Ranks</h2><p>4 ranks!</p>' in exported


def test_a_page_of_the_store_is_an_entry(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(request: PageRequest) -> PageContent | None:
        number, name = len(request.store.list_runs()), request.address.item
        return PageContent(html.P(f"{number} runs! {name}"))

    toy = StorePage("Disk", "/disk", build, is_item=str.isalpha,
                    has_item=lambda _, name: name in ("", "scratch"))  # fmt: skip
    monkeypatch.setattr(store_pages, "STORE_PAGES", (*STORE_PAGES, toy))
    client = create_server(store).test_client()

    assert "0 runs! " in ask_page(client, "/disk")
    assert "0 runs! scratch" in ask_page(client, "/disk/scratch")
    assert '"Disk"' in client.get("/_dash-layout").get_data(as_text=True)
    places = ("/disk", "/disk/scratch", "/disk/home", "/disk/2")
    assert [client.get(place).status_code for place in places] == [200, 200, 404, 404]


def test_a_command_is_an_entry(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @click.command()
    def count_ranks_command() -> None:
        """Count ranks."""
        print_line("4")

    module = ModuleType("stepsplit.dashboard.commands.toy")
    module.count_ranks_command = count_ranks_command  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(COMMANDS, "count-ranks", CommandEntry("toy", "Count ranks."))

    assert cli.run(["count-ranks"]) == 0
    assert capsys.readouterr().out == "4\n"
    assert cli.run(["--help"]) == 0
    assert "  count-ranks  Count ranks.\n" in capsys.readouterr().out


def test_the_list_of_commands_imports_none_of_them() -> None:
    program = (
        "import sys; from stepsplit.dashboard import cli; cli.run(['--help'])\n"
        "print([m for m in sys.modules if m.startswith('stepsplit.dashboard.commands.')])"
    )
    lines = _run_python(program).splitlines()
    assert lines[-1] == "['stepsplit.dashboard.commands.common']"


class ToySink:
    """Keeps what it gets."""

    kept: ClassVar[list[object]] = []

    def __init__(self, place: str) -> None:
        self.name = f"toy:{place}"

    def write(self, points: Sequence[ScalarPoint]) -> None:
        self.kept.append((self.name, [point.step for point in points]))

    def close(self) -> None:
        self.kept.append("closed")


def test_a_sink_is_an_entry(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = ModuleType("stepsplit.dashboard.sinks.toy")
    module.open_sink = ToySink  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(log_to.SINK_KINDS, "toy", SinkKind("toy:PLACE", needs_place=True))

    assert cli.run(["analyze", str(TRACES), "--log-to", "toy:here"]) == 0
    assert ToySink.kept == [("toy:here", [19]), "closed"]
    assert cli.run(["analyze", str(TRACES), "--log-to", "toy"]) == 2
    assert "'toy' has no place; write toy:PLACE" in capsys.readouterr().err
    assert cli.run(["analyze", str(TRACES), "--log-to", "other"]) == 2
    assert "json:FILE, toy:PLACE" in capsys.readouterr().err


def test_the_html_export_imports_no_database() -> None:
    program = (
        "import sys; from stepsplit.analyzer import analyze\n"
        "from stepsplit.dashboard.pages.components import View\n"
        "from stepsplit.dashboard.web.html_export import export_html\n"
        f"export_html(View('a run', analyze({str(TRACES)!r}), None))\n"
        "print([m for m in ('sqlalchemy', 'alembic', 'flask', 'uvicorn') if m in sys.modules])"
    )
    assert _run_python(program).splitlines()[-1] == "[]"


def _run_python(program: str) -> str:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
