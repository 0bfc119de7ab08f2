"""What the docs show for notebooks runs: the example, and the pages' code."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.browser_builders import running_chromium
from support.required import absent
from support.samples import SAMPLES, read_golden

DOCS = SAMPLES.parent / "docs"


def list_code(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(), flags=re.M | re.S)


def test_the_code_of_the_page_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(SAMPLES.parent)
    (code,) = list_code("notebooks.md")
    exec(code, {})


@pytest.mark.slow
def test_the_example_runs_and_shows_report_tables_and_figures() -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(DOCS / "example.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "clear the outputs"
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(DOCS)}}).execute()

    shown = [
        output["data"] for cell in notebook.cells for output in cell.get("outputs", ())
        if "data" in output
    ]  # fmt: skip
    assert 'class="stepsplit-report"' in shown[0]["text/html"]
    assert sum("<table" in one.get("text/html", "") for one in shown) >= 3
    assert sum("application/vnd.plotly.v1+json" in one for one in shown) == 4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::Warning")  # of HTA
def test_htas_calls_and_ours_on_one_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec("hta") is None:
        absent("hta", "traceinsight is not installed")
    monkeypatch.chdir(SAMPLES.parent)
    names: dict[str, object] = {}
    opens, ours, bridge = list_code("from_hta.md")
    exec(opens, names)
    exec(ours, names)
    hta, report = names["hta"], read_golden("h100_fsdp2")

    # The rows of the page.
    found = hta.get_temporal_breakdown(visualize=False)  # type: ignore[attr-defined]
    assert found["idle_time_pctg"].tolist() == [23.0, 69.61]
    assert found["non_compute_time_pctg"].tolist() == [73.59, 27.19]
    with pytest.raises(ValueError, match="argmax of an empty sequence"):
        hta.get_potential_stragglers()  # type: ignore[attr-defined]
    steps = report.steps_frame()
    mean = steps[steps["kind"] == "full"].groupby("rank")[["skew_ns", "idle_ns"]].mean() / 1e6
    assert mean.round(1).to_numpy().tolist() == [[18.2, 6.8], [0.0, 25.3]]
    late = report.lateness_frame().set_index("rank")
    assert (late["last"][1], late["calls"][1], bool(late["straggler"][1])) == (55, 68, True)
    first = report.findings[0]
    assert first.ranks == (1,) and round(first.gain_ns / 1e6, 1) == 19.7
    exec(bridge, names)


@pytest.mark.slow
def test_a_report_is_readable_on_light_and_dark_pages(tmp_path: Path) -> None:
    shown = read_golden("built_tp_pp_dp_slow_rank")._repr_html_()
    pages = {
        "light": "<body data-jp-theme-light='true' style='background: white; color: black'>",
        "dark": "<body data-jp-theme-light='false' style='background: black; color: white'>",
    }
    # As JupyterLab aligns the cells of every table.
    sheet = "<style>:not(.b).a td, :not(.b).a th { text-align: right }</style>"
    colors = {}
    with running_chromium() as browser:
        for name, body in pages.items():
            (tmp_path / f"{name}.html").write_text(
                f"<html>{sheet}{body}<div class='a'>{shown}</div></body></html>"
            )
            # The page wins over the system.
            page = browser.new_page(color_scheme="light" if name == "dark" else "dark")
            page.goto(f"file://{tmp_path}/{name}.html")
            spans = page.locator(".stepsplit-report .bar span")
            colors[name] = [
                spans.nth(at).evaluate("one => getComputedStyle(one).backgroundColor")
                for at in range(spans.count())
            ]
            bar = page.locator(".stepsplit-report .bar").bounding_box()
            assert bar is not None and bar["width"] > 300
            # One below the other.
            keys = page.locator(".stepsplit-report .key").all()
            assert len({str(key.bounding_box()["x"]) for key in keys}) == 1  # type: ignore[index]
    assert len(colors["light"]) == 7
    assert colors["light"][0] == "rgb(0, 114, 178)" and colors["dark"][0] == "rgb(59, 154, 217)"
