"""plotly.js with the traces of flat axes, which all charts are: a third of what plotly brings.

scripts/plotly-cartesian.min.js.gz is the file of the npm package plotly.js-cartesian-dist-min,
version 4.1.1, packed; CONTRIBUTING.md says how it is renewed, and
tests/dashboard/test_plotly_script.py pins it.
"""

from __future__ import annotations

import gzip
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flask import Flask, Response

PLOTLY_PATH = "/_dash-component-suites/plotly/package_data/plotly.min.js"
"""Where Dash's charts ask for it."""


def read_plotly_script() -> str:
    """The script as text, to be in a page."""
    return gzip.decompress(_SCRIPT.read_bytes()).decode()


def add_plotly_route(server: Flask) -> None:
    """Serves the script in place of the whole plotly.js; unpacked and hashed once, and not for each
    request."""

    # The HTML export has the script without a server.
    from flask import Response, request

    @server.get(PLOTLY_PATH)
    def send_plotly() -> Response:
        is_packed = request.accept_encodings.quality("gzip") > 0
        body, digest = _read_body(is_packed)
        response = Response(body, mimetype="text/javascript")
        if is_packed:
            response.content_encoding = "gzip"
        response.vary.add("Accept-Encoding")
        response.cache_control.no_cache = True
        response.set_etag(digest)
        response.make_conditional(request)
        return response


@cache
def _read_body(is_packed: bool) -> tuple[bytes, str]:
    """The content of an answer and its digest."""
    body = _SCRIPT.read_bytes()
    if not is_packed:
        body = gzip.decompress(body)
    return body, sha256(body).hexdigest()


_SCRIPT = files("stepsplit.dashboard.web") / "scripts" / "plotly-cartesian.min.js.gz"
