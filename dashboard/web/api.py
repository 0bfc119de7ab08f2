"""The HTTP API: uploads, runs, health and metrics."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO, cast

from flask import Blueprint, Response, jsonify, request, send_file
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector

from stepsplit.analyzer.report.io import REPORT_NAME
from stepsplit.dashboard.store.runs import RunRow, Tag
from stepsplit.dashboard.store.store import FileRow, Store, StoreCounts
from stepsplit.dashboard.web.uploads import (
    JSON_BYTES,
    HttpError,
    Limits,
    UploadPart,
    build_offset_headers,
    build_whole_file_part,
    delete_file,
    parse_next_part,
    parse_relative_path,
    receive_part,
)

# The upload API: create a run, upload its files (whole or in parts), finish, poll the status.

RUNS = "/api/v1/runs"


@dataclass(frozen=True, slots=True)
class Api:
    """The request handlers of the API."""

    store: Store
    limits: Limits

    def create(self) -> tuple[Response, int]:
        """POST {name, tags}: creates a run that accepts files."""
        request.max_content_length = JSON_BYTES
        new = parse_new_run(request.get_json(silent=True))
        return jsonify(id=self.store.add(new.name, new.tags)), 201

    def put(self, run_id: str, path: str) -> Response:
        """PUT: stores the body as one file of the run."""
        part = build_whole_file_part(self._open_body(), request.content_length, request.headers)
        return self._receive_part(run_id, path, part, 201)

    def patch(self, run_id: str, path: str) -> Response:
        """PATCH: appends the body as the next part of a file."""
        part = parse_next_part(self._open_body(), request.content_length, request.headers)
        return self._receive_part(run_id, path, part, 200)

    def head_file(self, run_id: str, path: str) -> Response:
        """HEAD: the number of bytes stored of a file."""
        self._find_run(run_id)
        row = self.store.files.find_file(run_id, str(parse_relative_path(path)))
        if row is None:
            raise HttpError(404, "file not found")
        return Response(
            status=204, headers=build_offset_headers(row) | {"Cache-Control": "no-store"}
        )

    def remove(self, run_id: str, path: str) -> Response:
        """DELETE: removes a file from the upload."""
        self._find_run(run_id)
        delete_file(self.store, run_id, parse_relative_path(path))
        return Response(status=204)

    def finish(self, run_id: str) -> tuple[Response, int]:
        """POST: ends the upload and queues the analysis."""
        self._find_run(run_id)
        if not self.store.queue(run_id):
            raise self._explain_refusal(run_id)
        return self._build_status(run_id), 202

    def read_status(self, run_id: str) -> Response:
        """GET: the state of the run."""
        return self._build_status(run_id)

    def report(self, run_id: str) -> Response:
        """GET: report.json of the run."""
        run = self._find_run(run_id)
        path = (self.store.artifacts.fetch_results(run_id) / REPORT_NAME).absolute()
        if run.state != "done" or not path.exists():
            raise HttpError(404, f"no report: the run is {run.state}")
        return send_file(path, mimetype="application/json", download_name=f"{run_id}.{REPORT_NAME}")

    def _open_body(self) -> BinaryIO:
        request.max_content_length = self.limits.file_bytes
        return cast(BinaryIO, request.stream)

    def _receive_part(self, run_id: str, path: str, part: UploadPart, status: int) -> Response:
        self._find_run(run_id)
        row = receive_part(self.store, run_id, parse_relative_path(path), part, self.limits)
        answer = jsonify(path=row.path, bytes=row.received_bytes, complete=row.complete)
        answer.status_code = status
        answer.headers.update(build_offset_headers(row))
        return answer

    def _explain_refusal(self, run_id: str) -> HttpError:
        if self._find_run(run_id).state != "uploading":
            return HttpError(409, "this upload is already finished")
        incomplete = [row for row in self.store.files.list_files(run_id) if not row.complete]
        return (
            _refuse_incomplete(incomplete[0])
            if incomplete
            else HttpError(400, "the run has no files yet")
        )

    def _build_status(self, run_id: str) -> Response:
        run, stored = self._find_run(run_id), self.store.files.sum_size(run_id)
        return jsonify(
            id=run.id,
            name=run.name,
            state=run.state,
            error=run.error,
            tags={tag.key: tag.value for tag in run.tags},
            progress=run.progress,
            progress_note=run.progress_note,
            files=stored.files,
            received_bytes=stored.bytes,
        )

    def _find_run(self, run_id: str) -> RunRow:
        run = self.store.find_run(run_id)
        if run is None:
            raise HttpError(404, "run not found")
        return run


def _refuse_incomplete(row: FileRow) -> HttpError:
    stored = f"{row.received_bytes} bytes received"
    return HttpError(409, f"{row.path} is incomplete: {stored}; send the rest, or DELETE it")


def build_api_routes(api: Api) -> Blueprint:
    """The routes of the API."""
    routes = Blueprint("api", __name__)
    run = f"{RUNS}/<run_id>"
    file = f"{run}/files/<path:path>"
    routes.add_url_rule(RUNS, "create", api.create, methods=["POST"])
    routes.add_url_rule(file, "put", api.put, methods=["PUT"])
    routes.add_url_rule(file, "patch", api.patch, methods=["PATCH"])
    routes.add_url_rule(file, "head", api.head_file, methods=["HEAD"])
    routes.add_url_rule(file, "remove", api.remove, methods=["DELETE"])
    routes.add_url_rule(f"{run}/finish", "finish", api.finish, methods=["POST"])
    routes.add_url_rule(run, "status", api.read_status)
    routes.add_url_rule(f"{run}/{REPORT_NAME}", "report", api.report)
    return routes


# Name and tags of a new run.

_KEY_LENGTH, _VALUE_LENGTH, _MOST_TAGS = 64, 200, 32


@dataclass(frozen=True, slots=True)
class NewRun:
    """Validated name and tags."""

    name: str
    tags: tuple[Tag, ...]


def parse_new_run(body: object) -> NewRun:
    """Name and tags from the JSON body. Raises Refused if they are invalid."""
    fields = body if isinstance(body, Mapping) else {}
    name, tags = fields.get("name"), fields.get("tags") or {}
    if not isinstance(name, str) or not name.strip() or not name.strip().isprintable():
        raise HttpError(400, 'send JSON with a name: {"name": "my run"}')
    if not isinstance(tags, Mapping) or len(tags) > _MOST_TAGS:
        raise HttpError(400, f'tags: at most {_MOST_TAGS} strings by key: {{"branch": "main"}}')
    return NewRun(name.strip(), tuple(_tag(key, value) for key, value in tags.items()))


def _tag(key: object, value: object) -> Tag:
    if _is_text(key, 1, _KEY_LENGTH) and _is_text(value, 0, _VALUE_LENGTH):
        return Tag(str(key), str(value))
    lengths = f"{_KEY_LENGTH} and {_VALUE_LENGTH}"
    raise HttpError(400, f"a tag's key and value must be strings of at most {lengths} characters")


def _is_text(value: object, least: int, most: int) -> bool:
    return isinstance(value, str) and least <= len(value) <= most and value.isprintable()


# Health of the server and its database, and metrics.


def build_health_routes(store: Store) -> Blueprint:
    """The routes /healthz, /readyz and /metrics."""
    routes = Blueprint("health", __name__)

    @routes.get("/healthz")
    def healthz() -> Response:
        return jsonify(status="ok")

    @routes.get("/readyz")
    def readyz() -> Response:
        if not store.is_ready():
            raise HttpError(503, "the database does not answer")
        return jsonify(status="ok")

    @routes.get("/metrics")
    def metrics() -> Response:
        return Response(
            export_metrics(store.count_contents()), content_type="text/plain; version=0.0.4"
        )

    return routes


# Prometheus metrics: requests of all processes, runs and jobs of the store.

FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Environment variable with the folder that server processes share for their counters.

Set it before this module is imported.
"""

_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")

_PROCESS_REGISTRY = CollectorRegistry()

_REQUESTS = Counter(
    "stepsplit_requests",
    "Requests by route, method and status.",
    ("route", "method", "status"),
    registry=_PROCESS_REGISTRY,
)

_SECONDS = Histogram(
    "stepsplit_request_seconds",
    "Time to answer by route.",
    ("route",),
    buckets=(0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0),
    registry=_PROCESS_REGISTRY,
)

_RECEIVED = Counter(
    "stepsplit_received_bytes",
    "Bytes of request bodies, by announced length.",
    registry=_PROCESS_REGISTRY,
)


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """An answered request. route is the URL rule, None if no rule matched."""

    route: str | None
    method: str
    status: int
    seconds: float
    body_bytes: int


def count_request(done: RequestRecord) -> None:
    """Counts one request."""
    route = done.route or "none"
    method = done.method if done.method in _METHODS else "other"
    _REQUESTS.labels(route, method, str(done.status)).inc()
    _SECONDS.labels(route).observe(done.seconds)
    _RECEIVED.inc(done.body_bytes)


def export_metrics(counts: StoreCounts) -> bytes:
    """All metrics in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_StoreCollector(counts))
    if FOLDER_VARIABLE in os.environ:
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)
    return generate_latest(registry) + generate_latest(_PROCESS_REGISTRY)


class _StoreCollector:
    def __init__(self, counts: StoreCounts) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        """The current metrics of the store."""
        counts = self._counts
        yield _build_state_gauge("stepsplit_runs", "Runs by state.", counts.runs)
        yield _build_state_gauge("stepsplit_jobs", "Analyses by state.", counts.jobs)
        waited = "Waiting time of the oldest queued analysis."
        yield GaugeMetricFamily("stepsplit_oldest_queued_seconds", waited, counts.oldest_queued_s)
        stored = "Total size of stored uploads."
        yield GaugeMetricFamily("stepsplit_upload_bytes", stored, counts.upload_bytes)


def _build_state_gauge(name: str, text: str, values: Mapping[str, int]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=["state"])
    for state, number in sorted(values.items()):
        family.add_metric([state], number)
    return family
