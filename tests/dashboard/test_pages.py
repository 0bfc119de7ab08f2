"""Pages of one run, two runs and many runs, and their empty states."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from dash import dcc, html
from msgspec import structs
from support.page_text import find
from support.report_builders import MS, analysis, make_run_of_many_ranks
from support.samples import analyze_recording, read_golden

from stepsplit.analyzer import analyze, examine
from stepsplit.analyzer.report.report import NO_MODEL, AxisSize, MemoryRow, Report, WarningRow
from stepsplit.dashboard.pages.address import Address, AddressQuery, build_page_url, format_query
from stepsplit.dashboard.pages.communication import build_collectives_page, build_pipeline_page
from stepsplit.dashboard.pages.compare import compare_page
from stepsplit.dashboard.pages.components import View
from stepsplit.dashboard.pages.compute import build_memory_page
from stepsplit.dashboard.pages.history import build_history_page
from stepsplit.dashboard.pages.model import build_model_page
from stepsplit.dashboard.pages.overview import build_overview
from stepsplit.dashboard.pages.run_columns import filter_runs, sort_runs
from stepsplit.dashboard.pages.run_pages import build_run_page, build_waiting_page
from stepsplit.dashboard.pages.runs import build_runs_page
from stepsplit.dashboard.pages.store_pages import parse_address
from stepsplit.dashboard.pages.tables import DataTable
from stepsplit.dashboard.store.metrics import CheckRow, MetricPoint, build_headline
from stepsplit.dashboard.store.run_row import RunRow, State, Tag

SAMPLES = Path(__file__).parents[2] / "sample_traces"
RUN = "abcdef012345"


def text(part: Any) -> str:
    if isinstance(part, list | tuple):
        return " ".join(text(one) for one in part)
    if hasattr(part, "to_plotly_json"):
        return text(getattr(part, "children", None))
    return "" if part is None else str(part)


def graphs(part: Any) -> list[str]:
    return [one.id for one in find(part, dcc.Graph)]


def view(report: Report | None = None) -> View:
    made = analysis()
    return View("a run", report or made.report, made.tables, RUN)


def listed(name: str, created: int, state: State = "done", **more: Any) -> RunRow:
    done = build_headline(analysis().report) if state == "done" else None
    return RunRow(f"{created:012x}", name, created, state, more.pop("error", None), done, **more)


@pytest.mark.parametrize(
    ("path", "page"),
    [("/", "runs"), (f"/run/{RUN}", "overview"), (f"/run/{RUN}/timeline", "timeline"),
     ("/compare", "compare"), ("/history", "history"), (f"/run/{RUN}/", "overview")],
)  # fmt: skip
def test_every_page_has_a_url(path: str, page: str) -> None:
    address = parse_address(path, "?step=4&tp=x&tp=8")
    assert address is not None
    assert (address.page, address.chosen.parse_int("step"), address.chosen.parse_int("tp")) == (
        page,
        4,
        8,
    )


@pytest.mark.parametrize("path", ["/run/..", f"/run/{RUN}/secrets", "/etc", "/run/ABC", None])
def test_unknown_urls_are_none(path: str | None) -> None:
    assert parse_address(path, "") is None or path is None


def test_a_url_omits_default_options() -> None:
    assert build_page_url(RUN, "timeline", step=None, rank=3) == f"/run/{RUN}/timeline?rank=3"
    assert format_query({"q": "", "sort": None}) == ""
    assert parse_address("/", "?step=-1&rank=1e9") == Address(
        "runs", "", AddressQuery({"step": "-1", "rank": "1e9"})
    )
    assert AddressQuery({"step": "-1", "rank": "1e9"}).parse_int("rank") is None


def test_findings_link_to_the_timeline() -> None:
    page = build_overview(view())
    links = [link.href for link in find(page, dcc.Link) if link.children == "open in timeline"]
    # With the rank of its group that waits for it, in the middle one of the steps.
    assert links == [f"/run/{RUN}/timeline?rank=3&open=3,2&show=2,3&step=6"]
    assert "15.0 ms (10.4 %)" in text(page)


def test_without_a_model_the_overview_shows_what_is_missing() -> None:
    why = "cannot infer [training] seq_len from the recording; analyze --write-job x writes it"
    warning = WarningRow(NO_MODEL, why)
    report = msgspec.structs.replace(analysis().report, warnings=(warning,))
    page = build_overview(view(report))
    # Once, and without the command line's way to state it.
    assert text(page).count("cannot infer [training] seq_len") == 1 and "--write" not in text(page)
    assert "job.toml" in text(page)
    assert "waterfall" not in graphs(page)


def test_with_a_model_the_overview_shows_the_waterfall_and_its_caveats() -> None:
    page = build_overview(view(analyze_recording(SAMPLES / "tp2_pp2", "auto")))
    assert {"sides", "waterfall"} <= set(graphs(page))
    assert "caveat: cpu" in text(page)


def test_a_pages_tabs_name_the_page() -> None:
    for name in ("overview", "timeline", "pipeline", "collectives", "compute", "memory", "model"):
        page = build_run_page(view(), Address(name, RUN, AddressQuery()), listed("x", 1, "done"))
        (on,) = [link for link in find(page, dcc.Link) if getattr(link, "className", "") == "on"]
        assert on.children == name.capitalize()


def test_a_job_without_a_pipeline_says_so() -> None:
    report = msgspec.structs.replace(analysis().report, pipeline=None)
    assert "One pipeline stage" in text(build_pipeline_page(view(report), AddressQuery()))


def test_the_grid_is_of_the_chosen_step_and_of_a_full_one_otherwise() -> None:
    for asked, shown in (("7", "step 7 took"), ("3", "step 6 took"), ("x", "step 6 took")):
        assert shown in text(build_pipeline_page(view(), AddressQuery({"step": asked})))


def test_an_ideal_that_is_longer_than_the_measured_step_is_none() -> None:
    """The same microbatches, closer together than stages of equal length allow."""
    report = analysis().report
    assert report.pipeline is not None
    pipeline = msgspec.structs.replace(report.pipeline, schedule="1f1b")
    shown = view(msgspec.structs.replace(report, pipeline=pipeline))
    assert shown.tables is not None
    boxes = shown.tables.boxes
    close = structs.replace(boxes, start_ns=boxes.start_ns // 2)
    tables = structs.replace(shown.tables, boxes=close)

    page = text(build_pipeline_page(replace(shown, tables=tables), AddressQuery()))

    assert "with equal stages" in text(build_pipeline_page(shown, AddressQuery()))
    assert "no ideal grid: stages of equal length would not be faster" in page
    assert "with equal stages" not in page


def rows_of_waits(mesh: tuple[AxisSize, ...] = (), **chosen: str) -> tuple[str, list[str]]:
    """The title and the rows of the matrix of waits of a sample, as if it were of another mesh."""
    made = examine([SAMPLES / "tp2_pp2"])
    run = made.report.run
    if mesh:
        size = prod(axis.size for axis in mesh)
        run = msgspec.structs.replace(run, ranks=tuple(range(size)), world_size=size, mesh=mesh)
    report = msgspec.structs.replace(made.report, run=run)
    page = build_collectives_page(View("a", report, made.tables, RUN), AddressQuery(chosen))
    (graph,) = (one for one in find(page, dcc.Graph) if one.id == "waits")
    return graph.figure.layout.yaxis.title.text, list(graph.figure.data[0].y)


def test_the_matrix_has_the_waits_of_the_full_steps() -> None:
    """All but one step left out: for a known rank it waits at most what the split of that step
    says, and for most of it."""
    made = examine([SAMPLES / "tp2_pp2"])
    kept = min(row.step for row in made.report.steps if row.kind == "full")
    steps = tuple(
        row if row.step == kept else msgspec.structs.replace(row, kind="other")
        for row in made.report.steps
    )
    report = msgspec.structs.replace(made.report, steps=steps)
    page = build_collectives_page(
        View("a", report, made.tables, RUN), AddressQuery({"waits": "direct"})
    )
    (graph,) = (one for one in find(page, dcc.Graph) if one.id == "waits")
    drawn_ns = 1e6 * np.nansum(np.array(graph.figure.data[0].z, dtype=float), axis=1)
    waited_ns = np.array([row.skew_ns + row.bubble_ns for row in steps if row.step == kept])
    assert (drawn_ns <= waited_ns + 1).all() and (drawn_ns > 0.8 * waited_ns).all()


def test_waits_are_grouped_by_what_the_address_says() -> None:
    ranks = ("waiting (rank)", ["0", "1", "2", "3"])

    assert rows_of_waits() == rows_of_waits(group="nothing") == ranks
    assert rows_of_waits(group="stage") == ("waiting (stage)", ["0", "1"])
    assert rows_of_waits(group="tp") == ("waiting (tp group)", ["0", "1"])


def test_waits_of_many_ranks_are_grouped_by_the_finest_groups_that_can_be_read() -> None:
    mesh = (AxisSize("dp_replicate", 20), AxisSize("tp", 2))

    assert rows_of_waits(mesh) == ("waiting (tp group)", [str(number) for number in range(20)])
    assert len(rows_of_waits(mesh, group="rank")[1]) == 40


def test_wait_and_transfer_are_those_of_the_slowest_group() -> None:
    page = build_collectives_page(view(), AddressQuery())
    (figure,) = [one.figure for one in find(page, dcc.Graph) if one.id == "wait-transfer"]
    assert list(figure.data[0].y) == [
        "all_reduce on tp,<br>33.6 MB", "send on pp,<br>16.8 MB",
        "broadcast on pp,<br>size unknown",
    ]  # fmt: skip
    assert [list(trace.x) for trace in figure.data] == [[0.415, 0.6, 0.021], [0.56, 0, 0]]


def test_memory_is_shown_by_rank_and_by_allocator_reserve() -> None:
    row = MemoryRow(0, 6 << 30, 8 << 30, 2 << 30, None, None, 3 << 30, None, None)
    page = build_memory_page(view(msgspec.structs.replace(analysis().report, memory=(row,))))
    (figure,) = [one.figure for one in find(page, dcc.Graph)]
    assert {trace.name: list(trace.x) for trace in figure.data} == {
        "weights": [2], "activations": [3], "uncategorized": [1],
    }  # fmt: skip
    assert "2.0 GiB" in text(page)
    # What has no category is explained, where it is a tenth of the peak.
    assert "uncategorized, 16.7 % of rank 0: all that is not weights or activations" in text(page)
    assert "--memory" not in text(page), "activations were measured"
    assert "No memory was recorded" in text(build_memory_page(view()))


def test_without_activations_the_memory_page_says_how_to_measure_them() -> None:
    recorded = read_golden("h100_fsdp2")
    words = text(build_memory_page(view(recorded)))
    assert "uncategorized, 92.1 % of rank 0: all that is not weights, gradients or opt" in words
    assert "and activations, which a recording with memory (--memory) measures" in words
    known = MemoryRow(0, 1000, 1000, 950, None, None, None, None, None)
    report = msgspec.structs.replace(recorded, memory=(known,))
    assert "all that is not" not in text(build_memory_page(view(report)))


def test_a_changed_job_is_compared_with_the_measured_one() -> None:
    report = analyze_recording(SAMPLES / "tp2_pp2", "auto")
    page = build_model_page(
        view(report), AddressQuery({"tp": "1", "dp_replicate": "2", "global_batch": "48"})
    )
    assert graphs(page) == ["splits", "memory"]
    (bars,) = [one.figure for one in find(page, dcc.Graph) if one.id == "splits"]
    assert list(bars.data[0].y) == ["measured", "predicted", "changed"]
    assert bars.data[0].x[1] != bars.data[0].x[2]
    # Nothing is changed yet.
    page = build_model_page(view(report), AddressQuery())
    step, memory = (one.figure for one in find(page, dcc.Graph))
    assert list(step.data[0].y) == ["measured", "predicted"]
    assert list(memory.data[0].y) == ["model, stage 0", "model, stage 1"]


def test_the_memory_page_says_that_only_predictions_are_shown() -> None:
    report = analyze_recording(SAMPLES / "tp2_pp2", "auto")
    assert not report.memory
    words = text(build_memory_page(view(report)))
    assert "no rank's memory was recorded; predicted peak of each stage" in words


def test_what_was_taken_for_a_model_by_numbers_is_on_the_page() -> None:
    report = analyze_recording(SAMPLES / "tp2_pp2", "auto")
    assert report.job is not None
    model = {k: v for k, v in report.job.model.items() if k not in ("gated", "tied")}
    tables = msgspec.structs.replace(report.job, model={**model, "name": "llama-3.1-8b"})
    page = text(build_model_page(view(msgspec.structs.replace(report, job=tables)), AddressQuery()))
    assert "read model as " in page and "parameters, but llama-3.1-8b has 8.03B" in page


def test_an_invalid_job_shows_its_error() -> None:
    report = analyze_recording(SAMPLES / "tp2_pp2", "auto")
    page = build_model_page(view(report), AddressQuery({"tp": "64"}))
    assert "Invalid job" in text(page)
    assert graphs(page) == []


def test_only_what_was_recorded_is_called_so() -> None:
    report = analyze_recording(SAMPLES / "tp2_pp2", "auto")
    page = build_model_page(view(report), AddressQuery({"schedule": "interleaved"}))
    menus = {getattr(one, "data-choice"): text(one) for one in find(page, html.Select)}
    assert "2 (as recorded)" in menus["pp"]
    assert "as recorded" not in menus["chunks"]  # one chunk is no interleaved schedule


def test_the_plan_ranks_layouts_when_asked() -> None:
    report = analyze_recording(SAMPLES / "tp2_pp2", "auto")
    assert "Compare the layouts of 4 ranks" in text(build_model_page(view(report), AddressQuery()))
    *_, table = find(build_model_page(view(report), AddressQuery({"plan": "1"})), html.Table)
    steps = [float(text(row.children[8]).split()[0]) for row in table.children[1].children]
    assert steps == sorted(steps)
    assert len(steps) > 2


def test_a_hardware_file_of_the_run_is_part_of_its_job(tmp_path: Path) -> None:
    run = tmp_path / "job.toml"
    (tmp_path / "mine.toml").write_text('preset = "cpu"\nmemory_bytes = 123456789\n')
    run.write_text('[hardware]\nfile = "mine.toml"\n')
    report = analyze(SAMPLES / "tp2_pp2", job=run)
    assert report.job is not None
    assert report.job.hardware["memory_bytes"] == 123456789
    assert "file" not in report.job.hardware


def test_an_unchanged_job_is_predicted_with_the_rates_that_the_run_was_compared_with(
    tmp_path: Path,
) -> None:
    (tmp_path / "job.toml").write_text(
        '[hardware]\npreset = "cpu"\n[[hardware.transfers]]\nop = "all_reduce"\nranks = 2\n'
        "ranks_per_node = 2\nsizes_bytes = [1, 1_000_000_000]\ntimes_ns = [9e7, 9e8]\n"
    )
    shown = view(analyze(SAMPLES / "tp2_pp2", job=tmp_path / "job.toml"))
    page = text(build_model_page(shown, AddressQuery()))
    assert "+0.0 %" in page and "by the model's ratio" in page
    ranked = text(build_model_page(shown, AddressQuery({"plan": "1"})))
    plain = view(analyze_recording(SAMPLES / "tp2_pp2", "auto"))
    assert ranked != text(build_model_page(plain, AddressQuery({"plan": "1"})))


def test_two_runs_are_compared_bucket_by_bucket() -> None:
    one, other = (View(n, analyze_recording(SAMPLES / n), None, RUN) for n in ("pp2_m2", "pp2_m8"))
    page = compare_page(one, other)
    assert graphs(page) == ["splits", "difference"]
    for words in ("microbatches", "beyond step-to-step noise", "+210.5 %", "recv float32", "gemm",
                  "Bottlenecks that changed", "idle 3.7 % of the step on both ranks"):  # fmt: skip
        assert words in text(page)
    empty = View("empty", msgspec.structs.replace(one.report, steps=()), None, RUN)
    assert "cannot be compared" in text(compare_page(empty, other))


def test_runs_match_all_words_and_sort_unknown_values_last() -> None:
    rows = [
        listed("alpha", 1, tags=(Tag("branch", "main"),)),
        listed("beta", 2, "failed", error="no trace in it"),
        listed("gamma", 3),
    ]
    assert [run.name for run in filter_runs(rows, "branch=main ALPHA")] == ["alpha"]
    assert [run.name for run in filter_runs(rows, "failed")] == ["beta"]
    assert [run.name for run in sort_runs(rows, "-added")] == ["gamma", "beta", "alpha"]
    assert [run.name for run in sort_runs(rows, "step")][-1] == "beta"
    assert [run.name for run in sort_runs(rows, "nonsense")] == ["alpha", "beta", "gamma"]


def pills(part: Any) -> list[Any]:
    return [one for one in find(part, html.Span) if "pill" in getattr(one, "className", "")]


def test_the_list_shows_sorts_and_searches_check_results() -> None:
    rows = [
        listed("alpha", 1, verdict=CheckRow("pass", "nothing got worse")),
        listed("beta", 2),
        listed("gamma", 3, verdict=CheckRow("inconclusive", "too few runs")),
        listed("delta", 4, "failed", verdict=CheckRow("regressed", "step +12.3 %")),
    ]

    page = build_runs_page(rows, AddressQuery({"sort": "verdict"}))

    assert [
        (text(one), one.className, one.title) for one in pills(page) if hasattr(one, "title")
    ] == [
        ("inconclusive", "pill running", "too few runs"),
        ("pass", "pill done", "nothing got worse"),
        ("regressed", "pill failed", "step +12.3 %"),
    ]
    (table,) = find(page, html.Table)
    widths = {sum(cell.colSpan or 1 for cell in row.children) for row in table.children[1].children}
    assert widths == {len(table.children[0].children.children)}
    assert [text(row.children[3]) for row in table.children[1].children][-1] == ""
    assert [run.name for run in filter_runs(rows, "regressed")] == ["delta"]


def test_the_list_shows_progress_and_errors() -> None:
    rows = [
        listed("going", 3, "running", progress=0.4, progress_note="2 of 5 files"),
        listed("failed", 2, "failed", error="rank0.json: no trace in it"),
    ]
    page = build_runs_page(rows, AddressQuery())
    assert [bar.value for bar in find(page, html.Progress)] == ["40"]
    assert "2 of 5 files" in text(page)
    assert "no trace in it" in text(page)
    assert "No run matches this search" in text(build_runs_page(rows, AddressQuery({"q": "zzz"})))
    assert "stepsplit demo" in text(build_runs_page([], AddressQuery()))


@pytest.mark.parametrize(
    ("state", "words"),
    [("uploading", "not finished"), ("queued", "Queued for"), ("failed", "disk full")],
)
def test_a_run_without_a_report_shows_its_state(state: State, words: str) -> None:
    assert words in text(build_waiting_page(listed("x", 1, state, error="disk full")))


def test_history_marks_outliers_and_budget_violations() -> None:
    values = [100.0, 101, 99, 100, 102, 100, 150, 101]
    points = [MetricPoint(RUN, f"run {i}", i, value * MS) for i, value in enumerate(values)]
    page = build_history_page(points, ["branch=main"], AddressQuery({"budget": "101.5"}))
    assert [text(one) for one in pills(page)] == ["outlier, over budget", "over budget"]
    assert "Too few runs" in text(build_history_page(points[:1], [], AddressQuery()))
    few = build_history_page(points[:4], [], AddressQuery({"metric": "nonsense", "budget": "x"}))
    assert not pills(few)
    assert "No lasting change in 8 runs." in text(page)


def test_history_lists_and_draws_level_changes() -> None:
    values = [100.0, 101, 99, 100, 102, 100, 120, 121, 119, 122, 120, 121]
    points = [MetricPoint(f"{i:012x}", f"run {i}", i, value * MS) for i, value in enumerate(values)]

    page = build_history_page(points, [], AddressQuery())

    (section,) = [one for one in find(page, html.Section) if text(one).startswith("Changes")]
    (table,) = find(section, html.Table)
    assert [text(cell) for cell in table.children[1].children[0].children] == [
        "run 6", "100.3 ms", "120.5 ms", "+20.1 %",
    ]  # fmt: skip
    assert [link.href for link in find(table, dcc.Link)] == [build_page_url(f"{6:012x}")]
    assert "not used by check" in text(section)
    (figure,) = [one.figure for one in find(page, dcc.Graph)]
    (level,) = [trace for trace in figure.data if trace.name == "level"]
    assert list(level.y) == pytest.approx([100.33, 120.5, 120.5], abs=0.01)
    assert [one.text for one in figure.layout.annotations] == ["+20.1 %"]


def test_the_overview_lists_the_kernels_on_the_critical_path_with_links_to_them() -> None:
    report = analyze_recording(SAMPLES / "built_tp_pp_dp_slow_rank")
    page = build_overview(View("a run", report, analysis().tables, RUN))
    first = report.path_kernels[0]
    assert f"{first.kernel} rank 3, stream 7" in text(page)
    links = [one.href for one in find(page, dcc.Link) if text(one) == "longest"]
    assert links[0].startswith(f"/run/{RUN}/timeline?rank=3&from={first.start_ns - first.dur_ns}")
    assert len(links) == len(report.path_kernels)


def test_of_many_ranks_the_overview_shows_stages_and_the_ranks_that_are_busy_longer() -> None:
    page = build_overview(View("many", make_run_of_many_ranks(), None, RUN))

    figures = {one.id: one.figure for one in find(page, dcc.Graph)}
    assert "by-rank" not in figures
    compute, *_ = figures["by-group"].data
    assert list(compute.x) == ["stage 0", "stage 1", "stage 2", "stage 3"]
    assert list(compute.y) == pytest.approx([50, 51 + 10 / 32, 52 + 5 * 8 / 32, 53])
    (grid,) = figures["busy-ranks"].data
    expected = np.zeros((8, 16))
    expected[:, 9], expected[5, 4] = 5, 10
    np.testing.assert_array_equal(grid.z, expected)
    assert grid.customdata[5][4] == 37
    (section,) = [one for one in find(page, html.Section) if "longer than the median" in text(one)]
    (table,) = find(section, DataTable)
    assert [text(cell.content) for cell in table.cells[0][:3]] == ["rank 37", "n4", "10.0 ms"]
    assert {cell.content for row in table.cells[1:9] for cell in row[1:3]} == {"n9", "5.00 ms"}
    assert len(table.cells) == 100
    assert "28 smaller rows in report.json" in text(section)
