"""The Flask server: the API, health, access and pages; its log of requests."""

from __future__ import annotations

import logging
import time

from flask import Flask, Response, g, request
from flask_compress import Compress
from sqlalchemy.exc import SQLAlchemyError
from werkzeug.exceptions import HTTPException

from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.api import (
    Api,
    RequestRecord,
    build_api_routes,
    build_health_routes,
    count_request,
)
from stepsplit.dashboard.web.app import add_pages
from stepsplit.dashboard.web.auth import Access, Authenticator, build_login_routes, protect
from stepsplit.dashboard.web.uploads import (
    HttpError,
    Limits,
    build_error_response,
    handle_database_error,
)

# The Flask server: the API, health, access control and the pages.

_BODY_BYTES = 4 << 20
"""Largest request body, except for uploaded files."""


def create_server(
    store: Store, access: Access | None = None, limits: Limits | None = None
) -> Flask:
    """The dashboard on the store; by default only for requests from this machine."""
    server = Flask(__name__, static_folder=None)
    server.url_map.merge_slashes = False
    server.config["MAX_CONTENT_LENGTH"] = _BODY_BYTES
    log_requests(server)
    server.register_blueprint(build_api_routes(Api(store, limits or Limits())))
    server.register_blueprint(build_health_routes(store))
    server.register_error_handler(HttpError, build_error_response)
    server.register_error_handler(SQLAlchemyError, handle_database_error)
    server.register_error_handler(HTTPException, _convert_error)
    authenticator = Authenticator(access or Access(), store)
    server.register_blueprint(build_login_routes(authenticator))
    _compress_pages(server)
    _keep_private(server)
    # The pages come last, because they catch all remaining routes.
    script_hashes = add_pages(server, store)
    _render_once(server)
    protect(server, authenticator, script_hashes)
    return server


def _compress_pages(server: Flask) -> None:
    """Compresses the pages with their scripts and data, that of the timeline included; the API's
    other answers stay as they are."""
    server.config["COMPRESS_REGISTER"] = False
    # Files of assets/ are small, and would stay open when a client has them already.
    server.config["COMPRESS_STREAMS"] = False
    compress = Compress(server)

    @server.after_request
    def compress_page(response: Response) -> Response:
        of_page = not request.path.startswith("/api/") or request.blueprint == "timeline"
        whole = of_page and response.status_code == 200
        return compress.after_request(response) if whole else response


_PUBLIC = ("/assets/", "/_dash-component-suites/")
"""Scripts and styles, which are the same for everyone."""


def _keep_private(server: Flask) -> None:
    """No cache keeps pages and data: not that of a proxy, nor that of a browser on a shared
    machine."""

    @server.after_request
    def forbid_caches(response: Response) -> Response:
        if not (request.path.startswith(_PUBLIC) and response.status_code < 400):
            response.headers["Cache-Control"] = "private, no-store"
        return response


def _render_once(server: Flask) -> None:
    """Renders the page once in this process: Dash serves only scripts of a page it has rendered,
    and requests may go to different processes."""
    with server.test_request_context():
        server.view_functions["/"]()


def _convert_error(error: HTTPException) -> Response | HTTPException:
    """Errors of the API as JSON, other errors unchanged."""
    if not request.path.startswith("/api/"):
        return error
    return build_error_response(HttpError(error.code or 500, error.description or error.name))


# Counting and logging of requests.

_LOG = logging.getLogger("stepsplit.requests")


def log_requests(server: Flask) -> None:
    """Counts and logs all requests. Call it first, so that refused requests are included."""

    @server.before_request
    def start_timer() -> None:
        g.begun = time.monotonic()

    @server.after_request
    def record_request(response: Response) -> Response:
        seconds = time.monotonic() - g.get("begun", time.monotonic())
        rule = request.url_rule
        route = None if rule is None else rule.rule
        size = request.content_length or 0
        done = RequestRecord(route, request.method, response.status_code, seconds, size)
        count_request(done)
        _log_request(done)
        return response


def _log_request(record: RequestRecord) -> None:
    # Only the path: queries and headers may contain secrets.
    fields = {
        "method": record.method,
        "path": request.path,
        "status": record.status,
        "ms": round(record.seconds * 1e3, 1),
        "bytes": record.body_bytes,
        "address": request.remote_addr,
    }
    _LOG.info("request", extra={"fields": fields})
