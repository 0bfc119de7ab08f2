"""The clock of a host relative to rank 0's, measured with datagrams, whatever the launcher."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict

import pytest

torch = pytest.importorskip("torch")

from stepsplit.collectors.probes import host_clock  # noqa: E402
from stepsplit.collectors.probes.host_clock import ClockAddress, ClockServer, HostClock, probe_clock  # noqa: E402

SLURM = {
    "SLURM_NTASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
}
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", *SLURM)

KEY = "00" * 16

Start = Callable[[dict[str, str], str], HostClock]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    """Starts the clock of rank 4 with this environment and rank 0's address."""

    def start_clock(environment: dict[str, str], address: str) -> HostClock:
        for name in NAMES:
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(host_clock, "wait_for_value", lambda *_: address)
        before = threading.enumerate()
        clock = HostClock("run", 4, "b")
        for thread in threading.enumerate():
            if thread.name == "stepsplit-clock" and thread not in before:
                thread.join(10)
        return clock

    return start_clock


@pytest.fixture
def server() -> Iterator[ClockServer]:
    with ClockServer("localhost", "127.0.0.1") as server:
        threading.Thread(target=server.serve, args=(20.0,), daemon=True).start()
        yield server


def publish(server: ClockServer, **other: object) -> str:
    """What rank 0 publishes of its server."""
    return json.dumps(asdict(server.address) | other)


def test_a_slurm_job_of_two_hosts_measures_without_the_variables_of_torchrun(
    start: Start, server: ClockServer
) -> None:
    (probe,) = start(SLURM, publish(server)).list_probes()

    assert abs(probe.offset_ns) <= probe.round_trip_ns


def test_a_slurm_job_of_one_host_does_not(start: Start, server: ClockServer) -> None:
    one_host = SLURM | {"SLURM_STEP_TASKS_PER_NODE": "8", "SLURM_NODEID": "0"}

    assert start(one_host, publish(server)).list_probes() == ()


def test_a_name_that_does_not_resolve_in_this_pod_is_replaced_by_an_address(
    start: Start, server: ClockServer
) -> None:
    (address, *_) = server.address.numeric
    unknown = publish(server, name="trainer-0.invalid")

    assert len(start(SLURM, unknown).list_probes()) == 1
    assert len(start(SLURM | {"MASTER_ADDR": address}, unknown).list_probes()) == 1


def test_a_host_that_gets_no_answer_warns_once(start: Start) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        caught: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(host_clock, "_TIMEOUT_S", 0.05)
            patch.setattr(
                "stepsplit.collectors.guard.warn_lost",
                lambda rank, what: caught.append(json.dumps([rank, what])),
            )
            address = ClockAddress("127.0.0.1", ["127.0.0.1"], port, KEY)
            probes = start(SLURM, json.dumps(asdict(address))).list_probes()

    assert probes == ()
    (text,) = caught
    assert f"its clock's offset from rank 0: no answer to datagrams from 127.0.0.1:{port}" in text


# What others send to the port.


@pytest.fixture
def peer(server: ClockServer) -> Iterator[socket.socket]:
    """Another sender, who knows the address of the server but not its key."""
    (address, *_) = server.address.numeric
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer:
        peer.connect((address, server.address.port))
        peer.settimeout(0.2)
        yield peer


def collect_requests(key: str, n: int = 1) -> list[bytes]:
    """Requests as a rank with this key sends them."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        threading.Thread(
            target=probe_clock, args=("127.0.0.1", silent.getsockname()[1], key), daemon=True
        ).start()
        return [silent.recv(256) for _ in range(n)]


def test_only_a_request_with_the_key_of_the_job_is_answered_and_no_answer_is(
    server: ClockServer, peer: socket.socket
) -> None:
    (request,), (of_others,) = map(collect_requests, (server.address.key, KEY))
    peer.send(request)
    answer = peer.recv(256)
    assert len(answer) <= len(request) and answer[:8] != request[:8]

    changed = bytes([request[0], *request[1:20], request[20] ^ 1, *request[21:]])
    for datagram in (b"", b"x", of_others, changed, request[:-1], request + b"x", answer):
        peer.send(datagram)
        with pytest.raises(TimeoutError):
            peer.recv(256)

    peer.send(request)
    assert len(peer.recv(256)) == len(answer)


def test_a_server_listens_at_the_addresses_that_it_publishes_only(server: ClockServer) -> None:
    assert "0.0.0.0" not in server.address.numeric
    if "127.0.0.1" not in server.address.numeric:
        assert probe_clock("127.0.0.1", server.address.port, server.address.key) is None


def test_a_flood_takes_a_server_a_bounded_number_of_datagrams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_clock, "_BURST", 50)
    monkeypatch.setattr(host_clock, "_PER_S", 0)
    with ClockServer("localhost") as server:
        (request,), (address, *_) = collect_requests(server.address.key), server.address.numeric
        serving = threading.Thread(target=server.serve, args=(0.5,))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer:
            peer.connect((address, server.address.port))
            for _ in range(100):
                peer.send(request)
            serving.start()
            serving.join()
            peer.setblocking(False)
            answers = 0
            with suppress(BlockingIOError):
                while peer.recv(256):
                    answers += 1
    assert answers == 50


def test_an_answer_to_an_earlier_request_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_clock, "_TIMEOUT_S", 0.05)
    with ClockServer("localhost") as server, ExitStack() as stack:
        threading.Thread(target=server.serve, args=(5.0,), daemon=True).start()
        (earlier,), (address, *_) = collect_requests(server.address.key), server.address.numeric
        forger, peer = (
            stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) for _ in range(2)
        )
        peer.settimeout(5)
        peer.sendto(earlier, (address, server.address.port))
        replayed = peer.recv(256)
        forger.bind(("127.0.0.1", 0))
        forger.settimeout(5)

        def replay() -> None:
            with suppress(OSError):
                while True:
                    _, sender = forger.recvfrom(256)
                    forger.sendto(replayed, sender)

        threading.Thread(target=replay, daemon=True).start()
        port = forger.getsockname()[1]
        assert probe_clock("127.0.0.1", port, server.address.key) is None
