"""The GPU of a rank: its clock and throttling, the times of steps on it, and versions."""

import ctypes
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.stderr_lines import warns

torch = pytest.importorskip("torch")

from support.fake_gpu import UUID, FakeGpu  # noqa: E402

from stepsplit.collectors import profile_run  # noqa: E402
from stepsplit.collectors.formats.rank_record import RankRecord, read_record  # noqa: E402
from stepsplit.collectors.formats.run_spec import from_json  # noqa: E402
from stepsplit.collectors.probes import versions  # noqa: E402
from stepsplit.collectors.probes.gpu import GpuReading, find_gpu_uuid, read_gpu  # noqa: E402
from stepsplit.collectors.probes.step_clock import GpuStepClock  # noqa: E402
from stepsplit.collectors.probes.versions import read_versions  # noqa: E402


class Nvml(SimpleNamespace):
    """Imitates nvidia-ml-py on a GPU with two links with replays, without throttle reasons."""

    NVML_CLOCK_SM = 1
    NVML_NVLINK_ERROR_DL_REPLAY = 0

    def __init__(self, known: str = f"GPU-{UUID}") -> None:
        self.known, self.threads = known, set[str]()
        super().__init__(
            nvmlInit=lambda: self.threads.add(threading.current_thread().name),
            nvmlDeviceGetHandleByUUID=self.find,
            nvmlDeviceGetDeviceHandleFromMigDeviceHandle=lambda part: f"whole of {part}",
            nvmlDeviceGetClockInfo=lambda handle, kind: 1980,
            nvmlDeviceGetCurrentClocksThrottleReasons=self.unknown,
            nvmlDeviceGetNvLinkErrorCounter=lambda handle, link, kind: {0: 3, 1: 4}[link],
        )

    def find(self, uuid: str) -> str:
        if uuid != self.known:
            raise RuntimeError("Not Found")
        return uuid

    def unknown(self, handle: str) -> int:
        raise RuntimeError("not supported")


def read(nvml: Any, hip: str | None = None) -> GpuReading:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "pynvml", nvml)
        patch.setattr(torch.version, "hip", hip)
        return read_gpu(UUID)


def test_unsupported_readings_are_none_and_link_errors_are_summed() -> None:
    reading = read(Nvml())

    assert reading.state is not None and reading.note == ""
    state = reading.state
    assert (state.sm_clock_mhz, state.throttle_reasons, state.link_errors) == (1980, None, 7)


def test_a_mig_instance_has_the_readings_of_the_whole_gpu() -> None:
    reading = read(Nvml(known=f"MIG-{UUID}"))

    assert reading.state is not None and reading.state.sm_clock_mhz == 1980
    assert reading.note.startswith("a MIG instance: ")


@pytest.mark.parametrize(
    ("nvml", "hip", "why"),
    [
        (Nvml(), "6.4", "NVML does not read AMD GPUs"),
        (None, None, "pynvml (nvidia-ml-py) is not installed"),
        (Nvml(known="another"), None, f"NVML cannot read GPU {UUID}: Not Found"),
    ],
)
def test_a_missing_reading_has_a_reason(nvml: Any, hip: str | None, why: str) -> None:
    assert read(nvml, hip) == GpuReading(None, why)


def test_without_a_gpu_there_is_nothing_to_read() -> None:
    assert find_gpu_uuid() is None


def record_steps(folder: Path, gpu: FakeGpu, lag_ms: float) -> RankRecord:
    """Records steps 10 and 11 of 40; under the profiler a step takes 12 ms on the GPU, else 10.

    The GPU is lag_ms behind the host, which queues all of it at once.
    """
    with profile_run(folder, wait=9, active=2) as run:
        for step in range(40):
            gpu.queued_ms += 12 if step in (10, 11) else 10
            gpu.done_ms = gpu.queued_ms - lag_ms
            run.step()
        gpu.done_ms = gpu.queued_ms
    for thread in threading.enumerate():
        if thread.name == "stepsplit-gpu":
            thread.join()
    return read_record((folder / "rank0_record.json").read_bytes())


@pytest.mark.parametrize("lag_ms", [0.0, 35.0], ids=["together", "three steps ahead"])
def test_steps_are_timed_on_the_gpu_however_far_the_host_is_ahead(
    lag_ms: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeGpu(monkeypatch)
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())

    times = record_steps(tmp_path, gpu, lag_ms).steps

    assert times.gpu_before_ns == (10_000_000,) * 8
    assert times.gpu_profiled_ns == (12_000_000,) * 2
    assert set(times.gpu_after_ns) == {10_000_000}
    # The host did nothing: its times say nothing of the GPU.
    assert max(times.before_ns) < 10_000_000
    # Events are used again.
    assert gpu.events < 8


def test_readings_are_taken_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)

    record = record_steps(tmp_path, FakeGpu(monkeypatch), 0.0)

    assert nvml.threads == {"stepsplit-gpu"}
    assert [state.sm_clock_mhz for state in record.gpu] == [1980, 1980]


def test_the_reason_for_a_missing_reading_is_in_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)

    record = record_steps(tmp_path, FakeGpu(monkeypatch), 0.0)

    assert (record.gpu, record.gpu_note) == ((), "pynvml (nvidia-ml-py) is not installed")


def test_a_capture_is_not_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, clock = FakeGpu(monkeypatch), GpuStepClock()
    for captured in (False, False, True, False, False):
        gpu.capturing = captured
        gpu.queued_ms = gpu.done_ms = gpu.queued_ms + 10
        clock.step("before")
        # The two intervals next to the capture are not of one step.
    gpu.capturing = True
    assert clock.collect("before") == (10_000_000,) * 2


def test_a_gpu_that_never_ends_a_step_costs_a_bounded_number_of_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu, clock = FakeGpu(monkeypatch), GpuStepClock()
    gpu.done_ms = -1.0
    for _ in range(1000):
        gpu.queued_ms += 10
        clock.step("before")

    assert len(clock._pending) <= 64
    assert clock.collect("before") == ()


def test_a_failing_event_loses_the_times_on_the_gpu_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(enable_timing: bool) -> None:
        raise RuntimeError("CUDA error: out of memory")

    gpu = FakeGpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "Event", fail)

    with warns("lost") as caught:
        record = record_steps(tmp_path, gpu, 0.0)

    assert [each for each in caught if "its steps" in each] == [
        "rank 0: lost the times of its steps on the GPU: CUDA error: out of memory"
    ]
    assert record.steps.gpu_before_ns == () and len(record.steps.before_ns) == 8


class Cupti:
    """Imitates the loaded library of CUPTI."""

    def cuptiGetVersion(self, number: Any) -> int:
        number._obj.value = 26
        return 0


def test_versions_of_cuda_hip_nccl_cupti_and_the_driver_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maps = tmp_path / "maps"
    maps.write_text("7f0-7f1 r-xp 0 00:00 1 /usr/lib/libcupti.so.12\n")
    monkeypatch.setattr(versions, "_MAPS", maps)
    monkeypatch.setattr(versions, "_CUPTI_PACKAGES", ())
    monkeypatch.setattr(versions, "read_driver_version", lambda: "580.95.05")
    monkeypatch.setattr(ctypes, "CDLL", lambda path: Cupti())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    try:
        read_versions.cache_clear()
        on_cuda = dict(read_versions())
        monkeypatch.setattr(torch.version, "cuda", None)
        monkeypatch.setattr(torch.version, "hip", "6.4.1")
        read_versions.cache_clear()
        on_rocm = dict(read_versions())
    finally:
        read_versions.cache_clear()

    assert {k: v for k, v in on_cuda.items() if k not in ("python", "torch")} == {
        "cuda": "12.8",
        "nccl": "2.27.5",
        "cupti": "API 26",
        "driver": "580.95.05",
    }
    assert "cuda" not in on_rocm and on_rocm["hip"] == "6.4.1"


def test_the_queues_to_the_gpu_are_in_the_record_and_in_run_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text, number in (("1", 1), ("many", None)):
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", text)
        with profile_run(tmp_path, wait=0, warmup=0, active=1) as run:
            torch.ones(2) + 1
            run.step()
        record = read_record((tmp_path / "rank0_record.json").read_bytes())
        spec = from_json((tmp_path / "run.json").read_bytes())
        assert record.max_connections == spec.max_connections == number
