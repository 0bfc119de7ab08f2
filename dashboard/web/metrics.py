"""What a monitoring system scrapes: requests of all processes, runs and jobs of the store."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector

from stepsplit.dashboard.store.counts import Counts

FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Names the folder in which server processes count together; set before this module is loaded."""

_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
_OF_PROCESS = CollectorRegistry()
_REQUESTS = Counter(
    "stepsplit_requests",
    "Requests by route, method and status.",
    ("route", "method", "status"),
    registry=_OF_PROCESS,
)
_SECONDS = Histogram(
    "stepsplit_request_seconds",
    "Time to answer by route.",
    ("route",),
    buckets=(0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0),
    registry=_OF_PROCESS,
)
_RECEIVED = Counter(
    "stepsplit_received_bytes",
    "Bytes of request bodies, by announced length.",
    registry=_OF_PROCESS,
)


@dataclass(frozen=True, slots=True)
class Answered:
    """A request that was answered. route is a template, never an address; None where none fits."""

    route: str | None
    method: str
    status: int
    seconds: float
    body_bytes: int


def count_request(done: Answered) -> None:
    """Counts one request."""
    route = done.route or "none"
    method = done.method if done.method in _METHODS else "other"
    _REQUESTS.labels(route, method, str(done.status)).inc()
    _SECONDS.labels(route).observe(done.seconds)
    _RECEIVED.inc(done.body_bytes)


def exposition(counts: Counts) -> bytes:
    """All metrics in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_OfStore(counts))
    if FOLDER_VARIABLE in os.environ:
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)
    return generate_latest(registry) + generate_latest(_OF_PROCESS)


class _OfStore:
    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        """The store's part, as it is now."""
        counts = self._counts
        yield _by_state("stepsplit_runs", "Runs by state.", counts.runs)
        yield _by_state("stepsplit_jobs", "Analyses by state.", counts.jobs)
        waited = "How long the oldest queued analysis has waited."
        yield GaugeMetricFamily("stepsplit_oldest_queued_seconds", waited, counts.oldest_queued_s)
        held = "Size of all uploads that are held."
        yield GaugeMetricFamily("stepsplit_upload_bytes", held, counts.upload_bytes)


def _by_state(name: str, text: str, values: Mapping[str, int]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=["state"])
    for state, number in sorted(values.items()):
        family.add_metric([state], number)
    return family
