"""Flight Recorder dumps without traces: a run of their own kind."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from flask.testing import FlaskClient
from support.hang_dumps import write_dump
from support.required import shared_trace
from support.store_builders import ask_page, claimed, found, queued
from support.watch_builders import RUN, batch, minutes_ago, window

from stepsplit.analyzer.diagnose.hang.find import read_calls
from stepsplit.analyzer.diagnose.hang.result import from_json, to_json
from stepsplit.analyzer.errors import DataError
from stepsplit.dashboard.store.ingest import analyze_upload, process_job
from stepsplit.dashboard.store.run_row import RunEdit, Tag
from stepsplit.dashboard.store.store import Store

DUMPS = {"trace_0": write_dump(5, "started"), "trace_1": write_dump(4, "completed")}


def test_dumps_are_a_run_that_says_who_is_missing(
    client: FlaskClient, store: Store, tmp_path: Path
) -> None:
    folder = tmp_path / "dumps"
    folder.mkdir()
    for name, content in DUMPS.items():
        (folder / name).write_bytes(content)
    run_id = queued(store, "hung", **DUMPS)

    assert process_job(store, claimed(store), analyze_upload) == "done"

    run, known = found(store, run_id), read_calls([folder])
    assert run.is_hang and run.error == known.verdict
    assert client.get(f"/api/v1/runs/{run_id}/hang.json").data == to_json(known)
    page = ask_page(client, f"/run/{run_id}")
    for words in (
        known.culprits[0].message, "What to do", "Look at the stack of rank 1",
        "waits in all_reduce 5 of default_pg (group 0)", "has not called all_reduce 5",
    ):  # fmt: skip
        assert words in page
    assert known.verdict in ask_page(client, "/")


def test_a_run_of_dumps_has_no_report_and_is_not_compared(
    client: FlaskClient, store: Store
) -> None:
    run_id = queued(store, "hung", **DUMPS)
    process_job(store, claimed(store), analyze_upload)

    answer = client.get(f"/api/v1/runs/{run_id}/report.json")

    assert answer.status_code == 404
    assert answer.json == {"error": "no report: the run has Flight Recorder dumps: get hang.json"}
    for path, search in ((f"/run/{run_id}/timeline", ""), ("/compare", f"?baseline={run_id}")):
        assert "cannot be" not in ask_page(client, path, search)
    assert not store.complete_next_run(), "its job is known to be unknown"


def test_logs_and_states_without_dumps_are_a_run_of_a_hang_too(
    client: FlaskClient, store: Store
) -> None:
    line = (
        "[rank1]:[E603 17:48:01.006 ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught collective"
        " operation timeout: WorkNCCL(SeqNum=24, OpType=ALLREDUCE, NumelIn=19, NumelOut=19,"
        " Timeout(ms)=600000) ran for 600071 milliseconds before timing out."
    )
    files = {"job.log": line.encode()}
    run_id = queued(store, "hung", **files)
    assert process_job(store, claimed(store), analyze_upload) == "done"
    run, _ = found(store, run_id), store.load_hang(run_id)
    assert run.is_hang and "all_reduce 24" in ask_page(client, f"/run/{run_id}")

    damaged = {"rank0_state.json": b'{"schema": "stepsplit.state/1", "rank": "x"}'}
    torn = queued(store, "torn", **damaged)
    assert process_job(store, claimed(store), analyze_upload) == "failed"
    assert "rank0_state.json: invalid state" in str(found(store, torn).error)

    other = queued(store, "none", **{"notes.txt": b"step 3 loss 2.1"})
    assert process_job(store, claimed(store), analyze_upload) == "failed"
    assert "trace" in str(found(store, other).error), "what is missing of a recording"


def test_a_watched_job_that_has_stopped_leads_to_its_dumps(
    client: FlaskClient, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.watches.add_batch(batch(world_size=1, windows=(window(0, minutes_ago(1)),)))
    assert "may have stopped" not in ask_page(client, f"/watch/{RUN}")
    run_id = queued(store, "hung", **DUMPS)
    process_job(store, claimed(store), analyze_upload)

    later_ns = time.time_ns() + 20 * 60 * 10**9
    monkeypatch.setattr(time, "time_ns", lambda: later_ns)
    page = ask_page(client, f"/watch/{RUN}")

    # Dumps of rank 1, which the job of one rank does not have, are of another job.
    assert "may have stopped" in page and "stepsplit hang --out FOLDER" in page
    assert run_id not in page
    store.edit(run_id, RunEdit(tags=(Tag("job", RUN),)))
    page = ask_page(client, f"/watch/{RUN}")
    assert "Dumps of this job" in page and run_id in page
    assert "has not called all_reduce 5" in page
    # A name that only begins like the job's is another job's; dumps of long ago are of another day.
    for name, is_own in (
        (f"{RUN}-70b-night", False),
        (f"{RUN}.v2", False),
        (f"my {RUN}: hung.", True),
    ):
        store.edit(run_id, RunEdit(name=name, tags=()))
        assert ("Dumps of this job" in ask_page(client, f"/watch/{RUN}")) == is_own, name
    old = [
        replace(one, created_unix_ns=one.created_unix_ns - 2 * 3_600 * 10**9)
        for one in store.list_runs()
    ]
    monkeypatch.setattr(Store, "list_runs", lambda self: old)
    page = ask_page(client, f"/watch/{RUN}")
    assert "may have stopped" in page and run_id not in page


def test_dumps_of_a_real_hang(client: FlaskClient, store: Store) -> None:
    dumps = sorted(shared_trace("flight_recorder_nvrx/lock_gil_1st").glob("_dump_*"))
    run_id = queued(store, "hung", **{path.name: path.read_bytes() for path in dumps})

    assert process_job(store, claimed(store), analyze_upload) == "done"

    assert store.load_hang(run_id) == read_calls(dumps)
    assert store.load_hang(run_id).culprits[0].message in ask_page(client, f"/run/{run_id}")


@pytest.mark.parametrize("text", [b"{}", b"[", b'{"schema": "stepsplit.hang/9"}'])
def test_what_is_no_hang_is_refused(text: bytes) -> None:
    with pytest.raises(DataError, match=r"^hang\.json: "):
        from_json(text)
