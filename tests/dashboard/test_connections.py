"""Slow clients hold no thread: a request is answered once it has arrived, late ones are dropped."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from dashboard_processes import open_store, running_dashboard
from store_builders import state

from stepsplit.dashboard.upload import Connection, FileToSend, Sender

_SERVER = """
import json, socket, sys
from gunicorn.app.base import BaseApplication
from stepsplit.dashboard.web import server

for name, value in json.loads(sys.argv[1]).items():
    assert hasattr(server, name)
    setattr(server, name, value)

def answer(environ, start_response):
    path, body = environ["PATH_INFO"], b"page"
    if path == "/length":
        try:
            body = b"%d" % len(environ["wsgi.input"].read())
        except ConnectionResetError:
            print("too slow", flush=True)
            raise
    if path == "/large":
        body = bytes(64 << 20)
    if path == "/page":
        body = bytes(7 << 20)
    start_response("200 OK", [("Content-Length", str(len(body)))])
    return [body]

def print_port(arbiter):
    # Connections inherit it; else the kernel takes 4 MiB or more of each answer.
    arbiter.LISTENERS[0].sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)
    print(arbiter.LISTENERS[0].sock.getsockname()[1], flush=True)

class Worker(server.PatientWorker):
    def _stop_sending(self, conn):
        super()._stop_sending(conn)
        print("dropped", flush=True)

class Server(BaseApplication):
    def load_config(self):
        self.cfg.set("bind", "127.0.0.1:0")
        self.cfg.set("worker_class", Worker)
        self.cfg.set("threads", 2)
        self.cfg.set("worker_connections", 2 * server.MOST_WAITING)
        self.cfg.set("graceful_timeout", 20)
        self.cfg.set("control_socket_disable", True)
        self.cfg.set("loglevel", "critical")
        self.cfg.set("when_ready", print_port)

    def load(self):
        return answer

Server().run()
"""
"""Two threads for pages, and the constants of the module that the test sets."""

NEVER = {"HEAD_S": 600.0, "GRACE_S": 600.0, "STALL_S": 600.0, "_LINGER_S": 60.0}
WAIT_S = 30.0
"""Much longer than any answer takes, and much shorter than NEVER."""


@dataclass(frozen=True)
class Server:
    """A server of two threads, and its first lines of output after the port."""

    process: subprocess.Popen[str]
    port: int

    def connect(self) -> socket.socket:
        """A client that has sent nothing yet."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_S)

    def connect_slowly(self) -> socket.socket:
        """A client whose kernel keeps little of what it has not read."""
        link = socket.socket()
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        link.settimeout(WAIT_S)
        link.connect(("127.0.0.1", self.port))
        return link

    def ask(self, *pieces: bytes) -> bytes:
        """The whole answer to a request that arrives in pieces."""
        with self.connect() as link:
            for piece in pieces:
                link.sendall(piece)
            return read_all(link)


@contextmanager
def running(constants: dict[str, float]) -> Iterator[Server]:
    """A server until the end of the block."""
    command = [sys.executable, "-c", _SERVER, json.dumps(constants)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield Server(process, int(process.stdout.readline()))
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def patient() -> Iterator[Server]:
    """A server that waits for ever."""
    with running(NEVER) as server:
        yield server


@pytest.fixture(scope="module")
def strict() -> Iterator[Server]:
    """A server that waits for a fraction of a second for a request."""
    with running(NEVER | {"HEAD_S": 0.2, "GRACE_S": 0.2}) as server:
        yield server


@pytest.fixture(scope="module")
def paced() -> Iterator[Server]:
    """A server that soon expects the minimum rate."""
    with running(NEVER | {"GRACE_S": 0.2}) as server:
        yield server


def write_head(first: str, *fields: str) -> bytes:
    """The head of a request."""
    return "\r\n".join([f"{first} HTTP/1.1", "Host: localhost", *fields, "", ""]).encode()


CLOSE = "Connection: close"
SLOW = {
    "unfinished head": b"GET / HTTP/1.1\r\nHost: localhost\r\nX-A: ",
    "unfinished body": write_head("POST /length", "Content-Length: 60000") + b"x",
    "unfinished upload": write_head("PUT /length", "Content-Length: 999999") + b"x",
    "chunks": write_head("PUT /length", "Transfer-Encoding: chunked") + b"5\r\nx",
    "unread upload": write_head("POST /", "Content-Length: 999999") + b"x",
    "nothing": b"",
}


@pytest.mark.parametrize("kind", SLOW)
def test_pages_are_answered_while_clients_send_slowly(kind: str, patient: Server) -> None:
    with ExitStack() as stack:
        slow = [stack.enter_context(patient.connect()) for _ in range(100)]
        for link in slow:
            link.sendall(SLOW[kind])

        answers = [patient.ask(_get("/")) for _ in range(5)]

        for link in slow:
            link.setblocking(False)
        waits = [_is_waiting(link) for link in slow]
    assert [_split(answer) for answer in answers] == [(b"200 OK", b"page")] * 5
    # An answer without the body is the only one that need not wait for it.
    assert all(waits) or kind == "unread upload"


def test_a_request_in_pieces_is_answered_as_a_whole_one(patient: Server) -> None:
    request = _post("/length", b"x" * 1_000)
    pieces = [request[i : i + 1] for i in range(60)] + [request[60:200], request[200:]]

    assert _split(patient.ask(*pieces)) == _split(patient.ask(request)) == (b"200 OK", b"1000")


@pytest.mark.parametrize("size", [0, 65_536, 65_537, 20_000_000])
def test_bodies_of_all_sizes_arrive(size: int, patient: Server) -> None:
    body = bytes(size)
    chunked = write_head("PUT /length", "Transfer-Encoding: chunked", CLOSE)
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (size, body) if size else b"0\r\n\r\n"

    answers = [patient.ask(_post("/length", body)), patient.ask(chunked, chunks)]

    assert [_split(answer) for answer in answers] == [(b"200 OK", b"%d" % size)] * 2


def test_a_connection_takes_several_requests_even_at_once(patient: Server) -> None:
    first = write_head("GET /one")
    upload = write_head("PUT /length", "Content-Length: 70000") + bytes(70_000)

    answer = patient.ask(first + upload + first + _post("/length", b"1234"))

    bodies = [part.partition(b"\r\n\r\n")[2] for part in answer.split(b"HTTP/1.1 200 OK")[1:]]
    assert bodies == [b"page", b"70000", b"page", b"4"]


def test_a_client_that_expects_to_be_asked_is_asked_for_its_body(patient: Server) -> None:
    fields = "Expect: 100-continue", "Content-Length: 3", CLOSE
    head = write_head("PUT /length", *fields)
    with patient.connect() as link:
        link.sendall(head)
        asked = link.recv(100)
        link.sendall(b"abc")
        answer = read_all(link)

    assert asked.startswith(b"HTTP/1.1 100 Continue")
    assert _split(answer) == (b"200 OK", b"3")


def test_a_head_without_end_is_refused(patient: Server) -> None:
    heads = [b"GET / HTTP/1.1\r\nA: " + b"x" * 40_000, b"GET / HTTP/1.1\r\n" + b"A: x\r\n" * 8_000]

    answers = [patient.ask(head) for head in heads]

    assert [_split(answer)[0] for answer in answers] == [b"431 Request Header Fields Too Large"] * 2


def test_a_late_request_is_refused(strict: Server) -> None:
    with ExitStack() as stack:
        late = [stack.enter_context(strict.connect()) for _ in range(3)]
        for link, kind in zip(late, ("unfinished head", "unfinished body", "nothing"), strict=True):
            link.sendall(SLOW[kind])

        assert [_split(read_all(link)) for link in late] == [(b"408 Request Timeout", b"")] * 3


def test_an_upload_below_the_minimum_rate_is_ended(paced: Server) -> None:
    """It sends a byte now and then, so that it is never silent for long."""
    assert paced.process.stdout is not None
    with paced.connect() as link:
        link.sendall(SLOW["unfinished upload"])
        link.settimeout(0.05)
        while True:
            try:
                answer = link.recv(100)
                break
            except TimeoutError:
                link.sendall(b"x")
            except ConnectionError:
                answer = b""
                break

    assert paced.process.stdout.readline() == "too slow\n"
    assert b"200" not in answer


def test_an_upload_at_a_higher_rate_is_not(paced: Server) -> None:
    body = bytes(1_000_000)
    request = _post("/length", body)
    pieces = [request[i : i + 20_000] for i in range(0, len(request), 20_000)]

    assert _split(paced.ask(*pieces)) == (b"200 OK", b"1000000")


def test_pages_are_answered_while_clients_take_theirs_slowly(patient: Server) -> None:
    with ExitStack() as stack:
        slow = [stack.enter_context(patient.connect_slowly()) for _ in range(12)]
        for link in slow:
            link.sendall(write_head("GET /page") + _get("/"))
            link.recv(1)

        answers = [patient.ask(_get("/")) for _ in range(5)]
        late = [len(read_all(link)) for link in slow]

    assert [_split(answer) for answer in answers] == [(b"200 OK", b"page")] * 5
    # Each is whole, and followed by the answer to the second request.
    assert min(late) == max(late) > (7 << 20) + 100


def test_an_answer_that_is_taken_too_slowly_ends(paced: Server) -> None:
    assert paced.process.stdout is not None
    with paced.connect_slowly() as link:
        link.sendall(_get("/page"))
        assert paced.process.stdout.readline() == "dropped\n"

        assert _reads_until_closed(link) < 7 << 20


def test_beyond_the_most_unsent_bytes_the_oldest_answers_end() -> None:
    with running(NEVER | {"UNSENT_BYTES": 30 << 20}) as server, ExitStack() as stack:
        slow = [stack.enter_context(server.connect_slowly()) for _ in range(12)]
        for link in slow:
            link.sendall(_get("/page"))
            link.recv(1)

        assert _split(server.ask(_get("/"))) == (b"200 OK", b"page")
        read = [_reads_until_closed(link) for link in (slow[0], slow[-1])]

    assert read[0] < 7 << 20 < read[1]


def test_a_client_that_takes_no_large_answer_is_dropped() -> None:
    with running(NEVER | {"STALL_S": 0.5}) as server, ExitStack() as stack:
        for _ in range(4):
            link = stack.enter_context(server.connect_slowly())
            link.sendall(_get("/large"))
            link.recv(1)

        assert _split(server.ask(_get("/"))) == (b"200 OK", b"page")


def test_beyond_the_most_connections_the_oldest_unfinished_are_refused() -> None:
    with running(NEVER | {"MOST_WAITING": 8}) as server, ExitStack() as stack:
        slow = [stack.enter_context(server.connect()) for _ in range(12)]
        for link in slow:
            link.sendall(SLOW["unfinished head"])

        assert _split(server.ask(_get("/"))) == (b"200 OK", b"page")
        refused = [_split(read_all(link))[0] for link in slow[:5]]
        slow[-1].setblocking(False)
        newest_waits = _is_waiting(slow[-1])

    assert refused == [b"408 Request Timeout"] * 5 and newest_waits


def test_a_stop_waits_for_requests_but_not_for_idle_clients() -> None:
    with running(NEVER) as server, server.connect(), server.connect() as sending:
        half = _post("/length", b"x" * 70_000)
        sending.sendall(half[:40_000])
        # Once another request is answered, both connections were seen.
        server.ask(_get("/"))

        server.process.send_signal(signal.SIGTERM)
        sending.sendall(half[40_000:])

        assert _split(read_all(sending)) == (b"200 OK", b"70000")
        assert server.process.wait(WAIT_S) == 0


@pytest.mark.slow
@pytest.mark.in_turn("dashboard/web")
def test_an_upload_and_pages_of_the_dashboard_pass_slow_uploads(tmp_path: Path) -> None:
    """Twice as many slow uploads as there are threads for uploads: they are ended in time."""
    trace = tmp_path / "rank0_trace.json"
    trace.write_bytes(bytes(20_000_000))
    with (
        running_dashboard(tmp_path, "--workers", "0") as dashboard,
        closing(Connection(dashboard.url, None)) as connection,
        ExitStack() as stack,
    ):
        sender, port = Sender(connection), int(dashboard.url.rpartition(":")[2])
        run_id, other, slow = sender.create("run", {}), sender.create("slow", {}), []
        for i in range(64):
            slow.append(stack.enter_context(socket.create_connection(("127.0.0.1", port))))
            place = f"PUT /api/v1/runs/{other}/files/slow{i}"
            slow[i].sendall(write_head(place, "Content-Length: 9999999") + b"x")
        pages = [urllib.request.urlopen(f"{dashboard.url}/", timeout=WAIT_S).status for _ in "ab"]
        ended = threading.Event()
        sending = threading.Thread(target=_send_slowly, args=(slow, ended))
        sending.start()
        try:
            sender.send(run_id, FileToSend(trace, trace.name, trace.stat().st_size))
            sender.finish(run_id)
        finally:
            ended.set()
            sending.join()

    assert pages == [200, 200]
    with open_store(tmp_path) as store:
        assert state(store, run_id) == ("queued", None)
        assert store.files.list_files(other) == ()


def _send_slowly(links: list[socket.socket], ended: threading.Event) -> None:
    """A byte of each, until the server closes it."""
    while not ended.wait(0.5):
        for link in links:
            with suppress(OSError):
                link.send(b"x")


def read_all(link: socket.socket) -> bytes:
    """What the server sends until it closes the connection."""
    blocks = []
    while block := link.recv(1 << 16):
        blocks.append(block)
    return b"".join(blocks)


def _get(path: str) -> bytes:
    return write_head(f"GET {path}", CLOSE)


def _post(path: str, body: bytes) -> bytes:
    return write_head(f"POST {path}", CLOSE, f"Content-Length: {len(body)}") + body


def _split(answer: bytes) -> tuple[bytes, bytes]:
    """The status and the body."""
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.partition(b"\r\n")[0].partition(b" ")[2], body


def _reads_until_closed(link: socket.socket) -> int:
    """Bytes that arrive until the server closes the connection, which it does not do at once."""
    size = 0
    with suppress(ConnectionError):
        while block := link.recv(1 << 16):
            size += len(block)
    return size


def _is_waiting(link: socket.socket) -> bool:
    """Whether the server has neither answered nor closed the connection."""
    try:
        link.recv(1)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
