"""The trace of the script's own torch.profiler as the recording (--share), in this process."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from support.stderr_lines import warns

torch = pytest.importorskip("torch")

from stepsplit.collectors.record.active_recording import ActiveRecording  # noqa: E402
from stepsplit.collectors.record.plan import RecordPlan, parse_plan  # noqa: E402
from stepsplit.collectors.record.user_spec import UserSpec  # noqa: E402


def train(recording: ActiveRecording, own: Any, steps: int) -> None:
    """Steps as an agent counts them: the optimizer's end, then the script's own profiler."""
    weight = torch.ones(4, 4)
    for step in range(steps):
        weight @ weight
        recording.end_step(step)
        own.step()


def read_marks(path: Path) -> list[str]:
    content = path.read_bytes()
    events = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)[
        "traceEvents"
    ]
    marks = {each["name"] for each in events if each["name"].startswith("ProfilerStep#")}
    return sorted(marks)


def test_the_own_trace_is_recorded_and_can_be_exported_again(tmp_path: Path) -> None:
    exported = tmp_path / "own.json"
    own = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=1),
    )
    plan = RecordPlan(str(tmp_path / "run"), "run", first=3, steps=5, share=True)
    with warns("own torch.profiler") as lines:
        recording = ActiveRecording(plan, UserSpec())
        recording.begin(0)
        with own:
            train(recording, own, 6)
        recording.close()

    said = "rank 0: steps 2 to 3 are those of the script's own torch.profiler (--share)"
    assert lines == [said]
    recorded = read_marks(tmp_path / "run" / "rank0_trace.json.gz")
    for _ in range(2):
        own.export_chrome_trace(str(exported))
        assert read_marks(exported) == recorded == ["ProfilerStep#2", "ProfilerStep#3"]
    assert json.loads(exported.read_text())["traceName"] == str(exported)
    assert "__exit__" in vars(torch.autograd.profiler.profile)


def test_an_own_profiler_that_has_not_ended_leaves_no_trace(tmp_path: Path) -> None:
    own = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    plan = RecordPlan(str(tmp_path / "run"), "run", first=2, steps=5, share=True)
    with warns("lost its trace") as lines, own:
        recording = ActiveRecording(plan, UserSpec())
        recording.begin(0)
        train(recording, own, 4)
        recording.close()

    assert lines == ["rank 0: lost its trace: the script's own torch.profiler had not ended"]
    own.export_chrome_trace(str(tmp_path / "own.json"))
    assert (tmp_path / "own.json").stat().st_size > 1000


def test_a_plan_without_share_waits_as_plans_of_older_versions_do() -> None:
    assert parse_plan('{"out": "runs/a", "name": "a", "first": 2}').share is False
