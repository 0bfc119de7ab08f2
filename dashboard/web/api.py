"""The upload API: name a run, put its files or their parts, finish; then ask how it goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import BinaryIO, cast

from flask import Blueprint, Response, jsonify, request, send_file

from stepsplit.analyzer.report.io import REPORT_NAME
from stepsplit.dashboard.store.files import FileRow
from stepsplit.dashboard.store.rows import RunRow
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.limits import JSON_BYTES, Limits
from stepsplit.dashboard.web.new_run import new_run
from stepsplit.dashboard.web.part import Part, next_part, whole_file
from stepsplit.dashboard.web.receive import forget, offset_headers, receive, relative
from stepsplit.dashboard.web.refused import Refused

RUNS = "/api/v1/runs"


@dataclass(frozen=True, slots=True)
class Api:
    """The handlers, with what they work on."""

    store: Store
    limits: Limits

    def create(self) -> tuple[Response, int]:
        """POST {name, tags}: a new run that waits for files."""
        request.max_content_length = JSON_BYTES
        asked = new_run(request.get_json(silent=True))
        return jsonify(id=self.store.add(asked.name, asked.tags)), 201

    def put(self, run_id: str, path: str) -> Response:
        """PUT: the body becomes one file of the run's input."""
        part = whole_file(self._body(), request.content_length, request.headers)
        return self._taken(run_id, path, part, 201)

    def patch(self, run_id: str, path: str) -> Response:
        """PATCH: the body is the next part of a file."""
        part = next_part(self._body(), request.content_length, request.headers)
        return self._taken(run_id, path, part, 200)

    def head(self, run_id: str, path: str) -> Response:
        """HEAD: how much of the file is held."""
        self._run(run_id)
        row = self.store.files.one(run_id, str(relative(path)))
        if row is None:
            raise Refused(404, "there is no such file")
        return Response(status=204, headers=offset_headers(row) | {"Cache-Control": "no-store"})

    def remove(self, run_id: str, path: str) -> Response:
        """DELETE: the file is no part of the upload after all."""
        self._run(run_id)
        forget(self.store, run_id, relative(path))
        return Response(status=204)

    def finish(self, run_id: str) -> tuple[Response, int]:
        """POST: all files are there, the analysis may begin."""
        self._run(run_id)
        if not self.store.queue(run_id):
            raise self._why_not(run_id)
        return self._status(run_id), 202

    def status(self, run_id: str) -> Response:
        """GET: where the run stands."""
        return self._status(run_id)

    def report(self, run_id: str) -> Response:
        """GET: the report itself."""
        run = self._run(run_id)
        path = (self.store.artifacts.results(run_id) / REPORT_NAME).absolute()
        if run.state != "done" or not path.exists():
            raise Refused(404, f"the run is {run.state}: there is no report")
        return send_file(path, mimetype="application/json", download_name=f"{run_id}.{REPORT_NAME}")

    def _body(self) -> BinaryIO:
        request.max_content_length = self.limits.file_bytes
        return cast(BinaryIO, request.stream)

    def _taken(self, run_id: str, path: str, part: Part, status: int) -> Response:
        self._run(run_id)
        row = receive(self.store, run_id, relative(path), part, self.limits)
        answer = jsonify(path=row.path, bytes=row.received_bytes, complete=row.complete)
        answer.status_code = status
        answer.headers.update(offset_headers(row))
        return answer

    def _why_not(self, run_id: str) -> Refused:
        if self._run(run_id).state != "uploading":
            return Refused(409, "this run was finished before")
        rest = [row for row in self.store.files.of(run_id) if not row.complete]
        return _incomplete(rest[0]) if rest else Refused(400, "the run has no files yet")

    def _status(self, run_id: str) -> Response:
        run, held = self._run(run_id), self.store.files.held(run_id)
        return jsonify(
            id=run.id,
            name=run.name,
            state=run.state,
            error=run.error,
            tags={tag.key: tag.value for tag in run.tags},
            progress=run.progress,
            progress_note=run.progress_note,
            files=held.files,
            received_bytes=held.bytes,
        )

    def _run(self, run_id: str) -> RunRow:
        run = self.store.run(run_id)
        if run is None:
            raise Refused(404, "there is no such run")
        return run


def _incomplete(row: FileRow) -> Refused:
    held = f"{row.received_bytes} bytes of it are held"
    return Refused(409, f"{row.path} is not complete: {held}; send the rest, or DELETE it")


def blueprint(api: Api) -> Blueprint:
    """The routes of the API."""
    routes = Blueprint("api", __name__)
    run = f"{RUNS}/<run_id>"
    file = f"{run}/files/<path:path>"
    routes.add_url_rule(RUNS, "create", api.create, methods=["POST"])
    routes.add_url_rule(file, "put", api.put, methods=["PUT"])
    routes.add_url_rule(file, "patch", api.patch, methods=["PATCH"])
    routes.add_url_rule(file, "head", api.head, methods=["HEAD"])
    routes.add_url_rule(file, "remove", api.remove, methods=["DELETE"])
    routes.add_url_rule(f"{run}/finish", "finish", api.finish, methods=["POST"])
    routes.add_url_rule(run, "status", api.status)
    routes.add_url_rule(f"{run}/{REPORT_NAME}", "report", api.report)
    return routes
