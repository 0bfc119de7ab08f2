"""A run as one page to keep."""

from __future__ import annotations

from flask import Blueprint, Response, jsonify

from stepsplit.analyzer.errors import DataError
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.loaded import Loaded
from stepsplit.dashboard.web.still import still_page


def still_routes(store: Store, loaded: Loaded) -> Blueprint:
    """GET report.html of a finished run."""
    routes = Blueprint("still", __name__)

    @routes.get("/api/v1/runs/<run_id>/report.html")
    def still(run_id: str) -> tuple[Response, int]:
        run = store.run(run_id)
        if run is None or run.state != "done":
            return jsonify(error="there is no finished run of that id"), 404
        page = still_page(loaded.view(run))
        name = f"attachment; filename={run_id}.html"
        headers = {"Content-Disposition": name}
        return Response(page, mimetype="text/html", headers=headers), 200

    @routes.errorhandler(DataError)
    def unreadable(error: DataError) -> tuple[Response, int]:
        return jsonify(error=str(error)), 404

    return routes
