"""The upload API: name a run, put its files, finish; then ask how it goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import BinaryIO, cast

from flask import Blueprint, Response, jsonify, request, send_file

from stepsplit.analyzer.report.wire import REPORT_NAME
from stepsplit.dashboard.store.artifacts import INPUT_NAME
from stepsplit.dashboard.store.ingest import Worker
from stepsplit.dashboard.store.store import RunRow, Store
from stepsplit.dashboard.web.receive import Refused, receive, relative

FILE_LIMIT_BYTES = 8 << 30
_NAME_LENGTH = 200
_JSON_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Api:
    """The handlers, with what they work on."""

    store: Store
    worker: Worker
    file_limit_bytes: int

    def create(self) -> tuple[Response, int]:
        """POST {name}: a new run that waits for files."""
        request.max_content_length = _JSON_BYTES
        body = request.get_json(silent=True)
        name = body.get("name") if isinstance(body, dict) else None
        if not isinstance(name, str) or not name.strip():
            raise Refused(400, 'send JSON with a name: {"name": "my run"}')
        return jsonify(id=self.store.add(name.strip()[:_NAME_LENGTH])), 201

    def put(self, run_id: str, path: str) -> tuple[Response, int]:
        """PUT: the body becomes one file of the run's input."""
        if self._run(run_id).state != "uploading":
            raise Refused(409, "this run takes no more files; make a new one")
        target = relative(path)
        request.max_content_length = self.file_limit_bytes
        folder = self.store.folder(run_id) / INPUT_NAME
        stream = cast(BinaryIO, request.stream)
        taken = receive(stream, request.content_length, folder, target, self.file_limit_bytes)
        return jsonify(path=str(target), bytes=taken), 201

    def finish(self, run_id: str) -> tuple[Response, int]:
        """POST: all files are there, the analysis may begin."""
        self._run(run_id)
        if not any((self.store.folder(run_id) / INPUT_NAME).iterdir()):
            raise Refused(400, "the run has no files yet")
        if not self.store.queue(run_id):
            raise Refused(409, "this run was finished before")
        self.worker.submit(run_id)
        return self._status(run_id), 202

    def status(self, run_id: str) -> Response:
        """GET: where the run stands."""
        return self._status(run_id)

    def report(self, run_id: str) -> Response:
        """GET: the report itself."""
        run = self._run(run_id)
        if run.state != "done":
            raise Refused(404, f"the run is {run.state}: there is no report")
        path = (self.store.folder(run_id) / REPORT_NAME).absolute()
        return send_file(path, mimetype="application/json", download_name=f"{run_id}.{REPORT_NAME}")

    def _status(self, run_id: str) -> Response:
        run = self._run(run_id)
        return jsonify(id=run.id, name=run.name, state=run.state, error=run.error)

    def _run(self, run_id: str) -> RunRow:
        run = self.store.run(run_id)
        if run is None:
            raise Refused(404, "there is no such run")
        return run


def blueprint(api: Api) -> Blueprint:
    """The routes of the API."""
    routes = Blueprint("api", __name__)
    run = "/api/v1/runs/<run_id>"
    routes.add_url_rule("/healthz", "healthz", lambda: jsonify(status="ok"))
    routes.add_url_rule("/api/v1/runs", "create", api.create, methods=["POST"])
    routes.add_url_rule(f"{run}/files/<path:path>", "put", api.put, methods=["PUT"])
    routes.add_url_rule(f"{run}/finish", "finish", api.finish, methods=["POST"])
    routes.add_url_rule(run, "status", api.status)
    routes.add_url_rule(f"{run}/{REPORT_NAME}", "report", api.report)
    routes.register_error_handler(Refused, _refused)
    return routes


def _refused(error: Refused) -> tuple[Response, int]:
    return jsonify(error=str(error)), error.status
