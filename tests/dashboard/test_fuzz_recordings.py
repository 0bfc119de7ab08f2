"""Fuzzing of the whole: mutated recordings through every command, page and export."""

from __future__ import annotations

import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

import click
import pytest
from mutants import mutate
from store_builders import claimed, queued, state

from stepsplit.analyzer.errors import StepsplitError
from stepsplit.dashboard.cli import stepsplit
from stepsplit.dashboard.pages.components import RUN_PAGES, build_page_url, parse_address
from stepsplit.dashboard.store.ingest import analyze_upload, process_job
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.app import PageBuilder
from stepsplit.dashboard.web.report_cache import ReportCache
from stepsplit.dashboard.web.server import create_server

PEER = Path(__file__).parents[2] / "sample_traces" / "built_zero_bubble"
MUTANTS = int(os.environ.get("STEPSPLIT_MUTANTS") or 24)


def list_commands(recording: str, out: Path) -> Iterator[list[str]]:
    """What a user would run on a recording, with every kind of output."""
    saved = str(out / "saved")
    yield ["analyze", recording, "--out", saved, "--html", str(out / "page.html"), "--workers", "1"]
    yield ["analyze", recording, "--job", "auto", "--workers", "1"]
    yield ["compare", str(PEER), recording]
    yield ["compare", recording, recording, "--json", str(out / "comparison.json")]
    yield ["check", recording, "--baseline", str(PEER), "--across-setups"]
    yield ["what-if", recording]
    yield ["export", recording, "--perfetto", str(out / "trace.pftrace")]
    if (out / "saved").is_dir():
        yield ["compare", saved, str(PEER)]
        yield ["export", saved, "--perfetto", str(out / "saved.pftrace")]


def run_command(command: list[str]) -> str:
    """The outcome of a command; other errors than those of stepsplit and click propagate."""
    try:
        stepsplit.main(command, standalone_mode=False)
    except (StepsplitError, click.ClickException) as error:
        assert "\n" not in str(error), str(error)
        return "refused"
    except click.exceptions.Exit:
        pass
    return "done"


def upload(store: Store, recording: Path) -> str:
    """Uploads the recording and analyzes it as a worker does: the id of the run."""
    files = {file.name: file.read_bytes() for file in recording.iterdir()}
    run_id = queued(store, "mutant", **files)
    process_job(store, claimed(store), analyze_upload)
    return run_id


def open_pages(store: Store, run_id: str) -> str:
    """Renders every page of a run and of its comparison, and reads every route of it."""
    run_state, error = state(store, run_id)
    assert "internal error" not in (error or ""), error
    if run_state == "failed":
        return "refused"
    pages = PageBuilder(store, ReportCache(store))
    urls = [(build_page_url(run_id, name), "") for name in RUN_PAGES]
    both = f"?baseline={run_id}&candidate={run_id}"
    for path, query in [*urls, ("/", ""), ("/compare", both), ("/history", "")]:
        content = pages.build_content(parse_address(path, query))
        problems = ("cannot be read", "cannot be shown", "does not expect")
        assert not any(one in str(content.children) for one in problems), path
    client, api = create_server(store).test_client(), f"/api/v1/runs/{run_id}"
    window = "timeline/window?from=0&to=1000000000&slots=100&ranks=0,1,2,3&open=0,1"
    for route in ("timeline", window, "perfetto", "report.html", "report.json"):
        with client.get(f"{api}/{route}", buffered=True) as answer:
            assert answer.status_code == 200, (route, answer.data[:300])
    return "done"


@pytest.mark.slow
@pytest.mark.in_turn("analyzer", "dashboard", "collectors/run_spec.py")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(4))
def test_a_mutated_recording_is_analyzed_or_refused_in_one_line(
    part: int, store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Any other exception than a StepsplitError is a failure; every report can be read back."""
    outcomes: Counter[str] = Counter()
    failures = []
    first = 77_000_000 + part * MUTANTS
    for seed in range(first, first + MUTANTS // 4):
        name, recorded = mutate(Random(seed))
        folder = recorded.write(tmp_path / str(seed) / "recording")
        try:
            for command in list_commands(str(folder), tmp_path / str(seed)):
                outcomes[f"{command[0]} {run_command(command)}"] += 1
            outcomes[f"pages {open_pages(store, upload(store, folder))}"] += 1
        except Exception as error:  # noqa: BLE001 - the failure names its seed
            failures.append((seed, name, repr(error)))
        shutil.rmtree(tmp_path / str(seed))
    capsys.readouterr()
    with capsys.disabled():
        sys.stdout.write(f"{dict(outcomes)}\n")
    assert failures == []
    assert outcomes["pages done"] > outcomes["pages refused"]
