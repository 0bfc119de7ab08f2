"""Options of the production server: who has access, limits of uploads and analyses, and the log."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network

from flask import Request
from werkzeug.datastructures import Headers

from stepsplit.analyzer.errors import UsageError
from stepsplit.dashboard.store.logins import ROLES, Role
from stepsplit.dashboard.store.logs import LogFormat
from stepsplit.dashboard.web import shared_host
from stepsplit.dashboard.web.alerting import AlertTarget
from stepsplit.dashboard.web.http_error import HttpError
from stepsplit.dashboard.web.uploads import Limits

# Access modes: local requests only, with a secret, through a trusted proxy, or open.

LOOPBACK = ("127.0.0.1", "localhost", "::1")

PROXY_SECRET = "X-Stepsplit-Proxy-Secret"
"""Header by which the proxy shows that a request is from it: on its host, every account can connect
from its address."""

_SECRET_LENGTH = 16
"""Least characters of that secret: a local account can try it as fast as the server answers."""


@dataclass(frozen=True, slots=True)
class TrustedProxy:
    """A proxy that authenticates users and names them in a header; trusted only if it connects
    from one of these networks and sends the secret. All users have the role, or that which
    role_header names."""

    header: str
    networks: tuple[IPv4Network | IPv6Network, ...]
    secret: str = field(repr=False)
    role: Role = Role.ADMIN
    role_header: str | None = None

    def find_role(self, headers: Headers) -> Role:
        """The role of who sends these headers. Raises HttpError if they name none."""
        if self.role_header is None:
            return self.role
        role = Role.parse(headers.get(self.role_header, "").strip())
        if role is None:
            roles = ", ".join(ROLES[:-1]) + f" or {ROLES[-1]}"
            raise HttpError(403, f"the proxy names no role in {self.role_header}; use {roles}")
        return role

    def is_sender(self, incoming: Request) -> bool:
        """Whether the proxy sent the request."""
        try:
            address = ip_address(incoming.remote_addr or "")
        except ValueError:
            return False
        plain = getattr(address, "ipv4_mapped", None) or address
        is_there = any(plain in network for network in self.networks)
        return is_there and is_same_secret(incoming.headers.get(PROXY_SECRET, ""), self.secret)


@dataclass(frozen=True, slots=True)
class Access:
    """The access mode.

    local: only requests to this machine's own names. guarded: only with a password, a token of
    the store, a one-time address, or through the trusted proxy.
    """

    local: bool = True
    guarded: bool = False
    passwords: Mapping[Role, str] = field(default_factory=dict, repr=False)
    proxy: TrustedProxy | None = None
    one_time: bool = False
    # Made before the server forks: all of its processes know each other's clients.
    cookie_key: bytes = field(
        default_factory=partial(secrets.token_bytes, 32), repr=False, compare=False
    )


def choose_access(
    host: str,
    *,
    password: str | None = None,
    uploader_password: str | None = None,
    viewer_password: str | None = None,
    proxy: TrustedProxy | None = None,
    has_tokens: bool = False,
    open_to_anyone: bool = False,
    one_time_login: bool | None = False,
) -> Access:
    """The access mode of a server that listens on host. password: of the role admin.
    one_time_login: None for one if nothing else restricts access and others may log in to this
    host. Raises UsageError if the server is reachable from other machines and no access control is
    set, or if two roles have the same password."""
    if open_to_anyone:
        return Access(local=False)
    # Only the same user opens the socket.
    is_socket = host.startswith("unix:")
    local = host in LOOPBACK or is_socket
    given = {
        Role.ADMIN: password, Role.UPLOADER: uploader_password, Role.VIEWER: viewer_password,
    }  # fmt: skip
    passwords = {role: one for role, one in given.items() if one is not None}
    if len(set(passwords.values())) < len(passwords):
        raise UsageError("two roles have the same password; choose another one for each role")
    if one_time_login is None:
        is_open = local and not is_socket and not passwords and proxy is None
        one_time_login = is_open and shared_host.has_other_users()
    if one_time_login:
        # That no client knows: sessions are bound to it, and so end with the server.
        passwords.setdefault(Role.ADMIN, secrets.token_urlsafe(32))
    if passwords or proxy is not None or (has_tokens and not local):
        return Access(False, True, passwords, proxy, one_time_login)
    if local:
        return Access()
    ways = "--password-file, a token (stepsplit token create) or --trusted-proxy-header"
    raise UsageError(f"{host} is reachable by others: restrict it with {ways}, or --open-to-anyone")


def parse_trusted_proxy(
    header: str | None,
    addresses: Sequence[str],
    role: Role | None = None,
    role_header: str | None = None,
    secret: str | None = None,
) -> TrustedProxy | None:
    """The trusted proxy from the options; None without them. Raises UsageError."""
    if role is not None and role_header is not None:
        raise UsageError("choose --trusted-proxy-role or --trusted-proxy-role-header")
    if header is None and not addresses and {role, role_header, secret} == {None}:
        return None
    if header is None or not addresses:
        raise UsageError("--trusted-proxy-header and --trusted-proxy must be used together")
    try:
        networks = tuple(ip_network(address, strict=False) for address in addresses)
    except ValueError as error:
        raise UsageError(f"--trusted-proxy: {error}; write 10.0.0.5 or 10.0.0.0/24") from None
    if not re.fullmatch(rf"[!-~]{{{_SECRET_LENGTH},}}", secret or ""):
        raise UsageError(
            "--trusted-proxy: any account of its host could name a user; put a secret of at least "
            f"{_SECRET_LENGTH} characters (openssl rand -hex 32) into --trusted-proxy-secret-file, "
            f"and have the proxy send it as {PROXY_SECRET}"
        )
    return TrustedProxy(header, networks, secret or "", role or Role.ADMIN, role_header)


def is_same_secret(sent: str, secret: str) -> bool:
    """Whether a secret that was sent is the right one; how long that takes says nothing of it."""
    # Of the hashes, whose comparison shows no length.
    hashes = (hashlib.sha256(text.encode("utf-8", "replace")).digest() for text in (sent, secret))
    return hmac.compare_digest(*hashes)


# All options.

Ready = Callable[[str], None]
"""Called with the URL of the server, without a slash at its end."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Access control, upload limits, analysis workers, webhook and log format of the server.

    limit_s, memory_bytes: what one analysis may take; memory None for the default. public_url: the
    address of the pages in messages; by default the one that the server listens on.
    """

    access: Access
    limits: Limits = field(default_factory=Limits)
    workers: int = 1
    limit_s: float = 3_600.0
    memory_bytes: int | None = None
    log_format: LogFormat = "text"
    alert_target: AlertTarget | None = None
    public_url: str | None = None
