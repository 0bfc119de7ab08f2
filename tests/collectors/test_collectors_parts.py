"""Measurements of a rank: clock, GPU, steps, memory, packing."""

import gzip
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from stepsplit.collectors.job_info import (  # noqa: E402
    probe_clock,
    read_gpu_state,
    read_host_info,
    serve_clock,
)
from stepsplit.collectors.memory import compute_activations_bytes, sum_storage_bytes  # noqa: E402
from stepsplit.collectors.rank_files import Packer, PackTask  # noqa: E402
from stepsplit.collectors.rank_record import MAX_KEPT_STEPS, StepClock  # noqa: E402


def test_the_offset_from_the_own_clock_is_within_the_round_trip() -> None:
    found = probe_clock("127.0.0.1", serve_clock())

    assert found is not None
    assert abs(found.offset_ns) <= found.round_trip_ns < 100_000_000


def test_a_probe_without_an_answer_is_none() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        assert probe_clock("127.0.0.1", silent.getsockname()[1]) is None


def test_without_a_gpu_the_state_is_none() -> None:
    assert read_gpu_state() is None


class Nvml(SimpleNamespace):
    """Imitates nvidia-ml-py on a GPU with two links with replays, without throttle reasons."""

    NVML_CLOCK_SM = 1
    NVML_NVLINK_ERROR_DL_REPLAY = 0

    def __init__(self) -> None:
        super().__init__(
            nvmlInit=lambda: None,
            nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
            nvmlDeviceGetClockInfo=lambda handle, kind: 1980,
            nvmlDeviceGetCurrentClocksThrottleReasons=self.unknown,
            nvmlDeviceGetNvLinkErrorCounter=self.replays,
        )

    def unknown(self, handle: str) -> int:
        raise RuntimeError("not supported")

    def replays(self, handle: str, link: int, kind: int) -> int:
        return {0: 3, 1: 4}[link]


def test_unsupported_gpu_readings_are_none_and_link_errors_are_summed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="7")
    )

    state = read_gpu_state()

    assert state is not None
    assert (state.sm_clock_mhz, state.throttle_reasons, state.link_errors) == (1980, None, 7)


def test_the_host_has_a_name_cores_and_memory() -> None:
    here = read_host_info()

    assert (here.host, here.gpus) == (socket.gethostname(), 0)
    assert here.cores > 0 and here.memory_bytes > 1 << 30 and here.cpu


def test_step_times_are_separated_by_profiler_state() -> None:
    clock = StepClock()
    for kind in ("", "before", "before", "", "profiled", "", "after"):
        clock.step(kind)

    times = clock.collect_times()
    kinds = (times.before_ns, times.profiled_ns, times.after_ns)
    assert [len(kind) for kind in kinds] == [2, 1, 1]
    assert all(step > 0 for kind in kinds for step in kind)
    for _ in range(MAX_KEPT_STEPS):
        clock.step("after")
    assert clock.full and len(clock.collect_times().after_ns) == MAX_KEPT_STEPS


def test_a_storage_shared_by_tensors_counts_once() -> None:
    whole = torch.zeros(100)

    assert sum_storage_bytes([whole, whole[:10], whole.view(10, 10), torch.zeros(5), None]) == 420


def profiled(step: Callable[[], Any], memory: bool) -> Any:
    """A profiler that has recorded a step."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with (
        torch.profiler.profile(activities=activities, profile_memory=memory) as profiler,
        torch.profiler.record_function("ProfilerStep#0"),
    ):
        step()
    return profiler


def test_activations_are_the_peak_above_the_memory_left_by_the_step() -> None:
    kept: list[Any] = []

    def step() -> None:
        kept.append(torch.zeros(1 << 20))
        torch.zeros(1 << 22)

    assert compute_activations_bytes(profiled(step, memory=True)) == 4 << 22


def test_without_memory_events_activations_are_none() -> None:
    assert compute_activations_bytes(profiled(lambda: torch.zeros(8), memory=False)) is None


def test_the_rank_packs_itself_if_no_process_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: Any, **kwargs: Any) -> None:
        raise OSError("Resource temporarily unavailable")

    nice: list[int] = []
    monkeypatch.setattr(subprocess, "Popen", refused)
    monkeypatch.setattr("os.nice", nice.append)
    raw, out = tmp_path / "raw", tmp_path / "rank0_flight.json.gz"
    raw.write_text('{"entries": []}')

    packer = Packer()
    packer.pack([PackTask(raw, out)])

    assert packer.wait(0.0)
    assert gzip.decompress(out.read_bytes()) == b'{"entries": []}'
    # The training continues in this process: it keeps its priority and its Ctrl-C handler.
    assert nice == []
