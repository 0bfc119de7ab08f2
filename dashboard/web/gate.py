"""The door of a guarded server: a request shows a secret, or it does not come in."""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field

from flask import Request

from stepsplit.dashboard.store.tokens import Tokens
from stepsplit.dashboard.web.access import Access
from stepsplit.dashboard.web.refused import Refused
from stepsplit.dashboard.web.throttle import Throttle

_ASK = {"WWW-Authenticate": 'Basic realm="stepsplit", charset="UTF-8"'}


@dataclass(frozen=True, slots=True)
class Gate:
    """What is asked of every request but those for the server's health."""

    access: Access
    tokens: Tokens
    throttle: Throttle = field(default_factory=Throttle)

    def check(self, request: Request) -> None:
        """Raises Refused where the request may not come in."""
        if not self.access.guarded or self._comes_from_proxy(request):
            return
        address = self._address(request)
        wait_s = self.throttle.wait_s(address)
        if wait_s > 0:
            headers = {"Retry-After": str(int(wait_s) + 1)}
            raise Refused(429, "too many wrong passwords; wait a minute", headers)
        secret = _secret(request)
        if secret is None:
            raise Refused(401, "this server wants a password or a token", _ASK)
        if not self._opens(secret):
            self.throttle.failed(address)
            raise Refused(401, "the password or token is wrong", _ASK)

    def _opens(self, secret: str) -> bool:
        password = self.access.password
        if password is not None and hmac.compare_digest(secret.encode(), password.encode()):
            return True
        return self.tokens.accepts(secret)

    def _comes_from_proxy(self, request: Request) -> bool:
        proxy = self.access.proxy
        named = proxy is not None and bool(request.headers.get(proxy.header, "").strip())
        return named and proxy is not None and proxy.is_at(request.remote_addr or "")

    def _address(self, request: Request) -> str:
        """Whom failures count for: behind the proxy, whoever it says that it speaks for."""
        remote, proxy = request.remote_addr or "", self.access.proxy
        if proxy is None or not proxy.is_at(remote):
            return remote
        return request.headers.get("X-Forwarded-For", remote).rpartition(",")[2].strip()


def _secret(request: Request) -> str | None:
    """The token of Bearer, or the password of Basic, whoever the user."""
    given = request.authorization
    if given is None:
        return None
    return given.token if given.type == "bearer" else given.password
