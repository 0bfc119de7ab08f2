"""A receiver of webhooks: a real HTTP server that checks signatures as docs/alerts.md shows."""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

SECRET = "the key of the signature"
PAGE = Path(__file__).parents[2] / "docs" / "alerts.md"


def read_example(language: str) -> str:
    """The first example in this language on the page."""
    found = re.search(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def is_genuine(headers: Mapping[str, str], body: bytes, secret: str = SECRET) -> bool:
    """The function of the page."""
    names: dict[str, Any] = {}
    exec(read_example("python"), names)
    return bool(names["is_genuine"](secret, headers, body))


@dataclass
class Receiver:
    """What came, and how it is answered.

    failures: how often each message is refused before it is accepted. status: of those that are
    accepted. drip_s: the time between the bytes of an answer, which then never ends.
    """

    url: str = ""
    failures: int = 0
    status: int = 200
    drip_s: float = 0.0
    messages: list[dict[str, Any]] = field(default_factory=list)
    forged: list[bytes] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    tries: Counter[int] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, path: str, headers: Mapping[str, str], body: bytes) -> int:
        """Notes a request and returns the status of its answer."""
        with self.lock:
            self.paths.append(path)
            if not is_genuine(headers, body):
                self.forged.append(body)
                return 403
            message = json.loads(body)
            self.tries[message["id"]] += 1
            if self.tries[message["id"]] <= self.failures:
                return 503
            self.messages.append(message)
            return self.status


@contextmanager
def running_receiver(**kind: Any) -> Iterator[Receiver]:
    """A receiver on a free port."""
    receiver = Receiver(**kind)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            status = receiver.answer(self.path, dict(self.headers), body)
            while receiver.drip_s:
                self.wfile.write(b"H")
                time.sleep(receiver.drip_s)
            self.send_response(status)
            if status in range(300, 400):
                self.send_header("Location", f"{receiver.url}elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_GET(self) -> None:
            receiver.paths.append(f"GET {self.path}")
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.block_on_close = True, False
    receiver.url = f"http://127.0.0.1:{server.server_port}/hook/"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield receiver
    finally:
        receiver.drip_s = 0.0
        server.shutdown()
        server.server_close()
