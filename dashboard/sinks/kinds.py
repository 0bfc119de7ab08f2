"""The kinds of sinks: TensorBoard, W&B, JSON lines, MLflow and OpenTelemetry."""

from __future__ import annotations

import base64
import json
import os
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from stepsplit.analyzer.errors import make_write_error
from stepsplit.collectors.record.log_to import STEP
from stepsplit.dashboard.sinks.scalars import PREFIX, Scalar, ScalarPoint, SinkError, SinkMetric
from stepsplit.dashboard.upload import Connection, ServerAnswer, TransientError

TIMEOUT_S = 5.0
"""How long a server may take to answer."""

START_TIMEOUT_S = 20.0
"""How long W&B may take to start a run, during which a watch sends nothing to others."""

_SECOND_NS, _MILLISECOND_NS = 10**9, 10**6

# Through a library, or to a file.


class TensorBoardSink:
    """Event files in DIR/stepsplit.

    A folder of their own, since TensorBoard follows only the newest event file of a folder.
    """

    def __init__(self, folder: str) -> None:
        self.name, self._folder = f"tensorboard:{folder}", Path(folder) / PREFIX
        self._writer: Any = None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise make_write_error(self._folder, error) from None

    def write(self, points: Sequence[ScalarPoint]) -> None:
        """Writes the points. Raises SinkError if the disk does not take them."""
        from tensorboard.summary import Writer

        try:
            self._writer = writer = self._writer or Writer(str(self._folder))
            for point in points:
                for one in point.scalars:
                    seconds = point.unix_ns / _SECOND_NS
                    writer.add_scalar(one.name, one.value, point.step, wall_time=seconds)
            writer.flush()
        except OSError as error:
            raise SinkError(f"{self.name}: {error.strerror or error}") from None

    def close(self) -> None:
        """Closes the file."""
        if self._writer is not None:
            with suppress(OSError):
                self._writer.close()


class JsonSink:
    """A file to which one JSON object a point is appended, with the names of trackers."""

    def __init__(self, file: str) -> None:
        self.name, self._path = f"json:{file}", Path(file)
        try:
            self._path.open("ab").close()
        except OSError as error:
            raise make_write_error(self._path, error) from None

    def write(self, points: Sequence[ScalarPoint]) -> None:
        """Appends the points in one piece. Raises SinkError if the disk does not take them."""
        lines = "".join(_format_line(point) for point in points)
        try:
            with self._path.open("ab") as file:
                file.write(lines.encode())
        except OSError as error:
            raise SinkError(f"{self.name}: {error.strerror or error}") from None

    def close(self) -> None:
        """Does nothing: the file is closed after each write."""


def _format_line(point: ScalarPoint) -> str:
    head = {"run": point.run, "unix_ns": point.unix_ns}
    return json.dumps({**head, **_build_values(point)}) + "\n"


def _build_values(point: ScalarPoint) -> dict[str, Any]:
    return {STEP: point.step, **{one.name: one.value for one in point.scalars}}


class WandbSink:
    """A run of W&B.

    With the id of a run that another process logs to, its numbers are added in W&B's shared mode,
    which needs a connection and that the other process has started it in this mode too. Without,
    or offline, they are a run of their own.
    """

    def __init__(self, place: str) -> None:
        self.name = f"wandb:{place}" if place else "wandb"
        self._place = place
        self._run: Any = None

    def write(self, points: Sequence[ScalarPoint]) -> None:
        """Logs the points; W&B sends them later. Raises SinkError if it cannot start the run."""
        import wandb

        try:
            for point in points:
                run = self._run or self._start(point.run)
                run.log(_build_values(point))
        except (wandb.Error, OSError) as error:
            text = " ".join(str(error).split())
            raise SinkError(f"{self.name}: {text or type(error).__name__}") from None

    def _start(self, name: str) -> Any:
        import wandb

        entity, project, run_id = split_wandb_place(self._place)
        project = project or os.environ.get("WANDB_PROJECT") or PREFIX
        if run_id and os.environ.get("WANDB_MODE", "online") in ("online", "shared"):
            shared = wandb.Settings(
                mode="shared", x_primary=False, x_label=PREFIX, silent=True,
                init_timeout=START_TIMEOUT_S,
            )  # fmt: skip
            self._run = wandb.init(entity=entity, project=project, id=run_id, settings=shared)
        else:
            self._run = wandb.init(
                entity=entity,
                project=project,
                id=run_id,
                name=name,
                resume="allow" if run_id else None,
                settings=wandb.Settings(silent=True, console="off", init_timeout=START_TIMEOUT_S),
            )
        self._run.define_metric(f"{PREFIX}/*", step_metric=STEP)
        return self._run

    def close(self) -> None:
        """Ends the run, which waits for W&B to have sent its numbers. Raises SinkError if W&B says
        that they are lost."""
        import wandb

        if self._run is None:
            return
        try:
            self._run.finish()
        except (wandb.Error, OSError) as error:
            text = " ".join(str(error).split()) or type(error).__name__
            raise SinkError(f"{self.name}: the numbers were not sent: {text}") from None


def split_wandb_place(place: str) -> tuple[str | None, str | None, str | None]:
    """Entity, project and run of [ENTITY/]PROJECT[/RUN]; None for what is not there."""
    parts = [part or None for part in place.split("/")]
    if len(parts) >= 3:
        return parts[0], parts[1], parts[2]
    return None, parts[0], parts[1] if len(parts) == 2 else None


# Over HTTP, without a library.


class _JsonServer:
    """A server that takes and answers JSON."""

    def __init__(self, name: str, url: str, headers: Mapping[str, str]) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SinkError(f"{name}: not an address such as http://host:5000")
        # Without a password, since the address is part of messages.
        url = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
        self.name, self._kind = name, name.partition(":")[0]
        self._headers = {"Content-Type": "application/json", **headers}
        self._connection = Connection(url, None, timeout_s=TIMEOUT_S)

    def request(self, method: str, path: str, body: object = None) -> ServerAnswer:
        """The answer, whatever its status; the connection may have been closed since the last one.

        Raises SinkError if the server cannot be reached.
        """
        content = b"" if body is None else json.dumps(body).encode()
        for is_last in (False, True):
            try:
                return self._connection.request(method, path, content, self._headers)
            except TransientError as error:
                if is_last:
                    raise SinkError(f"{self._kind}:{error}") from None
        raise AssertionError

    def ask(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        """The body of an answer that is not an error. Raises SinkError."""
        return self.check(self.request(method, path, body))

    def check(self, answer: ServerAnswer) -> dict[str, Any]:
        """The body of the answer. Raises SinkError if it is an error."""
        if answer.status >= 300:
            said = " ".join(str(answer.body.get("message", "")).split())[:200]
            reason = f": {said}" if said else ""
            raise SinkError(f"{self.name}: the server answers {answer.status}{reason}")
        return answer.body

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()


# MLflow.

MOST_METRICS = 1_000
"""Metrics that MLflow takes in one request."""

_API = "/api/2.0/mlflow"


class MlflowSink:
    """Metrics of a run of MLflow, by its REST API.

    The run is that of MLFLOW_RUN_ID; else one with the tag stepsplit.run, found by the name of our
    run or created, in the experiment MLFLOW_EXPERIMENT_ID or MLFLOW_EXPERIMENT_NAME (by default
    stepsplit). MLFLOW_TRACKING_URI is the address if there is none; MLFLOW_TRACKING_TOKEN, or
    _USERNAME and _PASSWORD, are sent.
    """

    def __init__(self, url: str) -> None:
        address = url or os.environ.get("MLFLOW_TRACKING_URI", "")
        self.name = f"mlflow:{_hide_password(address)}"
        if not address:
            raise SinkError("mlflow: write mlflow:URL, or set MLFLOW_TRACKING_URI")
        self._server = _JsonServer(self.name, address, _build_mlflow_headers(address))
        self._run_id = os.environ.get("MLFLOW_RUN_ID", "")
        self._is_own = not self._run_id

    def write(self, points: Sequence[ScalarPoint]) -> None:
        """Logs the points. Raises SinkError."""
        if not points:
            return
        run_id = self._run_id = self._run_id or self._find_or_create_run(points[0].run)
        metrics = [
            {
                "key": one.name, "value": one.value, "step": point.step,
                "timestamp": point.unix_ns // _MILLISECOND_NS,
            }
            for point in points for one in point.scalars
        ]  # fmt: skip
        for first in range(0, len(metrics), MOST_METRICS):
            part = metrics[first : first + MOST_METRICS]
            self._server.ask("POST", f"{_API}/runs/log-batch", {"run_id": run_id, "metrics": part})

    def close(self) -> None:
        """Marks a run of our own as finished."""
        if self._is_own and self._run_id:
            end = {"run_id": self._run_id, "status": "FINISHED", "end_time": _read_now_ms()}
            with suppress(SinkError):
                self._server.ask("POST", f"{_API}/runs/update", end)
        self._server.close()

    def _find_or_create_run(self, name: str) -> str:
        experiment = self._find_or_create_experiment()
        plain = name.replace("'", "")
        query = {
            "experiment_ids": [experiment], "max_results": 1,
            "filter": f"tags.`stepsplit.run` = '{plain}'",
        }  # fmt: skip
        found = self._server.ask("POST", f"{_API}/runs/search", query).get("runs")
        if found:
            return str(found[0]["info"]["run_id"])
        new = {
            "experiment_id": experiment, "run_name": name, "start_time": _read_now_ms(),
            "tags": [{"key": "stepsplit.run", "value": plain}],
        }  # fmt: skip
        made = self._server.ask("POST", f"{_API}/runs/create", new)
        return str(made["run"]["info"]["run_id"])

    def _find_or_create_experiment(self) -> str:
        stated = os.environ.get("MLFLOW_EXPERIMENT_ID")
        if stated:
            return stated
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PREFIX
        path = f"{_API}/experiments/get-by-name?experiment_name={quote(name)}"
        answer = self._server.request("GET", path)
        if answer.status == 404:
            made = self._server.ask("POST", f"{_API}/experiments/create", {"name": name})
            return str(made["experiment_id"])
        return str(self._server.check(answer)["experiment"]["experiment_id"])


def _read_now_ms() -> int:
    return time.time_ns() // _MILLISECOND_NS


def _build_mlflow_headers(url: str) -> dict[str, str]:
    token = os.environ.get("MLFLOW_TRACKING_TOKEN")
    if token:
        return {"Authorization": f"Bearer {token}"}
    parts = urlsplit(url)
    user = parts.username or os.environ.get("MLFLOW_TRACKING_USERNAME")
    password = parts.password or os.environ.get("MLFLOW_TRACKING_PASSWORD")
    if user is None or password is None:
        return {}
    pair = f"{unquote(user)}:{unquote(password)}".encode()
    return {"Authorization": f"Basic {base64.b64encode(pair).decode()}"}


def _hide_password(url: str) -> str:
    """The address as it may be printed."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=host, query="", fragment="").geturl()


# OpenTelemetry: OTLP over HTTP, as JSON.

_PATH = "/v1/metrics"


class OtlpSink:
    """Gauges for an OpenTelemetry collector, by OTLP over HTTP.

    Honours the variables OTEL_EXPORTER_OTLP_ENDPOINT (if there is no address) and _HEADERS, both
    also with METRICS_ before their last word, OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES.
    """

    def __init__(self, url: str) -> None:
        address = choose_otlp_address(url)
        self.name = f"otlp:{_hide_password(address.removesuffix(_PATH))}"
        headers = read_pairs("OTEL_EXPORTER_OTLP_HEADERS")
        headers |= read_pairs("OTEL_EXPORTER_OTLP_METRICS_HEADERS")
        self._server = _JsonServer(self.name, address, headers)

    def write(self, points: Sequence[ScalarPoint]) -> None:
        """Sends the points. Raises SinkError."""
        if not points:
            return
        answer = self._server.ask("POST", "", build_otlp_request(points))
        refused = answer.get("partialSuccess", {})
        if int(refused.get("rejectedDataPoints", 0)):
            reason = " ".join(str(refused.get("errorMessage", "")).split())[:200]
            raise SinkError(f"{self.name}: the server refuses points: {reason}")

    def close(self) -> None:
        """Closes the connection."""
        self._server.close()


def choose_otlp_address(url: str) -> str:
    """The whole address that metrics are sent to. Raises SinkError if there is none."""
    whole = os.environ.get("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "")
    base = url or ("" if whole else os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", ""))
    if not base and not whole:
        raise SinkError("otlp: write otlp:URL, or set OTEL_EXPORTER_OTLP_ENDPOINT")
    return whole if not base else base.rstrip("/").removesuffix(_PATH) + _PATH


def read_pairs(variable: str) -> dict[str, str]:
    """A variable such as "key=value,other=value", with percent-encoded values."""
    pairs = (part.partition("=") for part in os.environ.get(variable, "").split(","))
    return {key.strip(): unquote(value.strip()) for key, _, value in pairs if key.strip()}


def build_otlp_request(points: Sequence[ScalarPoint]) -> dict[str, Any]:
    """The points as an ExportMetricsServiceRequest in OTLP's JSON encoding."""
    by_metric: dict[str, list[tuple[ScalarPoint, Scalar]]] = defaultdict(list)
    metrics: dict[str, SinkMetric] = {}
    for point in points:
        for one in point.scalars:
            metrics[one.metric.otlp] = one.metric
            by_metric[one.metric.otlp].append((point, one))
    gauges = [_build_gauge(metrics[name], found) for name, found in by_metric.items()]
    scope = {"name": PREFIX, "version": version(PREFIX)}
    resource = {"service.name": PREFIX, **read_pairs("OTEL_RESOURCE_ATTRIBUTES")}
    if os.environ.get("OTEL_SERVICE_NAME"):
        resource["service.name"] = os.environ["OTEL_SERVICE_NAME"]
    parts = [{"scope": scope, "metrics": gauges}]
    return {
        "resourceMetrics": [
            {"resource": {"attributes": _build_attributes(resource)}, "scopeMetrics": parts}
        ]
    }


def _build_gauge(metric: SinkMetric, found: Sequence[tuple[ScalarPoint, Scalar]]) -> dict[str, Any]:
    values = [
        {
            "attributes": _build_attributes(
                {"run": point.run, **({metric.label: one.key} if metric.label else {})}
            ),
            "timeUnixNano": str(point.unix_ns),
            "asDouble": one.value,
        }
        for point, one in found
    ]
    return {
        "name": metric.otlp, "description": metric.text, "unit": metric.unit,
        "gauge": {"dataPoints": values},
    }  # fmt: skip


def _build_attributes(values: Mapping[str, str]) -> list[dict[str, Any]]:
    return [{"key": key, "value": {"stringValue": value}} for key, value in values.items()]
