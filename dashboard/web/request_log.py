"""Every request is counted, and logged where somebody wants lines."""

from __future__ import annotations

import logging
import time

from flask import Flask, Response, g, request

from stepsplit.dashboard.web.metrics import Answered, count_request

_LOG = logging.getLogger("stepsplit.requests")


def watch(server: Flask) -> None:
    """Watches all requests of the server. To be called first, so that refused ones count too."""

    @server.before_request
    def begin() -> None:
        g.begun = time.monotonic()

    @server.after_request
    def end(response: Response) -> Response:
        seconds = time.monotonic() - g.get("begun", time.monotonic())
        rule = request.url_rule
        route = None if rule is None else rule.rule
        size = request.content_length or 0
        done = Answered(route, request.method, response.status_code, seconds, size)
        count_request(done)
        _log(done)
        return response


def _log(done: Answered) -> None:
    # The path alone: a query or a header might tell what nobody should read in a log.
    fields = {
        "method": done.method,
        "path": request.path,
        "status": done.status,
        "ms": round(done.seconds * 1e3, 1),
        "bytes": done.body_bytes,
        "address": request.remote_addr,
    }
    _LOG.info("request", extra={"fields": fields})
