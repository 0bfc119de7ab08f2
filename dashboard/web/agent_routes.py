"""The tools for agents over HTTP: read-only, on the runs of the store, for who may view them."""

from __future__ import annotations

from importlib.util import find_spec

from flask import Blueprint, Response, request

from stepsplit.dashboard.agents.recordings import Recordings
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.http_error import HttpError

MCP = "/api/v1/mcp"

_BODY_BYTES = 256 << 10
"""Largest question."""


def build_agent_routes(store: Store) -> Blueprint:
    """The route of the Model Context Protocol."""
    routes, recordings = Blueprint("agents", __name__), Recordings((), store)

    @routes.post(MCP)
    def answer() -> Response:
        """POST: one message of the protocol; the answer is JSON."""
        request.max_content_length = _BODY_BYTES
        if find_spec("mcp") is None:
            raise HttpError(501, "this needs mcp; install it with: pip install 'stepsplit[agents]'")
        from stepsplit.dashboard.agents.server import answer_request

        status, headers, body = answer_request(
            recordings, request.method, dict(request.headers), request.get_data()
        )
        return Response(body, status, headers)

    return routes
