"""A training that is sampled for as long as it runs: its memory, its traces, its step times."""

import gc
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from stepsplit.analyzer import analyze  # noqa: E402
from stepsplit.collectors import Mesh, profile_run  # noqa: E402
from stepsplit.collectors.formats.watch_notes import SampleReport  # noqa: E402
from stepsplit.collectors.record import trace_window  # noqa: E402
from stepsplit.collectors.record.plan import RecordPlan  # noqa: E402
from stepsplit.collectors.record.trace_window import (  # noqa: E402
    PreparedProfilers,
    TraceWindow,
    can_detach,
    release_profiler,
)
from stepsplit.collectors.watch.budget import BudgetController, FirstSampleRise  # noqa: E402
from stepsplit.collectors.watch.plan import WatchPlan, parse_every  # noqa: E402
from stepsplit.collectors.watch.samples import choose_pivot, list_cross  # noqa: E402

JOBS = Path(__file__).parents[1] / "collector_jobs"


@pytest.mark.slow
@pytest.mark.parametrize("collection", [[], ["no-gc"]])
def test_two_hundred_recordings_leave_the_memory_as_it_was(
    collection: list[str], tmp_path: Path
) -> None:
    """Without release_profiler, 80 recordings added 36 MiB, and 133 MiB with gc switched off."""
    command = [sys.executable, str(JOBS / "cycles.py"), str(tmp_path), "200", *collection]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    settled_kib, ended_kib = map(int, done.stdout.split())
    assert ended_kib - settled_kib < 1024


def test_a_profiler_that_the_script_has_prepared_is_found_without_a_search() -> None:
    before = vars(torch.autograd.profiler.profile)["_prepare_trace"]
    prepared = PreparedProfilers()
    assert not prepared.is_any_waiting()
    own = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    own.prepare_trace()
    assert prepared.is_any_waiting()
    own.start_trace()
    own.stop_trace()
    assert not prepared.is_any_waiting()
    prepared.close()
    assert vars(torch.autograd.profiler.profile)["_prepare_trace"] is before


def test_a_trace_without_python_events_holds_the_same_events(tmp_path: Path) -> None:
    """Memory is recorded with torch's default, all else without the Python objects of events()."""
    lean, default = (record_two_steps(tmp_path, memory) for memory in (False, True))
    assert lean == Counter({key: n for key, n in default.items() if key[2] != "[memory]"})
    assert sum(lean.values()) > 100


@pytest.mark.parametrize("captures", (False, True))
def test_the_profiler_stays_attached_to_a_process_that_has_captured_a_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, captures: bool
) -> None:
    monkeypatch.setenv("TEARDOWN_CUPTI", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        trace_window, "_list_activities", lambda: [torch.profiler.ProfilerActivity.CPU]
    )
    monkeypatch.setattr(trace_window, "_has_captured", False)
    window = TraceWindow(RecordPlan(str(tmp_path), "graphs", first=1, steps=2), 1, lambda: None)

    for step in range(3):
        window.begin_step(step, step)
        if captures and step == 1:
            with suppress(RuntimeError, AttributeError):  # this torch may have no CUDA
                torch.cuda.CUDAGraph.capture_begin(SimpleNamespace())
        assert os.environ["TEARDOWN_CUPTI"] == "1"  # read again where Kineto attaches itself
        window.end_step(step)
    release_profiler(window.end())

    assert can_detach() is not captures
    assert os.environ["TEARDOWN_CUPTI"] == ("0" if captures else "1")


def record_two_steps(folder: Path, memory: bool) -> Counter[tuple[Any, ...]]:
    """The events of two steps of a training: their kinds, names and arguments, and how many."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    plan = RecordPlan(str(folder), "lean", first=1, steps=2, memory=memory)
    window = TraceWindow(plan, 1, lambda: None)
    for step in range(3):
        window.begin_step(step, step)
        model(torch.ones(8, 16)).pow(2).mean().backward()
        model.zero_grad()
        window.end_step(step)
    profiler = window.end()
    profiler.export_chrome_trace(str(folder / "trace.json"))
    release_profiler(profiler)
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    return Counter(
        (event.get("ph"), event.get("cat"), event["name"], *sorted(event.get("args", {})))
        for event in events
    )


def test_the_samples_of_a_large_job_visit_every_rank_with_its_whole_groups() -> None:
    mesh = Mesh.parse("pp=16,dp=128,tp=8")
    pivots = [choose_pivot(mesh, number) for number in range(128)]
    assert {len(list_cross(mesh, pivot)) for pivot in pivots} == {16 + 128 + 8 - 2}
    visited = {rank for pivot in pivots for rank in mesh.line(pivot, "dp_replicate")}
    assert visited == set(range(mesh.world_size))


@pytest.mark.parametrize(
    ("text", "interval"),
    [("200steps", (200, None)), ("1 step", (1, None)), ("10min", (None, 600)), ("30s", (None, 30))],
)
def test_an_interval_is_in_steps_or_in_time(text: str, interval: tuple[Any, Any]) -> None:
    assert parse_every(text) == interval


@pytest.mark.parametrize("text", ["10", "0steps", "min", "-5s", "10 minutes"])
def test_an_interval_without_a_unit_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="use 200steps, 30s, 10min or 1h"):
        parse_every(text)


def build_report(
    number: int,
    cost_ms: int = 1,
    before_ns: Any = (),
    after_ns: Any = (),
    fault: str = "",
) -> SampleReport:
    """A sample of rank 0 that cost so much."""
    return SampleReport(
        number, 0, 0, 100 * number, 2, 0, None, "", True, fault, bool(fault),
        cost_ms * 1_000_000, tuple(before_ns), tuple(after_ns),
    )  # fmt: skip


def test_a_dear_sample_is_followed_by_a_long_pause() -> None:
    controller = BudgetController(WatchPlan("out", "run", every_steps=200, budget=0.005))
    assert controller.compute_interval(10e6) == 200
    assert controller.add(build_report(1, cost_ms=100), [build_report(1, cost_ms=500)]) == ""
    # The worst rank cost 0.5 s, which is 0.5 % of 100 s: 10,000 steps of 10 ms.
    assert controller.compute_interval(10e6) == 10_000
    assert controller.add(build_report(2, cost_ms=1), []) == ""
    assert controller.compute_interval(10e6) == 200


def test_three_faults_in_a_row_end_the_samples_and_others_do_not() -> None:
    controller = BudgetController(WatchPlan("out", "run", every_steps=200))
    ends = [controller.add(build_report(n, fault="full"), []) for n in (1, 2)]
    ends += [controller.add(build_report(3), [])]
    ends += [controller.add(build_report(n, fault="full"), []) for n in (4, 5, 6)]
    assert ends == ["", "", "", "", "", "3 samples in a row failed: full"]


def watch_steps(steps_ms: Iterable[float], sample_at: int) -> str:
    """What is said of a rise of steps with noise of 2 %, the first sample before one of them."""
    rise, draw, texts = FirstSampleRise(), Random(0), []
    for number, step_ms in enumerate(steps_ms):
        if number in (sample_at, sample_at + 150):
            rise.begin_sample()
        rise.add(round(step_ms * 1e6 * (1 + draw.gauss(0, 0.02))))
        texts.append(rise.describe())
    (text,) = {each for each in texts if each} or {""}
    return text


def test_steps_that_stay_slower_after_the_first_sample_are_found_once() -> None:
    text = watch_steps([10.0] * 100 + [11.5] * 300, 100)

    assert text.startswith("steps take 11.5 ms since the first sample, 9.96 ms before; ")
    assert "TEARDOWN_CUPTI=1" in text


@pytest.mark.parametrize(
    ("steps_ms", "sample_at"),
    [
        ([10.0] * 500, 100),
        # Of 95 steps, half are slow: it is over.
        ([10.0] * 100 + [12.0] * 48 + [10.0] * 300, 100),
        # Later samples attach nothing.
        ([10.0] * 250 + [12.0] * 300, 100),
        # The steps of a start are slower than later ones.
        ([20.0] * 10 + [10.0] * 90 + [10.4] * 300, 100),
        # Too few before to know.
        ([10.0] * 20 + [12.0] * 300, 20),
    ],
)
def test_steps_that_do_not_stay_slower_end_no_samples(
    steps_ms: list[float], sample_at: int
) -> None:
    assert watch_steps(steps_ms, sample_at) == ""


def read_notes(out: Path, kind: str) -> list[dict[str, Any]]:
    """What rank 0 has noted of one kind."""
    lines = (out / "ranks" / "rank0.jsonl").read_text().splitlines()
    return [each for each in map(json.loads, lines) if each["kind"] == kind]


def train_watched(out: Path, steps: int, slower_s: float = 0.0) -> float:
    """A training of one process that profile_run samples; its last loss.

    slower_s: by how much steps are slower once there is a sample.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss = torch.zeros(())
    with profile_run(out, every=200, budget=0.5) if steps > 0 else nullcontext() as run:
        for _ in range(abs(steps)):
            loss = model(torch.ones(32, 64)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.001 + slower_s * (out / "samples").exists())
            if run is not None:
                run.step()
    return float(loss.detach())


@contextmanager
def collection(enabled: bool) -> Iterator[None]:
    """Python's garbage collection in the block."""
    was_enabled = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        yield
    finally:
        (gc.enable if was_enabled else gc.disable)()


STEPS = 4_000


@pytest.mark.slow
@pytest.mark.parametrize("with_gc", [True, False])
def test_a_training_is_sampled_until_its_end_and_its_loss_is_the_same(
    with_gc: bool, tmp_path: Path
) -> None:
    with collection(with_gc):
        assert train_watched(tmp_path, STEPS) == train_watched(tmp_path, -STEPS)
    samples = read_notes(tmp_path, "sample")
    assert len(samples) >= 2
    assert {each["no_data"] for each in samples} <= {"", "the training ended within the sample"}
    for sample in samples[:2]:
        report = analyze(tmp_path / "samples" / sample["folder"])
        assert [step.step for step in report.steps] == [sample["step"], sample["step"] + 1]
        assert all(step.split.step_ns == step.step_ns for step in report.steps)
    assert read_notes(tmp_path, "ended")[0]["step"] == STEPS
    windows = read_notes(tmp_path, "window")
    # Every step is in a window but the first, and of each sample its warmup, steps and export.
    assert sum(each["steps"] for each in windows) == STEPS - 1 - 4 * len(samples)
    assert all(w["min_step_ns"] <= w["median_step_ns"] <= w["max_step_ns"] for w in windows)


@pytest.mark.slow
def test_where_the_profiler_stays_attached_a_lasting_rise_ends_the_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("stepsplit.collectors.watch.background.can_detach", lambda: False)

    train_watched(tmp_path, STEPS, slower_s=0.002)

    # The next one may be announced before the rise has lasted.
    assert len(read_notes(tmp_path, "sample")) <= 2
    end = next(each for each in read_notes(tmp_path, "ended") if each["text"])
    assert end["text"].startswith("steps take ")
    assert f"no more samples: {end['text']}" in capfd.readouterr().err
    assert sum(each["steps"] for each in read_notes(tmp_path, "window")) > STEPS / 2


@pytest.mark.slow
def test_while_the_script_profiles_itself_a_sample_has_no_data_and_steps_are_timed(
    tmp_path: Path,
) -> None:
    own = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(wait=10**6, warmup=1, active=1),
    )
    own.prepare_trace()
    train_watched(tmp_path, STEPS)
    own.start_trace()
    own.stop_trace()
    samples = read_notes(tmp_path, "sample")
    assert samples
    assert {each["no_data"] for each in samples} == {"the script's own torch.profiler is running"}
    assert not any(each["is_fault"] for each in samples)
    assert not (tmp_path / "samples").exists()
    assert sum(each["steps"] for each in read_notes(tmp_path, "window")) > STEPS / 2
