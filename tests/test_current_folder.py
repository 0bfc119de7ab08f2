"""What stepsplit starts imports nothing from the current folder; what the user starts does."""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from stepsplit.analyzer.readers import workers
from stepsplit.analyzer.readers.workers import Task, run_all
from stepsplit.collectors.record.command import record
from stepsplit.collectors.record.environment import NcclLogs
from stepsplit.collectors.record.plan import RecordPlan
from stepsplit.collectors.safe_io.helper_process import (
    build_helper_command,
    build_helper_environment,
)
from stepsplit.collectors.watch.command import run_watched
from stepsplit.collectors.watch.plan import WatchPlan
from stepsplit.dashboard.environment import read_environment
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.store.worker import Workers
from stepsplit.dashboard.watch_process import ReducerOptions, ReducerProcess

SAMPLE = Path(__file__).parents[1] / "sample_traces" / "dp4"
STEPSPLIT = str(Path(sys.executable).with_name("stepsplit"))
OTHERS = [
    "alembic", "click", "dash", "dask", "distributed", "fastapi", "flask", "flask_compress",
    "flask_limiter", "flask_login", "fsspec", "granian", "gunicorn", "isal", "jinja2", "mlflow",
    "msgspec", "numpy", "orjson", "pandas", "plotly", "prometheus_client", "psycopg", "pyarrow",
    "pytz", "rich", "ruptures", "scipy", "six", "sqlalchemy", "stepsplit", "tensorboard",
    "torch", "triton", "typing_extensions", "uvicorn", "waitress", "wandb", "werkzeug",
    "sitecustomize", "usercustomize",
]  # fmt: skip


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that does not exist, to which every module of the current folder writes its name."""
    folder, mark = tmp_path / "recording", tmp_path / "imported"
    shutil.copytree(SAMPLE, folder)
    for name in {*sys.stdlib_module_names, *OTHERS} - {*sys.builtin_module_names}:
        (folder / f"{name}.py").write_text(f"open({str(mark)!r}, 'a').write({name!r} + ' ')\n")
    monkeypatch.chdir(folder)
    # Such a path is the user's; an empty or relative part of it is the current folder as well.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", ".", "recording", str(tmp_path), ""]))
    return mark


def test_a_helper_searches_absolute_parts_of_the_path_only(mark: Path, tmp_path: Path) -> None:
    environment = build_helper_environment({"ADDED": "1"})

    assert environment["PYTHONPATH"] == str(tmp_path)
    assert (environment["PYTHONSAFEPATH"], environment["ADDED"]) == ("1", "1")
    assert "PYTHONSAFEPATH" not in os.environ
    helper = build_helper_command("stepsplit.collectors", "--help")
    assert subprocess.run(helper, env=environment, capture_output=True).returncode == 0
    # Also the Python processes that a library starts in the helper.
    program = "import sys, json, sqlite3, subprocess; print(*sys.path, sep='\\n')"
    other = [sys.executable, "-c", program]
    printed = subprocess.run(other, env=environment, capture_output=True, check=True).stdout
    assert not {"", ".", str(Path.cwd())} & set(printed.decode().splitlines())
    assert not mark.exists()


def test_workers_import_nothing_from_a_recording(
    mark: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "LEAST_BYTES", 0)
    tasks = [Task(str(n), 1, abs, (-n,)) for n in range(4)]
    assert run_all(tasks, 2) == [0, 1, 2, 3]
    assert not mark.exists()


def test_nor_do_the_processes_of_the_dashboard_and_the_watch(
    mark: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []

    class Started(subprocess.Popen[bytes]):
        def __init__(self, command: list[str], env: dict[str, str], **options: object) -> None:
            started.append((command, env))
            super().__init__([*command[:3], "this"], **options)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "Popen", Started)
    store = Store.open(f"sqlite:///{tmp_path / 'store.db'}", tmp_path / "artifacts")
    server = Workers(store, 1)
    server.watch()
    server.stop()
    options = ReducerOptions(folder=str(tmp_path), run="run", host="host", disk_bytes=1)
    reducer = ReducerProcess(options)
    # Its Python ends before it has read what it is sent.
    with suppress(BrokenPipeError), reducer._start():
        pass

    assert [command[1:4] for command, _ in started] == [
        ["-P", "-m", "stepsplit.dashboard"],
        ["-P", "-m", "stepsplit.dashboard.watch_process"],
    ]
    assert all(env["PYTHONSAFEPATH"] == "1" for _, env in started)
    assert not mark.exists()


@pytest.mark.slow
def test_doctor_imports_nothing_from_here(mark: Path) -> None:
    assert read_environment().torch is not None
    assert not mark.exists()


def record_command(command: list[str], out: Path) -> int:
    return record(command, RecordPlan(str(out), "run", first=10), NcclLogs())


def watch_command(command: list[str], out: Path) -> int:
    return run_watched(command, WatchPlan(str(out), "run", every_steps=100))


@pytest.mark.parametrize("run", [record_command, watch_command])
def test_the_command_of_the_user_imports_what_lies_beside_it(
    run: Callable[[list[str], Path], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project := tmp_path / "project").mkdir()
    (project / "model.py").write_text("NAME = 'ours'\n")
    (project / "train.py").write_text(
        "import os, sys, model\n"
        "assert model.NAME == 'ours' and 'PYTHONSAFEPATH' not in os.environ\n"
        "open('ran', 'a').write('x')\n"
    )
    (project / "lib").mkdir()
    (project / "lib" / "relative.py").touch()
    monkeypatch.setenv("PYTHONPATH", "lib")
    out = tmp_path / "out"

    monkeypatch.chdir(project)
    assert run([sys.executable, "train.py"], out) == 0
    assert run([sys.executable, "-m", "train"], out) == 0
    assert run([sys.executable, "-c", "import train, relative"], out) == 0
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ran").touch()
    assert run([sys.executable, "project/train.py"], out) == 0

    assert ((project / "ran").read_text(), (tmp_path / "ran").read_text()) == ("xxx", "x")


@pytest.mark.slow
@pytest.mark.in_turn("collectors", "dashboard/commands", "analyzer/readers")
@pytest.mark.parametrize(
    "arguments",
    [
        ["analyze", "."],
        ["analyze", ".", "--log-to", "json:../points.jsonl", "--html", "../page.html"],
        ["baseline", ".", "--out", "../baseline.json"],
        ["check", ".", "--budget", "exposed_comm=99%"],
        ["compare", ".", "."],
        ["demo", "--no-serve"],
        ["doctor"],
        ["export", ".", "--perfetto", "../all.pftrace.gz"],
        ["hang", "."],
        ["redact", ".", "--out", "../redacted"],
        ["reduce", ".", "--out", "../reduced"],
        ["runs"],
        ["what-if", ".", "--change", "link:dp_replicate=2"],
    ],
    ids=lambda words: words[0],
)
def test_no_command_imports_anything_from_a_recording(
    arguments: list[str], mark: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With traces that are large enough for workers."""
    monkeypatch.delenv("PYTHONPATH")
    if "." in arguments:
        for packed in Path().glob("*_trace.json.gz"):
            text = gzip.decompress(packed.read_bytes())
            packed.with_suffix("").write_bytes(text[:-1] + b" " * (13 << 20) + text[-1:])
            packed.unlink()

    done = subprocess.run([STEPSPLIT, *arguments], capture_output=True, text=True)

    assert not mark.exists(), mark.read_text()
    assert done.returncode in (0, 1, 2, 3) and "internal error" not in done.stderr, done.stderr
