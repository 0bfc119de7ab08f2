"""Routes for the data of a finished run: its timeline in JSON, and files to download."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import orjson
from flask import Blueprint, Response, jsonify, request

from stepsplit.analyzer.errors import DataError
from stepsplit.dashboard.pages.timeline import (
    MAX_QUERY_LENGTH,
    TimelineView,
    WindowDetail,
    build_index_json,
    build_matches_json,
    build_range_json,
    build_window_json,
)
from stepsplit.dashboard.reporters.perfetto import perfetto_trace
from stepsplit.dashboard.web.html_export import export_html, export_roles_html
from stepsplit.dashboard.web.report_cache import ReportCache, require_tables

# The timeline: ranks and steps of a run, its time windows, and questions about it.

SLOTS, RANKS = 2_000, 512

BAND_SLOTS = 2
"""Slots of the shortest slice of a band that is sent by itself: narrower ones have no label."""

MAX_MATCHES = 200
"""Matches of a search in one response."""

MAX_NAMES = 200
"""Kernels and calls of a range in one response."""

_MAX_NUMBER = 1 << 61
"""Largest time in ns, so that the length of a window fits into 64 bits."""

_RUN = "/api/v1/runs/<run_id>"


def build_timeline_routes(cache: ReportCache) -> Blueprint:
    """The routes; all of them require a finished run."""
    routes = Blueprint("timeline", __name__)
    answers: dict[str, Callable[[TimelineView], dict[str, Any]]] = {
        "": build_index_json,
        "/window": _read_window,
        "/search": _search,
        "/measure": _measure,
        "/names": _measure_names,
        "/slice": _read_slice,
        "/name": _read_name,
    }
    for path, answer in answers.items():
        routes.add_url_rule(
            f"{_RUN}/timeline{path}",
            path.strip("/") or "index",
            lambda run_id, answer=answer: _build_json_response(answer(cache.load_timeline(run_id))),
        )
    routes.add_url_rule(
        f"{_RUN}/perfetto", "perfetto", lambda run_id: _send_perfetto(cache, run_id)
    )
    routes.register_error_handler(
        DataError, lambda error: (_build_json_response({"error": str(error)}), 404)
    )
    routes.register_error_handler(
        ValueError, lambda error: (_build_json_response({"error": str(error)}), 400)
    )
    return routes


def _build_json_response(body: dict[str, Any]) -> Response:
    packed = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(packed, mimetype="application/json")


def _read_window(scene: TimelineView) -> dict[str, Any]:
    """The window of the query: from and to in ns, slots per row, ranks and open as lists; compact
    is the number of slots of closed ranks, q the text searched for."""
    from_ns, to_ns = _parse_range()
    detail = WindowDetail(
        slots=_clamp(_parse_number("slots"), SLOTS),
        compact_slots=_clamp(_parse_number("compact"), SLOTS) if _has("compact") else None,
        query=_parse_query() if _has("q") else "",
        band_slots=BAND_SLOTS,
    )
    ranks, opened = _parse_ranks(scene), _parse_numbers("open")
    return build_window_json(scene.read_window(from_ns, to_ns, detail, ranks, opened))


def _search(scene: TimelineView) -> dict[str, Any]:
    """The matches of q between from and to (default: the whole run) on ranks (default: all).

    The response starts with the match number `at`, by default with the first match that starts at
    `near` or later; limit is the number of matches in it.
    """
    ranks = _parse_ranks(scene) if _has("ranks") else None
    from_ns, to_ns = _parse_range() if _has("from") or _has("to") else (-_MAX_NUMBER, _MAX_NUMBER)
    found = scene.search(_parse_query()).narrow(ranks, from_ns, to_ns)
    if _has("at"):
        first = max(_parse_number("at"), 0)
    else:
        first = found.count_before(_parse_number("near") if _has("near") else from_ns)
    limit = _clamp(_parse_number("limit"), MAX_MATCHES) if _has("limit") else MAX_MATCHES
    return build_matches_json(found, scene.read_slices, first, limit)


def _measure(scene: TimelineView) -> dict[str, Any]:
    """The time of each bucket between from and to on each of the ranks."""
    from_ns, to_ns = _parse_range()
    splits = scene.measure(_parse_ranks(scene), from_ns, to_ns)
    return build_range_json(from_ns, to_ns, splits)


def _measure_names(scene: TimelineView) -> dict[str, Any]:
    """The kernels and calls between from and to over the ranks, the first MAX_NAMES of them."""
    names = scene.measure_names(_parse_ranks(scene), *_parse_range())
    return {"count": len(names), "names": [asdict(one) for one in names[:MAX_NAMES]]}


def _read_slice(scene: TimelineView) -> dict[str, Any]:
    """The slice of a rank that starts at `start` on a lane and depth; null if there is none."""
    (rank,) = _parse_ranks(scene, "rank")[:1] or [-1]
    lane, depth = request.args.get("lane", ""), _parse_number("depth")
    return {"slice": scene.find_slice(rank, lane, depth, _parse_number("start"))}


def _read_name(scene: TimelineView) -> dict[str, Any]:
    """The name that takes most of a bucket's time between from and to; null if unknown."""
    (rank,) = _parse_ranks(scene, "rank")[:1] or [-1]
    return {"name": scene.find_name(rank, _parse_number("bucket"), *_parse_range())}


def _has(name: str) -> bool:
    return name in request.args


def _clamp(number: int, most: int) -> int:
    return min(max(number, 1), most)


def _parse_range() -> tuple[int, int]:
    from_ns, to_ns = _parse_number("from"), _parse_number("to")
    if to_ns <= from_ns:
        raise ValueError("the window is empty: to must be later than from")
    return from_ns, to_ns


def _parse_query() -> str:
    text = request.args.get("q", "").strip()
    if not text or len(text) > MAX_QUERY_LENGTH:
        raise ValueError(f"q must have 1 to {MAX_QUERY_LENGTH} characters")
    return text


def _parse_ranks(scene: TimelineView, name: str = "ranks") -> list[int]:
    """The ranks of the list that the run has, each once."""
    known = {one.rank for one in scene.ranks}
    return [rank for rank in list(dict.fromkeys(_parse_numbers(name)))[:RANKS] if rank in known]


def _parse_number(name: str) -> int:
    try:
        number = int(float(request.args.get(name, "")))
    except (ValueError, OverflowError):
        raise ValueError(f"{name} must be a number") from None
    if abs(number) > _MAX_NUMBER:
        raise ValueError(f"{name} must be at most {_MAX_NUMBER}")
    return number


def _parse_numbers(name: str) -> list[int]:
    parts = request.args.get(name, "").split(",")
    return [int(part) for part in parts if part.isascii() and part.isdigit() and len(part) < 9]


def _send_perfetto(cache: ReportCache, run_id: str) -> Response:
    """A gzip-compressed trace of all ranks for ui.perfetto.dev."""
    view = cache.load_finished_run(run_id)
    chunks = perfetto_trace(view.report, require_tables(view))

    def compress() -> Iterator[bytes]:
        packer = zlib.compressobj(3, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
        for chunk in chunks:
            yield packer.compress(chunk)
        yield packer.flush()

    headers = {"Content-Disposition": _name_download(view.name, view.run_id, ".pftrace.gz")}
    return Response(compress(), mimetype="application/gzip", headers=headers)


def _name_download(name: str, run_id: str, suffix: str) -> str:
    """The header that names a file after the run, with its id: names may be the same."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:_NAME_CHARACTERS]
    return f"attachment; filename={'-'.join(filter(None, (plain, run_id)))}{suffix}"


_NAME_CHARACTERS, _NOTE_CHARACTERS, MAX_NOTES = 80, 260, 30


# The HTML export.


def build_export_routes(cache: ReportCache) -> Blueprint:
    """GET report.html of a finished run."""
    routes = Blueprint("html_export", __name__)

    @routes.get(f"{_RUN}/report.html")
    def export_run(run_id: str) -> Response:
        if (job := cache.load_roles(run_id)) is not None:
            run, whole = job
            headers = {"Content-Disposition": _name_download(run.name, run.id, ".html")}
            content = export_roles_html(run.name, whole)
            return Response(content, mimetype="text/html", headers=headers)
        view = cache.load_finished_run(run_id)
        headers = {"Content-Disposition": _name_download(view.name, view.run_id, ".html")}
        notes = [text[:_NOTE_CHARACTERS] for text in request.args.getlist("note")[:MAX_NOTES]]
        return Response(export_html(view, notes), mimetype="text/html", headers=headers)

    @routes.errorhandler(DataError)
    def report_data_error(error: DataError) -> tuple[Response, int]:
        return jsonify(error=str(error)), 404

    return routes
