"""What keeps other sites out: only this machine's names, no writes from elsewhere, a strict CSP."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from flask import Flask, Request, Response, request

from stepsplit.dashboard.web.access import LOOPBACK
from stepsplit.dashboard.web.gate import Gate
from stepsplit.dashboard.web.refused import Refused

HEALTH = ("health.healthz", "health.readyz")
_READING = ("GET", "HEAD")


def protect(server: Flask, gate: Gate, script_hashes: Sequence[str]) -> None:
    """Guards every request, and puts the security headers on every answer."""
    policy = content_policy(script_hashes)

    @server.before_request
    def guard() -> None:
        if gate.access.local:
            _refuse_other_names(request)
        _refuse_other_sites(request)
        if request.endpoint not in HEALTH:
            gate.check(request)

    @server.after_request
    def harden(response: Response) -> Response:
        response.headers["Content-Security-Policy"] = policy
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Referrer-Policy"] = "same-origin"
        response.headers["Cross-Origin-Resource-Policy"] = "same-origin"
        return response


def content_policy(script_hashes: Sequence[str]) -> str:
    """The Content-Security-Policy: everything from this server, and dash's one inline script."""
    scripts = " ".join(["'self'", *(f"{digest}" for digest in script_hashes)])
    return (
        f"default-src 'self'; script-src {scripts}; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data: blob:; object-src 'none'; base-uri 'none'; form-action 'self'; "
        "frame-ancestors 'none'"
    )


def _refuse_other_names(asked: Request) -> None:
    # A site whose name was pointed at 127.0.0.1 still sends its own name as Host.
    if _host(f"//{asked.host}") not in LOOPBACK:
        raise Refused(403, "this server answers to localhost only")


def _refuse_other_sites(asked: Request) -> None:
    if asked.method in _READING:
        return
    # Behind a proxy the page came by https, which the proxy may not tell.
    own = (f"{asked.scheme}://{asked.host}", f"https://{asked.host}")
    origin = asked.headers.get("Origin")
    if origin is not None and origin not in own:
        raise Refused(403, "writes from another site are refused")
    if asked.headers.get("Sec-Fetch-Site", "same-origin") not in ("same-origin", "none"):
        raise Refused(403, "writes from another site are refused")


def _host(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None
