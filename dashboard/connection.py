"""Requests to a dashboard or another server, with the standard library only."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from stepsplit.analyzer.errors import UsageError

# Timeouts, limits of rate, and gateways whose server starts anew: the same request may pass later.
_TRANSIENT_STATUS = (408, 429, 500, 502, 503, 504)

_TIMEOUT_S = 120.0


class TransientError(Exception):
    """A temporary error, such as a broken connection, after which a retry makes sense."""

    def __init__(self, message: str, wait_s: float = 0.0) -> None:
        self.wait_s = wait_s
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class ServerAnswer:
    """A response of the server; body is {} if its content is not a JSON object."""

    status: int
    headers: Mapping[str, str]
    body: dict[str, Any]
    content: bytes = b""

    @property
    def wait_s(self) -> float:
        """The delay before a retry that the server asks for, at most 60 s; 0 if none."""
        asked = self.headers.get("Retry-After", "")
        return min(float(asked), 60.0) if asked.isdecimal() else 0.0


class Connection:
    """One connection, reopened after an error."""

    def __init__(self, url: str, token: str | None, timeout_s: float = _TIMEOUT_S) -> None:
        self.url, self._token = url.rstrip("/"), token
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"{url}: not a dashboard address such as http://host:8050")
        # A dashboard behind a proxy may have a path of its own, which begins each request's.
        secure = parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        self._prefix = parts.path
        try:
            self._http = kind(parts.hostname, parts.port, timeout=timeout_s)
        except ValueError as error:
            raise UsageError(f"{url}: {error}") from None

    def request(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> ServerAnswer:
        """Sends a request and returns the response, whatever its status.

        Raises TransientError if there is no response, or if its status is a temporary error.
        """
        auth = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        try:
            self._http.request(method, self._prefix + path, body, {**auth, **(headers or {})})
            response = self._http.getresponse()
            content = response.read()
        except (OSError, http.client.HTTPException) as error:
            # Closed, it connects anew with the next request; in the middle of one it would refuse.
            self._http.close()
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise TransientError(f"{self.url}: {reason}") from None
        answer = ServerAnswer(
            response.status, dict(response.headers), _parse_object(content), content
        )
        if answer.status in _TRANSIENT_STATUS:
            raise TransientError(f"{self.url}: {extract_error(answer)}", answer.wait_s)
        return answer

    def close(self) -> None:
        """Closes the connection."""
        self._http.close()


def extract_error(answer: ServerAnswer) -> str:
    """The error message of a response."""
    return str(answer.body.get("error") or f"the server answered {answer.status}")


def _parse_object(content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
