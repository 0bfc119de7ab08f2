"""Predictions of the model page run in a process of their own, with limits of time and memory."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import pytest
from support.page_text import read_cards
from support.report_builders import analysis

from stepsplit.analyzer.analysis import analyze
from stepsplit.analyzer.model import prediction_process
from stepsplit.analyzer.model.config_decode import TomlTable
from stepsplit.analyzer.model.config_file import decode_job
from stepsplit.analyzer.model.predict import predict
from stepsplit.analyzer.model.prediction import prediction_to_json
from stepsplit.analyzer.model.prediction_process import (
    MAX_AT_ONCE,
    NoPrediction,
    predict_in_process,
)
from stepsplit.analyzer.report.headline import compute_mean_step_ns
from stepsplit.analyzer.report.report import JobTables, Report
from stepsplit.dashboard.pages.address import AddressQuery
from stepsplit.dashboard.pages.components import build_cards, format_mean_step
from stepsplit.dashboard.pages.model import apply_changes
from stepsplit.dashboard.pages.page import PageContent
from stepsplit.dashboard.pages.store_pages import parse_address
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.page_builder import PageBuilder
from stepsplit.dashboard.web.report_cache import ReportCache

SAMPLE = Path(__file__).parents[2] / "sample_traces" / "tp2_pp2"
TABLES: dict[str, dict[str, object]] = {
    "model": {"preset": "llama-3.1-8b"},
    "parallel": {"tp": 2, "pp": 4, "dp": 8},
    "training": {"seq_len": 2048, "micro_batch": 1, "microbatches": 32},
    "hardware": {"preset": "h100-sxm"},
}


@lru_cache(maxsize=1)
def report() -> Report:
    return analyze(SAMPLE, job="auto")


@pytest.fixture
def pages(store: Store) -> PageBuilder:
    return PageBuilder(store, ReportCache(store))


def show(store: Store, pages: PageBuilder, search: str) -> PageContent:
    run_id = next((row.id for row in store.list_runs()), "")
    run_id = run_id or store.import_report("run", report(), analysis().tables)
    return pages.build_content(parse_address(f"/run/{run_id}/model", search))


def replace_model(monkeypatch: pytest.MonkeyPatch, code: str, seconds: int = 2) -> None:
    """The process of a prediction runs this code instead of the model, with a limit of seconds."""
    program = (
        "import sys, time\n"
        "from stepsplit.analyzer.model import prediction_process as process\n"
        f"process.MAX_SECONDS = {seconds}\n"
        f"process.MAX_WALL_SECONDS = 6\n"
        f"process.predict = lambda *_: {code}\n"
        "process.main()\n"
    )
    monkeypatch.setattr(prediction_process, "_COMMAND", (sys.executable, "-P", "-c", program))


def test_numbers_without_limit_are_answered(store: Store, pages: PageBuilder) -> None:
    step, refused = (
        str(show(store, pages, f"?tp=1&dp_replicate=2&{more}").children)
        for more in ("global_batch=48000000000", "pp=99999999999")
    )
    assert "3,000,000,000 microbatches/rank" in step
    assert "Invalid job" in refused


def test_a_schedule_gets_the_chunks_that_it_needs() -> None:
    recorded = JobTables(**TABLES)
    interleaved, plain = (
        apply_changes(recorded, AddressQuery(chosen)).job
        for chosen in ({"schedule": "interleaved"}, {"schedule": "gpipe", "chunks": "2"})
    )
    assert interleaved is not None and interleaved.parallel.chunks == 2
    assert plain is not None and plain.parallel.chunks == 1
    four = apply_changes(recorded, AddressQuery({"schedule": "interleaved", "chunks": "4"})).job
    assert four is not None and four.parallel.chunks == 4


def test_a_change_is_relative_to_the_measured_step(store: Store, pages: PageBuilder) -> None:
    measured = format_mean_step(compute_mean_step_ns(report().steps))
    same, other = (str(show(store, pages, search).children) for search in ("", "?global_batch=48"))
    whole = f"of the mean step of {measured}: "
    assert "+0.0 %" in same and f"{whole}{measured}, by the model's ratio" in same
    assert whole in other and f"{measured}: {measured}" not in other
    # The overview says the same, though the model is compared with the median step of a stage.
    assert read_cards(build_cards(report()))["mean step"][0] == measured


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("exec('while True: pass')", "it takes more than 5 s of processor time"),
        ("bytearray(1 << 30)", "it takes more than 512 MiB of memory"),
    ],
)
def test_a_prediction_beyond_a_limit_is_a_sentence_on_the_page(
    code: str, sentence: str, store: Store, pages: PageBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        replace_model(patched, code)
        refused = show(store, pages, "?tp=1")
    assert "No prediction" in str(refused.children)
    assert sentence in str(refused.children)
    assert not refused.pending
    assert "predicted step" in str(show(store, pages, "?tp=1").children), "not cached"


@pytest.mark.slow
def test_more_predictions_at_once_are_refused_and_their_pages_ask_again(
    store: Store, pages: PageBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same page each time: no request waits for the answer of another."""
    report()
    show(store, pages, "")
    replace_model(monkeypatch, "time.sleep(60)")
    with ThreadPoolExecutor(8) as threads:
        since = time.monotonic()
        shown = list(threads.map(lambda _: _ask_and_time(store, pages, since), range(8)))
    busy = [page for page, _ in shown if page.pending]
    assert len(busy) == 8 - MAX_AT_ONCE
    assert {"computing other predictions; try again" in str(page.children) for page in busy} == {
        True
    }
    ended = sorted(seconds for _, seconds in shown)
    assert ended[-MAX_AT_ONCE - 1] < 5 < ended[-MAX_AT_ONCE]


def _ask_and_time(store: Store, pages: PageBuilder, since: float) -> tuple[PageContent, float]:
    page = show(store, pages, "?tp=1")
    return page, time.monotonic() - since


def test_the_process_ends_with_the_server() -> None:
    """The server is killed while it waits for a prediction."""
    program = (
        "import sys\n"
        "from stepsplit.analyzer.model import prediction_process as process\n"
        "program = '''import os, time\n"
        "from stepsplit.analyzer.model import prediction_process as process\n"
        "process.predict = lambda *_: (print(os.getpid(), flush=True), time.sleep(60))\n"
        "os.dup2(2, 1)\n"
        "process.main()'''\n"
        "process._COMMAND = (sys.executable, '-P', '-c', program)\n"
        f"process.predict_in_process({TABLES!r}, 'a test', False)\n"
    )
    command = [sys.executable, "-P", "-c", program]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        child = int(server.stderr.readline())
        server.kill()
        assert server.stderr.read() == "", "closed by the end of both"
    assert (
        not Path(f"/proc/{child}/cmdline").exists()
        or not Path(f"/proc/{child}/cmdline").read_bytes()
    )


def test_a_prediction_and_a_plan_come_back_whole() -> None:
    few = {**TABLES, "parallel": {"tp": 2}, "model": {**TABLES["model"], "layers": 2}}
    answer = predict_in_process(few, "a test", with_plan=True)
    here = predict(decode_job(TomlTable("a test", "", few)))
    assert prediction_to_json(answer.prediction) == prediction_to_json(here)
    assert answer.plan is not None
    assert answer.plan.gpus == 2


def test_a_plan_has_a_larger_limit_and_beyond_it_the_prediction_is_shown_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The plan of eight GPUs takes some 5 s of processor time: longer than a prediction may."""
    program = (
        "from stepsplit.analyzer.model import plan, prediction_process as process\n"
        "process.MAX_PLAN_SECONDS = 2\n"
        "plan.plan = lambda *_, **__: exec('while True: pass')\n"
        "process.main()\n"
    )
    monkeypatch.setattr(prediction_process, "_COMMAND", (sys.executable, "-P", "-c", program))
    answer = predict_in_process(TABLES, "a test", with_plan=True)
    assert answer.plan is None
    assert answer.plan_error.startswith("the search takes more than 60 s of processor time")
    here = predict(decode_job(TomlTable("a test", "", TABLES)))
    assert prediction_to_json(answer.prediction) == prediction_to_json(here)


@pytest.mark.slow
def test_the_plan_of_a_usual_job_is_not_refused() -> None:
    eight = {**TABLES, "parallel": {"tp": 2, "dp": 4}}
    answer = predict_in_process(eight, "a test", with_plan=True)
    assert answer.plan is not None, answer.plan_error
    assert answer.plan.gpus == 8


def test_a_bug_of_the_model_is_not_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_model(monkeypatch, "1 / 0")
    with pytest.raises(RuntimeError, match="the process of a prediction ended with status 1"):
        predict_in_process(TABLES, "a test", with_plan=False)
    with pytest.raises(NoPrediction, match="512 MiB"):
        replace_model(monkeypatch, "bytearray(1 << 30)")
        predict_in_process(TABLES, "a test", with_plan=False)
