"""The Flask server: the API, health, access control and the pages."""

from __future__ import annotations

import logging

from flask import Flask, Response, request
from flask_compress import Compress
from sqlalchemy.exc import SQLAlchemyError
from werkzeug.exceptions import HTTPException

from stepsplit.analyzer.errors import StepsplitError
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.agent_routes import build_agent_routes
from stepsplit.dashboard.web.api import Api, build_api_routes
from stepsplit.dashboard.web.app import add_pages
from stepsplit.dashboard.web.auth import Authenticator, build_login_routes, protect
from stepsplit.dashboard.web.http_error import HttpError, build_error_response
from stepsplit.dashboard.web.metrics import build_health_routes, log_requests
from stepsplit.dashboard.web.openapi import refuse_unknown_parameters
from stepsplit.dashboard.web.options import Access
from stepsplit.dashboard.web.uploads import Limits

_LOG = logging.getLogger("stepsplit.requests")

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
    server.register_blueprint(build_agent_routes(store))
    server.register_blueprint(build_api_routes(Api(store, limits or Limits())))
    server.register_blueprint(build_health_routes(store))
    server.register_error_handler(HttpError, build_error_response)
    server.register_error_handler(SQLAlchemyError, _report_database_error)
    server.register_error_handler(StepsplitError, _report_unreadable_run)
    server.register_error_handler(HTTPException, _convert_error)
    authenticator = Authenticator(access or Access(), store)
    server.register_blueprint(build_login_routes(authenticator))
    _finish_answers(server)
    # The pages come last, because they catch all remaining routes.
    script_hashes = add_pages(server, store)
    # Dash serves only scripts of a page that this process has rendered, and requests may go to
    # different processes.
    with server.test_request_context():
        server.view_functions["/"]()
    protect(server, authenticator, script_hashes)
    server.before_request(refuse_unknown_parameters)
    return server


_PUBLIC = ("/assets/", "/_dash-component-suites/")
"""Scripts and styles, which are the same for everyone."""


def _finish_answers(server: Flask) -> None:
    """Compresses the pages with their scripts and data, that of the timeline included, while the
    API's other answers stay as they are; and forbids caches to keep pages and data: that of a
    proxy, and that of a browser on a shared machine."""
    server.config["COMPRESS_REGISTER"] = False
    # Files of assets/ are small, and would stay open when a client has them already.
    server.config["COMPRESS_STREAMS"] = False
    compress = Compress(server)

    @server.after_request
    def compress_page(response: Response) -> Response:
        of_page = not request.path.startswith("/api/") or request.blueprint == "timeline"
        whole = of_page and response.status_code == 200
        return compress.after_request(response) if whole else response

    @server.after_request
    def forbid_caches(response: Response) -> Response:
        if not (request.path.startswith(_PUBLIC) and response.status_code < 400):
            response.headers["Cache-Control"] = "private, no-store"
        return response


def _convert_error(error: HTTPException) -> Response | HTTPException:
    """Errors of the API as JSON, other errors unchanged."""
    if not request.path.startswith("/api/"):
        return error
    return build_error_response(HttpError(error.code or 500, error.description or error.name))


def _report_database_error(error: SQLAlchemyError) -> Response:
    _LOG.error("the database is unavailable: %s", str(error).splitlines()[0])
    reason = "the database is unavailable; try again"
    return build_error_response(HttpError(503, reason, {"Retry-After": "5"}))


def _report_unreadable_run(error: StepsplitError) -> Response:
    _LOG.error("the files of a run cannot be read: %s", error)
    # The reason names folders of the server.
    reason = "the files of this run cannot be read; the server's log says why"
    return build_error_response(HttpError(500, reason))
