"""Every page of every sample and of simulated jobs: a number that occurs twice is the same, and
what is shown are numbers and words, not gaps in the data or names of fields."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from pathlib import Path

import msgspec
import pytest
from simulator.engine import simulate
from simulator.kineto import write_recording
from simulator.noise import Noise
from simulator.planted import PLANTED, planted, scenario_of
from simulator.style import Style
from support.databases import make_sqlite
from support.ground_truth import SEED
from support.hang_dumps import write_dump
from support.page_text import (
    read_cards,
    read_chart_text,
    read_export,
    read_page,
    read_tables,
    read_text,
)
from support.report_builders import analysis
from support.samples import SAMPLES
from support.watch_builders import STORY, batch, event, list_story

from stepsplit.analyzer import examine
from stepsplit.analyzer.buckets import BUCKETS, Split
from stepsplit.analyzer.diagnose.causes import CAUSES
from stepsplit.analyzer.diagnose.hang.find import read_calls
from stepsplit.analyzer.report import report as rows
from stepsplit.analyzer.report.report import ComparedStage, Gap, Report
from stepsplit.analyzer.report.step_rows import list_full_steps
from stepsplit.analyzer.report.tables import Tables
from stepsplit.analyzer.units import choose_part_unit_ns, format_milliseconds
from stepsplit.dashboard.figures.run import draw_split_by_rank
from stepsplit.dashboard.pages.address import Address, AddressQuery
from stepsplit.dashboard.pages.compare import compare_page
from stepsplit.dashboard.pages.components import View
from stepsplit.dashboard.pages.hang import build_hang_page
from stepsplit.dashboard.pages.history import METRICS, build_history_page
from stepsplit.dashboard.pages.overview import build_caveats
from stepsplit.dashboard.pages.run_actions import RunRights
from stepsplit.dashboard.pages.run_pages import RUN_PAGES, build_run_page
from stepsplit.dashboard.pages.runs import build_runs_page
from stepsplit.dashboard.pages.tables import EXPORTED_ROWS
from stepsplit.dashboard.pages.watch import build_watch_list, build_watch_page, read_watch_view
from stepsplit.dashboard.store.metrics import (
    METRIC_NAMES,
    MetricPoint,
    build_headline,
    collect_metrics,
    compute_job_fingerprint,
)
from stepsplit.dashboard.store.run_row import RunRow
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.html_export import export_html

NAMES = sorted(path.name for path in SAMPLES.iterdir() if path.is_dir())
RUN = "abcdef012345"

NO_NUMBER = re.compile(r"\b(?:nan|NaN|None|inf|Infinity|null|undefined|[a-z]+ none ms|rank none)\b")
"""A gap in the data, shown as if it were a number or a name."""

FIELDS = {
    field
    for one in vars(rows).values()
    if isinstance(one, type) and issubclass(one, msgspec.Struct)
    for field in one.__struct_fields__
    if "_" in field
} | {name for name in (*METRIC_NAMES, *(cause.code for cause in CAUSES)) if "_" in name}
"""Names of fields, causes and metrics: words for people have no underscore."""

OF_JOBS = {"micro_batch", "global_batch", "seq_len", "head_size", "kv_heads"}
"""Keys that a user writes in his job.toml."""


def build_pages(report: Report, tables: Tables) -> dict[str, object]:
    """All pages of the run, the list of runs and its comparison with itself, by name."""
    view = View("a run", report, tables, RUN)
    row = RunRow(RUN, "a run", 10**18, "done", None, build_headline(report),
                 job=compute_job_fingerprint(report))  # fmt: skip
    pages: dict[str, object] = {
        page.key: build_run_page(view, Address(page.key, RUN, AddressQuery()), row)
        for page in RUN_PAGES
    }
    return pages | {
        "runs": build_runs_page([row], AddressQuery()),
        "compare": compare_page(view, view),
    }


def check(report: Report, tables: Tables) -> None:
    pages = build_pages(report, tables)
    check_words(pages)
    check_numbers(report, pages)
    check_export(report, tables)


def check_export(report: Report, tables: Tables) -> None:
    """The exported page has each card and each row of its pages, with the same numbers."""
    view = View("a run", report, tables)
    export = read_export(export_html(view))
    assert NO_NUMBER.findall(export) == []
    export = "".join(export.split())
    for page in RUN_PAGES:
        if page.chapter is not None and page.has_data(report):
            content = page.build(view, AddressQuery())
            for label, (value, note) in read_cards(content).items():
                assert "".join(f"{label}{value}{note}".split()) in export, page.key
            # Of a long table the export has the first rows.
            for row in (row for table in read_tables(content) for row in table[:EXPORTED_ROWS]):
                assert "".join("".join(row.values()).split()) in export, page.key


def check_words(pages: dict[str, object]) -> None:
    for name, page in pages.items():
        text = read_page(page)
        assert NO_NUMBER.findall(text) == [], name
        words = set(re.findall(r"(?<![\w.:])[a-z]+(?:_[a-z]+)+(?![\w.:(])", read_text(page)))
        assert sorted(words & FIELDS - OF_JOBS) == [], name
        assert re.findall(r"profil\w* -[\d.]+ %", text) == [], name
        assert re.findall(r"stepsplit [a-z]+ --|\$ stepsplit", text) == [], name


def check_numbers(report: Report, pages: dict[str, object]) -> None:
    """Collects what each quantity is said to be, and compares the texts."""
    said: dict[str, set[str]] = defaultdict(set)
    # The cards of the model's page are predictions.
    for page in (page for name, page in pages.items() if name != "model"):
        for label, (value, note) in read_cards(page).items():
            if label in ("mean step", "pipeline bubble", "MFU", "peak memory"):
                said[label].add(value)
            if label in ("compute", "collective", "bubble"):
                said[f"{label} share"].add(value)
            for skew in re.findall(r"of which skew ([\d.]+ %)", note):
                said["skew share"].add(skew)
            for ideal in re.findall(r"ideal ([\d.]+ %)", note):
                said["ideal bubble"].add(ideal)
            for median in re.findall(r"median ([\d.,]+ ms)", note):
                said["median step"].add(median)
            if label in ("baseline", "candidate"):
                said["median step"].add(value)
        text = read_text(page)
        for measured, ideal in re.findall(
            r"bubble is ([\d.]+ %) of the pipeline window, ideal ([\d.]+ %)", text
        ):
            said["pipeline bubble"].add(measured)
            said["ideal bubble"].add(ideal)
        for ideal in re.findall(r"dashed: ideal ([\d.]+ %)", text):
            said["ideal bubble"].add(ideal)
        for share in re.findall(r"skew ([\d.]+ %) of the step", text):
            said["skew share"].add(share)
        for table in read_tables(page):
            for row in table:
                if "time split" in row:
                    said["median step"].add(row["step ▼" if "step ▼" in row else "step"])
                    said["compute share"].add(row["compute"])
                    said["collective share"].add(row["collective"])
                    said["skew share"].add(row["of which skew"])
                    said["bubble share"].add(row["bubble"])
    for _, note in read_cards(pages["pipeline"]).values():
        said["ideal bubble"].update(re.findall(r"; ideal ([\d.]+ %)", note))
    assert {name: texts for name, texts in said.items() if len(texts) > 1} == {}
    check_sums(report, pages)


def parse_ms(text: str) -> float:
    return float(text.removesuffix(" ms").replace(",", ""))


def check_sums(report: Report, pages: dict[str, object]) -> None:
    """Parts in a table add up to the whole that another part of the page says."""
    summary = report.summary
    assert summary is not None
    mean_ms = {row.bucket: row.mean_ns / 1e6 for row in summary.buckets}
    for table in read_tables(pages["collectives"]):
        heads = set(table[0]) if table else set()
        if {"axis", "phase", "transfer", "skew", "bubble"} <= heads:
            for bucket in ("skew", "bubble"):
                whole = sum(parse_ms(row[bucket]) for row in table)
                # The rows are rounded together.
                unit_ms = choose_part_unit_ns(summary.step_ns) / 1e6
                assert whole == pytest.approx(mean_ms[bucket], abs=1.001 * unit_ms), bucket
        if "caused per step" in heads:
            whole = sum(parse_ms(row["caused per step"]) for row in table)
            numbers = list_full_steps(report.steps)
            own = [one for one in report.steps if one.step in numbers]
            waits = sum(one.skew_ns + one.bubble_ns for one in own) / len(own) / 1e6
            assert whole == pytest.approx(waits, rel=0.01, abs=0.06 * len(table))
    for table in read_tables(pages["compute"]):
        if table and {"family", "share of compute"} <= set(table[0]):
            shares = sum(float(row["share of compute"].removesuffix(" %")) for row in table)
            assert shares == pytest.approx(100, abs=0.06 * len(table))
    ranks = {one.rank for one in report.steps}
    for rank in ranks if len(ranks) <= 64 else ():
        own = [one for one in report.steps if one.rank == rank and one.kind == "full"]
        if own:
            shown = format_milliseconds(sum(one.step_ns for one in own) / len(own))
            headings = re.findall(
                rf"<b>rank {rank}</b>[^<]*?mean of (\d+) steps",
                read_chart_text(draw_split_by_rank(report)),
            )
            assert set(headings) == {str(len(own))}, (rank, shown)


QUICK = ("built_ddp_host_stall", "dp4", "h100_pp2", "tp2_pp2")
IN_TURN = pytest.mark.in_turn("dashboard/pages", "dashboard/figures", "analyzer")
SLOW_IN_TURN = (pytest.mark.slow, IN_TURN)


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=SLOW_IN_TURN) for name in NAMES],
)
def test_every_page_of_a_sample(name: str) -> None:
    made = examine([SAMPLES / name])
    check(made.report, made.tables)


@pytest.mark.parametrize("name", ["tp2_pp2", pytest.param("h100_pp2", marks=SLOW_IN_TURN)])
def test_every_page_of_a_sample_that_is_compared_with_the_model(name: str) -> None:
    made = examine([SAMPLES / name], job="auto")
    check(made.report, made.tables)


def simulate_job(name: str, folder: Path, seed: int = SEED) -> tuple[Report, Tables]:
    scenario = scenario_of(planted(name, seed), seed)
    write_recording(scenario, simulate(scenario.job, Noise.of(seed)), folder, Style())
    made = examine([folder])
    return made.report, made.tables


@pytest.mark.parametrize("name", ["slow_rank fsdp", "uneven_stages pp2", "nothing tp_dp"])
def test_every_page_of_a_simulated_job(name: str, tmp_path: Path) -> None:
    check(*simulate_job(name, tmp_path))


@pytest.mark.slow
@IN_TURN
@pytest.mark.parametrize("seed", [SEED, SEED + 1])
@pytest.mark.parametrize("name", PLANTED)
def test_every_page_of_many_simulated_jobs(name: str, seed: int, tmp_path: Path) -> None:
    check(*simulate_job(name, tmp_path, seed))


@pytest.mark.parametrize("name", ["h100_pp2", "tp2_pp2_dp2", "built_ddp_host_stall"])
def test_the_history_has_the_numbers_of_the_list(name: str) -> None:
    report = examine([SAMPLES / name]).report
    numbers = build_headline(report)
    row = RunRow(RUN, name, 10**18, "done", None, numbers, job=compute_job_fingerprint(report))
    columns = {"columns": "step,collective,skew,bubble,idle,mfu,memory"}
    (listed,) = read_tables(build_runs_page([row], AddressQuery(columns)))[0]
    heads = {"step_ns": "step", "skew": "of which skew", "bubble": "bubble", "idle": "idle",
             "mfu": "MFU"}  # fmt: skip
    n_compared = 0
    for metric, value in collect_metrics(report, numbers).items():
        if value is None or metric not in METRICS:
            continue
        points = [MetricPoint(RUN, name, 10**18 + n, value, row.job) for n in range(2)]
        page = build_history_page(points, [], AddressQuery({"metric": metric}))
        assert NO_NUMBER.findall(read_page(page)) == [], metric
        (shown, other) = read_tables(page)[-1]
        label = METRICS[metric].label
        assert shown[label] == other[label]
        seen = listed.get(heads.get(metric, ""), "")
        if seen:
            # The list has fewer digits, and shares that are rounded together to 100 %.
            ours, theirs = (
                float(text.split()[0].replace(",", "")) for text in (shown[label], seen)
            )
            digits = len(seen.split()[0].partition(".")[2])
            assert ours == pytest.approx(theirs, abs=0.99 * 10**-digits), metric
            n_compared += 1
    assert n_compared >= 3


def test_a_watched_run_has_the_same_numbers_on_its_page_and_in_the_list(tmp_path: Path) -> None:
    store = Store.open(make_sqlite(tmp_path / "runs.db"), tmp_path / "artifacts")
    now_ns = time.time_ns()
    for one in list_story(now_ns, hours=5):
        store.watches.add_batch(one)
    (run,) = store.watches.list_watches()
    began_ns = now_ns - 20 * 60 * 10**9
    store.watches.add_batch(
        batch(run=STORY, incarnation=run.start.incarnation, world_size=run.start.world_size,
              unix_ns=now_ns, id="more", events=(event("change", began_ns, "slower", 90_000,
              before_ns=4.1e8, after_ns=4.9e8, rank=5),))
    )  # fmt: skip
    (run,) = store.watches.list_watches()
    alerts = store.alerts.list_alerts(run.name, 9)
    view = read_watch_view(store.watches, run, AddressQuery(), now_ns)
    page = build_watch_page(view, AddressQuery(), alerts)
    listing = build_watch_list([run], now_ns, store.alerts.count_open())
    store.close()

    check_words({"watch": page, "list": listing})
    ((row,),) = read_tables(listing)
    cards, text = read_cards(page), read_text(page)
    overhead, (interval, _), (dropped, _) = (
        cards[name] for name in ("overhead of samples", "interval of samples", "dropped")
    )
    assert row["overhead"] == f"{overhead[0]} of {overhead[1].removeprefix('budget ')}"
    assert row["sample each"] == f"{interval} steps" and row["dropped"] == dropped
    assert f"step {row['last step']}" in text and f"{row['ranks']} ranks on" in text
    assert f"{row['open alerts']} open alert" in text
    happened = next(one for one in read_tables(page) if one and "begin" in one[0])
    (alert,) = [one for one in happened if one["what"] == "step time"]
    assert (alert["size"], alert["rank"]) == ("410 ms to 490 ms a step", "5")


def test_a_hang_has_the_same_words_on_its_page_and_in_the_list(tmp_path: Path) -> None:
    for number, (seqs, state) in enumerate(((5, "started"), (4, "completed"))):
        (tmp_path / f"trace_{number}").write_bytes(write_dump(seqs, state))
    hang = read_calls([tmp_path])
    run = RunRow(RUN, "hung", 10**18, "done", hang.verdict, None)
    page, listing = build_hang_page(hang, run, RunRights()), build_runs_page([run], AddressQuery())

    check_words({"hang": page, "runs": listing})
    assert hang.verdict in read_text(page) and hang.verdict in read_text(listing)
    calls, ranks = read_tables(page)
    assert [(one["waiting"], one["missing"]) for one in calls] == [("rank 0", "rank 1")]
    assert [one["rank"] for one in ranks] == ["rank 1", "rank 0"]
    for rank in ranks:
        assert f"{calls[0]['call']} of {calls[0]['group']}" in rank["state"]


def test_metrics_have_a_label() -> None:
    assert set(METRICS) == set(METRIC_NAMES)
    assert not [one.label for one in METRICS.values() if "_" in one.label]
    assert len(BUCKETS) == 7


@pytest.mark.parametrize(
    ("times", "words"),
    [
        (1.0, None),
        (2.9, None),
        (104.0, "the measured step is 104.0 times the predicted one, and 98.0 % of it is idle"),
        (1 / 4, "the predicted step is 4.0 times the measured one"),
    ],
)
def test_a_model_that_is_many_times_off_is_a_caveat(times: float, words: str | None) -> None:
    step_ns = 1_000_000_000
    measured = Split(step_ns // 50, 0, 0, 0, 0, 0, step_ns - step_ns // 50)
    predicted = Split(round(step_ns / times), 0, 0, 0, 0, 0, 0)
    stage = ComparedStage(0, 0, 1, "full", measured, predicted)
    gap = Gap(stage=0, low_ns=1, high_ns=2, confidence="low", stages=(stage,), rows=(),
              calls=(), memory=(), notes=("a note",))  # fmt: skip
    report = analysis().report

    notes = [read_text(one) for one in build_caveats(report, gap)]

    found = [note for note in notes if " times the " in note]
    assert found == ([] if words is None else [found[0]])
    assert words is None or found[0].startswith(f"caveat: {words}")
