"""A run as one page to keep."""

from __future__ import annotations

from flask import Blueprint, Response, jsonify

from stepsplit.analyzer.errors import DataError
from stepsplit.dashboard.web.loaded import Loaded
from stepsplit.dashboard.web.still import still_page


def still_routes(loaded: Loaded) -> Blueprint:
    """GET report.html of a finished run."""
    routes = Blueprint("still", __name__)

    @routes.get("/api/v1/runs/<run_id>/report.html")
    def still(run_id: str) -> Response:
        page = still_page(loaded.finished(run_id))
        name = f"attachment; filename={run_id}.html"
        headers = {"Content-Disposition": name}
        return Response(page, mimetype="text/html", headers=headers)

    @routes.errorhandler(DataError)
    def unreadable(error: DataError) -> tuple[Response, int]:
        return jsonify(error=str(error)), 404

    return routes
