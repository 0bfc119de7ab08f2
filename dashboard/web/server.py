"""The Flask server: the API, health, who may come in, and the pages."""

from __future__ import annotations

from flask import Flask, Response, request
from sqlalchemy.exc import SQLAlchemyError
from werkzeug.exceptions import HTTPException

from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.access import Access
from stepsplit.dashboard.web.api import Api, blueprint
from stepsplit.dashboard.web.app import add_pages
from stepsplit.dashboard.web.gate import Gate
from stepsplit.dashboard.web.health import health
from stepsplit.dashboard.web.limits import Limits
from stepsplit.dashboard.web.refused import Refused, as_json, away
from stepsplit.dashboard.web.request_log import watch
from stepsplit.dashboard.web.security import protect

_BODY_BYTES = 4 << 20
"""What a request may hold that is no file of an upload."""


def create_server(
    store: Store, access: Access | None = None, limits: Limits | None = None
) -> Flask:
    """The dashboard on the store, for this machine alone unless access says otherwise."""
    server = Flask(__name__, static_folder=None)
    server.url_map.merge_slashes = False
    server.config["MAX_CONTENT_LENGTH"] = _BODY_BYTES
    watch(server)
    server.register_blueprint(blueprint(Api(store, limits or Limits())))
    server.register_blueprint(health(store))
    server.register_error_handler(Refused, as_json)
    server.register_error_handler(SQLAlchemyError, away)
    server.register_error_handler(HTTPException, _plain)
    # The pages come last: what is no other route is theirs.
    script_hashes = add_pages(server, store)
    _draw_once(server)
    protect(server, Gate(access or Access(), store.tokens), script_hashes)
    return server


def _draw_once(server: Flask) -> None:
    """Dash gives out only those scripts that it has put into a page, and the process that drew the
    browser's page may be another."""
    with server.test_request_context():
        server.view_functions["/"]()


def _plain(error: HTTPException) -> Response | HTTPException:
    """Scripts get errors as they get everything, in JSON."""
    if not request.path.startswith("/api/"):
        return error
    return as_json(Refused(error.code or 500, error.description or error.name))
