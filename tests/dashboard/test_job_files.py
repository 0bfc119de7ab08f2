"""The job.toml of an upload: found by content, attached later, and doubted if it does not fit."""

from __future__ import annotations

import gc
import re
import time
import tomllib
import uuid
from pathlib import Path
from typing import Any

import fsspec
import pytest
from flask.testing import FlaskClient
from hypothesis import given, strategies as st
from msgspec import structs
from support.report_builders import analysis
from support.store_builders import ask_page, claimed, known_analysis, queued, state

from stepsplit.analyzer import analyze
from stepsplit.analyzer.model.config_decode import format_toml
from stepsplit.analyzer.report.report import NO_MODEL
from stepsplit.dashboard import cli
from stepsplit.dashboard.store.ingest import analyze_upload, process_job
from stepsplit.dashboard.store.job_files import find_job_file, list_unused_files
from stepsplit.dashboard.store.store import Store

RUNS = "/api/v1/runs"
SAMPLE = Path(__file__).parents[2] / "sample_traces" / "dp4"
JOB = b'[hardware]\npreset = "a100-sxm-80gb"\n'


@pytest.mark.parametrize(
    ("files", "used", "unused"),
    [
        (["exp/job.toml"], "exp/job.toml", []),
        (["exp/Job.TOML", "exp/run.toml"], "exp/Job.TOML", ["exp/run.toml"]),
        (["exp/RUN.toml"], "exp/RUN.toml", []),
        (["exp/gpt.toml", "exp/ruff.toml"], "exp/gpt.toml", ["exp/ruff.toml"]),
        (["job.toml", "a/JOB.toml", "a/job.toml"], "job.toml", ["a/JOB.toml", "a/job.toml"]),
        (["JOB.toml", "job.toml"], "job.toml", ["JOB.toml"]),
        (["exp/ruff.toml"], None, ["exp/ruff.toml"]),
        (["exp/broken.toml"], None, ["exp/broken.toml"]),
    ],
)  # fmt: skip
def test_a_job_file_is_found_by_name_in_any_case_or_by_content(
    tmp_path: Path, files: list[str], used: str | None, unused: list[str]
) -> None:
    texts = {"ruff.toml": "[lint]\n", "broken.toml": "[model"}
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(texts.get(Path(name).name, "[parallel]\ndp = 2\n"))

    found = find_job_file(tmp_path)
    warnings = list_unused_files(tmp_path, found)

    assert found == (tmp_path / used if used else None)
    assert [one.message.split(" is not used")[0] for one in warnings] == unused
    reason = f"{used} describes the job" if used else "none of the tables [model]"
    assert all(reason in one.message for one in warnings)


def test_a_run_gets_a_job_file_later(client: FlaskClient, store: Store) -> None:
    run_id = queued(store, **{path.name: path.read_bytes() for path in SAMPLE.glob("r*")})
    assert process_job(store, claimed(store), analyze_upload) == "done"
    before = store.load_report(run_id).job

    for _ in range(2):
        answer = client.put(f"{RUNS}/{run_id}/job", data=JOB)
        early = client.put(f"{RUNS}/{run_id}/job", data=JOB)
        assert process_job(store, claimed(store), analyze_upload) == "done"

    after = store.load_report(run_id).job
    assert (answer.status_code, early.status_code) == (202, 409)
    assert before is not None and before.hardware["preset"] != "a100-sxm-80gb"
    assert after is not None and after.hardware["preset"] == "a100-sxm-80gb"
    assert [row.path for row in store.files.list_files(run_id)].count("job.toml") == 1
    assert [one.action for one in store.audit.list_entries(9)] == ["job attached"] * 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"[model", "job.toml"),
        (b"[lint]\n", "none of the tables"),
        (b"\xff", "job.toml"),
        (b'[hardware]\nfile = "mine.toml"\n', "refers to another file"),
        (b'[model]\nlayers = 2\nfile = "mine.toml"\n', "refers to another file"),
    ],
)
def test_what_is_no_job_file_changes_nothing(
    client: FlaskClient, store: Store, text: bytes, says: str
) -> None:
    run_id = queued(store)
    assert process_job(store, claimed(store), known_analysis) == "done"

    answer = client.put(f"{RUNS}/{run_id}/job", data=text)

    assert answer.status_code == 400 and answer.json is not None
    assert says in answer.json["error"]
    assert state(store, run_id) == ("done", None)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"parallel": {"tp": 8}}, "the layout has 32 ranks but the recording has 4"),
        ({"parallel": {"dp": 2}}, "the layout has 2 ranks but the recording has 4"),
        ({"model": {"layers": None}}, "model.layers: the model needs it"),
    ],
)
def test_a_form_is_refused_that_would_be_analyzed_for_nothing(
    client: FlaskClient, store: Store, changes: dict[str, dict[str, int]], says: str
) -> None:
    run_id = queued(store, **{path.name: path.read_bytes() for path in SAMPLE.glob("r*")})
    assert process_job(store, claimed(store), analyze_upload) == "done"
    if "model" in changes:
        # As of a recording without shapes, of which the layers stay unknown.
        text = store.read_job(run_id)
        assert text is not None
        lines = [line for line in text.splitlines() if not line.startswith(b"layers")]
        store.artifacts.save_file(run_id, "job.toml", b"\n".join(lines))

    answer = client.put(f"{RUNS}/{run_id}/job", json=changes)

    assert answer.status_code == 400 and answer.json is not None
    assert says in answer.json["error"]
    assert state(store, run_id) == ("done", None)


def test_an_imported_report_gets_no_job_file(client: FlaskClient, store: Store) -> None:
    made = analysis()
    run_id = store.import_report("imported", made.report, made.tables)

    answer = client.put(f"{RUNS}/{run_id}/job", data=JOB)

    assert (answer.status_code, state(store, run_id)[0]) == (409, "done")


def test_the_command_adds_a_job_file(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_id = queued(store)
    assert process_job(store, claimed(store), known_analysis) == "done"
    job = tmp_path / "mine.toml"
    job.write_bytes(JOB)
    words = ["--store", store.url, "--artifacts", str(tmp_path / "artifacts")]

    assert cli.run(["retry", run_id, "--job", str(job), *words]) == 0

    assert capsys.readouterr().out == f"queued {run_id}  run\n"
    assert (store.find_folder(run_id) / "input" / "job.toml").read_bytes() == JOB


def test_a_job_that_cannot_be_that_of_the_recording_is_doubted(tmp_path: Path) -> None:
    """Four CPUs are not four A100s: the step is hundreds of times too long."""
    job = tmp_path / "job.toml"
    job.write_bytes(JOB)

    report = analyze(SAMPLE, job=job)

    assert report.gap is not None
    assert report.gap.confidence == "low"
    assert report.gap.notes[0].startswith("this job.toml does not describe this recording: ")
    assert [one.message for one in report.warnings if one.code == "job_mismatch"] == [
        report.gap.notes[0]
    ]
    assert report.findings == analyze(SAMPLE).findings


def test_an_mfu_above_one_is_not_shown(tmp_path: Path) -> None:
    """The model is a thousand times the recorded one on the same four processors."""
    job = tmp_path / "job.toml"
    job.write_text(
        '[model]\nhidden = 8192\nlayers = 80\nheads = 64\n[hardware]\npreset = "a100-sxm-80gb"\n'
    )

    report = analyze(SAMPLE, job=job)

    assert report.gap is not None and report.mfu is None
    assert "the MFU would be" in report.gap.notes[0]


# The form of the job: what the server keeps of a job, and how it changes it.

RECORDED = {
    path.name: path.read_bytes() for path in SAMPLE.glob("r*") if path.name != "report.json"
}
FULL = b"""# mine
[model]
preset = "llama-3.1-8b"   # as published
layers = 4

[parallel]
dp = 4
rank_order = "tp-cp-dp-pp"

[training]
seq_len = 128
micro_batch = 1
global_batch = 8

[hardware]
preset = "h100-sxm"
intra = { bytes_per_s = 4.5e11 }
"""


def analyzed(store: Store, **files: bytes) -> str:
    """A run of the sample with these files, analyzed for real."""
    run_id = queued(store, **RECORDED, **files)
    assert process_job(store, claimed(store), analyze_upload) == "done"
    return run_id


def done(store: Store, job: bytes | None = None) -> str:
    """A run whose analysis says nothing, with this job.toml."""
    run_id = queued(store)
    assert process_job(store, claimed(store), known_analysis) == "done"
    if job is not None:
        store.artifacts.save_file(run_id, "job.toml", job)
    return run_id


def fields_of(form: Any) -> dict[str, Any]:
    """The fields of a form, such as parallel.tp."""
    fields = [field for group in form["groups"] for field in group["fields"]]
    return {f"{field['table']}.{field['key']}": field for field in fields}


def test_the_inferred_job_of_a_run_is_kept(client: FlaskClient, store: Store) -> None:
    run_id = analyzed(store)

    answer = client.get(f"{RUNS}/{run_id}/job")
    fields = fields_of(client.get(f"{RUNS}/{run_id}/job/form").json)

    report = store.load_report(run_id)
    assert answer.mimetype == "text/plain" and report.job is not None
    assert tomllib.loads(answer.text) == structs.asdict(report.job)
    assert fields["parallel.dp"]["value"] == "4"
    assert (fields["hardware.preset"]["value"], fields["training.dtype"]["value"]) == (
        "cpu", "fp32",
    )  # fmt: skip
    assert not any(field["needed"] for field in fields.values())
    assert str(store.find_folder(run_id)) not in answer.text
    store.delete(run_id)
    assert not store.find_folder(run_id).exists()


def test_the_form_names_what_the_model_needs(client: FlaskClient, store: Store) -> None:
    files = {name: content for name, content in RECORDED.items() if name != "run.json"}
    run_id = queued(store, **files)
    assert process_job(store, claimed(store), analyze_upload) == "done"

    fields = fields_of(client.get(f"{RUNS}/{run_id}/job/form").json)

    needed = {name for name, field in fields.items() if field["needed"]}
    (warning,) = (w.message for w in store.load_report(run_id).warnings if w.code == NO_MODEL)
    assert "training.micro_batch" in needed
    assert all(name.partition(".")[2] in warning for name in needed)
    assert {name.partition(".")[2] for name in needed} == set(
        re.findall(r"[a-z_]+", re.sub(r"\[\w+\]| and ", " ", warning.split(" from the ")[0]))
    ) - {"cannot", "infer"}


@pytest.mark.parametrize("own", [JOB, FULL], ids=["partial", "complete"])
def test_a_given_job_is_completed_and_keeps_its_lines(
    client: FlaskClient, store: Store, own: bytes
) -> None:
    run_id = analyzed(store, **{"job.toml": own})

    kept = client.get(f"{RUNS}/{run_id}/job").data

    tables = tomllib.loads(kept.decode())
    given = tomllib.loads(own.decode())
    assert {name: tables[name] | keys for name, keys in given.items()}.items() <= tables.items()
    assert set(own.splitlines()) <= set(kept.splitlines())
    assert (tables["parallel"]["dp"], tables["parallel"]["cp"]) == (4, 1)


def test_a_job_that_cannot_be_used_is_kept_for_its_correction(
    client: FlaskClient, store: Store
) -> None:
    run_id = queued(store, **RECORDED, **{"exp/job.toml": b"[model\n"})
    assert process_job(store, claimed(store), analyze_upload) == "failed"

    form = client.get(f"{RUNS}/{run_id}/job/form").json

    assert form is not None and form["toml"] == "[model\n" and form["groups"] == []
    assert "not valid TOML" in form["error"]


def test_runs_of_an_earlier_version_have_the_job_of_their_report_or_upload(
    client: FlaskClient, store: Store
) -> None:
    compared, failed = analyzed(store), queued(store, **{"exp/Job.toml": JOB, "rank0": b"trace"})
    assert process_job(store, claimed(store), known_analysis) == "done"
    now = tomllib.loads(client.get(f"{RUNS}/{compared}/job").text)
    (store.find_folder(compared) / "job.toml").unlink()

    before = tomllib.loads(client.get(f"{RUNS}/{compared}/job").text)

    assert before == now
    assert client.get(f"{RUNS}/{failed}/job").data == JOB


def test_without_a_known_job_the_form_is_empty(client: FlaskClient, store: Store) -> None:
    run_id = done(store)

    answers = [client.get(f"{RUNS}/{name}/job") for name in (run_id, "0" * 12)]
    form = client.get(f"{RUNS}/{run_id}/job/form").json

    assert [answer.status_code for answer in answers] == [404, 404]
    assert all(answer.json is not None and list(answer.json) == ["error"] for answer in answers)
    assert fields_of(form)["parallel.tp"]["value"] == "" and form is not None
    assert form["toml"] == ""


def test_fields_change_only_their_keys(client: FlaskClient, store: Store) -> None:
    run_id = done(store, FULL)
    changes = {"parallel": {"dp": 2, "tp": 2}, "hardware": {"gpus_per_node": 4}}

    answer = client.put(f"{RUNS}/{run_id}/job", json=changes)

    assert answer.status_code == 202
    text = client.get(f"{RUNS}/{run_id}/job").text
    assert (
        text
        == FULL.decode()
        .replace("dp = 4\n", "dp = 2\n")
        .replace('"tp-cp-dp-pp"\n', '"tp-cp-dp-pp"\ntp = 2\n')
        + "gpus_per_node = 4\n"
    )
    assert (store.find_folder(run_id) / "input" / "job.toml").read_text() == text


@pytest.mark.parametrize(
    ("own", "changes", "merged"),
    [
        ("", {"parallel": {"tp": 2}}, "[parallel]\ntp = 2\n"),
        ("[parallel]\ndp = 4\n", {"parallel": {"dp_shard": 2}}, "[parallel]\ndp_shard = 2\n"),
        ("[training]\nmicrobatches = 2 # so\n[model]\n", {"training": {"global_batch": 8}},
         "[training]\nglobal_batch = 8\n[model]\n"),
        ("[model]\nlayers = 2\n# heads =   # needed\n", {"model": {"heads": 8}},
         "[model]\nlayers = 2\nheads = 8\n"),
        ("[model]\nlayers = 2\n", {"model": {"preset": "llama-3.1-8b"}},
         '[model]\npreset = "llama-3.1-8b"\n'),
        ("[model]\nlayers = 2\n", {"model": {"layers": None}}, "[model]\n"),
        ("[model] # mine\nlayers = 2\n", {"model": {"layers": 3}}, "[model] # mine\nlayers = 3\n"),
        ("model.layers = 2\n", {"model": {"layers": 3}}, "[model]\nlayers = 3\n"),
        ('[model]\nname = """\nlayers = 9\n"""\n', {"model": {"layers": 3}},
         '[model]\nname = "layers = 9\\n"\nlayers = 3\n'),
        ("[model]\nlayers = 2\n", {"model": {"layers": 2}}, "[model]\nlayers = 2\n"),
        ("", {"training": {"offload": ["optimizer"]}}, '[training]\noffload = ["optimizer"]\n'),
    ],
)  # fmt: skip
def test_a_change_keeps_the_rest_of_the_file(
    client: FlaskClient, store: Store, own: str, changes: dict[str, Any], merged: str
) -> None:
    form = client.post(f"{RUNS}/{done(store)}/job/form", json={"toml": own, **changes}).json

    assert form is not None and form["toml"] == merged


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=5),
        st.recursive(
            st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text()
            | st.dates() | st.datetimes(),
            lambda own: st.lists(own, max_size=3) | st.dictionaries(st.text(), own, max_size=3),
            max_leaves=8,
        ),
        max_size=5,
    )
)  # fmt: skip
def test_what_is_written_as_toml_reads_as_it_was(values: dict[str, Any]) -> None:
    assert tomllib.loads(format_toml(values)) == values


_LONG = "x" * 60_000


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        ({"json": {"parallel": {"tp": "two"}}}, "parallel.tp: 'two' is not a valid count; write"),
        ({"json": {"parallel": {"tp": 0}}}, "parallel.tp: 0 is not a valid count"),
        ({"json": {"parallel": {"tp": 1e30}}}, "parallel.tp: 1e+30 is not a valid count"),
        ({"json": {"model": {"gated": "no"}}}, "model.gated: 'no' is neither true nor false"),
        ({"json": {"hardware": {"preset": "h1000"}}}, "hardware.preset: 'h1000' is unknown; write"),
        ({"json": {"training": {"recompute": "some"}}}, "training.recompute: 'some' is unknown"),
        ({"json": {"parallel": {"dp": 3}}}, "must be divisible by micro_batch (1) x dp (3); make"),
        ({"json": {"model": {"layer": 3}}}, "model.layer: unknown key; write layers"),
        ({"json": {"modle": {}}}, "'modle' is not a table of a job.toml; send model"),
        ({"json": {"parallel": 5}}, "parallel is not a table"),
        ({"json": {"model": {"latent": {"rope": 5}}}}, "model.latent: a table; send"),
        ({"json": {"hardware": {"file": "/etc/passwd"}}}, "refers to another file"),
        ({"json": []}, "send a job.toml, or JSON with its changes"),
        ({"json": {"toml": 5}}, "send a job.toml, or JSON with its changes"),
        ({"json": {"toml": "[model"}}, "not valid TOML"),
        ({"data": b'{"parallel": {"tp": NaN}}', "content_type": "application/json"}, "send a job"),
        ({"data": b"[" * 60_000, "content_type": "application/json"}, "send a job.toml"),
        ({"json": {"model": {f"key{n}": n for n in range(10_000)}}}, "too large"),
        ({"json": {"model": {f"k{n}": n for n in range(5_000)}}}, "model.k0: unknown key"),
        ({"json": {"model": {"name": _LONG}}}, "more than 1000 characters"),
        ({"json": {_LONG: {}}}, "is not a table of a job.toml"),
        ({"json": {"model": {_LONG: 1}}}, "unknown key"),
        ({"data": b"[model]\n" + b"".join(b"k%d=1\n" % n for n in range(7_000))}, "200 keys"),
        ({"data": b"[model]\nlayers = nan\n"}, "model.layers: nan is not a valid count"),
        ({"data": b"[notes]\n[model]\n"}, "notes: unknown key"),
        ({"data": b"a." * 20_000 + b"b = 1\n"}, "job.toml"),
        ({"data": b"x = " + b"[" * 50_000}, "job.toml"),
        ({"data": b"x = " + b"{a=" * 250 + b"1" + b"}" * 250 + b"\n[model]"}, "16 deep"),
        ({"json": {"toml": "x = " + "[" * 250 + "]" * 250, "model": {"layers": 2}}}, "16 deep"),
        ({"data": b"#" * 300_000}, "too large"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_a_wrong_job_is_refused_in_one_line_that_names_the_fix(
    client: FlaskClient, store: Store, sent: dict[str, Any], says: str
) -> None:
    run_id = done(store, FULL)

    # Without a collection of what thousands of tests before left, which takes a second.
    gc.disable()
    begun = time.thread_time()
    try:
        answer = client.put(f"{RUNS}/{run_id}/job", **sent)
        seconds = time.thread_time() - begun
    finally:
        gc.enable()

    assert answer.json is not None and answer.status_code == (413 if says == "too large" else 400)
    error = answer.json["error"]
    assert says == "too large" or says in error
    assert "\n" not in error and len(error) <= 2_000
    assert seconds < 1, seconds
    assert state(store, run_id) == ("done", None)
    assert client.get(f"{RUNS}/{run_id}/job").data == FULL


def test_another_machine_reads_the_newest_job(tmp_path: Path) -> None:
    where, database = f"memory://{uuid.uuid4().hex}", f"sqlite:///{tmp_path}/runs.db"
    worker, web = (Store.open(database, where, tmp_path / machine) for machine in ("a", "b"))
    run_id = done(worker)

    before = web.read_job(run_id)
    worker.artifacts.save_file(run_id, "job.toml", JOB)
    first = web.read_job(run_id)
    worker.artifacts.save_file(run_id, "job.toml", FULL)

    assert (before, first, web.read_job(run_id)) == (None, JOB, FULL)
    fsspec.filesystem("memory").store.clear()
    worker.close()
    web.close()


def test_pages_say_that_a_job_is_of_another_recording(client: FlaskClient, store: Store) -> None:
    """Four processors are not four A100s, nor the job of eight ranks."""
    a100 = analyzed(store, **{"job.toml": JOB})
    eight = analyzed(store, **{"job.toml": b"[parallel]\ndp = 8\n"})
    layout = analyzed(store, **{"job.toml": b"[parallel]\ntp = 2\ndp = 2\n"})

    says = {
        a100: "this job.toml does not describe this recording",
        eight: "job.toml describes 8 ranks (dp 8) but the recording has 4; fix [parallel]",
        layout: "layout mismatch: job.toml has",
    }
    for run_id, message in says.items():
        for page in ("", "/model"):
            shown = ask_page(client, f"/run/{run_id}{page}")
            assert message in shown, (message, page)
            is_compared = page == "" and run_id != eight
            assert shown.count('"data-job"') == (1 if is_compared else 2)
            assert str(store.find_folder(run_id)) not in shown
