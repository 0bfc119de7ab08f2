"""Runs by job, a history per job, and the comparison of any number of runs."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from dash import dcc, html
from dash.development.base_component import Component
from hypothesis import given, strategies as st
from msgspec import structs
from support.databases import make_sqlite
from support.job_builders import JOBS, key_of, store_runs
from support.page_text import find
from support.report_builders import MS, paced

from stepsplit.analyzer.regression.compare import build_side, compare_reports
from stepsplit.analyzer.report.report import AxisSize, Report
from stepsplit.analyzer.units import format_milliseconds, format_percent
from stepsplit.dashboard.figures.communication import MAX_JOBS, compute_typical_range
from stepsplit.dashboard.pages.address import AddressQuery
from stepsplit.dashboard.pages.compare import MAX_COMPARED, build_comparison_of_many
from stepsplit.dashboard.pages.components import JobRun, View, label_jobs
from stepsplit.dashboard.pages.history import build_history_page
from stepsplit.dashboard.pages.run_columns import filter_runs
from stepsplit.dashboard.pages.runs import GROUP_ROWS, MAX_GROUPS, build_runs_page
from stepsplit.dashboard.pages.store_pages import parse_address
from stepsplit.dashboard.store.metrics import JobFingerprint, MetricPoint
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.page_builder import PageBuilder
from stepsplit.dashboard.web.report_cache import ReportCache

GPT = [1.0, 1.01, 0.99, 1.0, 1.02, 1.0, 1.2, 1.21, 1.19, 1.22, 1.2, 1.21]
PACES = {"gpt": GPT, "tiny": [1.0] * 5, "m2": [1.0, 1.1], "m8": [1.0]}


def text(part: Any) -> str:
    if isinstance(part, list | tuple):
        return " ".join(text(one) for one in part)
    if isinstance(part, Component):
        return text(getattr(part, "children", None))
    return "" if part is None else str(part)


def rows_of(table: html.Table) -> list[list[str]]:
    """What the table says, row by row, with its head."""
    return [[text(cell) for cell in row.children] for row in find(table, html.Tr)]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[str]]]:
    """A folder with a store of 20 runs, and their ids."""
    folder = tmp_path_factory.mktemp("filled")
    with closing(Store.open(make_sqlite(folder / "runs.db"), folder / "artifacts")) as store:
        return folder, store_runs(store, PACES)


@pytest.fixture
def ids(
    store: Store, tmp_path: Path, filled: tuple[Path, dict[str, list[str]]]
) -> dict[str, list[str]]:
    """Of the runs in the store, which are copied."""
    folder, ids = filled
    shutil.copytree(folder / "artifacts", tmp_path / "artifacts", dirs_exist_ok=True)
    with (
        closing(sqlite3.connect(folder / "runs.db")) as source,
        closing(sqlite3.connect(tmp_path / "runs.db")) as target,
    ):
        source.backup(target)
    return ids


def show(store: Store, path: str, search: str = "") -> Component:
    """The page as the dashboard builds it."""
    pages = PageBuilder(store, ReportCache(store))
    shown = pages.build_content(parse_address(path, search)).children
    assert isinstance(shown, Component)
    return shown


def listed(page: Component) -> list[str]:
    links = (one for one in find(page, dcc.Link) if getattr(one, "className", "") == "run-link")
    return [text(one) for one in links]


# The list of runs.


def test_the_list_shows_the_job_of_each_run_unless_all_have_one(
    store: Store, ids: dict[str, list[str]]
) -> None:
    flat = show(store, "/")
    keys = [one for one in find(flat, html.A) if getattr(one, "className", "") == "job-key"]
    assert len(listed(flat)) == len(keys) == 20
    assert {(text(one), one.href, one.title) for one in keys} == {
        (key_of(job), f"/?job={key_of(job)}", label)
        for job, label in (("gpt", "pp2 tp2 · 4 x H100"), ("tiny", "pp2 tp2 · 4 x cpu"),
                           ("m2", "pp2 · 2 x cpu"), ("m8", "pp2 · 2 x cpu"))
    }  # fmt: skip

    own = show(store, "/", f"?job={key_of('tiny')}&sort=name")
    assert listed(own) == [f"tiny-{day:02}" for day in range(5)]
    assert not [one for one in find(own, html.A) if getattr(one, "className", "") == "job-key"]
    links = {text(one): one.href for kind in (dcc.Link, html.A) for one in find(own, kind)}
    assert links["history"] == f"/history?job={key_of('tiny')}"
    assert links["all jobs"] == "/?sort=name"
    assert links["step"] == f"/?job={key_of('tiny')}&sort=-step"


def test_the_search_finds_jobs(store: Store, ids: dict[str, list[str]]) -> None:
    runs = store.list_runs()
    assert len(filter_runs(runs, "h100")) == len(filter_runs(runs, key_of("gpt"))) == 12
    assert [run.name for run in filter_runs(runs, "2 x CPU m8")] == ["m8-00"]


def test_groups_have_a_heading_with_the_last_run_and_what_changed(
    store: Store, ids: dict[str, list[str]]
) -> None:
    sections = list(find(show(store, "/", "?group=job"), html.Section))

    heads = [text(next(find(one, html.H2))) for one in sections]
    assert heads == [
        "pp2 tp2 · 4 x H100", "pp2 tp2 · 4 x cpu", "pp2 · 2 x cpu · m2-01", "pp2 · 2 x cpu · m8-00",
    ]  # fmt: skip
    assert [listed(one)[0] for one in sections] == ["gpt-11", "tiny-04", "m2-01", "m8-00"]
    assert len(listed(sections[0])) == GROUP_ROWS
    gpt, tiny, m2, m8 = map(text, sections)
    assert "10 of 12 runs" in gpt and "all 12 runs" in gpt
    assert "last 2026-10-02" in gpt and "+18.6 %" in gpt
    assert "+0.0 %" in tiny and "+10.0 %" in m2 and "against" not in m8
    trends = [one for one in find(sections, html.Span) if getattr(one, "className", "") == "trend"]
    # A bar for each run, which leads to it, after what they say.
    assert [len(one.children) - 1 for one in trends] == [12, 5, 2]
    assert [bar.style["height"] for bar in trends[2].children[1:]] == ["91%", "100%"]


def test_groups_are_searched_sorted_and_keep_their_address(
    store: Store, ids: dict[str, list[str]]
) -> None:
    page = show(store, "/", "?group=job&q=m2&sort=name")
    assert listed(page) == ["m2-00", "m2-01"]
    hrefs = [one.href for one in find(page, html.A) if text(one) == "step"]
    assert set(hrefs) == {"/?group=job&q=m2&sort=-step"}
    assert "No run matches" in text(show(store, "/", "?group=job&q=zzz"))
    assert "no job zzz" in text(show(store, "/", "?group=job&job=zzz"))
    assert len(listed(show(store, "/", "?group=%3Cb%3E"))) == 20


def test_runs_of_unknown_jobs_are_the_last_group(store: Store) -> None:
    store_runs(store, {"m8": [1.0]})
    store.add("open")
    sections = list(find(show(store, "/", "?group=job"), html.Section))
    assert [text(next(find(one, html.H2))) for one in sections] == [
        "pp2 · 2 x cpu",
        "unknown job",
    ]
    assert "all" not in text(sections[1])


def test_the_page_of_many_jobs_is_limited(store: Store, ids: dict[str, list[str]]) -> None:
    one = store.list_runs()[0]
    runs = [replace(one, job=JobFingerprint(f"{n:08x}", f"job {n}")) for n in range(1_000)]
    page = build_runs_page(runs, AddressQuery({"group": "job"}))
    assert len(list(find(page, html.Section))) == MAX_GROUPS
    assert f"{1_000 - MAX_GROUPS} more jobs" in text(page)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xy"), st.text(max_size=2))))
def test_jobs_have_names_of_their_own(runs: list[tuple[str, str, str]]) -> None:
    jobs = [JobRun(JobFingerprint(key, label), name) for key, label, name in runs]
    labels = label_jobs(jobs)
    assert set(labels) == {key for key, _, _ in runs}
    assert len(set(labels.values())) == len(labels)


# History.


def points_of(job: str, values: Sequence[float], first_day: int = 0) -> list[MetricPoint]:
    own = JobFingerprint(job, job)
    return [
        MetricPoint(f"{i:012x}", f"{job}-{i}", first_day + i, value * MS, own)
        for i, value in enumerate(values)
    ]


def history(points: Sequence[MetricPoint], **chosen: str) -> list[Component]:
    return build_history_page(points, [], AddressQuery(chosen))


def test_without_a_job_each_has_a_line_and_no_typical_range() -> None:
    page = history([*points_of("big", [100.0] * 9), *points_of("small", [1.0] * 7)])
    (graph,) = find(page, dcc.Graph)
    assert [(trace.name, len(trace.x)) for trace in graph.figure.data] == [("big", 9), ("small", 7)]
    colors = {(trace.line.color, trace.marker.symbol) for trace in graph.figure.data}
    assert len(colors) == 2


def test_changes_and_outliers_are_those_of_a_job() -> None:
    level = [100.0, 101, 99, 100, 102, 100, 120, 121, 119, 122, 120, 121]
    points = [*points_of("moved", level), *points_of("still", [10.0] * 8 + [11.0, 10.0])]

    changes, runs = list(find(history(points), html.Table))

    assert rows_of(changes)[1:] == [["moved-6", "moved", "100.3 ms", "120.5 ms", "+20.1 %"]]
    assert [row for row in rows_of(runs) if row[-1]] == [
        ["run", "job", "median step", "typical", "difference", "remark"],
        ["still-8", "still", "11.00 ms", "10.00 ms", "+10.0 %", "outlier"],
    ]


def test_values_have_four_digits_and_no_exponent() -> None:
    points = points_of("job", [12_345.6, 1_234.56, 384.0, 58.321, 0.02])
    (runs,) = (one for one in find(history(points), html.Table) if "median step" in text(one))
    assert [row[1] for row in rows_of(runs)[1:]] == [
        "0.020 ms", "58.32 ms", "384.0 ms", "1,235 ms", "12,346 ms",
    ]  # fmt: skip


def test_one_job_is_chosen_by_a_menu_and_has_its_typical_range(
    store: Store, ids: dict[str, list[str]]
) -> None:
    every = show(store, "/history")
    (menu,) = [
        one
        for one in find(every, html.Select)
        if one.to_plotly_json()["props"]["data-choice"] == "job"
    ]
    assert [text(one) for one in menu.children] == [
        "all jobs", "pp2 tp2 · 4 x H100 (12)", "pp2 tp2 · 4 x cpu (5)", "pp2 · 2 x cpu · m2-01 (2)",
        "pp2 · 2 x cpu · m8-00 (1)",
    ]  # fmt: skip

    own = show(store, "/history", f"?job={key_of('gpt')}")

    (graph,) = find(own, dcc.Graph)
    assert {trace.name for trace in graph.figure.data} == {"typical range", "runs", "level"}
    changes, runs = find(own, html.Table)
    assert rows_of(changes)[1][0] == "gpt-06"
    assert "job" not in rows_of(runs)[0] and len(rows_of(runs)) == 13
    assert "Too few runs" in text(show(store, "/history", "?job=unknown"))


def test_the_most_frequent_jobs_are_drawn() -> None:
    points = [one for n in range(12) for one in points_of(f"job {n:02}", [1.0 + n] * (n + 1))]
    page = history(points)
    (graph,) = find(page, dcc.Graph)
    assert [trace.name for trace in graph.figure.data] == [
        f"job {n:02}" for n in range(11, 11 - MAX_JOBS, -1)
    ]
    assert "4 more jobs are not drawn" in text(page)


@given(st.lists(st.floats(0, 1e9), min_size=6, max_size=40))
def test_the_typical_range_of_what_is_never_negative_is_not(values: list[float]) -> None:
    ranges = [compute_typical_range(values, at) for at in range(len(values))]
    assert all(one is not None and 0 <= one.low <= one.median <= one.high for one in ranges)
    (graph,) = find(history(points_of("job", [value / MS for value in values])), dcc.Graph)
    bands = [trace for trace in graph.figure.data if trace.name == "typical range"]
    assert len(bands) == 2 and min(min(band.y) for band in bands) >= 0
    assert graph.figure.layout.yaxis.rangemode == "nonnegative"


# Compare.


def views(*reports: Report) -> list[View]:
    return [View(f"run {at}", report, None, f"{at:08x}") for at, report in enumerate(reports)]


def test_runs_of_other_layouts_show_how_the_job_scales() -> None:
    one, m8 = JOBS["gpt"], JOBS["m8"]
    assert one.run.world_size > m8.run.world_size
    reports = [one, paced(one, 1.5), m8]

    _, scaling = list(find(build_comparison_of_many(views(*reports), "gpu"), html.Table))[:2]

    step_ns = [build_side(report).mean.step_ns for report in (m8, one, paced(one, 1.5))]
    assert [(row[0], row[1], row[-1]) for row in rows_of(scaling)[1:]] == [
        (name, f"{report.run.world_size}", format_percent(step_ns[0] / ns))
        for name, report, ns in zip(
            ("run 2", "run 0", "run 1"), (m8, one, one), step_ns, strict=True
        )
    ]


def test_runs_of_one_layout_have_no_scaling() -> None:
    page = build_comparison_of_many(views(*(paced(JOBS["gpt"], pace) for pace in (1.0, 1.5, 2.0))))
    assert "Scaling" not in text(page)


def test_each_run_has_its_own_mesh_though_some_are_inferred() -> None:
    one = JOBS["gpt"]
    sizes = (AxisSize("dp_shard", one.run.world_size),)
    inferred, stated = (
        msgspec.structs.replace(
            one, run=msgspec.structs.replace(one.run, mesh=sizes, mesh_source=source)
        )
        for source in ("messages", "run.json")
    )

    page = build_comparison_of_many(views(one, inferred, stated))

    changed = {row[0]: row[1:] for row in rows_of(list(find(page, html.Table))[-1])}
    own = f"dp_shard {one.run.world_size}"
    assert changed["mesh"][1:] == [own, own] and changed["mesh"][0] != own
    assert "inferred mesh" not in changed


def test_each_run_is_compared_with_the_first() -> None:
    one, tiny = JOBS["gpt"], JOBS["tiny"]
    reports = [one, paced(one, 1.5), tiny, JOBS["m8"]]

    page = build_comparison_of_many(views(*reports))

    table, _, settings = find(page, html.Table)
    rows = {row[0]: row[1:] for row in rows_of(table)}
    pairs = [compare_reports(one, other) for other in reports[1:]]
    sides = [pairs[0].baseline, *(pair.candidate for pair in pairs)]
    assert rows["median step"] == [format_milliseconds(side.median_ns) for side in sides]
    assert rows["change"] == [
        "",
        "+50.0 %",
        *(f"{100 * (p.ratio or 0) - 100:+.1f} %" for p in pairs[1:]),
    ]
    assert rows["step-to-step noise"] == ["", "beyond", "beyond", "beyond"]
    assert rows["microbatches"] == ["4", "4", "3", "8"]
    assert [cell.split()[0] for cell in rows["bubble"]] == [
        format_milliseconds(side.mean.bubble_ns).split()[0] for side in sides
    ]
    assert rows["MFU"] == ["41.2 %", "41.2 %", "", ""]
    assert rows["collective on tp"][3] == "0.00 ms"
    changed = {row[0]: row[1:] for row in rows_of(settings)}
    assert changed["device"] == ["NVIDIA H100", "NVIDIA H100", "cpu", "cpu"]
    assert changed["microbatches"] == ["4", "4", "3", "8"]
    assert "torch" in changed and "step" not in changed
    (graph,) = find(page, dcc.Graph)
    assert list(graph.figure.data[0].y) == ["1 run 0", "2 run 1", "3 run 2", "4 run 3"]
    details = [link.href for link in find(table, dcc.Link) if text(link) == "in detail"]
    assert details == [f"/compare?baseline={0:08x}&candidate={n:08x}" for n in (1, 2, 3)]


def test_runs_of_one_job_have_no_configuration_differences() -> None:
    page = build_comparison_of_many(views(*(paced(JOBS["m2"], pace) for pace in (1.0, 1.0, 0.9))))
    (table,) = find(page, html.Table)
    rows = {row[0]: row[1:] for row in rows_of(table)}
    assert rows["change"] == ["", "+0.0 %", "-10.0 %"]
    assert "time per microbatch" not in rows


def renamed(report: Report, names: Mapping[str, str]) -> Report:
    """The report as if its mesh were inferred from the calls, with other names for its axes."""

    def rename(row: Any) -> Any:
        return structs.replace(row, axis=names.get(row.axis, row.axis))

    mesh = tuple(map(rename, report.run.mesh or ()))
    return structs.replace(
        report,
        run=structs.replace(report.run, mesh_source="messages", mesh=mesh),
        groups=tuple(map(rename, report.groups)),
        exposed=tuple(map(rename, report.exposed)),
    )


def test_axes_have_the_names_that_a_run_states() -> None:
    stated = JOBS["tiny"]
    reports = [
        renamed(stated, {"tp": "cp"}),
        renamed(stated, {"tp": "dp_shard"}),
        stated,
    ]

    page = build_comparison_of_many(views(*reports))

    rows = {row[0]: row[1:] for row in rows_of(next(find(page, html.Table)))}
    assert len(set(rows["collective on tp"])) == len(set(rows["bubble on pp"])) == 1
    assert not [name for name in rows if name.endswith(("on cp", "on dp_shard"))]


def test_runs_are_added_removed_and_made_the_baseline(
    store: Store, ids: dict[str, list[str]]
) -> None:
    a, b, c = ids["gpt"][:3]
    two = show(store, "/compare", f"?baseline={a}&candidate={b}")
    assert "Difference by bucket" in text(two)
    assert f"/compare?runs={a},{b},{c}" in [one.href for one in find(two, dcc.Link)]

    three = show(store, "/compare", f"?runs={a},{b},{c}")
    buttons = {text(one): one.href for one in find(three, html.Ol) for one in find(one, dcc.Link)}
    assert buttons == {
        "remove  gpt-00": f"/compare?baseline={b}&candidate={c}",
        "use as baseline  gpt-01": f"/compare?runs={b},{a},{c}",
        "remove  gpt-01": f"/compare?baseline={a}&candidate={c}",
        "use as baseline  gpt-02": f"/compare?runs={c},{a},{b}",
        "remove  gpt-02": f"/compare?baseline={a}&candidate={b}",
    }


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        ("", "Select runs"),
        (",,,", "Select runs"),
        ("A,A,A", "Select runs"),
        ("A,B,A,B,,", "Difference by bucket"),
        ("A,B,nonsense,../../etc,%00,<b>", "4 runs of the address are not finished, not here"),
        ("A,B,C," + ",".join(f"{n:012x}" for n in range(97)), "97 runs of the address"),
        ("OPEN,A,B,C", "1 runs of the address"),
        ("ALL", "At most 12 are compared: 8 are left out"),
    ],
)
def test_odd_lists_of_runs_are_answered(
    store: Store, ids: dict[str, list[str]], runs: str, words: str
) -> None:
    names = {"A": ids["gpt"][0], "B": ids["gpt"][1], "C": ids["tiny"][0], "OPEN": store.add("open")}
    names["ALL"] = ",".join(one for own in ids.values() for one in own)
    asked = ",".join(names.get(part, part) for part in runs.split(","))

    page = show(store, "/compare", f"?runs={asked}")

    assert words in text(page)
    assert len(list(find(page, html.Li))) <= MAX_COMPARED


def test_a_run_without_a_step_cannot_be_compared() -> None:
    empty = structs.replace(JOBS["gpt"], steps=())
    assert "cannot be compared" in text(build_comparison_of_many(views(empty, *JOBS.values())))


def test_no_runs_no_groups() -> None:
    assert "No runs yet" in text(build_runs_page([], AddressQuery({"group": "job"})))
