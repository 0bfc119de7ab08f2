"""Slow clients hold no thread: a request is answered once it has arrived, late ones are dropped."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

import pytest
from support.dashboard_processes import open_store, running_dashboard
from support.store_builders import state
from support.waiting import until

from stepsplit.dashboard.connection import Connection
from stepsplit.dashboard.upload import Sender
from stepsplit.dashboard.upload_files import FileToSend

# Python 3.13 has another phrase for it.
TOO_LARGE = f"413 {HTTPStatus(413).phrase}".encode()
_SERVER = """
import json, sys
from pathlib import Path
from flask import Flask, g, request
from stepsplit.dashboard.web import gateway, http_server
from stepsplit.dashboard.web.uploads import Limits

for name, value in json.loads(sys.argv[1]).items():
    module = gateway if hasattr(gateway, name) else http_server
    assert hasattr(module, name)
    setattr(module, name, value)
gateway.THREADS = 2

flask = Flask("test")
flask.config["MAX_CONTENT_LENGTH"] = 4 << 20

@flask.before_request
def log_in():
    if request.path.startswith("/private"):
        if "Authorization" not in request.headers:
            return "who?", 401
        g.user = "me"

@flask.route("/", methods=["GET", "POST"])
def page():
    return "page"

@flask.route("/private/length", methods=["POST", "PUT", "PATCH"], endpoint="api.put")
@flask.route("/length", methods=["POST", "PUT"])
def length():
    request.max_content_length = 1 << 40
    return str(sum(map(len, iter(lambda: request.stream.read(1 << 16), b""))))

@flask.route("/user")
def user():
    return request.headers.get("X-User", "none") + " " + request.remote_addr

@flask.route("/large")
def large():
    return bytes(30 << 20)

with http_server.open_listener(sys.argv[2], 0) as listener:
    # Connections inherit it; else the kernel takes 4 MiB or more of each answer.
    listener.setsockopt(http_server.socket.SOL_SOCKET, http_server.socket.SO_SNDBUF, 64 << 10)
    print(http_server.format_url(sys.argv[2], listener).rpartition(":")[2], flush=True)
    limits = Limits(file_bytes=30 << 20, spare_bytes=0)
    http_server.answer_requests(gateway.Gateway(flask, limits, Path(sys.argv[3])), listener)
"""
"""Two threads for pages, and the constants of the modules that the test sets."""

NEVER = {"HEAD_S": 600.0, "GRACE_S": 600.0, "STALL_S": 600.0}
WAIT_S = 30.0
"""Much longer than any answer takes, and much shorter than NEVER."""


@dataclass(frozen=True)
class Server:
    """A server of two threads."""

    process: subprocess.Popen[str]
    port: int
    folder: Path

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
def running(constants: dict[str, float], folder: Path, host: str = "127.0.0.1") -> Iterator[Server]:
    """A server until the end of the block."""
    command = [sys.executable, "-c", _SERVER, json.dumps(constants), host, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            port = process.stdout.readline().strip()
            yield Server(process, int(port) if port.isdigit() else 0, folder)
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that waits for ever."""
    with running(NEVER, tmp_path_factory.mktemp("patient")) as server:
        yield server


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that waits for a fraction of a second."""
    constants = {"HEAD_S": 0.2, "GRACE_S": 0.2, "STALL_S": 1.0}
    with running(constants, tmp_path_factory.mktemp("strict")) as server:
        yield server


def write_head(first: str, *fields: str) -> bytes:
    """The head of a request."""
    return "\r\n".join([f"{first} HTTP/1.1", "Host: localhost", *fields, "", ""]).encode()


CLOSE = "Connection: close"
LOGIN = "Authorization: Bearer x"
CHUNKED = "Transfer-Encoding: chunked"
SLOW = {
    "unfinished head": b"GET / HTTP/1.1\r\nHost: localhost\r\nX-A: ",
    "unfinished second head": write_head("GET /") + b"GET / HTTP/1.1\r\n",
    "unfinished body": write_head("POST /length", "Content-Length: 60000") + b"x",
    "zeros": write_head("POST /length", f"Content-Length: {'0' * 12}60000") + b"x",
    "length twice": write_head("POST /length", *["Content-Length: 60000"] * 2) + b"x",
    "body of HTTP/1.0": b"POST /length HTTP/1.0\r\nContent-Length: 60000\r\n\r\nx",
    "bare newlines": b"POST /length HTTP/1.1\nHost: localhost\nContent-Length: 60000\n\nx",
    "chunks": write_head("POST /length", CHUNKED) + b"5\r\nx",
    "chunks and length": write_head("POST /length", CHUNKED, "Content-Length: 5") + b"5\r\nx",
    "chunk extension": write_head("POST /length", CHUNKED) + b"5;a=b\r\nx",
    "unfinished trailer": write_head("POST /length", CHUNKED) + b"1\r\nx\r\n0\r\nA: ",
    "unfinished upload": write_head("PUT /private/length", LOGIN, "Content-Length: 9999999") + b"x",
    "unread body": write_head("GET /", "Content-Length: 60000") + b"x",
    "asked for its body": write_head("POST /length", "Expect: 100-continue", "Content-Length: 9"),
    "nothing": b"",
}


@pytest.mark.parametrize("kind", SLOW)
def test_pages_and_uploads_are_answered_while_clients_send_slowly(
    kind: str, patient: Server
) -> None:
    upload = write_head("PUT /private/length", LOGIN, CLOSE, "Content-Length: 200000")
    with ExitStack() as stack:
        slow = [stack.enter_context(patient.connect()) for _ in range(40)]
        for link in slow:
            link.sendall(SLOW[kind])

        answers = [patient.ask(_get("/")) for _ in range(3)]
        answers.append(patient.ask(upload, bytes(200_000)))

        for link in slow:
            link.setblocking(False)
        waits = [_is_waiting(link) for link in slow]
    assert [_split(answer)[1] for answer in answers] == [b"page"] * 3 + [b"200000"]
    assert all(waits) or kind in ("unfinished second head", "asked for its body")


@pytest.mark.parametrize(
    "head",
    [
        write_head("POST /length", "Content-Length: 5", "Content-Length: 6"),
        write_head("POST /length", f"Content-Length: {'0' * 50}5"),
        write_head("POST /length", "Content-Length: -5"),
        write_head("POST /length", "Content-Length: 5, 6"),
        write_head("POST /length", "Transfer-Encoding: gzip, chunked"),
        write_head("POST /length", "Transfer-Encoding: xchunked"),
        b"POST /length HTTP/1.1\r\nHost: localhost\r\nContent-Length : 5\r\n\r\n",
        b"POST /length HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nA: " + b"x" * 40_000,
        write_head("GET /", CLOSE, f"A: {'x' * 40_000}"),
        b"GET / HTTP/1.1\r\n" + b"A: x\r\n" * 8_000,
    ],
)
def test_a_head_that_could_be_read_in_two_ways_is_refused(head: bytes, patient: Server) -> None:
    assert patient.ask(head).startswith(b"HTTP/1.1 4")


def test_the_name_of_a_header_has_no_underscore(patient: Server) -> None:
    """To WSGI X_User is X-User, which a proxy removes from what clients send."""
    answer = patient.ask(write_head("GET /user", "X_User: admin", CLOSE))

    assert _split(answer)[1] == b"none 127.0.0.1"


def test_a_request_in_pieces_is_answered_as_a_whole_one(patient: Server) -> None:
    request = _post("/length", b"x" * 1_000)
    pieces = [request[i : i + 1] for i in range(60)] + [request[60:200], request[200:]]

    assert _split(patient.ask(*pieces)) == _split(patient.ask(request)) == (b"200 OK", b"1000")


@pytest.mark.parametrize("size", [0, 65_536, 65_537, 20_000_000])
def test_bodies_of_all_sizes_arrive(size: int, patient: Server) -> None:
    body, place = bytes(size), "PUT /private/length"
    chunked = write_head(place, CHUNKED, LOGIN, CLOSE)
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (size, body) if size else b"0\r\n\r\n"
    whole = write_head(place, f"Content-Length: {size}", LOGIN, CLOSE)

    answers = [patient.ask(whole, body), patient.ask(chunked, chunks)]

    assert [_split(answer) for answer in answers] == [(b"200 OK", b"%d" % size)] * 2
    assert list(patient.folder.iterdir()) == []


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        (["PUT /private/length", "Content-Length: 9999999"], b"401 Unauthorized"),
        (["PUT /private/length", CHUNKED], b"401 Unauthorized"),
        (["POST /length", "Content-Length: 9999999"], TOO_LARGE),
        (["PUT /private/length", LOGIN, "Content-Length: 9999999999999"], TOO_LARGE),
    ],
)
def test_a_large_body_is_refused_before_it_arrives(
    fields: list[str], status: bytes, patient: Server
) -> None:
    part = b"" if CHUNKED not in fields else b"%x\r\n%b\r\n" % (99_999, bytes(99_999))
    with patient.connect() as link:
        link.sendall(write_head(*fields) + part)
        answer = link.recv(1_000)

    assert _split(answer)[0] == status


def test_a_connection_takes_several_requests_even_at_once(patient: Server) -> None:
    first = write_head("GET /")
    upload = write_head("PUT /private/length", LOGIN, "Content-Length: 70000") + bytes(70_000)

    answer = patient.ask(first + upload + first + _post("/length", b"1234"))

    bodies = [part.partition(b"\r\n\r\n")[2] for part in answer.split(b"HTTP/1.1 200 OK")[1:]]
    assert bodies == [b"page", b"70000", b"page", b"4"]


def test_a_client_that_expects_to_be_asked_is_asked_for_its_body(patient: Server) -> None:
    head = write_head("PUT /length", "Expect: 100-continue", "Content-Length: 3", CLOSE)
    with patient.connect() as link:
        link.sendall(head)
        asked = link.recv(100)
        link.sendall(b"abc")
        answer = read_all(link)

    assert asked.startswith(b"HTTP/1.1 100 ")
    assert _split(answer) == (b"200 OK", b"3")


@pytest.mark.parametrize("kind", SLOW)
def test_a_late_request_is_refused(kind: str, strict: Server) -> None:
    with strict.connect() as link:
        link.sendall(SLOW[kind])
        answer = read_all(link)

    is_body = "head" not in kind and kind != "nothing"
    assert (b"408 Request Timeout" in answer) == is_body


def test_a_request_below_the_minimum_rate_is_ended(strict: Server) -> None:
    """It sends a byte now and then, so that it is never silent for long."""
    with strict.connect() as link:
        link.sendall(SLOW["unfinished upload"])
        link.settimeout(0.05)
        while True:
            try:
                answer = link.recv(100)
                break
            except TimeoutError:
                link.sendall(b"x")

    assert answer.startswith(b"HTTP/1.1 408 ")


def test_an_upload_at_a_higher_rate_is_not(strict: Server) -> None:
    head = write_head("PUT /private/length", LOGIN, CLOSE, "Content-Length: 1000000")

    answer = strict.ask(head, *[bytes(20_000)] * 50)

    assert _split(answer) == (b"200 OK", b"1000000")


def test_pages_are_answered_while_clients_take_theirs_slowly(patient: Server) -> None:
    with ExitStack() as stack:
        slow = [stack.enter_context(patient.connect_slowly()) for _ in range(12)]
        for link in slow:
            link.sendall(write_head("GET /large") + _get("/"))
            link.recv(1)

        answers = [patient.ask(_get("/")) for _ in range(5)]
        late = [len(read_all(link)) for link in slow[:3]]

    assert [_split(answer) for answer in answers] == [(b"200 OK", b"page")] * 5
    # Each is whole, and followed by the answer to the second request.
    assert min(late) == max(late) > (30 << 20) + 100


def test_an_answer_that_is_taken_too_slowly_ends(strict: Server) -> None:
    with strict.connect_slowly() as link:
        link.sendall(_get("/large"))
        time.sleep(2.5)

        assert _reads_until_closed(link) < 30 << 20


def test_a_stop_waits_for_requests_but_not_for_idle_clients(tmp_path: Path) -> None:
    with running(NEVER, tmp_path) as server, server.connect(), server.connect() as sending:
        half = _post("/length", b"x" * 50_000)
        sending.sendall(half[:40_000])
        # Once another request is answered, both connections were seen.
        server.ask(_get("/"))

        server.process.send_signal(signal.SIGTERM)
        sending.sendall(half[40_000:])

        assert _split(read_all(sending)) == (b"200 OK", b"50000")
        server.process.wait(WAIT_S)


def test_a_unix_socket_is_for_its_user_only(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    place = tmp_path / "socket"
    with running(NEVER, tmp_path, f"unix:{place}"), socket.socket(socket.AF_UNIX) as link:
        link.connect(str(place))
        link.sendall(_get("/user"))

        # Without an address, which no client of a network is.
        assert _split(read_all(link)) == (b"200 OK", b"none ")
        assert place.stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
@pytest.mark.in_turn("dashboard/web")
def test_an_upload_and_pages_of_the_dashboard_pass_slow_uploads(tmp_path: Path) -> None:
    """Many more slow uploads than threads."""
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
        sender.send(run_id, FileToSend(trace, trace.name, trace.stat().st_size))
        sender.finish(run_id)
        for link in slow:
            link.setblocking(False)
        waits = [_is_waiting(link) for link in slow]

    assert pages == [200, 200] and all(waits)
    with open_store(tmp_path) as store:
        assert state(store, run_id) == ("queued", None)
        assert store.files.list_files(other) == ()


@pytest.mark.slow
@pytest.mark.in_turn("dashboard/web")
def test_a_part_that_is_cut_off_keeps_what_arrived(tmp_path: Path) -> None:
    with (
        running_dashboard(tmp_path, "--workers", "0") as dashboard,
        closing(Connection(dashboard.url, None)) as connection,
        open_store(tmp_path) as store,
    ):
        run_id, port = Sender(connection).create("run", {}), int(dashboard.url.rpartition(":")[2])
        place = f"PATCH /api/v1/runs/{run_id}/files/a"
        with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as link:
            link.sendall(write_head(place, "Upload-Offset: 0", "Content-Length: 5000000"))
            link.sendall(bytes(3_000_000))
        until(lambda: any(row.received_bytes for row in store.files.list_files(run_id)))
        (row,) = store.files.list_files(run_id)

    assert not row.complete and 2_000_000 < row.received_bytes <= 3_000_000


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
