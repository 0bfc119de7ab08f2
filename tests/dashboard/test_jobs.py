"""The job of a run: what changes its key and what does not, in the store, the API and the shell."""

from __future__ import annotations

import random
import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from generate.released import RELEASED
from hypothesis import given, settings, strategies as st
from msgspec import structs
from sqlalchemy import create_engine, text
from support.gate_runs import RECIPE, record
from support.report_builders import analysis

from stepsplit.analyzer import analyze
from stepsplit.analyzer.report.io import read_report
from stepsplit.analyzer.report.report import AxisSize, Host, JobTables, Report
from stepsplit.analyzer.split.bandwidth import StepCallsRow
from stepsplit.dashboard import cli
from stepsplit.dashboard.store.metrics import compute_job_fingerprint
from stepsplit.dashboard.store.run_row import Tag
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.store.worker import WorkerOptions, run_worker
from stepsplit.dashboard.web.server import create_server

SAMPLES = Path(__file__).parents[2] / "sample_traces"
RECORDED = read_report(SAMPLES / "tp2_pp2")
MIB = 1 << 20


def key(report: Report) -> str:
    return compute_job_fingerprint(report).key


def changed(part: str, **fields: Any) -> Report:
    """The recorded report with fields of its run, or of each row of a part, changed."""
    if part == "run":
        return structs.replace(RECORDED, run=structs.replace(RECORDED.run, **fields))
    rows = tuple(
        structs.replace(row, **{name: change(row) for name, change in fields.items()})
        for row in getattr(RECORDED, part)
    )
    return structs.replace(RECORDED, **{part: rows})


def with_calls(op: str, message_bytes: int, calls: int, most: int | None = None) -> Report:
    """The recorded report with more calls on its first group in each step."""
    more = StepCallsRow(0, op, "float32", message_bytes, calls, calls, most or calls)
    return structs.replace(RECORDED, step_calls=(*RECORDED.step_calls, more))


SAME = {
    "other hosts": changed("run", hosts=(Host("another", (0, 1, 2, 3)),)),
    "another day": changed("run", name="nightly", t0_unix_ns="1790000000000000000"),
    "other versions": changed("run", torch="9.9", nccl="9.9", driver="999", backend="mpi"),
    "profiled otherwise": changed("run", profiling_slowdown=0.4, mesh_source="--mesh"),
    "slower kernels": changed("kernels", total_ns=lambda row: 2 * row.total_ns),
    "a kernel more": changed("kernels", count=lambda row: row.count + 5),
    "one collective more": with_calls("all_reduce", MIB // 2 - 4, 2),
    "many small collectives": with_calls("all_reduce", 8, 100_000),
    "sizes that depend on the data": with_calls("all_gather", 64 * MIB, 2, most=4),
    "tokens sent to experts": with_calls("all_to_all", 64 * MIB, 8),
    "half the precision": changed(
        "step_calls",
        dtype=lambda _: "bfloat16",
        message_bytes=lambda row: row.message_bytes and row.message_bytes // 2,
    ),
    "another schedule": structs.replace(RECORDED, pipeline=None),
    "a job.toml": structs.replace(RECORDED, job=JobTables({"layers": 2}, {}, {}, {}), mfu=0.4),
    "no memory": structs.replace(RECORDED, memory=None),
    "only what 0.1.0 counted": structs.replace(RECORDED, step_calls=()),
}
OTHER = {
    "another device": changed("run", device="NVIDIA B200"),
    "another world size": changed("run", world_size=8),
    "another mesh": changed("run", mesh=(AxisSize("tp", 2), AxisSize("pp", 2))),
    "an unknown mesh": changed("run", mesh=None),
    "a wider model": changed("step_calls", message_bytes=lambda row: 2 * (row.message_bytes or 0)),
    "a deeper model": changed("kernels", count=lambda row: 2 * row.count),
}


@pytest.mark.parametrize("name", SAME)
def test_the_same_job_has_the_same_key(name: str) -> None:
    assert compute_job_fingerprint(SAME[name]) == compute_job_fingerprint(RECORDED)


@pytest.mark.parametrize("name", OTHER)
def test_another_job_has_another_key(name: str) -> None:
    assert key(OTHER[name]) != key(RECORDED)


def test_each_sample_is_a_job_of_its_own_with_a_label() -> None:
    folders = [path for path in SAMPLES.iterdir() if (path / "report.json").exists()]
    jobs = {path.name: compute_job_fingerprint(read_report(path)) for path in folders}

    assert len({job.key for job in jobs.values()}) == len(folders)
    assert jobs["tp2_pp2"].label == "pp2 tp2 · 4 x cpu"
    assert compute_job_fingerprint(OTHER["another device"]).label == "pp2 tp2 · 4 x B200"


def test_names_of_axes_count_only_where_the_job_states_them() -> None:
    named = (AxisSize("dp", 2), AxisSize("ep", 2))
    inferred = [
        changed("run", mesh=mesh, mesh_source="messages") for mesh in (RECORDED.run.mesh, named)
    ]
    assert key(inferred[0]) == key(inferred[1])
    assert key(changed("run", mesh=named)) != key(RECORDED)


@pytest.mark.parametrize("rank", range(4))
def test_one_recorded_rank_shows_the_job(rank: int) -> None:
    assert key(analyze(SAMPLES / "tp2_pp2" / f"rank{rank}_trace.json.gz")) == key(RECORDED)


@settings(max_examples=50, deadline=None)
@given(st.randoms(use_true_random=False), st.text(max_size=30), st.floats(0.1, 10))
def test_order_names_and_durations_do_not_matter(
    rng: random.Random, name: str, pace: float
) -> None:
    def shuffle(rows: Any) -> Any:
        return tuple(rng.sample(rows, len(rows)))

    run = structs.replace(
        RECORDED.run, name=name, torch=name or None, hosts=(Host(name, RECORDED.run.ranks),)
    )
    again = structs.replace(
        RECORDED,
        run=run,
        steps=shuffle(RECORDED.steps),
        step_calls=shuffle(RECORDED.step_calls),
        collectives=shuffle(RECORDED.collectives),
        groups=shuffle(RECORDED.groups),
        kernels=shuffle(
            [structs.replace(one, total_ns=int(pace * one.total_ns)) for one in RECORDED.kernels]
        ),
    )
    assert key(again) == key(RECORDED)


@given(
    st.integers(1, 1 << 20), st.text(), st.lists(st.tuples(st.text(max_size=5), st.integers(1, 9)))
)
def test_any_run_has_a_key_and_a_label_of_one_line(
    world_size: int, device: str, axes: list[tuple[str, int]]
) -> None:
    mesh = tuple(AxisSize(*axis) for axis in axes)
    found = compute_job_fingerprint(changed("run", world_size=world_size, device=device, mesh=mesh))
    assert len(found.key) == 8 and int(found.key, 16) >= 0
    assert len(found.label) <= 200 and len(found.label.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.in_turn("collectors", "dashboard/store", "analyzer/model/config_file.py")
def test_real_recordings_of_a_job_have_one_key(tmp_path: Path) -> None:
    recipes = {
        "first": ("nothing", RECIPE),
        "shorter": ("nothing", replace(RECIPE, steps=8, active=5)),
        "one call more": ("extra_all_reduce", RECIPE),
        "wider": ("nothing", replace(RECIPE, hidden=384)),
    }
    keys = {
        name: key(analyze(record(tmp_path / name, *recipe))) for name, recipe in recipes.items()
    }
    assert keys["first"] == keys["shorter"] == keys["one call more"] != keys["wider"]


# The store.


def forget_jobs(url: str) -> None:
    """As the migration leaves runs that an earlier stepsplit stored."""
    engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    with engine.begin() as connection:
        connection.execute(text("UPDATE runs SET job_key = NULL, job_label = NULL"))
    engine.dispose()


def test_a_run_is_stored_with_its_job(store: Store) -> None:
    made = analysis()
    run_id = store.import_report("run", made.report, made.tables)
    (run,) = store.list_runs()
    assert run.job == compute_job_fingerprint(made.report)
    assert store.find_run(run_id) == run
    assert not store.complete_next_run()


def test_a_worker_fills_in_the_jobs_of_earlier_runs(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = analysis()
    store = Store.open(database_url, tmp_path / "artifacts")
    ids = [store.import_report(name, made.report, made.tables) for name in ("kept", "lost")]
    unfinished = store.add("unfinished")
    forget_jobs(database_url)
    (store.find_folder(ids[1]) / "report.json").write_text("{")
    assert {run.job for run in store.list_runs()} == {None}

    monkeypatch.setattr("stepsplit.dashboard.store.worker.time.sleep", stop_when_idle)
    with pytest.raises(StopIteration):
        run_worker(store, WorkerOptions("w"))

    jobs = {run.id: run.job for run in store.list_runs()}
    assert jobs == {ids[0]: compute_job_fingerprint(made.report), ids[1]: None, unfinished: None}
    assert not store.complete_next_run()
    store.close()


def stop_when_idle(_: float) -> None:
    raise StopIteration


def test_runs_of_a_released_version_get_their_job(tmp_path: Path) -> None:
    (released,) = RELEASED.iterdir()
    shutil.copytree(released / "artifacts", tmp_path / "artifacts")
    with closing(sqlite3.connect(tmp_path / "store.db")) as connection:
        connection.executescript((released / "store.sql").read_text())
    store = Store.open(f"sqlite:///{tmp_path}/store.db", tmp_path / "artifacts")
    (before,) = store.list_runs()

    assert (store.complete_next_run(), store.complete_next_run()) == (True, False)

    (after,) = store.list_runs()
    assert (before.job, after.job) == (None, compute_job_fingerprint(store.load_report(after.id)))
    store.close()


# The API and the command line.


@pytest.fixture
def two_jobs(store: Store) -> dict[str, str]:
    """Runs of two jobs and one without a report: their ids by name."""
    made = analysis()
    tag = [Tag("branch", "main")]
    ids = {name: store.import_report(name, made.report, made.tables) for name in ("one", "two")}
    return ids | {
        "other": store.import_report("other", RECORDED, made.tables, tag),
        "open": store.add("open", tag),
    }


def test_the_api_lists_runs_by_job(store: Store, two_jobs: dict[str, str]) -> None:
    client = create_server(store).test_client()

    def jobs(query: str) -> dict[str, str | None]:
        answer = client.get(f"/api/v1/runs{query}").json
        assert answer is not None
        return {row["name"]: row["job"] for row in answer["runs"]}

    own, other = key(analysis().report), key(RECORDED)
    assert jobs("") == {"one": own, "two": own, "other": other, "open": None}
    assert jobs(f"?job={own}&last=1") == {"two": own}
    assert jobs(f"?job={own}&tag=branch%3Dmain") == jobs("?job=%00'") == {}
    status = client.get(f"/api/v1/runs/{two_jobs['other']}").json
    assert status is not None
    assert (status["job"], status["job_label"]) == (other, "pp2 tp2 · 4 x cpu")


def test_the_command_lists_runs_by_job(
    store: Store, two_jobs: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def ids(*options: str) -> list[str]:
        place = ["--store", store.url, "--artifacts", str(tmp_path / "artifacts")]
        assert cli.run(["runs", *options, *place]) == 0
        lines = capsys.readouterr().out.splitlines()
        return [line.split()[0] for line in lines]

    assert ids() == [two_jobs[name] for name in ("open", "other", "two", "one")]
    assert ids("--job", key(RECORDED)) == [two_jobs["other"]]
    assert ids("--job", key(analysis().report), "--last", "1") == [two_jobs["two"]]
    assert ids("--tag", "branch=main") == [two_jobs["open"], two_jobs["other"]]
    assert ids("--job", "unknown") == []
