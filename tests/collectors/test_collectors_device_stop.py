"""Kineto stops to record the GPU when its buffers are full: the recording ends with that step."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.stderr_lines import warns

torch = pytest.importorskip("torch")

from support.fake_gpu import FakeGpu  # noqa: E402
from torch.profiler import ProfilerActivity  # noqa: E402

from stepsplit.collectors import profile_run  # noqa: E402
from stepsplit.collectors.formats.rank_record import RankRecord, read_record  # noqa: E402
from stepsplit.collectors.record import trace_window  # noqa: E402
from stepsplit.collectors.record.environment import SITE  # noqa: E402


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU is to be recorded. This build of torch cannot, so the profiler gets the CPU alone."""
    FakeGpu(monkeypatch)
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    monkeypatch.setattr(trace_window, "_list_activities", lambda: activities)
    monkeypatch.setattr(torch.profiler, "profile", CpuProfile)


class CpuProfile(torch.profiler.profile):  # type: ignore[misc]
    """A profiler that records the CPU alone."""

    def __init__(self, activities: list[ProfilerActivity], **options: Any) -> None:
        super().__init__(activities=activities[:1], **options)


def record_until(stopped_step: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> RankRecord:
    """Records steps 2 to 4 of 30; Kineto's flag is set in the given step."""
    now = 0
    monkeypatch.setattr(
        torch.autograd, "_is_kineto_stopped", lambda: now >= stopped_step, raising=False
    )
    with profile_run(folder, active=3) as run:
        for step in range(30):
            now = step
            torch.ones(8, 8) @ torch.ones(8, 8)
            run.step()
    return read_record((folder / "rank0_record.json").read_bytes())


def list_steps(folder: Path) -> list[str]:
    with gzip.open(folder / "rank0_trace.json.gz") as file:
        names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
    return sorted(name for name in names if name.startswith("ProfilerStep#"))


def test_the_recording_ends_with_the_step_that_lost_kernels_and_is_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with warns("lost its GPU data from step 3 on: Kineto's GPU buf"):
        record = record_until(3, tmp_path, monkeypatch)

    assert record.device_stopped_step == 3
    assert list_steps(tmp_path) == ["ProfilerStep#2", "ProfilerStep#3"]
    assert len(record.steps.profiled_ns) == 2 and len(record.steps.after_ns) == 20


def test_a_stop_in_the_warmup_leaves_a_marked_record_and_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with warns("lost its GPU data from step 1 on"):
        record = record_until(1, tmp_path, monkeypatch)

    assert (record.device_stopped_step, record.detail) == (1, "none")
    assert record.steps.profiled_ns == ()
    assert not list(tmp_path.glob("rank0_trace*"))


def test_a_stop_while_the_last_records_arrive_marks_the_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0

    def is_stopped() -> bool:
        nonlocal asked
        asked += 1
        return asked > 4  # after steps 1 to 4, then once more

    monkeypatch.setattr(torch.autograd, "_is_kineto_stopped", is_stopped)
    with (
        warns("from step 4 on"),
        profile_run(tmp_path, active=3) as run,
    ):
        for _ in range(6):
            run.step()

    assert read_record((tmp_path / "rank0_record.json").read_bytes()).device_stopped_step == 4


def test_an_old_torch_without_the_flag_and_a_flag_of_another_profiler_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch.autograd, "_is_kineto_stopped")
    with profile_run(tmp_path / "old", active=1) as run:
        for _ in range(4):
            run.step()
    monkeypatch.setattr(trace_window, "_list_activities", lambda: [ProfilerActivity.CPU])

    record = record_until(0, tmp_path / "cpu", monkeypatch)

    assert record.device_stopped_step is None
    assert list_steps(tmp_path / "old") == ["ProfilerStep#2"]


def test_kineto_gets_larger_buffers_unless_the_user_has_configured_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    for name, given in (("none", None), ("own", "/etc/mine.conf")):
        monkeypatch.setenv("KINETO_CONFIG", given or "")
        if given is None:
            monkeypatch.delenv("KINETO_CONFIG")

        with profile_run(tmp_path / name, active=1) as run:
            for _ in range(4):
                run.step()

        assert os.environ["KINETO_CONFIG"] == (given or str(SITE / "kineto.conf"))


SEES_CONFIG = """
import torch
with torch.profiler.profile():
    torch.ones(2)
"""


@pytest.mark.slow
def test_this_torch_reads_the_size_of_the_buffers_from_the_file() -> None:
    seen = subprocess.run(
        [sys.executable, "-c", SEES_CONFIG],
        env=os.environ | {"KINETO_CONFIG": str(SITE / "kineto.conf"), "KINETO_LOG_LEVEL": "0"},
        capture_output=True,
        text=True,
        check=True,
    )

    assert "Max GPU buffer size: 1024MB" in seen.stdout + seen.stderr
