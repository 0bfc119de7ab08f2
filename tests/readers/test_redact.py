"""Redacted copies of recordings: the same split, and no private word in any file."""

from __future__ import annotations

import gzip
import json
import pickle
import re
import stat
import tomllib
from pathlib import Path
from typing import Any

import pytest
from support.builders import GpuTrace

from stepsplit.analyzer import BUCKETS, analyze, read_files
from stepsplit.analyzer.errors import DataError, UsageError
from stepsplit.analyzer.readers.kernel_rules import read_rules
from stepsplit.analyzer.readers.nccl.records import NcclLog
from stepsplit.analyzer.redact import redact_recording
from stepsplit.analyzer.report.io import read_report
from stepsplit.collectors.formats.rank_record import (
    RankRecord,
    RecordedWork,
    StepWork,
    read_record,
    write_record,
)
from stepsplit.collectors.formats.run_spec import (
    GroupInfo,
    HostInfo,
    RankInfo,
    RunSpec,
    write_run_json,
)
from stepsplit.dashboard import cli

SAMPLES = Path(__file__).parents[2] / "sample_traces"
NAMES = sorted(path.name for path in SAMPLES.iterdir() if path.is_dir())
SMALL = ("built_fsdp_four_hosts", "pp2_m2")
SLOW_IN_TURN = (pytest.mark.slow, pytest.mark.in_turn("analyzer/redact"))
PRIVATE_IN_SAMPLES = re.compile(
    rb"\bvm\b|\bnode\d|/tmp/|gemm_(?:qkv|out|fc\d)|\bflash_attention|silu_and_mul|blocks\.\d"
)


def unpack(folder: Path) -> bytes:
    """The names and the unpacked content of all files of a folder."""
    content = b""
    for path in sorted(folder.rglob("*")):
        content += path.relative_to(folder).as_posix().encode() + b"\n"
        if path.is_file():
            packed = path.name.endswith(".gz")
            content += gzip.decompress(path.read_bytes()) if packed else path.read_bytes()
    return content


@pytest.mark.parametrize(
    "name",
    [name if name in SMALL else pytest.param(name, marks=SLOW_IN_TURN) for name in NAMES],
)
def test_a_redacted_sample_has_the_same_split_and_no_private_word(
    name: str, tmp_path: Path
) -> None:
    assert PRIVATE_IN_SAMPLES.search(unpack(SAMPLES / name))

    redact_recording([SAMPLES / name], tmp_path / "copy")

    golden, report = read_report(SAMPLES / name), analyze(tmp_path / "copy")
    assert report.steps == golden.steps
    assert report.kernels == golden.kernels
    assert PRIVATE_IN_SAMPLES.findall(unpack(tmp_path / "copy")) == []


# A recording with a private word in every field that may hold one.

WORDS = (
    "acme", "alice", "login7", "login8", "hunter2", "10.1.2.3", "titan", "Falcon", "Gadget",
)  # fmt: skip


def write_private_trace(folder: Path, rank: int) -> None:
    trace = GpuTrace(rank, 2, host=f"login{7 + rank}", groups=[("0", "default_pg", [0, 1])])
    trace.step(1, 0, 1000).step(2, 1000, 2000).step(3, 2000, 2100)
    for start in (0, 1000):
        trace.kernel("acme_titan_gemm<float>", start, start + 300)
        trace.all_reduce(start + 300, start + 500)
        trace.kernel("void falconlike::FalconSoftmax()", start + 500, start + 800)
        trace.annotation("Falcon stage of /home/alice/acme/train.py", start, start + 200)
        trace.annotation("FSDP::pre_forward (GadgetModel.layers.3)", start, start + 100)
        trace.annotation("Optimizer.step#GadgetAdam.step", start + 800, start + 850)
    trace.events += [
        host_event("python_function", "/home/alice/acme/train.py(93): load_titan"),
        host_event(
            "python_function", "/home/alice/venv/lib/python3.11/site-packages/torch/a.py(3): f"
        ),
        host_event("python_function", "<built-in method falcon of Gadget object at 0x7f>"),
        host_event("python_function", "nn.Module: GadgetModel_0"),
        host_event("cpu_op", "acme::titan_op", **{"Call stack": "/home/alice/acme/a.py(1): f"}),
        host_event("cpu_op", "autograd::engine::evaluate_function: FalconBackward"),
        host_event("cpu_op", "aten::mm", **{"Concrete Inputs": ["", "[1, 2]", "titan"]}),
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "acme-train"}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 5, "args": {"name": "titan_io"}},
        {"ph": "M", "name": "process_labels", "pid": 1, "tid": 0, "args": {"labels": "acme job"}},
    ]
    command = "python train.py --password hunter2"
    body = trace.body() | {"traceName": "/home/alice/acme/r.json", "command line": command}
    path = folder / f"rank{rank}_trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps(body).encode()))


def host_event(category: str, name: str, **args: Any) -> dict[str, Any]:
    times = {"ts": 10.0, "dur": 1.0}
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 100, "args": args, **times}


def write_private_recording(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for rank in (0, 1):
        write_private_trace(folder, rank)
    ranks = tuple(RankInfo(rank, 0, f"login{7 + rank}", 1, "Test GPU") for rank in (0, 1))
    hosts = tuple(HostInfo(f"login{n}", "Xeon", 8) for n in (7, 8))
    group = GroupInfo("0", "default_pg", (0, 1))
    spec = RunSpec("acme-gpt", 2, "nccl", ranks=ranks, groups=(group,), hosts=hosts)
    for info, origin in zip(ranks, ("run.step", "titan"), strict=True):
        counted = RecordedWork(origin, (StepWork(1, tokens=512), StepWork(2, samples=8, flops=9)))
        write_record(folder, RankRecord("acme-gpt", info, 2, "nccl", work=counted))
    path = write_run_json(folder, spec)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"argv": ["--password", "hunter2"]}))
    frame = {"name": "titan", "filename": "/home/alice/acme/train.py", "line": 7}
    entry = {"profiling_name": "nccl:all_reduce", "time_created_ns": 5, "frames": [frame],
             "process_group": ("0", "default_pg"), "collective_seq_id": 1, "p2p_seq_id": 0,
             "input_sizes": [[4]], "input_dtypes": ["Float"], "state": "completed"}  # fmt: skip
    dump = {"version": "2.5", "entries": [entry], "pg_config": {}, "pg_status": {}}
    (folder / "nccl_trace_rank_0").write_bytes(pickle.dumps(dump, 2))
    (folder / "login7.acme.log").write_text(
        "starting with --password hunter2\n"
        "login7:12:34 [0] NCCL INFO NCCL_TOPO_FILE set by environment to /home/alice/t.xml\n"
        "login7:12:34 [0] NCCL INFO Bootstrap : Using eth0:10.1.2.3<0>\n"
        "login7:12:34 [0] NCCL INFO comm 0x1 rank 0 nranks 2 cudaDev 0 busId 4 - Init COMPLETE\n"
        "login8:12:34 [0] NCCL INFO comm 0x2 rank 1 nranks 2 cudaDev 0 busId 4 - Init COMPLETE\n"
        "login8:12:34 [0] NCCL WARN lost login7.acme.example\n"
    )
    (folder / "job.toml").write_text(
        '# for alice\n[model]\npreset = "gpt3-175b"\nname = "titan"\n[training]\nmicro_batch = 1\n'
        'extra = [{owner = "alice", share = inf}]\n'
    )
    (folder / "notes.txt").write_text("titan by alice")
    return folder


def test_no_private_word_is_left_in_any_field(tmp_path: Path) -> None:
    private = write_private_recording(tmp_path / "acme")
    content = unpack(private).decode(errors="replace")
    assert [word for word in WORDS if word not in content] == []

    done = redact_recording([private], tmp_path / "copy")

    copied = unpack(tmp_path / "copy").decode().lower()
    assert [word for word in WORDS if word.lower() in copied] == []
    assert sorted(done.files) == [
        "flight0_rank0.json.gz",
        "job.toml",
        "nccl0.log",
        "rank0_record.json",
        "rank0_trace.json.gz",
        "rank1_record.json",
        "rank1_trace.json.gz",
        "run.json",
    ]
    # A script may name itself as who counted.
    files = [tmp_path / "copy" / f"rank{rank}_record.json" for rank in (0, 1)]
    copies = [read_record(file.read_bytes()) for file in files]
    counted = (StepWork(1, tokens=512), StepWork(2, samples=8, flops=9))
    assert [one.work and one.work.steps for one in copies] == [counted, counted]
    origins = [one.work.origin if one.work else "" for one in copies]
    assert origins[0] == "run.step" and origins[1].startswith("text")
    assert [(Path(place).name, why) for place, why in done.left_out] == [
        ("notes.txt", "not a file of a recording"),
        ("login7.acme.log", "2 lines that are no known message"),
    ]
    before, after = analyze(private), analyze(tmp_path / "copy")
    assert (after.steps, after.kernels) == (before.steps, before.kernels)
    assert sum(row.split.buckets_ns[BUCKETS.index("collective")] for row in after.steps) > 0


def test_a_log_keeps_its_communicators_and_warnings(tmp_path: Path) -> None:
    private = write_private_recording(tmp_path / "acme")

    redact_recording([private], tmp_path / "copy")

    [log] = [one.content for one in read_files(tmp_path / "copy") if one.kind == "NCCL log"]
    assert isinstance(log, NcclLog)
    assert [(m.rank, m.host) for c in log.communicators for m in c.members] == [
        (0, "host1"),
        (1, "host2"),
    ]
    assert [warning.text for warning in log.warnings] == ["warning1"]


def test_a_job_keeps_the_keys_of_the_model(tmp_path: Path) -> None:
    redact_recording([write_private_recording(tmp_path / "acme")], tmp_path / "copy")

    assert tomllib.loads((tmp_path / "copy" / "job.toml").read_text()) == {
        "model": {"preset": "gpt3-175b", "name": "text1"},
        "training": {"micro_batch": 1},
    }


def read_names(folder: Path, category: str) -> list[str]:
    with gzip.open(folder / "rank0_trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    return sorted({event["name"] for event in events if event.get("cat") == category})


def test_names_of_known_libraries_stay_and_others_state_their_class(tmp_path: Path) -> None:
    redact_recording([write_private_recording(tmp_path / "acme")], tmp_path / "copy")

    assert read_names(tmp_path / "copy", "kernel") == [
        "kernel1 {kind=compute op=unknown family=gemm}",
        "kernel2 {kind=compute op=unknown family=softmax}",
        "ncclDevKernel_AllReduce",
    ]
    assert read_names(tmp_path / "copy", "cpu_op") == [
        "aten::mm",
        "autograd::engine::evaluate_function: function4 {kind=compute op=unknown family=other} "
        "Backward",
        "op1:: {kind=compute op=unknown family=other}",
    ]
    assert read_names(tmp_path / "copy", "python_function") == [
        "<built-in function3>",
        "file1.py(93): function2",
        "nn.Module: module2_0",
        "torch/a.py(3): f",
    ]


def test_a_word_makes_a_public_name_private(tmp_path: Path) -> None:
    private = write_private_recording(tmp_path / "acme")

    redact_recording([private], tmp_path / "copy", words=["allreduce"])

    assert read_names(tmp_path / "copy", "kernel") == [
        "kernel1 {kind=compute op=unknown family=gemm}",
        "kernel2 {kind=communication op=all_reduce family=reduce} Reduce",
        "kernel3 {kind=compute op=unknown family=softmax}",
    ]
    assert b"allreduce" not in unpack(tmp_path / "copy").lower()
    assert analyze(tmp_path / "copy").steps == analyze(private).steps


def test_the_class_in_a_redacted_name_is_used_before_any_rule(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for rank in (0, 1):
        trace = GpuTrace(rank, 2, groups=[("0", "default_pg", [0, 1])])
        trace.step(1, 0, 1000).step(2, 1000, 2000).step(3, 2000, 2100)
        trace.kernel("acme_ring_exchange", 100, 400).kernel("gemm", 400, 900)
        trace.kernel("acme_ring_exchange", 1100, 1400).kernel("gemm", 1400, 1900)
        trace.write(tmp_path / "run")
    own, wrong = tmp_path / "own.toml", tmp_path / "wrong.toml"
    own.write_text('[[kernel]]\nmatch = "acme_ring"\nis = "communication"\nop = "all_gather"\n')
    wrong.write_text('[[kernel]]\nmatch = "^kernel"\nis = "copy"\n')

    rules = read_rules(own)
    redact_recording([tmp_path / "run"], tmp_path / "copy", rules=rules)

    before = analyze(tmp_path / "run", rules=rules)
    for after in (analyze(tmp_path / "copy"), analyze(tmp_path / "copy", rules=read_rules(wrong))):
        assert after.steps == before.steps
        assert [row.op for row in after.collectives] == [row.op for row in before.collectives]
    assert analyze(tmp_path / "run").steps != before.steps


def test_every_digit_of_a_time_and_every_whole_entry_of_a_cut_trace_is_kept(tmp_path: Path) -> None:
    events = '{"ph":"X","name":"a","cat":"cpu_op","ts":4357525319874123.401,"dur":1.250,"args":{}}'
    text = f'{{"host_name": "h1x", "traceEvents": [{events},\n{events},\n{{"ph":"X","na'
    (tmp_path / "rank0_trace.json").write_text(text)

    redact_recording([tmp_path / "rank0_trace.json"], tmp_path / "copy")

    copied = gzip.decompress((tmp_path / "copy" / "rank0_trace.json.gz").read_bytes())
    assert copied.count(b'"ts":4357525319874123.401') == 2
    assert copied.count(b'"dur":1.25') == 2
    assert len(json.loads(copied)["traceEvents"]) == 2


@pytest.mark.parametrize(
    "odd",
    [
        {"args": {"a": json.loads("[" * 90 + "]" * 90)}},
        {"args": {"labels": "a." * 20_000 + "@"}, "name": "b/" * 20_000},
        {"args": {"function": None, "file": ["x"]}, "name": 5, "cat": 7},
    ],
    ids=["deep", "long", "of other types"],
)
def test_odd_entries_are_copied_in_time(odd: dict[str, Any], tmp_path: Path) -> None:
    body = GpuTrace().step(1, 0, 10).kernel("gemm", 1, 5).body()
    body["traceEvents"].append(host_event("cpu_op", "aten::mm") | odd)
    (tmp_path / "rank0_trace.json").write_text(json.dumps(body))

    redact_recording([tmp_path / "rank0_trace.json"], tmp_path / "copy")

    with gzip.open(tmp_path / "copy" / "rank0_trace.json.gz") as file:
        assert len(json.load(file)["traceEvents"]) == len(body["traceEvents"])


def test_only_the_key_reverses_a_redaction(tmp_path: Path) -> None:
    private, key = write_private_recording(tmp_path / "acme"), tmp_path / "key.json"

    redact_recording([private], tmp_path / "copy", key=key)

    texts = json.loads(key.read_text())["texts"]
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert texts["host"] == {"host1": "login7", "host2": "login8"}
    assert texts["run"] == {"run1": "acme-gpt"}


def test_the_command_prints_what_was_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sample, out = str(SAMPLES / "built_zero_bubble"), str(tmp_path / "copy")

    assert cli.run(["redact", sample, "--out", out]) == 0

    assert capsys.readouterr().out.splitlines() == [
        f"{out}: 3 files",
        "replaced host: 1 in 2 places",
        "replaced kernel: 15 in 30 places",
        "replaced run: 1 in 1 places",
        f"left out {sample}/SOURCE.txt: not a file of a recording",
        f"left out {sample}/report.json: not a file of a recording",
        f"left out {sample}/truth.json: not a file of a recording",
    ]


def test_outputs_that_would_mix_or_leak_are_refused(tmp_path: Path) -> None:
    sample, out = SAMPLES / "built_zero_bubble", tmp_path / "copy"
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").write_text("")
    (tmp_path / "key").write_text("")
    with pytest.raises(UsageError, match="not an empty folder"):
        redact_recording([sample], tmp_path / "full")
    with pytest.raises(UsageError, match="the key would be in the redacted copy"):
        redact_recording([sample], out, key=out / "key.json")
    with pytest.raises(UsageError, match="exists already"):
        redact_recording([sample], out, key=tmp_path / "key")
    with pytest.raises(DataError, match="no file of a recording"):
        redact_recording([tmp_path / "full"], out)


def test_a_redaction_that_fails_half_way_leaves_nothing(tmp_path: Path) -> None:
    """A damaged file is refused after the trace has been copied."""
    source, copy = tmp_path / "run", tmp_path / "copy"
    source.mkdir()
    write_private_trace(source, 0)
    (source / "run.json").write_text('{"schema": "stepsplit.run/1", "name": ')
    with pytest.raises(DataError, match=r"run\.json"):
        redact_recording([source], copy)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


@pytest.mark.parametrize("command", ["redact", "reduce"])
def test_a_copy_within_the_recording_is_refused(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_private_trace(tmp_path, 0)
    for out in (tmp_path / "copy", tmp_path / "deep" / "copy"):
        assert cli.run([command, str(tmp_path), "--out", str(out)]) == 2
        assert "choose a folder outside of it" in capsys.readouterr().err
        assert not out.exists()


def test_an_empty_folder_that_exists_keeps_its_mode(tmp_path: Path) -> None:
    source, copy = tmp_path / "run", tmp_path / "copy"
    source.mkdir()
    write_private_trace(source, 0)
    copy.mkdir(mode=0o700)
    redact_recording([source], copy)
    assert stat.S_IMODE(copy.stat().st_mode) == 0o700
    assert [path.name for path in copy.iterdir()] == ["rank0_trace.json.gz"]


def test_marks_of_rl_phases_stay_without_what_is_the_users(tmp_path: Path) -> None:
    trace = GpuTrace().step(1, 0, 100).kernel("gemm", 0, 100)
    trace.annotation("AcmeTrainer.transformers.generate", 0, 40)
    trace.annotation("execute_context_0(0)_generation_4(4) acme", 0, 20)
    trace.annotation("update_actor", 50, 70).annotation("acme_reward", 70, 80)
    (tmp_path / "acme").mkdir()
    trace.write(tmp_path / "acme")

    redact_recording([tmp_path / "acme"], tmp_path / "copy")

    assert read_names(tmp_path / "copy", "user_annotation") == [
        "ProfilerStep#1", "class1.transformers.generate", "decode sequences=4", "range1",
        "update_actor",
    ]  # fmt: skip
    step, copy = analyze(tmp_path / "acme").rl_step, analyze(tmp_path / "copy").rl_step
    assert step and copy
    assert [row.time for row in copy.phases] == [row.time for row in step.phases]
    assert copy.tails == step.tails
