"""Access control: logging in and out, who sends a request and what it may do, security headers."""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address, ip_network
from urllib.parse import quote, urlencode

from flask import Blueprint, Flask, Response, g, render_template_string, request
from itsdangerous import BadSignature, TimestampSigner
from werkzeug.urls import iri_to_uri

from stepsplit.dashboard.store.audit import OK, AuditLog
from stepsplit.dashboard.store.logins import LIFETIME_S, Guessed, Role, User
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.http_error import HttpError
from stepsplit.dashboard.web.options import Access, is_same_secret
from stepsplit.dashboard.web.uploads import JSON_BYTES

# Every request: where it comes from, who sends it, and which role it needs.

HEALTH = ("health.healthz", "health.readyz")

LOGIN_PATH, LOGOUT_PATH = "/login", "/logout"

_OPEN_ENDPOINTS = (*HEALTH, "login.show", "login.enter", "login.leave")

_OPEN_PATHS = ("/assets/style.css", "/assets/theme.js", "/assets/favicon.svg")

_SAFE_METHODS = ("GET", "HEAD")

_LOCAL_HOST = re.compile(r"(?:127\.0\.0\.1|localhost|\[::1\])(?::\d+)?", re.IGNORECASE)


def protect(server: Flask, authenticator: Authenticator, script_hashes: Sequence[str]) -> None:
    """Checks every request, and adds security headers to every response."""
    access, audit = authenticator.access, authenticator.store.audit
    headers = {
        "Content-Security-Policy": build_content_policy(script_hashes),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
    }

    @server.before_request
    def check_request() -> Response | None:
        # By which guesses of passwords are counted; behind the proxy, what it says.
        g.address, proxy = request.remote_addr or "", access.proxy
        if proxy is not None and proxy.is_sender(request):
            forwarded = request.headers.get("X-Forwarded-For", g.address)
            g.address = forwarded.rpartition(",")[2].strip()
        if "\0" in request.path:
            # Names nothing, and PostgreSQL takes no such text.
            raise HttpError(404, "not found")
        # DNS rebinding: a site whose name resolves to 127.0.0.1 still sends its own name as Host.
        if access.local and not _LOCAL_HOST.fullmatch(request.host):
            raise HttpError(403, "this server only accepts requests to localhost")
        # Behind a proxy the page may have been served by https, which the request does not show.
        own_sites = (None, f"{request.scheme}://{request.host}", f"https://{request.host}")
        fetched = request.headers.get("Sec-Fetch-Site", "same-origin")
        is_own = request.headers.get("Origin") in own_sites and fetched in ("same-origin", "none")
        if request.method not in _SAFE_METHODS and not is_own:
            raise HttpError(403, "writes from another site are refused")
        if request.endpoint in _OPEN_ENDPOINTS or request.path in _OPEN_PATHS:
            return None
        try:
            user = g.user = authenticator.identify()
        except HttpError as error:
            is_page = request.method == "GET" and "text/html" in request.headers.get("Accept", "")
            if error.status == 401 and is_page:
                # A page that opens the login page: from there the browser also sends the session of
                # who has followed a link of another site.
                page = f"{LOGIN_PATH}?next={quote(request.full_path.rstrip('?'), safe='')}"
                body = (
                    '<!DOCTYPE html><html lang="en"><title>stepsplit</title>'
                    f'<meta http-equiv="refresh" content="0; url={page}">'
                    f'<p><a href="{page}">Log in</a></p></html>'
                )
                # Not the Basic scheme, for which a browser would ask in a window of its own.
                return Response(body, 401, {"WWW-Authenticate": 'Bearer realm="stepsplit"'})
            raise
        needed = find_needed_role(request.endpoint, request.method)
        if user.role < needed:
            reason = f"this needs the role {needed.label}; yours is {user.role.label}"
            record_action(audit, "refused", f"{request.method} {request.path}", reason)
            raise HttpError(403, reason)
        return None

    @server.after_request
    def add_headers(response: Response) -> Response:
        response.headers.update(headers)
        if "known_client" in g:
            _set_cookie(response, KNOWN_CLIENT, g.known_client, _KNOWN_S)
        return response


def build_content_policy(script_hashes: Sequence[str]) -> str:
    """The Content-Security-Policy: this server only, plus Dash's inline script by its hash."""
    scripts = " ".join(["'self'", *script_hashes])
    return (
        f"default-src 'self'; script-src {scripts}; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data: blob:; object-src 'none'; base-uri 'none'; form-action 'self'; "
        "frame-ancestors 'none'"
    )


_ADMIN_READS = ("api.list_audit", "api.list_tokens")

_UPLOADS = (
    "api.create", "api.check", "api.put", "api.patch", "api.remove", "api.finish", "api.edit",
    "api.analyze", "api.attach_job", "api.read_job_form", "api.add_watch_batch", "api.act_on_alert",
)  # fmt: skip

CALLBACKS = "/_dash-update-component"

_READS = (CALLBACKS, "agents.answer")
"""The callbacks of the pages and the tools of agents are asked by POST, and only read."""


def find_needed_role(endpoint: str | None, method: str) -> Role:
    """The role that a request to the endpoint needs. Writes that are not listed need an admin."""
    if endpoint in _ADMIN_READS:
        return Role.ADMIN
    # What no route answers is refused later, with a better reason.
    if method in (*_SAFE_METHODS, "OPTIONS") or endpoint in (None, *_READS, "api.unknown"):
        return Role.VIEWER
    return Role.UPLOADER if endpoint in _UPLOADS else Role.ADMIN


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

KNOWN_CLIENT = "stepsplit-known-client"
"""Cookie of a client that has logged in with the password of a role. It replaces no password: while
guesses wait, because others guess, it may still enter that password."""

_KNOWN_S = 30 * 86_400

FREE_FAILURES, MAX_WAIT_S = 5, 900
"""Of one address, or one known client: wrong passwords without a wait, and the longest wait."""

FREE_FAILURES_OF_ACCOUNT, MAX_WAIT_OF_ACCOUNT_S = 50, 60
"""Of all addresses together: more and shorter, because everyone who is new has to wait."""


def list_guessed(address: str) -> tuple[Guessed, ...]:
    """What a wrong password from the address counts for: the address, or the /64 of an IPv6
    address, all of which one host may use, and the account, which is every password's."""
    try:
        parsed = ip_address(address)
        place = str(getattr(parsed, "ipv4_mapped", None) or parsed)
        if isinstance(parsed, IPv6Address) and not parsed.ipv4_mapped:
            place = str(ip_network((parsed.packed[:8] + bytes(8), 64)))
    except ValueError:
        place = "unknown"
    return (
        Guessed(f"address {place}", FREE_FAILURES, MAX_WAIT_S),
        Guessed("account password", FREE_FAILURES_OF_ACCOUNT, MAX_WAIT_OF_ACCOUNT_S),
    )


@dataclass(frozen=True, slots=True)
class Authenticator:
    """Authentication of all requests except health checks."""

    access: Access
    store: Store
    # One password at a time, so that no others pass while a wrong one is recorded.
    _guessing: threading.Lock = field(default_factory=threading.Lock)

    def identify(self) -> User:
        """Who sends the request. Raises HttpError if it is not authorized."""
        user = self.find_user()
        if user is not None:
            return user
        sent = None
        with suppress(ValueError):
            # Of werkzeug, for the Basic scheme with characters that are not ASCII.
            sent = request.authorization
        # A token, or the password of Basic authentication with any user name.
        secret = None if sent is None else sent.token if sent.type == "bearer" else sent.password
        if secret is None:
            raise _refuse("this server requires a password or a token")
        return self.check_secret(secret)

    def find_user(self) -> User | None:
        """The user by the access mode, the proxy or the session; None if they name none."""
        if not self.access.guarded:
            name = "local" if self.access.local else "anyone"
            return User(name, Role.ADMIN, authenticated=False)
        proxy = self.access.proxy
        name = "" if proxy is None else request.headers.get(proxy.header, "").strip()
        if proxy is not None and name and proxy.is_sender(request):
            return User(f"proxy user {name}", proxy.find_role(request.headers))
        session_id = request.cookies.get(_name_cookie(SESSION))
        if not session_id:
            return None
        return self.store.sessions.find(session_id, self.access.passwords)

    def check_secret(self, secret: str) -> User:
        """The user of a token or password. Raises HttpError if it is wrong, or too early."""
        # A token is too long to be guessed, so that a valid one need not wait.
        token = self.store.tokens.verify(secret)
        if token is not None:
            return User(f"token {token.name}", token.role, token.id)
        passwords, failures = self.access.passwords, self.store.login_failures
        guessed, signer = list_guessed(g.address), TimestampSigner(self.access.cookie_key)
        known: Role | None = None
        own: tuple[Guessed, ...] = ()
        with suppress(BadSignature):
            signed = request.cookies.get(_name_cookie(KNOWN_CLIENT), "")
            client = signer.unsign(signed, max_age=_KNOWN_S).decode()
            known = Role.parse(client.partition("-")[0])
            own = (Guessed(f"client {client}", FREE_FAILURES, MAX_WAIT_S),)
        with self._guessing:
            wait_s = failures.compute_wait_s(guessed)
            if wait_s > 0 and known is not None:
                # Only the password that it has entered before: with the cookie of a viewer, that of
                # an admin is not to be guessed without waits.
                passwords = {role: one for role, one in passwords.items() if role is known}
                wait_s = failures.compute_wait_s(own)
            if wait_s > 0:
                seconds = int(wait_s) + 1
                reason = f"too many wrong passwords; wait {seconds} s"
                raise HttpError(429, reason, {"Retry-After": str(seconds)})
            matched = [role for role, one in passwords.items() if is_same_secret(secret, one)]
            if not matched:
                failures.record((*guessed, *own))
                record_action(self.store.audit, "login", outcome="wrong password or token")
                raise _refuse("wrong password or token")
        if known is not matched[0]:
            client = f"{matched[0].label}-{secrets.token_hex(8)}"
            g.known_client = signer.sign(client).decode()
        return User("password", matched[0])

    def end_session(self) -> None:
        """Ends the session that the browser has, if any."""
        session_id = request.cookies.get(_name_cookie(SESSION))
        user = self.find_user() if session_id else None
        if session_id and user is not None and self.store.sessions.end(session_id):
            g.user = user
            record_action(self.store.audit, "logout")


def _refuse(reason: str) -> HttpError:
    # The challenge is for programs; a browser would ask for it in a window, over an open page.
    challenge = {"WWW-Authenticate": 'Basic realm="stepsplit", charset="UTF-8"'}
    return HttpError(401, reason, {} if "Referer" in request.headers else challenge)


def _name_cookie(name: str) -> str:
    # Browsers keep one cookie of a name for all ports of a host: two dashboards would end each
    # other's sessions.
    port = request.host.rpartition(":")[2]
    return f"{name}-{port}" if port.isdecimal() else name


def _set_cookie(response: Response, name: str, value: str, max_age_s: int) -> None:
    """Sets the cookie, or deletes it after 0 s."""
    # Behind a proxy that ends TLS, only the browser's own word shows https.
    encrypted = request.is_secure or request.headers.get("Origin", "").startswith("https://")
    response.set_cookie(
        _name_cookie(name), value, max_age_s, secure=encrypted, httponly=True, samesite="Strict"
    )


# Logging in and out: the login page, and the cookie of a session.

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
{% if one_time %}<p>The address that the dashboard printed works once. To make a token:
<code>stepsplit token create NAME --role admin</code></p>{% endif %}
</form>
</main>
</body>
</html>
"""


def build_login_routes(authenticator: Authenticator) -> Blueprint:
    """The routes of the login page, and of logging out."""
    access, store, routes = authenticator.access, authenticator.store, Blueprint("login", __name__)

    @routes.get(LOGIN_PATH)
    def show() -> Response:
        """?next=PATH: the form; who is logged in goes on to the path. ?token=TOKEN: the one-time
        address."""
        place, problem = parse_next(request.args.get("next", "")), ""
        # Not by HEAD, which what shows previews of links may send.
        if access.one_time and "token" in request.args and request.method == "GET":
            password = access.passwords[Role.ADMIN]
            session_id = store.sessions.redeem(request.args["token"], password)
            if session_id is not None:
                return begin_session(session_id, place)
            problem = "this address was used before, or the dashboard was started again"
        if authenticator.find_user() is not None:
            return _go_to(place)
        return build_form(place, problem, 401 if problem else 200)

    @routes.post(LOGIN_PATH)
    def enter() -> Response:
        """password, next: begins a session."""
        request.max_content_length = JSON_BYTES
        place = parse_next(request.form.get("next", ""))
        secret = request.form.get("password", "")
        if not access.guarded:
            return _go_to(place)
        if not secret:
            return build_form(place, "enter the password or a token", 400)
        try:
            user = authenticator.check_secret(secret)
        except HttpError as error:
            form = build_form(place, str(error), error.status)
            form.headers.extend({k: v for k, v in error.headers.items() if k == "Retry-After"})
            return form
        return begin_session(store.sessions.create(secret, user.token_id), place)

    @routes.post(LOGOUT_PATH)
    def leave() -> Response:
        """Ends the session."""
        authenticator.end_session()
        response = _go_to(LOGIN_PATH)
        _set_cookie(response, SESSION, "", 0)
        return response

    def begin_session(session_id: str, place: str) -> Response:
        authenticator.end_session()
        g.user = store.sessions.find(session_id, access.passwords) or UNKNOWN
        record_action(store.audit, "login")
        response = _go_to(place)
        _set_cookie(response, SESSION, session_id, LIFETIME_S)
        return response

    def build_form(place: str, problem: str, status: int) -> Response:
        values = {"next": place, "problem": problem, "one_time": access.one_time}
        page = render_template_string(_PAGE, action=LOGIN_PATH, **values)
        return Response(page, status)

    return routes


def parse_next(text: str) -> str:
    """The path and query on this server to show after the login; / if it is none."""
    is_own = text.startswith("/") and not text.startswith("//") and "\\" not in text
    return text if is_own and text.isprintable() and len(text) <= 2_000 else "/"


def _go_to(place: str) -> Response:
    return Response("", 303, {"Location": iri_to_uri(place)})


def find_first_place(store: Store, access: Access, place: str = "") -> str:
    """What follows the server's address in the address that is printed: the place, or the login
    that leads there with a token that works once."""
    if not access.one_time:
        return place
    token = store.sessions.create_one_time(access.passwords[Role.ADMIN])
    return f"{LOGIN_PATH}?" + urlencode({"token": token} | ({"next": place} if place else {}))
