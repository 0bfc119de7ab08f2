"""A server that takes and answers JSON over HTTP, for sinks without a library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from stepsplit.dashboard.connection import Connection, ServerAnswer, TransientError
from stepsplit.dashboard.sinks.scalars import SinkError

TIMEOUT_S = 5.0
"""How long a server may take to answer."""


class JsonServer:
    """A server that takes and answers JSON."""

    def __init__(self, name: str, url: str, headers: Mapping[str, str]) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SinkError(f"{name}: not an address such as http://host:5000")
        # Without a password, since the address is part of messages.
        url = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
        self.name, self._kind = name, name.partition(":")[0]
        self._headers = {"Content-Type": "application/json", **headers}
        self._connection = Connection(url, None, timeout_s=TIMEOUT_S)

    def request(self, method: str, path: str, body: object = None) -> ServerAnswer:
        """The answer, whatever its status; the connection may have been closed since the last one.

        Raises SinkError if the server cannot be reached.
        """
        content = b"" if body is None else json.dumps(body).encode()
        # Twice: the server may have closed the connection since the last request.
        for is_last in (False, True):
            try:
                return self._connection.request(method, path, content, self._headers)
            except TransientError as error:
                if is_last:
                    raise SinkError(f"{self._kind}:{error}") from None
        raise AssertionError

    def ask(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        """The body of an answer that is not an error. Raises SinkError."""
        return self.check(self.request(method, path, body))

    def check(self, answer: ServerAnswer) -> dict[str, Any]:
        """The body of the answer. Raises SinkError if it is an error."""
        if answer.status >= 300:
            said = " ".join(str(answer.body.get("message", "")).split())[:200]
            reason = f": {said}" if said else ""
            raise SinkError(f"{self.name}: the server answers {answer.status}{reason}")
        return answer.body

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()


def hide_password(url: str) -> str:
    """The address as it may be printed."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=host, query="", fragment="").geturl()
