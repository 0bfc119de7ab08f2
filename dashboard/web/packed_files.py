"""Scripts and styles that are packed and hashed once in each process, and not for each request."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from functools import cache, partial
from hashlib import sha256
from importlib.resources import files

from flask import Flask, Response, request

ASSETS = files("stepsplit.dashboard.web") / "assets"

FIRST_SCRIPT = "theme.js"
"""Runs before the page is drawn, so that it is not in the script of all others."""


def add_packed_route(
    server: Flask, path: str, mimetype: str, read_packed: Callable[[], bytes]
) -> None:
    """Serves a text at the path.

    read_packed: returns it packed by gzip; called at the first request of each kind.
    """

    @cache
    def read_body(is_packed: bool) -> tuple[bytes, str]:
        body = read_packed() if is_packed else gzip.decompress(read_packed())
        return body, sha256(body).hexdigest()

    def send() -> Response:
        is_packed = request.accept_encodings.quality("gzip") > 0
        body, digest = read_body(is_packed)
        response = Response(body, mimetype=mimetype)
        if is_packed:
            response.content_encoding = "gzip"
        response.vary.add("Accept-Encoding")
        response.cache_control.no_cache = True
        response.set_etag(digest)
        response.make_conditional(request)
        return response

    server.add_url_rule(path, endpoint=path, view_func=send)


def add_assets(server: Flask) -> tuple[str, str]:
    """Serves all scripts of assets/ as one, in the order of their names, and the style.

    Seventeen requests for the scripts would wait for each other: a browser sends six at a time.

    Returns the addresses of script and style, which name their version.
    """
    scripts = sorted(
        one.name
        for one in ASSETS.iterdir()
        if one.name.endswith(".js") and one.name != FIRST_SCRIPT
    )
    addresses = []
    for name, mimetype, parts in (
        ("stepsplit.js", "text/javascript", scripts),
        ("style.css", "text/css", ["style.css"]),
    ):
        # Each script is a statement of its own, whatever the one before ends with.
        text = ";\n".join((ASSETS / one).read_text(encoding="utf-8") for one in parts)
        content = text.encode()
        add_packed_route(server, f"/assets/{name}", mimetype, partial(gzip.compress, content))
        addresses.append(f"/assets/{name}?m={sha256(content).hexdigest()[:16]}")
    script, style = addresses
    return script, style
