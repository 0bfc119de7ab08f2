"""Server options and access control: tokens, passwords, throttling, security headers."""

from __future__ import annotations

import hmac
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import urlsplit

from flask import Flask, Request, Response, request

from stepsplit.analyzer.errors import UsageError
from stepsplit.dashboard.store.ingest import LogFormat
from stepsplit.dashboard.store.store import Tokens
from stepsplit.dashboard.web.uploads import HttpError, Limits

# Options of the production server.

Ready = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Access control, upload limits, number of analysis workers and log format of the server."""

    access: Access
    limits: Limits = field(default_factory=Limits)
    workers: int = 1
    log_format: LogFormat = "text"


# Throttling of failed logins.

MOST_FAILURES, WINDOW_S = 10, 60.0

_MAX_ADDRESSES = 10_000


class Throttle:
    """Failed logins by client address; thread-safe. Each server process counts separately."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._lock = now, threading.Lock()
        self._failures: dict[str, list[float]] = {}

    def record_failure(self, address: str) -> None:
        """Records a failed login from the address."""
        with self._lock:
            recent = self._list_recent(address)
            # Bounded: with too many addresses the oldest one is dropped.
            self._failures.pop(address, None)
            self._failures[address] = [*recent, self._now()][-MOST_FAILURES:]
            if len(self._failures) > _MAX_ADDRESSES:
                del self._failures[next(iter(self._failures))]

    def compute_wait_s(self, address: str) -> float:
        """Seconds until the address may try again; 0 if it is not throttled."""
        with self._lock:
            recent = self._list_recent(address)
            if len(recent) < MOST_FAILURES:
                return 0.0
            return recent[0] + WINDOW_S - self._now()

    def _list_recent(self, address: str) -> list[float]:
        since = self._now() - WINDOW_S
        return [at for at in self._failures.get(address, ()) if at > since]


# Protection against other sites: allowed host names, same-origin writes, a strict CSP.

HEALTH = ("health.healthz", "health.readyz")

_SAFE_METHODS = ("GET", "HEAD")


def protect(server: Flask, authenticator: Authenticator, script_hashes: Sequence[str]) -> None:
    """Checks every request, and adds security headers to every response."""
    policy = build_content_policy(script_hashes)

    @server.before_request
    def check_request() -> None:
        if authenticator.access.local:
            _refuse_other_names(request)
        _refuse_other_sites(request)
        if request.endpoint not in HEALTH:
            authenticator.check(request)

    @server.after_request
    def add_headers(response: Response) -> Response:
        response.headers["Content-Security-Policy"] = policy
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Referrer-Policy"] = "same-origin"
        response.headers["Cross-Origin-Resource-Policy"] = "same-origin"
        return response


def build_content_policy(script_hashes: Sequence[str]) -> str:
    """The Content-Security-Policy: this server only, plus Dash's inline script by its hash."""
    scripts = " ".join(["'self'", *(f"{digest}" for digest in script_hashes)])
    return (
        f"default-src 'self'; script-src {scripts}; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data: blob:; object-src 'none'; base-uri 'none'; form-action 'self'; "
        "frame-ancestors 'none'"
    )


def _refuse_other_names(incoming: Request) -> None:
    # DNS rebinding: a site whose name resolves to 127.0.0.1 still sends its own name as Host.
    if _parse_host(f"//{incoming.host}") not in LOOPBACK:
        raise HttpError(403, "this server only accepts requests to localhost")


def _refuse_other_sites(incoming: Request) -> None:
    if incoming.method in _SAFE_METHODS:
        return
    # Behind a proxy the page may have been served by https, which the request does not show.
    own = (f"{incoming.scheme}://{incoming.host}", f"https://{incoming.host}")
    origin = incoming.headers.get("Origin")
    if origin is not None and origin not in own:
        raise HttpError(403, "writes from another site are refused")
    if incoming.headers.get("Sec-Fetch-Site", "same-origin") not in ("same-origin", "none"):
        raise HttpError(403, "writes from another site are refused")


def _parse_host(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


# Authentication by password, token or trusted proxy.

_CHALLENGE = {"WWW-Authenticate": 'Basic realm="stepsplit", charset="UTF-8"'}


@dataclass(frozen=True, slots=True)
class Authenticator:
    """Authentication of all requests except health checks."""

    access: Access
    tokens: Tokens
    throttle: Throttle = field(default_factory=Throttle)

    def check(self, request: Request) -> None:
        """Raises Refused if the request is not authorized."""
        if not self.access.guarded or self._is_from_proxy(request):
            return
        address = self._find_client_address(request)
        wait_s = self.throttle.compute_wait_s(address)
        if wait_s > 0:
            headers = {"Retry-After": str(int(wait_s) + 1)}
            raise HttpError(429, "too many wrong passwords; wait a minute", headers)
        secret = _read_secret(request)
        if secret is None:
            raise HttpError(401, "this server requires a password or a token", _CHALLENGE)
        if not self._is_valid_secret(secret):
            self.throttle.record_failure(address)
            raise HttpError(401, "wrong password or token", _CHALLENGE)

    def _is_valid_secret(self, secret: str) -> bool:
        password = self.access.password
        if password is not None and hmac.compare_digest(secret.encode(), password.encode()):
            return True
        return self.tokens.verify(secret)

    def _is_from_proxy(self, request: Request) -> bool:
        proxy = self.access.proxy
        named = proxy is not None and bool(request.headers.get(proxy.header, "").strip())
        return named and proxy is not None and proxy.is_at(request.remote_addr or "")

    def _find_client_address(self, request: Request) -> str:
        """The client address for throttling; behind the proxy, from X-Forwarded-For."""
        remote, proxy = request.remote_addr or "", self.access.proxy
        if proxy is None or not proxy.is_at(remote):
            return remote
        return request.headers.get("X-Forwarded-For", remote).rpartition(",")[2].strip()


def _read_secret(request: Request) -> str | None:
    """The Bearer token, or the password of Basic authentication (any user name)."""
    credentials = request.authorization
    if credentials is None:
        return None
    return credentials.token if credentials.type == "bearer" else credentials.password


# Access modes: local requests only, with a secret, through a trusted proxy, or open.

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class TrustedProxy:
    """A proxy that authenticates users and names them in a header; trusted only if it connects
    from one of these networks."""

    header: str
    networks: tuple[IPv4Network | IPv6Network, ...]

    def is_at(self, address: str) -> bool:
        """Whether the address is in the proxy's networks."""
        try:
            parsed = ip_address(address)
        except ValueError:
            return False
        if isinstance(parsed, IPv6Address) and parsed.ipv4_mapped:
            parsed = parsed.ipv4_mapped
        return any(parsed in network for network in self.networks)


@dataclass(frozen=True, slots=True)
class Access:
    """The access mode.

    local: only requests to this machine's own names. guarded: only with the password, a token of
    the store, or through the trusted proxy.
    """

    local: bool = True
    guarded: bool = False
    password: str | None = field(default=None, repr=False)
    proxy: TrustedProxy | None = None


def choose_access(
    host: str,
    *,
    password: str | None = None,
    proxy: TrustedProxy | None = None,
    has_tokens: bool = False,
    open_to_anyone: bool = False,
) -> Access:
    """The access mode of a server that listens on host. Raises UsageError if it is reachable from
    other machines and no access control is set."""
    local = host in LOOPBACK
    if open_to_anyone:
        return Access(local=False)
    if password is not None or proxy is not None:
        return Access(local=False, guarded=True, password=password, proxy=proxy)
    if local:
        return Access()
    if has_tokens:
        return Access(local=False, guarded=True)
    ways = "--password-file, a token (stepsplit token create) or --trusted-proxy-header"
    raise UsageError(f"{host} is reachable by others: restrict it with {ways}, or --open-to-anyone")


def parse_trusted_proxy(header: str | None, addresses: Sequence[str]) -> TrustedProxy | None:
    """The trusted proxy from the options; None without them. Raises UsageError."""
    if header is None and not addresses:
        return None
    if header is None or not addresses:
        raise UsageError("--trusted-proxy-header and --trusted-proxy must be used together")
    try:
        networks = tuple(ip_network(address, strict=False) for address in addresses)
    except ValueError as error:
        raise UsageError(f"--trusted-proxy: {error}; write 10.0.0.5 or 10.0.0.0/24") from None
    return TrustedProxy(header, networks)
