"""What a stranger has written into a recording is never executed by a terminal or a CI runner.

Every command prints recordings, reports, stores and answers whose texts hold escape sequences, line
breaks and commands of CI runners; what arrives at its streams is searched for them.
"""

from __future__ import annotations

import gzip
import io
import json
import logging
import re
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from unicodedata import category

import pytest
from fuzz.mutants import read_sample
from rich.table import Table
from support import doctor_builders
from support.planted_text import PLANTED, plant, plant_where_accepted
from support.stderr_lines import warns

from stepsplit.analyzer.regression.metrics import read_baseline
from stepsplit.analyzer.report.io import from_json
from stepsplit.collectors import guard
from stepsplit.dashboard import cli
from stepsplit.dashboard.commands import doctor
from stepsplit.dashboard.reporters.console import SafeConsole, Text
from stepsplit.dashboard.store.logs import LogFormat, set_up_logs
from stepsplit.dashboard.store.store import Store

SAMPLES = Path(__file__).parents[2] / "sample_traces"
IN_NAMES = PLANTED.replace("\0", "").replace("/", "|")[:200]
"""Of what a file name may consist."""
OWN = re.compile(r"::(error|warning) title=stepsplit(%3A [a-z]+)?::")
COLORS = re.compile(r"\x1b\[(?!5m)[0-9;]*m|(\r?\x1b\[(2K|1A|\?25[lh]))+\r?")
"""What our screens and progress bars consist of, and no planted text."""


def find_unsafe(printed: str) -> list[str]:
    """The lines that a terminal or a runner would not just show."""
    lines = COLORS.sub("", printed).split("\n")
    return [line for line in lines if _is_unsafe(line)]


def _is_unsafe(line: str) -> bool:
    is_shown = all(letter.isprintable() or category(letter) == "Zs" for letter in line)
    is_command = line.lstrip().startswith("::") and not OWN.match(line)
    return not is_shown or is_command or bool(re.search(r"##\w*\[", line))


TEXTS = frozenset({
    "name", "host", "device", "description", "run", "cpu", "gpu", "python", "torch", "cuda",
    "nccl", "driver", "host_name", "traceName", "trace_id", "dtype", "optimizer", "labels",
    "schedule", "framework", "comm_lib_version",
})  # fmt: skip


def plant_in_event(event: dict[str, Any]) -> dict[str, Any]:
    """An event of a trace with planted names, where the analysis needs no known one."""
    if event["ph"] == "M":
        return event | {"args": plant(event.get("args", {}), TEXTS)}
    plain = event.get("name", "").startswith("aten::")
    return event | {"name": event["name"] + PLANTED} if plain else event


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The hostile inputs, by the name that the commands below give them."""
    root = tmp_path_factory.mktemp("hostile")
    sample = read_sample("pp2_m2")
    sample.run = plant(sample.run, TEXTS)
    for name, trace in sample.traces.items():
        events = [plant_in_event(event) for event in trace["traceEvents"]]
        sample.traces[name] = plant(trace | {"traceEvents": []}, TEXTS) | {"traceEvents": events}
    # A byte that is no UTF-8.
    recording = sample.write(root / f"{IN_NAMES}\udc9b")
    (recording / f"rank7_trace.json{IN_NAMES}").write_text("{")
    (recording / "job.toml").write_text(f"[model]\nname = {json.dumps(PLANTED)}\n")
    report = root / "report"
    report.mkdir()
    known = (SAMPLES / "tp2_pp2/report.json").read_bytes()
    (report / "report.json").write_bytes(plant_where_accepted(known, from_json))
    plain = root / "plain.json"
    assert cli.run(["baseline", str(SAMPLES / "tp2_pp2"), "--out", str(plain)]) == 0
    trial, baseline = root / "trial.json", root / "baseline.json"

    def decode(text: bytes) -> object:
        trial.write_bytes(text)
        return read_baseline(trial)

    baseline.write_bytes(plant_where_accepted(plain.read_bytes(), decode))
    flights = root / "flights"
    flights.mkdir()

    for file in (SAMPLES / "dp4").glob("rank*_flight.json.gz"):
        dump = json.loads(gzip.decompress(file.read_bytes()))
        for one in dump["entries"]:
            one["process_group"][1] += PLANTED
            one["thread_name"] += PLANTED
        (flights / file.name.removesuffix(".gz")).write_text(json.dumps(dump))
    in_toml = json.dumps(PLANTED, ensure_ascii=False).replace("\x7f", "\\u007f")
    job = root / "job.toml"
    job.write_text(
        f"[model]\nname = {in_toml}\nlayers = 4\nhidden = 256\nheads = 8\n"
        "ffn = 1024\nvocab = 32000\n"
        "[parallel]\npp = 2\n[training]\nseq_len = 64\nmicro_batch = 4\nglobal_batch = 16\n"
        '[hardware]\npreset = "h100-sxm"\n'
    )
    published = root / "published"
    published.mkdir()
    table = SAMPLES.parent / "analyzer/validation/published/training_reports.csv"
    head, first, *_ = table.read_text().split("\n")
    (published / table.name).write_text(f'{head}\n"{PLANTED.replace(chr(0), "")}{first}\n')
    server = HTTPServer(("127.0.0.1", 0), _Stranger)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield {
        "RECORDING": str(recording), "REPORT": str(report), "BASELINE": str(baseline),
        "FLIGHTS": str(flights), "JOB": str(job), "PUBLISHED": str(published),
        "URL": f"http://127.0.0.1:{server.server_port}", "PLAIN": str(SAMPLES / "tp2_pp2"),
        "STORE": _write_store(root), "ID": (root / "run_id").read_text(), "TEXT": IN_NAMES,
    }  # fmt: skip
    server.shutdown()
    server.server_close()


class _Stranger(BaseHTTPRequestHandler):
    """A server that refuses everything with a planted message."""

    def do_POST(self) -> None:
        body = json.dumps({"error": PLANTED, "message": PLANTED}).encode()
        status = 404 if self.command in ("GET", "HEAD") else 403
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_PUT = do_HEAD = do_POST

    def log_message(self, format: str, *args: object) -> None:
        pass


def _write_store(root: Path) -> str:
    """A store of another program, with texts that ours would not have written."""
    url, file = f"sqlite:///{root}/runs.db", root / "runs.db"
    store = Store.open(url, root / "artifacts")
    store.add("run")
    store.close()
    with sqlite3.connect(file) as database:
        database.execute("UPDATE runs SET name = ?, note = ?, job_key = 'k'", (PLANTED, PLANTED))
        database.execute("INSERT INTO tags SELECT id, ?, ? FROM runs", (PLANTED[:60], PLANTED))
        database.execute(
            "INSERT INTO tokens (id, name, sha256, created_unix_ns) VALUES ('t', ?, 'x', 0)",
            (PLANTED,),
        )
        database.execute(
            "INSERT INTO audit (at_unix_ns, user_name, role, address, action, target, outcome)"
            " VALUES (?, ?, ?, ?, ?, ?, ?)",
            (time.time_ns(), *[PLANTED] * 6),
        )
        (run_id,) = database.execute("SELECT id FROM runs").fetchone()
    database.close()
    (root / "run_id").write_text(run_id)
    return url


STORE = "--store STORE"
COMMANDS = {
    "analyze": [
        "RECORDING", "RECORDING --json -", "RECORDING --job auto", "REPORT", "FLIGHTS", "URL/x",
        "RECORDING --mesh TEXT", "RECORDING --log-to json:points.jsonl --write-job draft.toml",
    ],
    "attach": ["999999999", "TEXT"],
    "audit": [STORE, f"--json - {STORE}"],
    "baseline": ["RECORDING --out b.json", "REPORT --out b.json"],
    "calibrate": ["RECORDING", "RECORDING --job JOB"],
    "check": [
        "REPORT --baseline BASELINE", "RECORDING --baseline PLAIN --across-setups",
        "REPORT --baseline BASELINE --budget calls:exact --json - --junit j --summary s"
        " --markdown m --codequality c --openmetrics o --bencher b --benchmark-action a",
        "store:TEXT --baseline PLAIN --store URL",
    ],
    "compare": ["REPORT RECORDING", "REPORT PLAIN --json -", "REPORT RECORDING PLAIN --work gpu"],
    "dashboard": ["--port TEXT", "--store TEXT"],
    "delete": [f"ID --dry-run {STORE}", f"TEXT {STORE}"],
    "demo": ["--parallel TEXT"],
    "doctor": ["", "--json -"],
    "edit": [f"ID --note n {STORE}"],
    "export": ["RECORDING --perfetto t.json", "REPORT --perfetto t.json"],
    "gather": ["TEXT --out g", "RECORDING --out g"],
    "hang": ["FLIGHTS", "FLIGHTS --json -", "TEXT"],
    "mcp": ["TEXT", "RECORDING --store TEXT"],
    "model": ["JOB", "JOB --explain", "JOB --json -", "RECORDING/job.toml"],
    "plan": ["JOB --gpus 2", "JOB --gpus 2 --json -"],
    "record": ["--mesh TEXT -- true", "-- ./TEXT"],
    "redact": ["RECORDING --out redacted"],
    "reduce": ["RECORDING --out reduced"],
    "retry": [f"ID {STORE}"],
    "runs": [STORE, f"--tag TEXT {STORE}"],
    "schema": ["TEXT"],
    "skill": ["", "--print"],
    "token": [f"list {STORE}", f"revoke TEXT {STORE}"],
    "upload": ["RECORDING --to URL"],
    "validate": ["PUBLISHED"],
    "watch": ["--send TEXT --to URL", "--attach TEXT"],
    "what-if": ["RECORDING", "REPORT", "RECORDING --change TEXT"],
    "worker": ["--store TEXT"],
}  # fmt: skip
"""How each command meets a stranger's text."""


class _Stream(io.StringIO):
    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal

    encoding = "utf-8"

    def isatty(self) -> bool:
        return self.is_terminal


def run(words: list[str], is_terminal: bool) -> str:
    """What the command prints on standard output and on standard error."""
    out, err = _Stream(is_terminal), _Stream(is_terminal)
    with redirect_stdout(out), redirect_stderr(err):
        status = cli.run(words)
    assert status in (0, 1, 2, 3), (words, err.getvalue())
    return f"{out.getvalue()}\n{err.getvalue()}"


@pytest.fixture
def somewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, places: dict[str, str]
) -> dict[str, str]:
    """The hostile inputs in a terminal of GitHub Actions, in a folder that may be written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    odd = replace(
        doctor_builders.HEALTHY, system=PLANTED, driver=PLANTED, stepsplit=PLANTED,
        smi_gpus=(PLANTED,), torch=replace(doctor_builders.TORCH, version=PLANTED, gpus=()),
    )  # fmt: skip
    monkeypatch.setattr(doctor, "read_environment", lambda: odd)
    return places


def test_every_command_meets_a_strangers_text() -> None:
    assert set(COMMANDS) == set(cli.COMMANDS)


RUN_ANY_WORDS = ("watch",)
"""To these an unknown option is the command of a training."""


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_no_command_prints_what_would_be_executed(
    name: str, somewhere: dict[str, str], tmp_path: Path
) -> None:
    lines = [line.split() for line in COMMANDS[name]]
    lines += [] if name in RUN_ANY_WORDS else [["--TEXT"]]
    pattern = re.compile("|".join(somewhere))
    printed = ""
    for i, line in enumerate(lines):
        words = [pattern.sub(lambda match: somewhere[match[0]], word) for word in line]
        text = run([name, *words], is_terminal=i % 2 == 0)
        assert not find_unsafe(text), (line, find_unsafe(text)[:3])
        printed += text
    assert "::error title" in printed, "nothing of a stranger was printed"
    for file in tmp_path.iterdir():
        if len(file.name) == 1:
            assert not find_unsafe(file.read_text()), (file.name, find_unsafe(file.read_text())[:3])


def test_json_keeps_the_exact_texts(
    somewhere: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["analyze", somewhere["RECORDING"], "--json", "-"]) == 0

    assert json.loads(capsys.readouterr().out)["run"]["name"] == f"pp2_m2{PLANTED}"


def test_markup_of_a_name_is_text() -> None:
    table, screen = Table(), io.StringIO()
    table.add_row("[red]a[/nope] :smile:", Text("[link=http://e]b\n\r"))

    SafeConsole(screen, width=60).print(table)

    assert "│ [red]a[/nope] :smile: │ [link=http://e]b\\n\\r │" in screen.getvalue()


def test_a_line_that_is_folded_before_a_command_is_none() -> None:
    screen = _Stream(is_terminal=True)

    SafeConsole(screen, width=20).print(Text(f"{'x' * 19} ::error::y", style="bold"))

    assert COLORS.sub("", screen.getvalue()) == f"{'x' * 19} \n:\\x3aerror::y\n"


@pytest.mark.parametrize("form", ["text", "json"])
def test_the_log_of_a_server(
    form: LogFormat, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root, own = logging.getLogger(), logging.getLogger("stepsplit")
    monkeypatch.setattr(root, "handlers", [])
    levels = root.level, own.level
    set_up_logs(form)
    try:
        raise ValueError(PLANTED)
    except ValueError:
        own.exception("run %s failed", PLANTED)
    finally:
        root.setLevel(levels[0])
        own.setLevel(levels[1])

    printed = capsys.readouterr().err
    assert "planted" in printed and "ValueError" in printed
    assert not find_unsafe(printed)


def test_a_collector_warns_on_one_line() -> None:
    with warns("planted") as lines:
        guard.warn(PLANTED)

    assert len(lines) == 1 and not find_unsafe(f"stepsplit: {lines[0]}")
