"""Access control: logging in and out, who sends a request and what it may do, security headers."""

from __future__ import annotations

import hmac
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import quote, urlsplit

from flask import Blueprint, Flask, Request, Response, g, render_template_string, request
from werkzeug.datastructures import Headers
from werkzeug.urls import iri_to_uri

from stepsplit.analyzer.errors import UsageError
from stepsplit.dashboard.store.audit import OK, AuditLog
from stepsplit.dashboard.store.logins import LIFETIME_S, ROLES, Guessed, Role, User
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.uploads import JSON_BYTES, HttpError

# Waiting after failed logins: by the client's address, and by the account, which is the password
# that all share. Clients that have logged in before, and valid tokens, do not wait.

FREE_FAILURES, MAX_WAIT_S = 5, 900
"""Of one address: wrong passwords without a wait, and the longest wait."""

FREE_FAILURES_OF_ACCOUNT, MAX_WAIT_OF_ACCOUNT_S = 50, 60
"""Of all addresses together: more and shorter, because everyone who is new has to wait."""

KNOWN_CLIENT = "stepsplit-known-client"
"""Cookie of a client that has logged in. It replaces no password."""

_KNOWN_S = 30 * 86_400


def list_guessed(address: str) -> tuple[Guessed, ...]:
    """What a wrong password from the address counts for."""
    return (
        Guessed(f"address {_find_network(address)}", FREE_FAILURES, MAX_WAIT_S),
        Guessed("account password", FREE_FAILURES_OF_ACCOUNT, MAX_WAIT_OF_ACCOUNT_S),
    )


def _find_network(address: str) -> str:
    """The IPv4 address, or the /64 of an IPv6 address: one host may use all of its addresses."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return "unknown"
    if isinstance(parsed, IPv6Address) and not parsed.ipv4_mapped:
        return str(ip_network((parsed.packed[:8] + bytes(8), 64)))
    return str(getattr(parsed, "ipv4_mapped", None) or parsed)


# Protection against other sites: allowed host names, same-origin writes, a strict CSP.

HEALTH = ("health.healthz", "health.readyz")

LOGIN_PATH = "/login"

_BEFORE_LOGIN = ("login.show", "login.enter", "login.leave")

_ASSETS_BEFORE_LOGIN = ("/assets/style.css", "/assets/theme.js", "/assets/favicon.svg")

_SAFE_METHODS = ("GET", "HEAD")


def protect(server: Flask, authenticator: Authenticator, script_hashes: Sequence[str]) -> None:
    """Checks every request, and adds security headers to every response."""
    policy = build_content_policy(script_hashes)

    @server.before_request
    def check_request() -> Response | None:
        g.address = authenticator.find_client_address(request)
        if "\0" in request.path:
            # Names nothing, and PostgreSQL takes no such text.
            raise HttpError(404, "not found")
        if authenticator.access.local:
            _refuse_other_names(request)
        _refuse_other_sites(request)
        if request.endpoint in HEALTH + _BEFORE_LOGIN or request.path in _ASSETS_BEFORE_LOGIN:
            return None
        try:
            g.user = authenticator.identify(request)
        except HttpError as error:
            if error.status == 401 and _is_navigation(request):
                return _build_way_to_login(request)
            raise
        _refuse_lower_roles(authenticator.store.audit, request)
        return None

    @server.after_request
    def add_headers(response: Response) -> Response:
        response.headers["Content-Security-Policy"] = policy
        response.headers["X-Content-Type-Options"] = "nosniff"
        if "known_client" in g:
            response.set_cookie(
                KNOWN_CLIENT, g.known_client, _KNOWN_S,
                secure=is_encrypted(request), httponly=True, samesite="Strict",
            )  # fmt: skip
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


def is_encrypted(incoming: Request) -> bool:
    """Whether the browser uses https. Behind a proxy that ends TLS, only its own word shows it."""
    return incoming.is_secure or incoming.headers.get("Origin", "").startswith("https://")


def _parse_host(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def _is_navigation(incoming: Request) -> bool:
    return incoming.method == "GET" and "text/html" in incoming.headers.get("Accept", "")


def _build_way_to_login(incoming: Request) -> Response:
    """A page that opens the login page, from where the browser also sends the session of who has
    followed a link of another site."""
    page = f"{LOGIN_PATH}?next={quote(incoming.full_path.rstrip('?'), safe='')}"
    refresh = f'<meta http-equiv="refresh" content="0; url={page}">'
    link = f'<a href="{page}">Log in</a>'
    body = f'<!DOCTYPE html><html lang="en"><title>stepsplit</title>{refresh}<p>{link}</p></html>'
    # Not the Basic scheme, for which a browser would ask in a window of its own.
    headers = {"WWW-Authenticate": 'Bearer realm="stepsplit"', "Cache-Control": "no-store"}
    return Response(body, 401, headers)


# Authorization: which role a request needs. Writes that are not listed need an admin.

_ADMIN_READS = ("api.list_audit", "api.list_tokens")

_UPLOADS = (
    "api.create", "api.check", "api.put", "api.patch", "api.remove", "api.finish", "api.edit",
    "api.analyze", "api.attach_job", "api.read_job_form", "api.add_watch_batch", "api.act_on_alert",
)  # fmt: skip

CALLBACKS = "/_dash-update-component"
"""The callbacks of the pages only read."""


def find_needed_role(endpoint: str | None, method: str) -> Role:
    """The role that a request to the endpoint needs."""
    if endpoint in _ADMIN_READS:
        return Role.ADMIN
    # What no route answers is refused later, with a better reason.
    if method in (*_SAFE_METHODS, "OPTIONS") or endpoint in (None, CALLBACKS, "api.unknown"):
        return Role.VIEWER
    return Role.UPLOADER if endpoint in _UPLOADS else Role.ADMIN


def _refuse_lower_roles(audit: AuditLog, incoming: Request) -> None:
    needed, role = find_needed_role(incoming.endpoint, incoming.method), current_user().role
    if role < needed:
        reason = f"this needs the role {needed.label}; yours is {role.label}"
        record_action(audit, "refused", f"{incoming.method} {incoming.path}", reason)
        raise HttpError(403, reason)


UNKNOWN = User("unknown", Role.VIEWER, authenticated=False)


def current_user() -> User:
    """Who sends the request that is being answered."""
    user: User = g.get("user", UNKNOWN)
    return user


def record_action(audit: AuditLog, action: str, target: str = "", outcome: str = OK) -> None:
    """Adds an action of the current user to the audit log."""
    user = current_user()
    role = "" if user is UNKNOWN else user.role.label
    audit.record(action, target, user_name=user.name, role=role, address=g.address, outcome=outcome)


# Authentication by session, password, token or trusted proxy.

SESSION = "stepsplit-session"
"""Cookie with the id of a session."""

_CHALLENGE = {"WWW-Authenticate": 'Basic realm="stepsplit", charset="UTF-8"'}


@dataclass(frozen=True, slots=True)
class Authenticator:
    """Authentication of all requests except health checks."""

    access: Access
    store: Store
    # One unproven password at a time, so that no others pass while a wrong one is recorded.
    _guessing: threading.Lock = field(default_factory=threading.Lock)

    def identify(self, request: Request) -> User:
        """Who sends the request. Raises HttpError if it is not authorized."""
        known = self.find_user(request)
        if known is not None:
            return known
        secret = _read_secret(request)
        if secret is None:
            reason = "this server requires a password or a token"
            raise HttpError(401, reason, _choose_challenge(request))
        return self.check_secret(request, secret)

    def find_user(self, request: Request) -> User | None:
        """The user by the access mode, the proxy or the session; None if they name none."""
        if not self.access.guarded:
            name = "local" if self.access.local else "anyone"
            return User(name, Role.ADMIN, authenticated=False)
        named = self._find_proxy_user(request)
        session_id = request.cookies.get(SESSION)
        if named is not None or not session_id:
            return named
        return self.store.sessions.find(session_id, self.access.passwords)

    def check_secret(self, request: Request, secret: str) -> User:
        """The user of a token or password. Raises HttpError if it is wrong, or too early."""
        # A token is too long to be guessed, so that a valid one need not wait.
        token = self.store.tokens.verify(secret)
        if token is not None:
            return User(f"token {token.name}", token.role, token.id)
        guessed = list_guessed(self.find_client_address(request))
        if self._is_known_client(request):
            return self._check_password(secret, guessed)
        with self._guessing:
            self._refuse_early_guess(guessed)
            user = self._check_password(secret, guessed)
        g.known_client = self._build_known_client()
        return user

    def _refuse_early_guess(self, guessed: Sequence[Guessed]) -> None:
        wait_s = self.store.login_failures.compute_wait_s(guessed)
        if wait_s > 0:
            seconds = int(wait_s) + 1
            reason = f"too many wrong passwords; wait {seconds} s"
            raise HttpError(429, reason, {"Retry-After": str(seconds)})

    def _check_password(self, secret: str, guessed: Sequence[Guessed]) -> User:
        entered = secret.encode()
        matched = [
            role for role, password in self.access.passwords.items()
            if hmac.compare_digest(entered, password.encode())
        ]  # fmt: skip
        if not matched:
            self.store.login_failures.record(guessed)
            record_action(self.store.audit, "login", outcome="wrong password or token")
            raise HttpError(401, "wrong password or token", _choose_challenge(request))
        return User("password", matched[0])

    def _build_known_client(self) -> str:
        until_s = str(int(time.time()) + _KNOWN_S)
        return f"{until_s}.{self._sign(until_s)}"

    def _is_known_client(self, request: Request) -> bool:
        until_s, _, signature = request.cookies.get(KNOWN_CLIENT, "").partition(".")
        is_signed = hmac.compare_digest(signature.encode(), self._sign(until_s).encode())
        return is_signed and int(until_s) > time.time()

    def _sign(self, text: str) -> str:
        return hmac.new(self.access.cookie_key, text.encode(), "sha256").hexdigest()

    def _find_proxy_user(self, request: Request) -> User | None:
        proxy = self.access.proxy
        name = "" if proxy is None else request.headers.get(proxy.header, "").strip()
        if proxy is None or not name or not proxy.is_at(request.remote_addr or ""):
            return None
        return User(f"proxy user {name}", proxy.find_role(request.headers))

    def find_client_address(self, request: Request) -> str:
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


def _choose_challenge(request: Request) -> Mapping[str, str]:
    """The challenge for programs; a browser would ask for it in a window, over an open page."""
    return {} if "Referer" in request.headers else _CHALLENGE


# Access modes: local requests only, with a secret, through a trusted proxy, or open.

LOOPBACK = ("127.0.0.1", "localhost", "::1")


_ROLES = ", ".join(ROLES[:-1]) + f" or {ROLES[-1]}"


@dataclass(frozen=True, slots=True)
class TrustedProxy:
    """A proxy that authenticates users and names them in a header; trusted only if it connects
    from one of these networks. All users have the role, or that which role_header names."""

    header: str
    networks: tuple[IPv4Network | IPv6Network, ...]
    role: Role = Role.ADMIN
    role_header: str | None = None

    def find_role(self, headers: Headers) -> Role:
        """The role of who sends these headers. Raises HttpError if they name none."""
        if self.role_header is None:
            return self.role
        role = Role.parse(headers.get(self.role_header, "").strip())
        if role is None:
            raise HttpError(403, f"the proxy names no role in {self.role_header}; use {_ROLES}")
        return role

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

    local: only requests to this machine's own names. guarded: only with a password, a token of
    the store, or through the trusted proxy. password: of the role admin.
    """

    local: bool = True
    guarded: bool = False
    password: str | None = field(default=None, repr=False)
    uploader_password: str | None = field(default=None, repr=False)
    viewer_password: str | None = field(default=None, repr=False)
    # Made before the server forks: all of its processes know each other's clients.
    cookie_key: bytes = field(
        default_factory=partial(secrets.token_bytes, 32), repr=False, compare=False
    )
    proxy: TrustedProxy | None = None

    @property
    def passwords(self) -> dict[Role, str]:
        """The passwords that there are, by role."""
        given = {
            Role.ADMIN: self.password,
            Role.UPLOADER: self.uploader_password,
            Role.VIEWER: self.viewer_password,
        }
        return {role: password for role, password in given.items() if password is not None}


def choose_access(
    host: str,
    *,
    password: str | None = None,
    uploader_password: str | None = None,
    viewer_password: str | None = None,
    proxy: TrustedProxy | None = None,
    has_tokens: bool = False,
    open_to_anyone: bool = False,
) -> Access:
    """The access mode of a server that listens on host. password: of the role admin. Raises
    UsageError if it is reachable from other machines and no access control is set, or if two roles
    have the same password."""
    local = host in LOOPBACK or host.startswith("unix:")
    if open_to_anyone:
        return Access(local=False)
    guarded = Access(
        local=False, guarded=True, password=password, uploader_password=uploader_password,
        viewer_password=viewer_password, proxy=proxy,
    )  # fmt: skip
    if len(set(guarded.passwords.values())) < len(guarded.passwords):
        raise UsageError("two roles have the same password; choose another one for each role")
    if guarded.passwords or proxy is not None:
        return guarded
    if local:
        return Access()
    if has_tokens:
        return Access(local=False, guarded=True)
    ways = "--password-file, a token (stepsplit token create) or --trusted-proxy-header"
    raise UsageError(f"{host} is reachable by others: restrict it with {ways}, or --open-to-anyone")


def parse_trusted_proxy(
    header: str | None,
    addresses: Sequence[str],
    role: Role | None = None,
    role_header: str | None = None,
) -> TrustedProxy | None:
    """The trusted proxy from the options; None without them. Raises UsageError."""
    if role is not None and role_header is not None:
        raise UsageError("choose --trusted-proxy-role or --trusted-proxy-role-header")
    if header is None and not addresses and role is None and role_header is None:
        return None
    if header is None or not addresses:
        raise UsageError("--trusted-proxy-header and --trusted-proxy must be used together")
    try:
        networks = tuple(ip_network(address, strict=False) for address in addresses)
    except ValueError as error:
        raise UsageError(f"--trusted-proxy: {error}; write 10.0.0.5 or 10.0.0.0/24") from None
    return TrustedProxy(header, networks, role or Role.ADMIN, role_header)


# Logging in and out: the login page, and the cookie of a session.

LOGOUT_PATH = "/logout"

_MAX_NEXT = 2_000

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Log in - stepsplit</title>
<link rel="icon" type="image/svg+xml" href="/assets/favicon.svg">
<script src="/assets/theme.js"></script>
<link rel="stylesheet" href="/assets/style.css">
</head>
<body>
<header class="top"><div class="inner">
<a class="brand" href="/">stepsplit</a>
<span class="tagline">where every training step went</span>
<button id="theme" type="button" class="theme">light / dark</button>
</div></header>
<main>
<form class="card login" method="post" action="{{ action }}">
<h1>Log in</h1>
<label for="password">Password or token</label>
<input id="password" name="password" type="password" autocomplete="current-password" required
 autofocus{% if problem %} aria-describedby="problem"{% endif %}>
<input type="hidden" name="next" value="{{ next }}">
{% if problem %}<p id="problem" class="problem" role="alert">{{ problem }}</p>{% endif %}
<button type="submit">Log in</button>
</form>
</main>
</body>
</html>
"""


def build_login_routes(authenticator: Authenticator) -> Blueprint:
    """The routes of the login page, and of logging out."""
    routes, pages = Blueprint("login", __name__), LoginPages(authenticator)
    routes.add_url_rule(LOGIN_PATH, "show", pages.show)
    routes.add_url_rule(LOGIN_PATH, "enter", pages.enter, methods=["POST"])
    routes.add_url_rule(LOGOUT_PATH, "leave", pages.leave, methods=["POST"])
    return routes


@dataclass(frozen=True, slots=True)
class LoginPages:
    """The request handlers."""

    authenticator: Authenticator

    def show(self) -> Response:
        """GET ?next=PATH: the form; who is logged in goes on to the path."""
        place = parse_next(request.args.get("next", ""))
        if self.authenticator.find_user(request) is not None:
            return _go_to(place)
        return _build_form(place)

    def enter(self) -> Response:
        """POST password, next: begins a session."""
        request.max_content_length = JSON_BYTES
        place = parse_next(request.form.get("next", ""))
        secret, store = request.form.get("password", ""), self.authenticator.store
        if not self.authenticator.access.guarded:
            return _go_to(place)
        if not secret:
            return _build_form(place, "enter the password or a token", 400)
        try:
            user = self.authenticator.check_secret(request, secret)
        except HttpError as error:
            return _build_form(place, str(error), error.status, error.headers.get("Retry-After"))
        self._end_session()
        session_id = store.sessions.create(secret, user.token_id)
        g.user = store.sessions.find(session_id, self.authenticator.access.passwords) or user
        record_action(store.audit, "login")
        response = _go_to(place)
        response.set_cookie(
            SESSION, session_id, LIFETIME_S,
            secure=is_encrypted(request), httponly=True, samesite="Strict",
        )  # fmt: skip
        return response

    def leave(self) -> Response:
        """POST: ends the session."""
        self._end_session()
        response = _go_to(LOGIN_PATH)
        response.delete_cookie(
            SESSION, secure=is_encrypted(request), httponly=True, samesite="Strict"
        )
        return response

    def _end_session(self) -> None:
        """Ends the session that the browser has, if any."""
        session_id, store = request.cookies.get(SESSION), self.authenticator.store
        user = self.authenticator.find_user(request) if session_id else None
        if session_id and user is not None and store.sessions.end(session_id):
            g.user = user
            record_action(store.audit, "logout")


def parse_next(text: str) -> str:
    """The path and query on this server to show after the login; / if it is none."""
    is_own = text.startswith("/") and not text.startswith("//") and "\\" not in text
    return text if is_own and text.isprintable() and len(text) <= _MAX_NEXT else "/"


def _go_to(place: str) -> Response:
    headers = {"Location": iri_to_uri(place), "Cache-Control": "no-store"}
    return Response("", 303, headers)


def _build_form(
    place: str, problem: str = "", status: int = 200, wait_s: str | None = None
) -> Response:
    page = render_template_string(_PAGE, action=LOGIN_PATH, next=place, problem=problem)
    response = Response(page, status, {"Cache-Control": "no-store"})
    if wait_s is not None:
        response.headers["Retry-After"] = wait_s
    return response
