"""The public figures: each by one call, the same as on the pages."""

from __future__ import annotations

import subprocess
import sys

import plotly.graph_objects as go
import pytest
from support.report_builders import analysis
from support.samples import SAMPLES, read_golden

from stepsplit.analyzer import Analysis, UsageError, compare_runs, examine
from stepsplit.dashboard import figures


@pytest.fixture(scope="module")
def run() -> Analysis:
    return examine([SAMPLES / "tp2_pp2"], job="auto")


NEEDS_TABLES = ("plot_pipeline", "plot_waits")
OF_TWO_RUNS = ("plot_difference",)
OF_ONE = [name for name in figures.__all__ if name not in OF_TWO_RUNS]


@pytest.mark.parametrize("name", OF_ONE)
def test_a_figure_is_one_call_on_a_run(run: Analysis, name: str) -> None:
    figure = getattr(figures, name)(run)

    assert isinstance(figure, go.Figure) and figure.data
    # It may be changed, and written.
    assert "mine" in figure.update_layout(title="mine").to_json()
    if name not in NEEDS_TABLES:
        assert getattr(figures, name)(run.report).data == getattr(figures, name)(run).data
    else:
        with pytest.raises(UsageError, match="examine"):
            getattr(figures, name)(run.report)


def test_bars_add_up_to_the_mean_step_of_each_rank(run: Analysis) -> None:
    bars = figures.plot_split_by_rank(run).data
    heights = [sum(bar.y[at] for bar in bars) for at in range(len(bars[0].x))]
    steps = run.report.steps_frame()
    means = steps[steps["kind"] == "full"].groupby("rank")["step_ns"].mean() / 1e6

    assert heights == pytest.approx(means.tolist(), abs=1e-5)


def test_a_figure_without_its_data_says_what_is_missing() -> None:
    report = read_golden("dp4")
    for name, said in (
        ("plot_stage_bubbles", "no pipeline"),
        ("plot_memory", "neither measured nor predicted"),
        ("plot_waterfall", "no model comparison"),
    ):
        if name == "plot_memory" and report.memory:
            continue
        with pytest.raises(UsageError, match=said):
            getattr(figures, name)(report)
    with pytest.raises(UsageError, match="no microbatches in step 99"):
        figures.plot_pipeline(analysis(), step=99)


def test_two_runs_are_one_figure() -> None:
    comparison = compare_runs(SAMPLES / "pp2_m2", SAMPLES / "pp2_m8")
    (waterfall,) = figures.plot_difference(comparison).data

    assert waterfall.y[0] == "baseline" and waterfall.y[-1] == "candidate"


def test_the_room_is_imported_without_plotly() -> None:
    code = (
        "import sys, stepsplit.dashboard.figures as f; assert 'plotly' not in sys.modules;"
        "assert len(f.__all__) == 13"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError):
        figures.plot_beauty  # noqa: B018
