"""The clock of a host relative to rank 0's, measured with datagrams, whatever the launcher."""

import json
import socket
import threading
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from stepsplit.collectors import job_info  # noqa: E402
from stepsplit.collectors.job_info import HostClock, serve_clock  # noqa: E402

SLURM = {
    "SLURM_NTASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
}
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", *SLURM)

Start = Callable[[dict[str, str], str], HostClock]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    """Starts the clock of rank 4 with this environment and rank 0's address."""

    def start_clock(environment: dict[str, str], address: str) -> HostClock:
        for name in NAMES:
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(job_info, "wait_for_value", lambda *_: address)
        before = threading.enumerate()
        clock = HostClock("run", 4, "b")
        for thread in threading.enumerate():
            if thread.name == "stepsplit-clock" and thread not in before:
                thread.join(10)
        return clock

    return start_clock


PORT = serve_clock()


def test_a_slurm_job_of_two_hosts_measures_without_the_variables_of_torchrun(start: Start) -> None:
    (probe,) = start(SLURM, f"127.0.0.1:{PORT}").list_probes()

    assert abs(probe.offset_ns) <= probe.round_trip_ns


def test_a_slurm_job_of_one_host_does_not(start: Start) -> None:
    one_host = SLURM | {"SLURM_STEP_TASKS_PER_NODE": "8", "SLURM_NODEID": "0"}

    assert start(one_host, f"127.0.0.1:{PORT}").list_probes() == ()


def test_a_name_that_does_not_resolve_in_this_pod_is_replaced_by_the_masters_address(
    start: Start,
) -> None:
    pod = SLURM | {"MASTER_ADDR": "127.0.0.1"}

    assert len(start(pod, f"trainer-0.invalid:{PORT}").list_probes()) == 1


def test_a_host_that_gets_no_answer_warns_once(start: Start) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        caught: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(job_info, "_TIMEOUT_S", 0.05)
            patch.setattr(
                "stepsplit.collectors.guard.warn_lost",
                lambda rank, what: caught.append(json.dumps([rank, what])),
            )
            probes = start(SLURM, f"127.0.0.1:{port}").list_probes()

    assert probes == ()
    (text,) = caught
    assert f"its clock's offset from rank 0: no answer to datagrams from 127.0.0.1:{port}" in text
