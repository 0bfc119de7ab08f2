"""MLflow: metrics of a run, by the REST API."""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from urllib.parse import quote, unquote, urlsplit

from stepsplit.dashboard.sinks.json_server import JsonServer, hide_password
from stepsplit.dashboard.sinks.scalars import PREFIX, ScalarPoint, SinkError

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
        self.name = f"mlflow:{hide_password(address)}"
        if not address:
            raise SinkError("mlflow: write mlflow:URL, or set MLFLOW_TRACKING_URI")
        self._server = JsonServer(self.name, address, _build_mlflow_headers(address))
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
                "timestamp": point.unix_ns // 10**6,
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
            # The numbers are there; a run that stays "running" is no loss.
            with suppress(SinkError):
                self._server.ask("POST", f"{_API}/runs/update", end)
        self._server.close()

    def _find_or_create_run(self, name: str) -> str:
        experiment = self._find_or_create_experiment()
        # A quote would end the text in the filter.
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
    return time.time_ns() // 10**6


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


open_sink = MlflowSink
