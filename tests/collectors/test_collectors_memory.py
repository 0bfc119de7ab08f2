"""Measuring memory costs neither the trace nor a memory history that the training records."""

import io
import json
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.stderr_lines import warns

torch = pytest.importorskip("torch")

from support.fake_gpu import FakeGpu  # noqa: E402

from stepsplit.collectors import profile_run  # noqa: E402
from stepsplit.collectors.formats.rank_record import MemoryState, read_record  # noqa: E402
from stepsplit.collectors.record.trace_events import measure_activations  # noqa: E402

SNAPSHOT = Path("memory", "rank0_snapshot.pickle")


def record_steps(folder: Path, during: Callable[[], None] = lambda: None) -> MemoryState:
    """Records one of four steps with its memory; `during` runs in that step."""
    weight = torch.nn.Parameter(torch.ones(8))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with profile_run(folder, active=1, profile_memory=True) as run:
        for step in range(4):
            if step == 2:
                during()
            weight.grad = torch.ones(8)
            optimizer.step()
            run.step()
    for thread in threading.enumerate():
        if thread.name == "stepsplit-memory":
            thread.join()
    memory = read_record((folder / "rank0_record.json").read_bytes()).memory
    assert memory is not None
    return memory


def switch_history(*arguments: Any) -> None:
    torch.cuda.memory._record_memory_history(*arguments)


def test_the_history_holds_python_stacks_of_allocations_and_ends_with_the_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeGpu(monkeypatch)
    seen: list[Any] = []

    record_steps(tmp_path, lambda: seen.append(gpu.history))

    # enabled, context, stacks, max_entries, clear_history
    assert [history[:5] for history in seen] == [("all", "alloc", "python", 50_000, False)]
    assert gpu.history is None
    content = pickle.loads((tmp_path / SNAPSHOT).read_bytes())
    assert content["device_traces"] == [[{"action": "alloc", "size": 512}]]
    assert torch._C._cuda_record_memory_history == gpu.record


def test_a_history_that_the_training_records_itself_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeGpu(monkeypatch)
    switch_history("all", "all", "all")
    own = gpu.history

    with warns("lost its memory snapshot: the training records a"):
        memory = record_steps(tmp_path)

    assert gpu.history == own is not None
    # With C++ stacks the snapshot could take minutes.
    assert gpu.snapshots == 0 and not (tmp_path / SNAPSHOT).exists()
    assert memory.peak_allocated_bytes == 50


@pytest.mark.parametrize("enabled", ["state", None])
def test_a_history_that_the_training_switches_meanwhile_is_left_alone(
    enabled: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeGpu(monkeypatch)

    with warns("lost its memory snapshot: the training has begun"):
        record_steps(tmp_path, lambda: switch_history(enabled, "all", "all"))

    assert (gpu.history or (None,))[0] == enabled
    assert gpu.snapshots == 0


@pytest.mark.parametrize("allocator", ["cudaMallocAsync", "pluggable"])
def test_an_allocator_without_a_history_loses_the_snapshot_alone(
    allocator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeGpu(monkeypatch, allocator)

    with warns("lost") as caught:
        memory = record_steps(tmp_path)

    (snapshot,) = {each for each in caught if "snapshot" in each}
    assert snapshot.endswith(
        f"its memory snapshot: {allocator} does not yet support recordHistory."
    )
    assert (tmp_path / "rank0_trace.json.gz").exists()
    assert memory.weights_bytes == 0  # of the device: the parameters of this test are on the CPU
    assert (memory.peak_allocated_bytes is None) == (allocator == "pluggable")


def test_a_snapshot_that_fails_loses_neither_the_trace_nor_the_other_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeGpu(monkeypatch)

    def fail(*_: Any) -> None:
        raise RuntimeError("out of host memory")

    monkeypatch.setattr(torch._C, "_cuda_memorySnapshot", fail)

    with warns("lost its memory snapshot: out of host memory"):
        memory = record_steps(tmp_path)

    assert gpu.history is None
    assert memory.peak_allocated_bytes == 50
    assert (tmp_path / "rank0_trace.json.gz").exists()


# Activations, measured while the trace is packed.


def change(at_us: float, size: int, device: int, index: int = 0) -> dict[str, Any]:
    args = {"Bytes": size, "Device Type": device, "Device Id": index}
    return {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "ts": at_us, "args": args}


def mark(step: int, begin_us: float, end_us: float) -> dict[str, Any]:
    times = {"ts": begin_us, "dur": end_us - begin_us}
    return {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step}", **times}


CPU, CUDA = 0, 1


@pytest.mark.parametrize(
    ("changes", "device", "activations_bytes"),
    [
        # The host's buffers have nothing to do with the GPU's peak.
        ([change(1, 700, CPU), change(2, 100, CUDA), change(3, -100, CUDA)], "device", 100),
        ([change(1, 700, CPU), change(2, 100, CUDA), change(3, -700, CPU)], "cpu", 700),
        ([change(1, 700, CPU)], "device", None),
        # What the step leaves is gradients, and the next step has its own begin.
        ([change(1, 100, CUDA), change(2, 30, CUDA), change(3, -30, CUDA)], "device", 30),
        ([change(9, 10, CUDA), change(11, 20, CUDA), change(12, -20, CUDA)], "device", 20),
        # Not in order of time, and on two GPUs.
        ([change(3, -50, CUDA), change(1, 50, CUDA), change(2, 40, CUDA, 1)], "device", 50),
        ([], "cpu", None),
    ],
)
def test_activations_are_the_peak_of_one_device_above_what_a_step_leaves(
    changes: list[Any], device: str, activations_bytes: int | None
) -> None:
    trace = {"traceEvents": [*changes, mark(1, 0, 10), mark(2, 10, 20)]}

    file = io.BytesIO(json.dumps(trace).encode())
    assert measure_activations(file, device) == activations_bytes


def test_the_record_gets_the_activations_when_the_trace_is_packed(tmp_path: Path) -> None:
    memory = record_steps(tmp_path, lambda: [torch.zeros(1 << 22)].clear())

    # The gradient of the step before is freed without an event of its allocation.
    assert memory.activations_bytes == pytest.approx(4 << 22, abs=64)
    # A test before may have communicated in this process: the Flight Recorder keeps its calls.
    assert {path.name for path in tmp_path.iterdir()} - {"rank0_flight.json.gz"} == {
        "rank0_record.json", "rank0_trace.json.gz", "run.json",
    }  # fmt: skip


class NoEvents:
    """The profiler's results, whose events take seconds to become Python objects."""

    def __init__(self, results: Any) -> None:
        self.results = results

    def __getattr__(self, name: str) -> Any:
        if name == "events":
            raise AssertionError("millions of events are walked on the training thread")
        return getattr(self.results, name)


def test_the_training_does_not_wait_for_the_activations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = torch.profiler.profile.stop_trace

    def stop_without_events(self: Any) -> None:
        stop(self)
        self.profiler.kineto_results = NoEvents(self.profiler.kineto_results)

    monkeypatch.setattr(torch.profiler.profile, "stop_trace", stop_without_events)

    assert record_steps(tmp_path).activations_bytes is not None


class PartitionedOptimizer:
    """Steps another optimizer on a part of the weights, as DeepSpeed's ZeRO 1 and 2 do."""

    def __init__(self, module: Any) -> None:
        self.bit16_groups = [list(module.parameters())]
        self.part = torch.nn.Parameter(torch.ones(8))
        self.inner = torch.optim.SGD([self.part], lr=0.1, momentum=0.9)

    def step(self) -> None:
        self.part.grad = torch.ones(8)
        self.inner.step()


def test_weights_are_the_modules_not_the_partition_that_is_stepped(tmp_path: Path) -> None:
    """16 weights of 4 bytes; the optimizer holds its part of 8 and as much momentum."""
    optimizer = PartitionedOptimizer(torch.nn.Linear(16, 1, bias=False))
    with profile_run(tmp_path, active=1) as run:
        for _ in range(4):
            optimizer.step()
            run.step()
    memory = read_record((tmp_path / "rank0_record.json").read_bytes()).memory
    assert memory is not None
    sizes = (memory.weights_bytes, memory.gradients_bytes, memory.optimizer_bytes)
    assert sizes == (64, 32, 64)
