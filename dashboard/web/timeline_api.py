"""What the timeline asks for as it is moved: the run's ranks and steps, and windows of it."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import orjson
from flask import Blueprint, Response, request

from stepsplit.analyzer.errors import DataError
from stepsplit.dashboard.reporters.perfetto import perfetto_trace
from stepsplit.dashboard.timeline.scene import Scene
from stepsplit.dashboard.timeline.wire import index_json, window_json
from stepsplit.dashboard.web.loaded import Loaded, tables_of

SLOTS, RANKS = 2_000, 256
_RUN = "/api/v1/runs/<run_id>"


def timeline_routes(loaded: Loaded) -> Blueprint:
    """The routes; every run that they name must be finished."""
    routes = Blueprint("timeline", __name__)
    routes.add_url_rule(
        f"{_RUN}/timeline", "index", lambda run_id: _json(index_json(loaded.scene(run_id)))
    )
    routes.add_url_rule(
        f"{_RUN}/timeline/window", "window", lambda run_id: _json(_window(loaded.scene(run_id)))
    )
    routes.add_url_rule(f"{_RUN}/perfetto", "perfetto", lambda run_id: _perfetto(loaded, run_id))
    routes.register_error_handler(DataError, lambda error: (_json({"error": str(error)}), 404))
    routes.register_error_handler(ValueError, lambda error: (_json({"error": str(error)}), 400))
    return routes


def _json(body: dict[str, Any]) -> Response:
    packed = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(packed, mimetype="application/json")


def _window(scene: Scene) -> dict[str, Any]:
    """from and to in ns, slots a line, ranks and open as lists of numbers."""
    from_ns, to_ns = _number("from"), _number("to")
    if to_ns <= from_ns:
        raise ValueError("the window is empty: to must be later than from")
    slots = min(max(_number("slots"), 1), SLOTS)
    known = {one.rank for one in scene.ranks}
    ranks = [rank for rank in _numbers("ranks")[:RANKS] if rank in known]
    return window_json(scene.window(from_ns, to_ns, slots, ranks, _numbers("open")))


def _number(name: str) -> int:
    try:
        return int(float(request.args.get(name, "")))
    except (ValueError, OverflowError):
        raise ValueError(f"{name} must be a number") from None


def _numbers(name: str) -> list[int]:
    parts = request.args.get(name, "").split(",")
    return [int(part) for part in parts if part.isascii() and part.isdigit() and len(part) < 9]


def _perfetto(loaded: Loaded, run_id: str) -> Response:
    """All ranks as a trace for ui.perfetto.dev, packed."""
    view = loaded.finished(run_id)
    body = _packed(perfetto_trace(view.report, tables_of(view)))
    name = f"attachment; filename={run_id}.pftrace.gz"
    return Response(body, mimetype="application/gzip", headers={"Content-Disposition": name})


def _packed(chunks: Iterator[bytes]) -> Iterator[bytes]:
    packer = zlib.compressobj(3, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    for chunk in chunks:
        yield packer.compress(chunk)
    yield packer.flush()
