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

_VERSION, _KEPT = "m", "public, max-age=31536000, immutable"


def add_packed_route(
    server: Flask,
    path: str,
    mimetype: str,
    read_packed: Callable[[], bytes],
    read_plain: Callable[[], bytes],
    version: str = "",
) -> None:
    """Serves a text at the path.

    read_packed, read_plain: return it with and without gzip; each is called at the first request
        of its kind.
    version: browsers keep what they got at the address with this version, "" for none.
    """

    @cache
    def read_body(is_packed: bool) -> tuple[bytes, str]:
        body = read_packed() if is_packed else read_plain()
        return body, sha256(body).hexdigest()

    def send() -> Response:
        is_packed = request.accept_encodings.quality("gzip") > 0
        body, digest = read_body(is_packed)
        response = Response(body, mimetype=mimetype)
        if is_packed:
            response.content_encoding = "gzip"
        response.vary.add("Accept-Encoding")
        # At the address of another version, as of a page that is open since before an upgrade,
        # the text of this one is no reason to keep it.
        is_kept = bool(version) and request.args.get(_VERSION) == version
        response.headers["Cache-Control"] = _KEPT if is_kept else "no-cache"
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
        version = sha256(content).hexdigest()[:16]
        # With the time of packing in it, each process would have another ETag.
        pack = partial(gzip.compress, content, mtime=0)
        add_packed_route(
            server, f"/assets/{name}", mimetype, pack, partial(bytes, content), version
        )
        addresses.append(f"/assets/{name}?{_VERSION}={version}")
    script, style = addresses
    return script, style
