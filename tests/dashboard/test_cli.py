"""The command line as scripts use it: options, exit statuses, errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import click
import pytest
from support.builders import CpuTrace, GpuTrace

from stepsplit.analyzer.report.io import read_report
from stepsplit.analyzer.report.tables import read_tables
from stepsplit.collectors.formats.watch_notes import NoteFile, RankStarted
from stepsplit.dashboard import cli

SAMPLES = Path(__file__).parents[2] / "sample_traces"
TRAINS = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return GpuTrace().step(1, 0, 10).kernel("gemm", 0, 5).kernel("gemm", 6, 10).write(tmp_path)


def test_analyze_prints_the_split_of_the_step(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["analyze", str(trace)]) == 0
    screen = capsys.readouterr().out
    assert "compute" in screen
    assert "90.0 %" in screen


def test_analyze_takes_a_stated_mesh(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["analyze", str(trace), "--mesh", "tp=1"]) == 0
    assert "mesh: stated" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options",
    [["--html", "a.html"], ["--mesh", "dp=2"], ["--rules", "a.toml"], ["--log-to", "wandb"],
     ["--workers", "2"], ["--job", "auto"], ["--write-job", "job.toml"], ["--parts"],
     ["--scheduler", "tcp://127.0.0.1:1"]],
)  # fmt: skip
def test_options_that_are_not_for_a_watch_are_refused(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    NoteFile(tmp_path, 0).write([RankStarted(0, 1, "h", 1, 0, 0.005, 1)])
    assert cli.run(["analyze", str(tmp_path), *options]) == 2
    printed, error = capsys.readouterr()
    assert (printed, error.count("\n")) == ("", 1)
    assert f"{options[0]}: not for the folder of a watch" in error
    assert cli.run(["analyze", str(tmp_path)]) == 0


def test_json_on_standard_output_is_json_alone(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["analyze", str(trace), "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["schema"] == "stepsplit.report/1"
    assert [row["compute_ns"] for row in report["steps"]] == [9_000]


def test_out_writes_the_report_and_its_tables(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert cli.run(["analyze", str(trace), "--out", str(out)]) == 0
    assert read_report(out).steps[0].compute_ns == 9_000
    assert read_tables(out / "tables").segments.dur_ns.tolist() == [5_000, 1_000, 4_000]
    assert sorted(p.name for p in out.iterdir()) == ["report.json", "tables"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["analyze", "nowhere.json"], ["nowhere.json", "check the path"]),
        (["analyze"], ["PATH"]),
        (["analyse"], ["analyse"]),
        (["analyze", "x", "--mesh", "tp"], ["--mesh", "'tp'", "tp=2,pp=2"]),
        (["record", "--mesh", "ep=2", "--", "true"], ["'ep=2'", "tp=2,pp=2"]),
        pytest.param(["demo", "--parallel", "tp=two", "--no-serve"], ["tp=two"], marks=TRAINS),
        (["dashboard", "--host", "0.0.0.0"], ["0.0.0.0", "--password-file", "--open-to-anyone"]),
        (["dashboard", "--trusted-proxy", "10.0.0.1"], ["--trusted-proxy-header"]),
        (["dashboard", "--password-file", "nowhere"], ["nowhere"]),
        (["dashboard", "--viewer-password-file", "nowhere"], ["nowhere"]),
        (["dashboard", "--trusted-proxy-role", "viewer"], ["--trusted-proxy-header"]),
        (["audit", "--since", "yesterday"], ["2026-11-30"]),
        (["token", "revoke", "absent"], ["absent", "token list"]),
        (["delete"], ["--older-than DAYS"]),
        (["delete", "0123456789ab", "--older-than", "3"], ["--older-than DAYS"]),
        (["delete", "--older-than", "-1"], ["--older-than"]),
        (["edit", "0123456789ab"], ["--name", "--untag"]),
        (["edit", "0123456789ab", "--tag", "main"], ["--tag main", "KEY=VALUE"]),
        (["edit", "0123456789ab", "--name", "x"], ["no run has the id 0123456789ab"]),
        (["retry", "0123456789ab"], ["no run has the id 0123456789ab"]),
        pytest.param(
            ["calibrate", "--quick", "--ranks", "9999"],
            ["--ranks 9999: too many", "use up to"],
            marks=TRAINS,
        ),
        (["runs", "--store", "sqlite:///nosuch/x.db"], ["nosuch/x.db: no such store", "--store"]),
        (["runs", "--store", "sqlite:///nosuch/x.db?timeout=3"], ["nosuch/x.db: no such store"]),
        (["delete", "0123456789ab"], ["no run has the id 0123456789ab"]),
        (["dashboard", "--port", "99999"], ["99999"]),
        (["dashboard", "--alert-url", "https://x/y"], ["STEPSPLIT_ALERT_SECRET"]),
        (["dashboard", "--alert-url", "ftp://x/y"], ["--alert-url", "https://HOST"]),
        (["dashboard", "--alert-url", "http://me:pw@x/y"], ["--alert-url", "without user"]),
        (["dashboard", "--alert-secret-file", "nowhere"], ["nowhere"]),
        (["dashboard", "--public-url", "stepsplit.example"], ["--public-url", "https://"]),
        (["dashboard", "--artifacts", "/proc/nowhere"], ["/proc/nowhere", "--artifacts"]),
        pytest.param(["demo", "--parallel", "tp=2000"], ["tp (2000)"], marks=TRAINS),
        (["export", "nowhere.json", "--perfetto", "x.gz"], ["nowhere.json", "check the path"]),
        (["export", "nowhere.json"], ["--perfetto"]),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    arguments: list[str],
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("stepsplit: ")
    assert output.err.count("\n") == 1
    assert all(word in output.err for word in words)


def test_marks_that_a_terminal_lacks_are_replaced_by_others() -> None:
    sample = str(SAMPLES / "pp2_m2")
    command = ["check", sample, "--baseline", sample, "--budget", "calls:exact"]
    ran = subprocess.run(
        [sys.executable, "-m", "stepsplit.dashboard", *command],
        env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, check=True,
    )  # fmt: skip
    assert b"\n+ calls    exact" in ran.stdout


def test_an_internal_error_is_one_line_that_names_the_traceback_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], trace: Path
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr("stepsplit.analyzer.analysis.examine_roles_or_run", broken)
    assert cli.run(["analyze", str(trace)]) == 4
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    file = Path(error.split()[-1])
    assert "ZeroDivisionError: ours" in file.read_text()
    file.unlink()


def test_an_unwritable_path_is_an_error(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["analyze", str(trace), "--json", f"{trace}/no/report.json"]) == 2
    assert "choose a place that can be written" in capsys.readouterr().err


def test_an_unwritable_report_leaves_no_partial_files(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "tables").write_text("in the way")
    assert cli.run(["analyze", str(trace), "--out", str(out)]) == 2
    assert cli.run(["analyze", str(trace), "--json", str(out)]) == 2
    assert capsys.readouterr().err.count("choose a place that can be written") == 2
    assert sorted(path.name for path in tmp_path.rglob("*") if "rank0" not in path.name) == [
        "out",
        "tables",
    ]


HELP = {
    (): [*cli.COMMANDS, "--version", "--help"],
    ("analyze",): [
        "--json FILE", "--out DIR", "--html FILE", "--workers N",
        "--scheduler URL", "--job FILE", "--write-job FILE", "--mesh AXES", "--parts",
        "--log-to SINK", "--rules FILE", "--help",
    ],
    ("baseline",): [
        "--out FILE", "--budgets-out FILE", "--rules FILE", "--store URL", "--artifacts URL",
        "--token TOKEN", "--help",
    ],
    ("check",): [
        "--baseline B...", "--budget FILE|RULE", "--job job.toml", "--rules FILE",
        "--across-setups", "--json FILE", "--junit FILE", "--summary FILE", "--markdown FILE",
        "--codequality FILE", "--openmetrics FILE", "--bencher FILE",
        "--benchmark-action FILE", "--dashboard URL", "--store URL", "--artifacts URL",
        "--token TOKEN", "--help",
    ],
    ("calibrate",): [
        "--quick", "--ranks N", "--out FILE", "--job FILE", "--json FILE", "--rules FILE", "--help",
    ],
    ("compare",): ["--json FILE", "--work [tokens|gpu|step]", "--rules FILE", "--help"],
    ("dashboard",): [
        "--store URL", "--artifacts URL", "--host TEXT", "--port PORT", "--workers N",
        "--limit MINUTES", "--memory GIB",
        "--password-file FILE", "--uploader-password-file FILE", "--viewer-password-file FILE",
        "--trusted-proxy-header NAME", "--trusted-proxy ADDRESS",
        "--trusted-proxy-role [viewer|uploader|admin]", "--trusted-proxy-role-header NAME",
        "--trusted-proxy-secret-file FILE", "--one-time-login / --open-to-this-host",
        "--open-to-anyone", "--alert-url URL", "--alert-secret-file FILE", "--public-url URL",
        "--log-format [text|json]", "--help",
    ],
    ("demo",): ["--parallel LAYOUT", "--out DIR", "--no-serve", "--port PORT", "--help"],
    ("attach",): [
        "--out DIR", "--name NAME", "--steps N", "--ranks auto|all|LIST", "--mesh AXES",
        "--memory", "--shapes",
        "--stacks", "--modules, --no-modules", "--share", "--timeout S", "--overwrite",
    ],
    ("doctor",): ["--json FILE", "--help"],
    ("export",): ["--perfetto FILE", "--workers N", "--rules FILE", "--help"],
    ("gather",): ["--out DIR"],
    ("model",): ["--from KIND", "--set KEY=VALUE", "--json FILE", "--explain", "--help"],
    ("plan",): [
        "--from KIND", "--set KEY=VALUE",
        "--gpus N", "--top K", "--keep KEY", "--pareto", "--price-per-gpu-hour X", "--workers N",
        "--json FILE",
        "--help",
    ],
    ("record",): [
        "--out DIR", "--name NAME", "--steps N", "--ranks auto|all|LIST", "--mesh AXES",
        "--memory", "--shapes",
        "--stacks", "--modules, --no-modules", "--share", "--first N", "--standby", "--nccl-calls",
        "--nccl-inspector", "--role ROLE", "--finish-hook CMD", "--overwrite",
    ],
    ("edit",): [
        "--name NAME", "--note TEXT", "--tag KEY=VALUE", "--untag KEY", "--store URL",
        "--artifacts URL", "--help",
    ],
    ("runs",): [
        "--job KEY", "--tag KEY=VALUE", "--last N", "--store URL", "--artifacts URL", "--help",
    ],
    ("retry",): ["--job FILE", "--store URL", "--artifacts URL", "--help"],
    ("delete",): [
        "--older-than DAYS", "--dry-run", "--store URL", "--artifacts URL", "--help",
    ],
    ("audit",): ["--since DATE", "--last N", "--json FILE", "--store URL", "--help"],
    ("token", "create"): ["--role [viewer|uploader|admin]", "--days N", "--store URL", "--help"],
    ("token", "list"): ["--store URL", "--help"],
    ("token", "revoke"): ["--store URL", "--help"],
    ("upload",): [
        "--to URL", "--name NAME", "--tag KEY=VALUE", "--mesh AXES", "--token TOKEN",
        "--resume ID", "--redact", "--each", "--wait",
        "--help",
    ],
    ("worker",): [
        "--store URL", "--artifacts URL", "--limit MINUTES", "--memory GIB",
        "--log-format [text|json]", "--help",
    ],
    ("what-if",): [
        "--change CHANGE", "--hardware PRESET", "--link AXIS=PRESET", "--gpus-per-node N",
        "--recorded-on PRESET", "--json FILE", "--rules FILE", "--help",
    ],
    ("validate",): ["--json FILE", "--rows", "--help"],
}  # fmt: skip


@pytest.mark.parametrize("verb", HELP, ids=lambda verb: " ".join(verb) or "stepsplit")
def test_the_options_of_each_command_are_frozen(
    verb: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run([*verb, "--help"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    named = [line for line in lines if line.startswith("--")]
    options = [" ".join(line.split("  ")[0].split()) for line in named]
    verbs = [line.split()[0] for line in lines if line.split("  ")[0] in cli.COMMANDS]
    assert verbs + options == HELP[verb]


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        (
            "stepsplit.analyzer.analysis",
            ["torch", "dash", "plotly", "flask", "sqlalchemy", "click", "rich", "pandas"],
        ),
        ("stepsplit.analyzer.readers.kineto.reader", ["pyarrow", "pandas"]),
        ("stepsplit.collectors", ["torch", "numpy", "pandas", "msgspec"]),
        ("stepsplit.dashboard.cli", ["torch", "dash", "plotly", "pandas"]),
    ],
)
def test_imports_stay_light(module: str, absent: list[str]) -> None:
    program = f"import sys, {module}; print(*[m for m in {absent!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


def test_the_list_of_commands_shows_the_first_line_of_each_help() -> None:
    context = click.Context(cli.stepsplit)
    for verb, entry in cli.COMMANDS.items():
        command = cli.stepsplit.get_command(context, verb)
        assert command is not None and command.get_short_help_str(200) == entry.summary, verb


IDLE = CpuTrace().step(0, 0, 100).step(1, 100, 200).op("aten::mm", 300, 360)
"""A CPU run whose ops lie outside of its steps."""


@pytest.mark.parametrize(
    ("recorded", "replayed"),
    [
        (IDLE, 0),
        (GpuTrace().step(1, 0, 10).kernel("gemm", 20, 30, launched=15), 2),
        (GpuTrace().step(1, 0, 0).kernel("gemm", 20, 30), 0),
    ],
    ids=["idle", "no step", "open step"],
)
def test_steps_without_work_end_in_every_output(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    recorded: CpuTrace | GpuTrace,
    replayed: int,
) -> None:
    file, out, page = str(recorded.write(tmp_path)), tmp_path / "out", tmp_path / "page.html"
    assert cli.run(["analyze", file, "--out", str(out), "--html", str(page)]) == 0
    assert cli.run(["export", str(out), "--perfetto", str(tmp_path / "saved.json")]) == 0
    assert cli.run(["export", file, "--perfetto", str(tmp_path / "read.json")]) == 0
    capsys.readouterr()
    assert cli.run(["what-if", file]) == replayed
    assert (capsys.readouterr().err.count("\n") == 1) == bool(replayed)


def test_a_wrong_run_json_is_one_line(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = {"schema": "stepsplit.run/1", "name": "a", "world_size": 1, "backend": "nccl"}
    run = trace.parent / "run.json"
    run.write_text(json.dumps(body | {"training": {"schedule": {"a": 1}}}))
    assert cli.run(["analyze", str(trace.parent)]) == 2
    assert capsys.readouterr().err == (
        f'stepsplit: {run}: training.schedule: {{"a": 1}} is not a text; fix it or leave it out\n'
    )


def test_a_gpu_trace_without_kernels_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = GpuTrace().step(1, 0, 100).op("aten::mm", 0, 90).kernel("gemm", 10, 20)
    trace.events.pop()
    assert cli.run(["analyze", str(trace.write(tmp_path))]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "device activity was not recorded: none of 1 launches led to a kernel" in lines[0]


@pytest.mark.parametrize(
    "words",
    [
        "delete --older-than nan",
        "delete --older-than 1e308",
        "token create ci --days inf",
        "worker --memory 1e308",
        "worker --limit nan",
        "watch --disk inf job.py",
    ],
)
def test_numbers_that_nothing_can_be_compared_with_are_refused(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(words.split()) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("stepsplit: Invalid value for '--")
