"""Whether the server lives, whether its database does, and its metrics."""

from __future__ import annotations

from flask import Blueprint, Response, jsonify

from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.metrics import exposition
from stepsplit.dashboard.web.refused import Refused


def health(store: Store) -> Blueprint:
    """The routes /healthz, /readyz and /metrics."""
    routes = Blueprint("health", __name__)

    @routes.get("/healthz")
    def healthz() -> Response:
        return jsonify(status="ok")

    @routes.get("/readyz")
    def readyz() -> Response:
        if not store.ready():
            raise Refused(503, "the database does not answer")
        return jsonify(status="ok")

    @routes.get("/metrics")
    def metrics() -> Response:
        return Response(exposition(store.counts()), content_type="text/plain; version=0.0.4")

    return routes
