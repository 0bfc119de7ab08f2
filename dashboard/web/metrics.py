"""Health of the server and its database, metrics for Prometheus, and the log of requests."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping

from flask import Blueprint, Flask, Response, g, jsonify, request
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector

from stepsplit.dashboard.store.store import Store, StoreCounts
from stepsplit.dashboard.web.http_error import HttpError
from stepsplit.dashboard.web.watch_metrics import WatchCollector

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
"""The methods that requests are counted by; all others count as one."""


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
            export_metrics(store.count_contents(), WatchCollector(store.watches)),
            content_type="text/plain; version=0.0.4",
        )

    return routes


# Prometheus metrics: requests of all processes, runs and jobs of the store.

FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Environment variable with the folder that server processes share for their counters.

Set it before this module is imported.
"""

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


_LOG = logging.getLogger("stepsplit.requests")


def log_requests(server: Flask) -> None:
    """Counts and logs all requests. Call it first, so that refused requests are included."""

    @server.before_request
    def start_timer() -> None:
        g.begun = time.monotonic()

    @server.after_request
    def record_request(response: Response) -> Response:
        seconds = time.monotonic() - g.get("begun", time.monotonic())
        route = "none" if request.url_rule is None else request.url_rule.rule
        method = request.method if request.method in METHODS else "other"
        size = request.content_length or 0
        _REQUESTS.labels(route, method, str(response.status_code)).inc()
        _SECONDS.labels(route).observe(seconds)
        _RECEIVED.inc(size)
        # Only the path: queries and headers may contain secrets.
        fields = {
            "method": request.method,
            "path": request.path,
            "status": response.status_code,
            "ms": round(seconds * 1e3, 1),
            "bytes": size,
            "address": request.remote_addr,
        }
        _LOG.info("request", extra={"fields": fields})
        return response


def export_metrics(counts: StoreCounts, watched: WatchCollector) -> bytes:
    """All metrics in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_StoreCollector(counts))
    registry.register(watched)
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
