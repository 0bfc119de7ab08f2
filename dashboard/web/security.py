"""What keeps other sites out: only this machine's names, no writes from elsewhere, a strict CSP."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from flask import Flask, Response, abort, request

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_READING = ("GET", "HEAD")


def protect(server: Flask, script_hashes: Sequence[str]) -> None:
    """Guards every request, and puts the security headers on every answer."""
    policy = content_policy(script_hashes)
    server.before_request(_refuse_strangers)

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


def _refuse_strangers() -> None:
    # A site whose name was pointed at 127.0.0.1 still sends its own name as Host.
    if _host(f"//{request.host}") not in LOOPBACK:
        abort(403, "this server answers to localhost only")
    if request.method in _READING:
        return
    origin = request.headers.get("Origin")
    if origin is not None and origin != f"{request.scheme}://{request.host}":
        abort(403, "writes from another site are refused")
    if request.headers.get("Sec-Fetch-Site", "same-origin") not in ("same-origin", "none"):
        abort(403, "writes from another site are refused")


def _host(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None
