"""Real trainings with the recorder: the files in the folder afterwards."""

import gzip
import inspect
import json
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from support.stderr_lines import warns

from stepsplit.collectors import Mesh, ModelSpec, profile_run
from stepsplit.collectors.demo.arguments import DemoArgs
from stepsplit.collectors.demo.launch import LaunchError, LaunchResult, launch_workload
from stepsplit.collectors.formats.rank_record import HostSamples, read_record
from stepsplit.collectors.formats.run_spec import GroupInfo, RunSpec, from_json

pytestmark = [pytest.mark.slow, pytest.mark.in_turn("collectors")]

SMALL = DemoArgs(steps=12, active=3, micro_batch=4, hidden=64, seq_len=32)


@dataclass(frozen=True)
class Recording:
    """A finished training and its files."""

    result: LaunchResult
    folder: Path

    @property
    def spec(self) -> RunSpec:
        return from_json((self.folder / "run.json").read_bytes())

    def events(self, rank: int) -> list[dict[str, Any]]:
        return list(self._read(f"rank{rank}_trace.json.gz")["traceEvents"])

    def flight(self, rank: int) -> list[dict[str, Any]]:
        return list(self._read(f"rank{rank}_flight.json.gz")["entries"])

    def names(self, rank: int, start: str) -> list[str]:
        """The names with this prefix, in order of time."""
        found = [e for e in self.events(rank) if e.get("name", "").startswith(start)]
        return [e["name"] for e in sorted(found, key=lambda e: float(e["ts"]))]

    def _read(self, name: str) -> Any:
        with gzip.open(self.folder / name) as file:
            return json.load(file)


def record(parallel: str, folder: Path) -> Recording:
    return Recording(launch_workload(parallel, folder, SMALL), folder)


@pytest.fixture(scope="module")
def data_parallel(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return record("dp=2", tmp_path_factory.mktemp("dp2"))


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return record("pp=2", tmp_path_factory.mktemp("pp2"))


def test_every_rank_writes_exactly_its_files(data_parallel: Recording) -> None:
    assert sorted(path.name for path in data_parallel.folder.iterdir()) == [
        "rank0_flight.json.gz",
        "rank0_record.json",
        "rank0_trace.json.gz",
        "rank1_flight.json.gz",
        "rank1_record.json",
        "rank1_trace.json.gz",
        "run.json",
    ]


def test_run_json_describes_the_job(data_parallel: Recording) -> None:
    spec = data_parallel.spec

    assert (spec.name, spec.world_size, spec.backend) == (data_parallel.folder.name, 2, "gloo")
    assert spec.mesh == Mesh.of({"dp_replicate": 2})
    assert [(rank.rank, rank.local_rank, rank.device) for rank in spec.ranks] == [
        (0, 0, "cpu"),
        (1, 1, "cpu"),
    ]
    assert GroupInfo("0", "default_pg", (0, 1)) in spec.groups
    assert spec.version("torch") == torch.__version__
    assert spec.model is not None and spec.model.layers == 2
    assert spec.training is not None and spec.training.global_batch == 32


def test_the_trace_holds_the_last_steps_and_the_flight_record_their_collectives(
    data_parallel: Recording,
) -> None:
    for rank in (0, 1):
        steps = data_parallel.names(rank, "ProfilerStep#")
        assert steps == ["ProfilerStep#9", "ProfilerStep#10", "ProfilerStep#11"]
        assert data_parallel.names(rank, "gloo:all_reduce")
        assert any(e["profiling_name"] == "gloo:all_reduce" for e in data_parallel.flight(rank))


def test_looks_at_the_stack_are_of_the_recorded_steps(tmp_path: Path) -> None:
    """Steps of 0.1 s, of which two are recorded; with Python stacks in the trace there are none."""
    calls: list[tuple[int, int]] = []
    with profile_run(tmp_path, wait=0, warmup=1, active=2) as run:
        for _ in range(4):
            time.sleep(0.1)
            called_ns = time.time_ns()
            run.step()
            calls.append((called_ns, time.time_ns()))
    host = read_record((tmp_path / "rank0_record.json").read_bytes()).host
    assert len(host.at_unix_ns) >= 2  # they are rarer where each costs more
    # A step begins and ends within a call: where that is slow, a look comes before it returns.
    assert calls[0][0] <= host.at_unix_ns[0]
    assert host.at_unix_ns[-1] <= calls[2][1]
    line = times_line(test_looks_at_the_stack_are_of_the_recorded_steps)
    assert line in {(place[0].function, place[0].line) for place in host.places}
    with profile_run(tmp_path, wait=0, warmup=1, active=1, with_stack=True) as run:
        for _ in range(3):
            time.sleep(0.05)
            run.step()
    assert read_record((tmp_path / "rank0_record.json").read_bytes()).host == HostSamples()


def test_run_json_is_there_before_any_thread_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training may leave by os._exit as soon as its steps are recorded."""
    monkeypatch.setattr("stepsplit.collectors.record.run_file.has_other_ranks", lambda: True)
    monkeypatch.setattr("threading.Thread.start", lambda thread: None)
    with profile_run(tmp_path, wait=0, warmup=1, active=2) as run:
        for _ in range(4):
            run.step()
        assert (tmp_path / "run.json").is_file()


def times_line(function: Any) -> tuple[str, int]:
    """The name of this test, and the line in which it first sleeps."""
    lines, first = inspect.getsourcelines(function)
    return function.__name__, first + next(i for i, t in enumerate(lines) if "time.sleep" in t)


def losses(result: LaunchResult) -> tuple[float, float]:
    said = re.fullmatch(r"loss (\S+) -> (\S+) over 12 steps\n", result.output)
    assert said is not None, result.output
    return float(said[1]), float(said[2])


@pytest.mark.parametrize("layout", ["data_parallel", "pipeline"])
def test_the_model_learns(layout: str, request: pytest.FixtureRequest) -> None:
    first, last = losses(request.getfixturevalue(layout).result)

    assert last < first - 0.3


def test_a_pipeline_names_its_microbatches_in_the_order_of_1f1b(pipeline: Recording) -> None:
    stage0 = ["F0", "F1", "B0", "F2", "B1", "F3", "B2", "B3"]
    stage1 = ["F0", "B0", "F1", "B1", "F2", "B2", "F3", "B3"]
    for rank, order in ((0, stage0), (1, stage1)):
        named = [n for n in pipeline.names(rank, "stepsplit::") if "stage=" in n]
        step = [f"stepsplit::{op[0]} stage={rank} mb={op[1]}" for op in order]
        assert named == step * 3


def test_every_message_has_a_send_on_one_rank_and_a_recv_on_the_other(pipeline: Recording) -> None:
    for src, dst in ((0, 1), (1, 0)):
        sent = pipeline.names(src, "stepsplit::send")
        received = pipeline.names(dst, "stepsplit::recv")
        assert [n.split(" ", 1)[1] for n in sent] == [n.split(" ", 1)[1] for n in received]
        assert len(sent) == 3 * SMALL.microbatches
        assert f"src={src} dst={dst} tag=0" in sent[0]
        assert f"bytes={4 * 32 * 64 * 4} dtype=float32" in sent[0]


def test_the_native_range_of_a_message_starts_inside_its_annotation(pipeline: Recording) -> None:
    events = pipeline.events(0)
    posted = sorted(
        (float(e["ts"]), float(e["ts"]) + float(e["dur"]))
        for e in events
        if e.get("name", "").startswith(("stepsplit::send", "stepsplit::recv"))
    )
    native = sorted(float(e["ts"]) for e in events if e.get("name") in ("gloo:send", "gloo:recv"))

    assert len(native) == len(posted) > 0
    assert all(begin <= ts <= end for ts, (begin, end) in zip(native, posted, strict=True))


def test_no_microbatch_contains_the_wait_for_a_message(pipeline: Recording) -> None:
    # A receive that ended inside a forward or backward would make the bubble look like compute.
    for rank in (0, 1):
        spans = [
            (e["name"].split(" ")[0], float(e["ts"]), float(e["ts"]) + float(e["dur"]))
            for e in pipeline.events(rank)
            if e.get("ph") == "X"
        ]
        chunks = [(b, e) for name, b, e in spans if name in ("stepsplit::F", "stepsplit::B")]
        received = [e for name, _, e in spans if name == "gloo:recv"]
        assert not [e for e in received for begin, end in chunks if begin < e < end]


def test_a_failing_training_is_reported_with_its_stderr(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="divisible"):
        launch_workload("dp=1", tmp_path, DemoArgs(steps=2, hidden=60, heads=7))


def steps(run: Any, count: int) -> None:
    for _ in range(count):
        torch.ones(8, 8) @ torch.ones(8, 8)
        run.step()


def test_a_job_without_torch_distributed_is_rank_0_of_1(tmp_path: Path) -> None:
    from stepsplit.collectors import profile_run

    model = ModelSpec(layers=1)
    with profile_run(tmp_path / "alone", mesh={"dp": 1}, model=model, active=2) as run:
        steps(run, 6)

    spec = from_json((tmp_path / "alone" / "run.json").read_bytes())
    assert (spec.world_size, spec.backend, spec.model) == (1, "none", model)
    assert (tmp_path / "alone" / "rank0_trace.json.gz").stat().st_size > 0


def test_an_exception_of_the_training_is_unchanged_and_recorded_steps_are_kept(
    tmp_path: Path,
) -> None:
    from stepsplit.collectors import profile_run

    failure = KeyError("user")
    with pytest.raises(KeyError) as caught, profile_run(tmp_path) as run:
        steps(run, 4)
        raise failure

    assert caught.value is failure
    assert (tmp_path / "rank0_trace.json.gz").exists()
    assert (tmp_path / "run.json").exists()


def test_an_unwritable_folder_loses_the_recording_not_the_training(
    tmp_path: Path,
) -> None:
    from stepsplit.collectors import profile_run

    (tmp_path / "file").touch()
    done = 0
    with warns("lost") as caught, profile_run(tmp_path / "file" / "run") as run:
        steps(run, 8)
        done = 8

    assert done == 8
    assert [line.split(": ")[1] for line in caught] == [
        "lost its trace",
        "lost run.json",
    ]


def test_a_mesh_of_the_wrong_size_is_ignored_with_a_warning(tmp_path: Path) -> None:
    from stepsplit.collectors import profile_run

    with (
        warns("the mesh has 2 ranks but the job has 1"),
        profile_run(tmp_path, mesh={"tp": 2}, active=1) as run,
    ):
        steps(run, 4)

    assert from_json((tmp_path / "run.json").read_bytes()).mesh is None


def test_torch_is_restored_after_the_recording(tmp_path: Path) -> None:
    from torch.distributed import ProcessGroup
    from torch.distributed.pipelining.stage import _PipelineStageBase

    from stepsplit.collectors.record.annotations import annotate_layers

    before = vars(ProcessGroup)["send"], vars(_PipelineStageBase)["forward_one_chunk"]
    with annotate_layers():
        once = vars(ProcessGroup)["send"]
        with annotate_layers():
            assert vars(ProcessGroup)["send"] is once is not before[0]
        assert vars(ProcessGroup)["send"] is once

    assert (vars(ProcessGroup)["send"], vars(_PipelineStageBase)["forward_one_chunk"]) == before


def test_a_run_that_ends_too_early_warns(tmp_path: Path) -> None:
    from stepsplit.collectors import profile_run

    with (
        warns("ended before the first recorded step"),
        profile_run(tmp_path, wait=5) as run,
    ):
        steps(run, 2)

    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_torch_distributed_debug_detail_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stepsplit.collectors import profile_run

    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    with (
        warns("DETAIL adds collectives"),
        profile_run(tmp_path, active=1) as run,
    ):
        steps(run, 3)
