"""Requests to a dashboard, by the standard library alone."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from stepsplit.analyzer.errors import UsageError

_PASSING = (408, 429, 500, 502, 503, 504)
_TIMEOUT_S = 120.0


class Passing(Exception):
    """Something that may be over in a moment, such as a broken connection; in words."""

    def __init__(self, message: str, wait_s: float = 0.0) -> None:
        self.wait_s = wait_s
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class Answer:
    """What the server said. body is {} where it was no JSON object."""

    status: int
    headers: Mapping[str, str]
    body: dict[str, Any]

    @property
    def wait_s(self) -> float:
        """How long the server asks to wait before another try; 0 where it does not."""
        asked = self.headers.get("Retry-After", "")
        return min(float(asked), 60.0) if asked.isdecimal() else 0.0


class Connection:
    """One connection, opened anew when it breaks."""

    def __init__(self, url: str, token: str | None) -> None:
        self.url, self._token = url.rstrip("/"), token
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"--to {url}: not a dashboard's address such as http://host:8050")
        secure = parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        self._prefix = parts.path
        try:
            self._http = kind(parts.hostname, parts.port, timeout=_TIMEOUT_S)
        except ValueError as error:
            raise UsageError(f"--to {url}: {error}") from None

    def ask(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> Answer:
        """The server's answer, whatever it is. Raises Passing where there is none, or where it is
        that the server is not well."""
        own = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        try:
            self._http.request(method, self._prefix + path, body, {**own, **(headers or {})})
            response = self._http.getresponse()
            content = response.read()
        except (OSError, http.client.HTTPException) as error:
            self._http.close()
            raise Passing(f"{self.url}: {_reason(error)}") from None
        answer = Answer(response.status, dict(response.headers), _object(content))
        if answer.status in _PASSING:
            raise Passing(f"{self.url}: {told(answer)}", answer.wait_s)
        return answer

    def close(self) -> None:
        """Ends the connection."""
        self._http.close()


def told(answer: Answer) -> str:
    """The line that the server gave for its refusal."""
    return str(answer.body.get("error") or f"the server answered {answer.status}")


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _object(content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
