"""stepsplit doctor: machines on which something is missing, and this one."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.doctor_builders import DISK, HEALTHY, TORCH

from stepsplit.dashboard import cli
from stepsplit.dashboard.commands.doctor import check_environment, find_failing
from stepsplit.dashboard.environment import (
    Environment,
    FolderState,
    Requirement,
    TorchState,
    find_module,
    parse_requirements,
    read_environment,
)


def on(machine: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepsplit.dashboard.commands.doctor.read_environment", lambda: machine)
    monkeypatch.setenv("COLUMNS", "200")


def with_requirement(name: str, **changes: str | bool | None) -> Environment:
    """The healthy machine with another state of one package."""
    requirements = HEALTHY.requirements or ()
    changed = (replace(one, **changes) if one.name == name else one for one in requirements)
    return replace(HEALTHY, requirements=tuple(changed))


def with_torch(**changes: object) -> Environment:
    return replace(HEALTHY, torch=replace(TORCH, **changes))


def test_a_machine_on_which_everything_works(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on(HEALTHY, monkeypatch)

    assert cli.run(["doctor", "analyze", "attach", "dashboard", "record"]) == 0

    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "stepsplit 0.2.0   Python 3.11.7   Linux x86_64   16 cores   torch 2.13.0+cu130"
        "   CUDA 13.0   NCCL 2.28.9",
        "works here: analyze, attach, dashboard, record",
        "",
        "package  installed     needed      for",
        "numpy    2.4.6         >=1.26.4",
        "pandas   2.2.0         >=2.2.0",
        "torch    2.13.0+cu130  >=2.4       collect",
        "dash     4.4.1         >=4.3       dashboard",
        "plotly   7.1.0         >=6.0       dashboard",
        "fsspec   2026.9.0      >=2024.2.0  cloud",
        "",
        "checked",
        "packages           complete",
        "extra collect      complete (record, demo)",
        "extra dashboard    complete (dashboard, worker, upload, --html)",
        "extra cloud        complete (URLs; s3:// needs s3fs too, gs:// gcsfs)",
        "profiler           test recording: 13 events on the host, 4 on a GPU",
        "torch.distributed  gloo, nccl (NCCL 2.28.9)",
        "Flight Recorder    of nccl and gloo",
        "GPU                2 x NVIDIA H100, driver 580.65.06, CUDA 13.0, CUPTI 13.0.85",
        "current folder     can be written, 100.0 GiB free",
        "temporary files    can be written, 100.0 GiB free",
        "cache              can be written, 100.0 GiB free",
        "/dev/shm           64.0 GiB",
        "agents             jobs started with stepsplit record",
        "other processes    Python 3.11.7 attaches to agents only (3.14 to any process)",
        "clock              tsc",
    ]


def test_a_fault_is_one_line_with_its_fix_and_fails_only_who_asks_for_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on(with_requirement("plotly", installed=None), monkeypatch)

    assert cli.run(["doctor"]) == 0
    screen = capsys.readouterr().out
    assert "works here: analyze, attach, record   would fail: dashboard\n" in screen
    assert screen[screen.index("PROBLEMS") :].splitlines() == [
        "PROBLEMS AND THEIR FIXES",
        "fails  extra dashboard  no plotly (dashboard, worker, upload, --html);"
        " pip install 'stepsplit[dashboard]'",
    ]
    assert cli.run(["doctor", "record", "attach"]) == 0
    assert cli.run(["doctor", "record", "dashboard"]) == 1


def test_what_was_not_imported_in_time_is_neither_working_nor_broken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a machine of which others left a tenth, torch's first import took more than a minute, and
    was said to have crashed."""
    on(with_torch(is_late=True), monkeypatch)

    assert cli.run(["doctor", "record"]) == 3
    screen = capsys.readouterr().out
    assert "works here: analyze, attach, dashboard   cannot tell: record\n" in screen
    assert screen[screen.index("PROBLEMS") :].splitlines() == [
        "PROBLEMS AND THEIR FIXES",
        "unknown  torch  torch 2.13.0+cu130 was not imported and tested after 60 s; run doctor"
        " again: it is faster after the first time, and where others leave more time",
    ]
    assert cli.run(["doctor"]) == 0


def test_a_probe_that_is_ended_for_its_time_says_nothing_of_what_it_had_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stepsplit.dashboard.environment.PROBE_TIMEOUT_S", 0.001)

    read = read_environment()

    assert read.requirements
    assert [one.error for one in read.requirements if one.error] == []
    assert {one.name for one in read.requirements if one.is_late} >= {"numpy", "pandas", "dash"}
    assert read.torch is None or (read.torch.is_late, read.torch.errors) == (True, ())


@pytest.mark.slow
def test_after_an_import_that_crashes_the_others_are_still_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lazy_loader.py").write_text("import os\nos.abort()\n")
    (tmp_path / "msgspec.py").write_text("raise ImportError('half a wheel')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    needed = read_environment().requirements or ()

    assert {one.name: one.error for one in needed if one.error} == {
        "lazy_loader": "the import crashed",
        "msgspec": "ImportError: half a wheel",
    }


NO_GPU = replace(TORCH, gpus=(), device_events=0)
FULL, LOCKED = FolderState(True, "ext4", 1 << 20), FolderState(False, "ext4", 1 << 40)


@pytest.mark.parametrize(
    ("machine", "name", "outcome", "words", "fails"),
    [
        (with_requirement("numpy", installed="1.26.3"), "packages", "fails",
         "numpy 1.26.3 is older than 1.26.4", "analyze attach dashboard record"),
        (with_requirement("numpy", error="ImportError: x"), "packages", "fails",
         "numpy cannot be imported (ImportError: x)", "analyze attach dashboard record"),
        (with_requirement("pandas", installed=None), "packages", "fails", "no pandas",
         "analyze attach dashboard record"),
        (with_requirement("torch", installed=None), "extra collect", "fails", "not installed",
         "record"),
        (with_requirement("fsspec", installed=None), "extra cloud", "ok", "not installed", ""),
        (with_requirement("fsspec", installed="2023.1.0"), "extra cloud", "warning", "older", ""),
        (replace(HEALTHY, requirements=None), "packages", "warning", "not installed", ""),
        (with_torch(errors=(("import", "OSError: libcudart"),)), "torch", "fails",
         "cannot be imported (OSError: libcudart)", "record"),
        (with_torch(is_late=True), "torch", "unknown", "not imported and tested after 60 s", ""),
        (with_requirement("numpy", is_late=True), "packages", "unknown",
         "not imported after 60 s: numpy", ""),
        (with_torch(host_events=0, errors=(("profiler", "RuntimeError: taken"),)), "profiler",
         "fails", "records nothing (RuntimeError: taken)", "record"),
        (with_torch(errors=(("gloo", "RuntimeError: no address"),)), "torch.distributed",
         "warning", "gloo does not start", ""),
        (with_torch(backends=()), "torch.distributed", "warning", "no backend", ""),
        (with_torch(flight_recorders=()), "Flight Recorder", "warning", "has none", ""),
        (with_torch(device_events=0), "GPU", "fails", "records no kernel", "record"),
        (with_torch(gpus=(), cuda="", version="2.13.0+cpu"), "GPU", "fails",
         "torch cannot use 2 x NVIDIA H100, driver 580.65.06: torch 2.13.0+cpu is built without"
         " CUDA", "record"),
        (with_torch(gpus=(), errors=(("gpu", "RuntimeError: the driver is too old"),)), "GPU",
         "fails", "the driver is too old", "record"),
        (replace(HEALTHY, torch=NO_GPU, smi_gpus=()), "GPU", "ok", "none here", ""),
        (replace(HEALTHY, has_pynvml=False), "GPU state", "warning", "no nvidia-ml-py", ""),
        (replace(HEALTHY, current=LOCKED), "current folder", "fails", "cannot be written",
         "attach dashboard record"),
        (replace(HEALTHY, current=FULL), "current folder", "warning", "only 1 MiB free", ""),
        (replace(HEALTHY, temporary=LOCKED), "temporary files", "fails", "cannot be written",
         "analyze attach dashboard record"),
        (replace(HEALTHY, cache=LOCKED), "cache", "warning", "cannot be written", ""),
        (replace(HEALTHY, cache=None), "cache", "ok", "off", ""),
        (replace(HEALTHY, current=replace(DISK, file_system="lustre"),
                 temporary=replace(DISK, file_system="tmpfs")), "scratch", "warning",
         "lustre is shared", ""),
        (replace(HEALTHY, shared_memory_bytes=64 << 20), "/dev/shm", "warning", "64 MiB", ""),
        (replace(HEALTHY, sockets_error="other users have access"), "agents", "fails",
         "other users have access", "attach"),
        (replace(HEALTHY, remote_debug=True), "other processes", "ok", "any Python 3.14", ""),
        (replace(HEALTHY, remote_debug=False), "other processes", "warning", "is off", ""),
        (replace(HEALTHY, remote_debug=True, ptrace_scope=1), "other processes", "warning",
         "ptrace_scope is 1", ""),
        (replace(HEALTHY, remote_debug=True, ptrace_scope=1, may_trace=True), "other processes",
         "ok", "any Python 3.14", ""),
        (replace(HEALTHY, variables=(("NCCL_DEBUG_FILE", "set"),)), "NCCL_DEBUG_FILE", "warning",
         "not in the recording", ""),
        (replace(HEALTHY, variables=(("TORCH_FR_BUFFER_SIZE", "0"),)), "TORCH_FR_BUFFER_SIZE",
         "warning", "switches the Flight Recorder off", ""),
        (replace(HEALTHY, clock_source="hpet"), "clock", "warning", "hpet", ""),
    ],
)  # fmt: skip
def test_each_fault_is_found(
    machine: Environment, name: str, outcome: str, words: str, fails: str
) -> None:
    checks = check_environment(machine)
    (found,) = (check for check in checks if check.name == name)
    assert (found.outcome, words in found.detail) == (outcome, True), found
    assert bool(found.fix) == (outcome != "ok")
    assert find_failing(checks) == tuple(fails.split())
    others = [check for check in checks if check.outcome != "ok" and check.name != name]
    assert others == []


@pytest.mark.parametrize(
    "machine",
    [
        replace(HEALTHY, variables=(("TORCH_FR_BUFFER_SIZE", "20000"), ("KINETO_CONFIG", "set"))),
        replace(
            HEALTHY,
            current=replace(DISK, file_system="lustre"),
            variables=(("STEPSPLIT_SCRATCH", "set"),),
        ),
        replace(HEALTHY, torch=None, smi_gpus=()),
    ],
)
def test_what_loses_nothing_is_no_problem(machine: Environment) -> None:
    assert [check for check in check_environment(machine) if check.outcome != "ok"] == []


def test_unknown_facts_are_no_fault_and_no_internal_error() -> None:
    nothing = Environment("", "3.11.7", "Linux", 0, (), TorchState(errors=(("import", "?"),)))
    assert find_failing(check_environment(nothing)) == ("record",)


def test_the_needed_versions_are_those_of_the_metadata() -> None:
    lines = [
        "absent-a>=1.26.4",
        "absent-b",
        'absent_c[binary]<4,>=3.1; extra == "postgres"',
        "absent-d>=2; python_version > '3' and extra == 'cloud'",
        'absent-e>=8; extra == "dev"',
    ]
    assert parse_requirements(lines) == (
        Requirement("absent-a", "", "1.26.4", None),
        Requirement("absent-b", "", "", None),
        Requirement("absent_c", "postgres", "3.1", None),
        Requirement("absent-d", "cloud", "2", None),
    )


def test_every_package_that_is_needed_is_looked_for_by_its_modules_name() -> None:
    needed = parse_requirements(metadata.requires("stepsplit") or ())
    installed = [one.name for one in needed if one.installed is not None and one.name != "torch"]
    assert len(installed) > 10
    assert [name for name in installed if find_spec(find_module(name)) is None] == []


@pytest.mark.slow
def test_this_machine_without_a_private_word(tmp_path: Path) -> None:
    home = tmp_path / "alice-secret"
    broken = home / "lib"
    broken.mkdir(parents=True)
    # A package that cannot be imported, with the home folder, the user and the host in its error.
    (broken / "dash.py").write_text(
        "import os, socket\n"
        'raise OSError(f\'{os.environ["HOME"]}/x of {os.environ["USER"]} on'
        " {socket.gethostname()}')\n"
    )
    environment = os.environ | {
        "HOME": str(home),
        "USER": "alice",
        "PYTHONPATH": str(broken),
        "NCCL_DEBUG_FILE": f"{home}/nccl.%p.log",
    }
    command = [sys.executable, "-m", "stepsplit.dashboard", "doctor", "dashboard", "--json", "-"]
    done = subprocess.run(
        command, env=environment, cwd=home, capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stderr) == (1, "")
    found = json.loads(done.stdout)
    outcomes = {check["name"]: check["outcome"] for check in found["checks"]}
    assert outcomes["packages"] == outcomes["profiler"] == outcomes["current folder"] == "ok"
    assert "dashboard" in found["fails"] and "analyze" not in found["fails"]
    (detail,) = (one["detail"] for one in found["checks"] if one["name"] == "extra dashboard")
    assert "OSError: ~/x of USER on HOST" in detail
    private = rf"alice|{re.escape(str(tmp_path))}|\b{re.escape(socket.gethostname())}\b"
    assert re.findall(private, done.stdout) == []
