"""Measurements of a rank: clock, GPU, steps, memory, packing."""

import socket
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from stepsplit.collectors.guard import CollectError  # noqa: E402
from stepsplit.collectors.job.rank_description import read_host_info  # noqa: E402
from stepsplit.collectors.probes.host_clock import ClockServer, probe_clock  # noqa: E402
from stepsplit.collectors.probes.memory import sum_storage_bytes  # noqa: E402
from stepsplit.collectors.probes.step_clock import MAX_KEPT_STEPS, StepClock  # noqa: E402
from stepsplit.collectors.record.command import check_out  # noqa: E402
from stepsplit.collectors.record.packer import Packer, PackTask  # noqa: E402


def test_the_offset_from_the_own_clock_is_within_the_round_trip() -> None:
    with ClockServer("localhost") as server:
        threading.Thread(target=server.serve, args=(1.0,), daemon=True).start()
        address = server.address
        found = probe_clock(address.numeric[0], address.port, address.key)

    assert found is not None
    assert abs(found.offset_ns) <= found.round_trip_ns < 100_000_000


def test_a_probe_without_an_answer_is_none() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        assert probe_clock("127.0.0.1", silent.getsockname()[1], "00" * 16) is None


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


def test_the_raw_file_is_kept_if_no_process_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: Any, **kwargs: Any) -> None:
        raise OSError("Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refused)
    raw, out = tmp_path / "raw", tmp_path / "rank0_flight.json.gz"
    raw.write_text('{"entries": []}')

    packer = Packer()
    packer.pack([PackTask(raw, out)])
    for thread in threading.enumerate():
        if thread.name == "stepsplit-keep":
            thread.join()

    assert packer.wait(0.0)
    # Packing a gigabyte in this process would hold up the training.
    assert [path.name for path in tmp_path.iterdir()] == ["rank0_flight.json"]


@pytest.mark.parametrize("stated", [None, "gloo", "cpu:gloo"])
def test_the_backend_is_the_one_that_runs(stated: str | None, tmp_path: Path) -> None:
    """torch calls it "undefined" if the script names none."""
    from torch import distributed

    from stepsplit.collectors.job.process_groups import read_job

    where = f"file://{tmp_path / 'store'}"
    distributed.init_process_group(stated, init_method=where, rank=0, world_size=1)
    try:
        assert read_job() == (0, 1, "gloo")
    finally:
        distributed.destroy_process_group()


def test_a_used_folder_is_refused_or_replaced(tmp_path: Path) -> None:
    """With what was analyzed of the earlier recording."""
    for name in ("run.json", "rank0_trace.json.gz", "rank1_record.json", "report.json", "notes.md"):
        (tmp_path / name).touch()
    for name in ("nccl", "tables"):
        (tmp_path / name).mkdir()

    with pytest.raises(CollectError, match="has a recording: choose another --out, or replace it"):
        check_out(tmp_path, overwrite=False)
    check_out(tmp_path, overwrite=True)

    assert [path.name for path in tmp_path.iterdir()] == ["notes.md"]
    check_out(tmp_path, overwrite=False)
