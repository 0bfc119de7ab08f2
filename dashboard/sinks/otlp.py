"""OpenTelemetry: OTLP over HTTP, as JSON."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any
from urllib.parse import unquote

from stepsplit.dashboard.sinks.json_server import JsonServer, hide_password
from stepsplit.dashboard.sinks.scalars import PREFIX, ScalarPoint, SinkError

_PATH = "/v1/metrics"


class OtlpSink:
    """Gauges for an OpenTelemetry collector, by OTLP over HTTP.

    Honours the variables OTEL_EXPORTER_OTLP_ENDPOINT (if there is no address) and _HEADERS, both
    also with METRICS_ before their last word, OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES.
    """

    def __init__(self, url: str) -> None:
        # An address in the option is a base, as that of the general variable; the variable for
        # metrics has the whole path (OTLP exporter specification).
        whole = os.environ.get("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "")
        base = url or ("" if whole else os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", ""))
        if not base and not whole:
            raise SinkError("otlp: write otlp:URL, or set OTEL_EXPORTER_OTLP_ENDPOINT")
        address = base.rstrip("/").removesuffix(_PATH) + _PATH if base else whole
        self.name = f"otlp:{hide_password(address.removesuffix(_PATH))}"
        headers = read_pairs("OTEL_EXPORTER_OTLP_HEADERS")
        headers |= read_pairs("OTEL_EXPORTER_OTLP_METRICS_HEADERS")
        self._server = JsonServer(self.name, address, headers)

    def write(self, points: Sequence[ScalarPoint]) -> None:
        """Sends the points. Raises SinkError."""
        if not points:
            return
        answer = self._server.ask("POST", "", build_otlp_request(points))
        # A collector may answer 200 and take only some of them.
        refused = answer.get("partialSuccess", {})
        if int(refused.get("rejectedDataPoints", 0)):
            reason = " ".join(str(refused.get("errorMessage", "")).split())[:200]
            raise SinkError(f"{self.name}: the server refuses points: {reason}")

    def close(self) -> None:
        """Closes the connection."""
        self._server.close()


def read_pairs(variable: str) -> dict[str, str]:
    """A variable such as "key=value,other=value", with percent-encoded values."""
    pairs = (part.partition("=") for part in os.environ.get(variable, "").split(","))
    return {key.strip(): unquote(value.strip()) for key, _, value in pairs if key.strip()}


def build_otlp_request(points: Sequence[ScalarPoint]) -> dict[str, Any]:
    """The points as an ExportMetricsServiceRequest in OTLP's JSON encoding."""
    gauges: dict[str, dict[str, Any]] = {}
    for point in points:
        for one in point.scalars:
            metric = one.metric
            new = {
                "name": metric.otlp, "description": metric.text, "unit": metric.unit,
                "gauge": {"dataPoints": []},
            }  # fmt: skip
            label = {metric.label: one.key} if metric.label else {}
            gauges.setdefault(metric.otlp, new)["gauge"]["dataPoints"].append(
                {
                    "attributes": _build_attributes({"run": point.run, **label}),
                    # JSON of protobuf has integers of 64 bits as texts.
                    "timeUnixNano": str(point.unix_ns),
                    "asDouble": one.value,
                }
            )
    scope = {"name": PREFIX, "version": version(PREFIX)}
    resource = {"service.name": PREFIX, **read_pairs("OTEL_RESOURCE_ATTRIBUTES")}
    if os.environ.get("OTEL_SERVICE_NAME"):
        resource["service.name"] = os.environ["OTEL_SERVICE_NAME"]
    parts = [{"scope": scope, "metrics": list(gauges.values())}]
    return {
        "resourceMetrics": [
            {"resource": {"attributes": _build_attributes(resource)}, "scopeMetrics": parts}
        ]
    }


def _build_attributes(values: Mapping[str, str]) -> list[dict[str, Any]]:
    return [{"key": key, "value": {"stringValue": value}} for key, value in values.items()]


open_sink = OtlpSink
