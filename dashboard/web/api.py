"""The HTTP API: uploads, runs, tokens, watched runs and the audit log."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from flask import Blueprint, Response, current_app, jsonify, request, send_file

from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.diagnose.hang.result import HANG_NAME
from stepsplit.analyzer.errors import DataError, StepsplitError, UsageError
from stepsplit.analyzer.regression.checks import ANSWERS
from stepsplit.analyzer.report.io import REPORT_NAME
from stepsplit.analyzer.report.roles import ROLES_NAME
from stepsplit.analyzer.watch.records import decode_batch
from stepsplit.dashboard.pages.run_actions import build_job_form_json
from stepsplit.dashboard.store.alerts import UNTIL_END_NS, WatchAlert
from stepsplit.dashboard.store.audit import audit_to_json, format_time, parse_since
from stepsplit.dashboard.store.ids import split_role_id
from stepsplit.dashboard.store.job_files import (
    check_job_ranks,
    check_job_text,
    check_needed_keys,
    merge_job,
    parse_job_changes,
)
from stepsplit.dashboard.store.logins import Token
from stepsplit.dashboard.store.run_row import RunRow, describe_edit, explain_no_retry
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.store.watch import WatchedRun
from stepsplit.dashboard.store.watch_batches import MAX_STARTS
from stepsplit.dashboard.store.watch_senders import OtherSenderError, UnknownStartError
from stepsplit.dashboard.upload_files import choose_run_name
from stepsplit.dashboard.web.auth import current_user, record_action
from stepsplit.dashboard.web.http_error import HttpError
from stepsplit.dashboard.web.metrics import METHODS
from stepsplit.dashboard.web.openapi import ADDRESS, describe_api
from stepsplit.dashboard.web.request_bodies import (
    find_sender,
    parse_alert_action,
    parse_new_run,
    parse_new_token,
    parse_run_edit,
    parse_sender,
    read_json,
)
from stepsplit.dashboard.web.uploads import (
    JSON_BYTES,
    Limits,
    UploadPart,
    build_offset_headers,
    build_whole_file_part,
    delete_file,
    discard_drafts,
    parse_next_part,
    parse_relative_path,
    receive_part,
    require_open_upload,
)

# The upload API: create a run, upload its files (whole or in parts), finish, poll the status.

RUNS = "/api/v1/runs"

WHO_AM_I = "/api/v1/whoami"

AUDIT = "/api/v1/audit"

SESSIONS = "/api/v1/sessions"

TOKENS = "/api/v1/tokens"

WATCH = "/api/v1/watch"

WATCH_BYTES = 4 << 20
"""Largest batch of a watched run."""

_DEFAULT_LAST = 100
"""Number of runs in a list by default."""

_NUMBER = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class Api:
    """The request handlers of the API."""

    store: Store
    limits: Limits

    def create(self) -> tuple[Response, int]:
        """POST {name, tags}: creates a run that accepts files."""
        request.max_content_length = JSON_BYTES
        new = parse_new_run(read_json())
        return jsonify(id=self.store.add(new.name, new.tags)), 201

    def list_runs(self) -> Response:
        """GET ?tag=KEY=VALUE&job=KEY&state=done&last=N: the newest runs of the job that have all
        tags."""
        pairs = [pair.partition("=") for pair in request.args.getlist("tag")]
        state, job, last = request.args.get("state"), request.args.get("job"), _read_last()
        if last is None or not all(key and equals for key, equals, _ in pairs):
            raise HttpError(400, "list runs with ?tag=branch=main&state=done&last=10")
        tags = [(key, value) for key, _, value in pairs]
        found = [
            run
            for run in self.store.list_runs()
            if run.has_tags(tags) and state in (None, run.state) and job in (None, run.job_key)
        ]
        return jsonify(runs=[_build_list_row(run) for run in found[:last]])

    def read_user(self) -> Response:
        """GET: who sends the request, and what he may do."""
        user = current_user()
        return jsonify(name=user.name, role=user.role.label, token=user.token_id)

    def describe(self) -> Response:
        """GET: this description."""
        return jsonify(describe_api(current_app))

    def record_check(self, run_id: str) -> Response:
        """POST {answer, headline}: shows the result of a check with the run."""
        request.max_content_length = JSON_BYTES
        run = self._find_run(run_id)
        body = read_json()
        fields = body if isinstance(body, Mapping) else {}
        answer, headline = fields.get("answer"), fields.get("headline")
        if answer not in ANSWERS or not isinstance(headline, str):
            raise HttpError(400, f"send JSON with answer ({', '.join(ANSWERS)}) and headline")
        self.store.verdicts.record(run_id, answer, headline)
        record_action(self.store.audit, "check recorded", f"{run.label}: {answer}")
        return Response(status=204)

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
        return Response(status=204, headers=build_offset_headers(row))

    def remove(self, run_id: str, path: str) -> Response:
        """DELETE: removes a file from the upload."""
        self._find_run(run_id)
        delete_file(self.store, run_id, parse_relative_path(path))
        return Response(status=204)

    def finish(self, run_id: str) -> tuple[Response, int]:
        """POST: ends the upload and queues the analysis."""
        self._find_run(run_id)
        paths = [row.path for row in self.store.files.list_files(run_id)]
        if not self.store.queue(run_id, choose_run_name(paths) if paths else ""):
            if self._find_run(run_id).state != "uploading":
                raise HttpError(409, "this upload is already finished")
            for row in self.store.files.list_files(run_id):
                if not row.complete:
                    stored = f"{row.path} is incomplete: {row.received_bytes} bytes received"
                    raise HttpError(409, f"{stored}; send the rest, or DELETE it")
            raise HttpError(400, "the run has no files yet")
        record_action(self.store.audit, "upload", self._find_run(run_id).label)
        discard_drafts(self.store, run_id)
        return self.read_status(run_id), 202

    def read_status(self, run_id: str) -> Response:
        """GET: the state of the run, or of a role of it, such as ID.0; the files are the run's."""
        run = self._find_run_or_role(run_id)
        stored = self.store.files.sum_size(split_role_id(run.id)[0])
        return jsonify(
            id=run.id,
            name=run.name,
            state=run.state,
            error=run.error,
            roles=run.roles,
            tags={tag.key: tag.value for tag in run.tags},
            note=run.note,
            job=run.job_key,
            job_label=None if run.job is None else run.job.label,
            progress=run.progress,
            progress_note=run.progress_note,
            files=stored.files,
            received_bytes=stored.bytes,
        )

    def delete_run(self, run_id: str) -> Response:
        """DELETE: deletes the run with its files and its report."""
        run = self._find_run(run_id)
        if not self.store.delete(run.id):
            raise HttpError(404, "run not found")
        record_action(self.store.audit, "run deleted", run.label)
        return Response(status=204)

    def edit_run(self, run_id: str) -> Response:
        """PATCH {name, note, tags}: changes those of them that are sent."""
        request.max_content_length = JSON_BYTES
        run, edit = self._find_run(run_id), parse_run_edit(read_json())
        if not self.store.edit(run.id, edit):
            raise HttpError(404, "run not found")
        record_action(self.store.audit, "run edited", describe_edit(run, edit))
        return self.read_status(run_id)

    def analyze_again(self, run_id: str) -> tuple[Response, int]:
        """POST: queues another analysis of the run's files."""
        run = self._find_run(run_id)
        if not self.store.analyze_again(run.id):
            raise HttpError(409, explain_no_retry(run))
        record_action(self.store.audit, "run queued", run.label)
        return self.read_status(run_id), 202

    def attach_job(self, run_id: str) -> tuple[Response, int]:
        """PUT a job.toml, or JSON with its changes: replaces the run's, queues another analysis."""
        run = self._find_run(run_id)
        text = self._read_job_body(run)
        try:
            check_job_text(text)
            if run.can_be_analyzed_again and run.state == "done" and not run.is_hang:
                self._check_for_run(run, text)
        except StepsplitError as error:
            raise _refuse_job(error) from None
        if not self.store.attach_job(run.id, text):
            raise HttpError(409, explain_no_retry(run))
        record_action(self.store.audit, "job attached", run.label)
        return self.read_status(run_id), 202

    def _check_for_run(self, run: RunRow, text: bytes) -> None:
        """Raises DataError for a job with which an analysis of the finished run is for nothing: of
        other ranks, or as a form without what the recording doesn't show either."""
        ranks = run.headline.world_size if run.headline else None
        check_job_ranks(text, ranks or 1)
        if request.is_json and (known := self.store.read_job(run.id)) is not None:
            check_needed_keys(text, known)

    def read_job(self, run_id: str) -> Response:
        """GET: the job.toml that the run's analysis used, or what it could infer of one."""
        text = self.store.read_job(self._find_run(run_id).id)
        if text is None:
            raise HttpError(404, "no job.toml is known; describe the job, or analyze the run again")
        return Response(text, mimetype="text/plain")

    def read_job_form(self, run_id: str) -> Response:
        """GET: the form of the run's job.toml. POST, with a body as for PUT: that of the result."""
        run = self._find_run(run_id)
        is_post = request.method == "POST"
        text = self._read_job_body(run) if is_post else self.store.read_job(run.id)
        try:
            form = jsonify(build_job_form_json(text or b""))
        except DataError as error:
            if is_post:
                raise _refuse_job(error) from None
            # Corrected as text.
            form = jsonify(toml=(text or b"").decode(errors="replace"), groups=[], error=str(error))
        return form

    def _read_job_body(self, run: RunRow) -> bytes:
        """The job.toml of the request: its text, or the run's with the changes of a JSON object."""
        request.max_content_length = 2 * JSON_BYTES if request.is_json else JSON_BYTES
        if not request.is_json:
            return request.get_data()
        body = read_json()
        if not isinstance(body, Mapping) or not isinstance(body.get("toml", ""), str):
            raise HttpError(400, _JOB_HINT)
        try:
            changes = parse_job_changes({k: v for k, v in body.items() if k != "toml"})
            own = body["toml"].encode() if "toml" in body else self.store.read_job(run.id)
            return merge_job(own or b"", changes)
        except DataError as error:
            raise _refuse_job(error) from None

    def report(self, run_id: str) -> Response:
        """GET: report.json of the run."""
        run = self._find_run_or_role(run_id)
        path = (self.store.artifacts.fetch_results(run_id) / REPORT_NAME).absolute()
        if not run.has_report or not path.exists():
            why = f"is {run.state}"
            if run.is_hang:
                why = f"has Flight Recorder dumps: get {HANG_NAME}"
            elif run.has_roles:
                own = f"{run.id}.0 is that of {run.roles[0]}"
                why = f"has several roles: get {ROLES_NAME}, or the report of a role ({own})"
            raise HttpError(404, f"no report: the run {why}")
        return send_file(path, mimetype="application/json", download_name=f"{run_id}.{REPORT_NAME}")

    def hang(self, run_id: str) -> Response:
        """GET: hang.json of a run of Flight Recorder dumps."""
        run = self._find_run(run_id)
        text = self.store.artifacts.read_file(run_id, HANG_NAME) if run.is_hang else None
        if text is None:
            raise HttpError(404, f"no {HANG_NAME}: the run has no Flight Recorder dumps alone")
        return Response(text, mimetype="application/json")

    def roles(self, run_id: str) -> Response:
        """GET: roles.json of a run of several roles. The report of the first is that of ID.0."""
        run = self._find_run(run_id)
        text = self.store.artifacts.read_file(run_id, ROLES_NAME) if run.has_roles else None
        if text is None:
            raise HttpError(404, f"no {ROLES_NAME}: the run is no job of several roles")
        return Response(text, mimetype="application/json")

    def list_audit(self) -> Response:
        """GET ?since=DATE&last=N: the newest entries of the audit log."""
        last = _read_last()
        if last is None:
            raise HttpError(400, "last must be a number of entries")
        try:
            since_ns = parse_since(request.args["since"]) if "since" in request.args else 0
        except UsageError as error:
            raise HttpError(400, str(error)) from None
        body = audit_to_json(self.store.audit.list_entries(last, since_ns))
        return Response(body, mimetype="application/json")

    def list_tokens(self) -> Response:
        """GET: all tokens, also revoked and expired ones, without their secrets."""
        rows = [_build_token_row(token) for token in self.store.tokens.list_tokens()]
        return jsonify(tokens=rows)

    def create_token(self) -> tuple[Response, int]:
        """POST {name, role, days}: creates a token; its secret is in this answer only."""
        request.max_content_length = JSON_BYTES
        asked = parse_new_token(read_json())
        if not current_user().authenticated:
            # It would stay valid when the server asks for a password later.
            raise HttpError(403, "this server has no login; use: stepsplit token create")
        new = self.store.tokens.create(asked.name, asked.role, asked.lifetime_s)
        record_action(self.store.audit, "token created", new.token.label)
        return jsonify(secret=new.secret, **_build_token_row(new.token)), 201

    def revoke_token(self, token_id: str) -> Response:
        """DELETE: revokes a token, which ends its sessions."""
        if not self.store.tokens.revoke(token_id):
            raise HttpError(404, "token not found")
        record_action(self.store.audit, "token revoked", token_id)
        return Response(status=204)

    def end_sessions(self) -> Response:
        """DELETE: ends all sessions, so that everyone has to log in again."""
        number = self.store.sessions.end_all()
        record_action(self.store.audit, "sessions ended", f"{number} sessions")
        return jsonify(ended=number)

    def add_watch_batch(self) -> Response:
        """POST: adds a batch of a watched run; one that was received before counts once."""
        request.max_content_length = WATCH_BYTES
        try:
            batch = decode_batch(request.get_data(), "the body")
        except DataError as error:
            raise self._refuse_batch("", 400, error) from None
        try:
            receipt = self.store.watches.add_batch(batch, find_sender())
        except OtherSenderError as error:
            raise self._refuse_batch(batch.run, 403, error) from None
        except UnknownStartError as error:
            refused = self._refuse_batch(batch.run, 409, error)
            answer = jsonify(error=str(refused), newest_incarnation=error.newest)
            answer.status_code = refused.status
            return answer
        except StepsplitError as error:
            raise self._refuse_batch(batch.run, 400, error) from None
        if receipt.is_new_run:
            record_action(self.store.audit, "watch began", batch.run)
        return jsonify(accepted=receipt.accepted)

    def _refuse_batch(self, run: str, status: int, error: Exception) -> HttpError:
        """The refusal of a batch, which is in the audit log too."""
        reason = str(error)[:_ERROR_LENGTH]
        record_action(self.store.audit, "watch refused", run, reason)
        return HttpError(status, reason)

    def hand_over_watch(self, name: str) -> Response:
        """PATCH {sender}: lets another sender add to a watched run; null for whoever is next."""
        request.max_content_length = JSON_BYTES
        sender = parse_sender(read_json())
        self.store.watches.hand_over(self._find_watch(name).name, sender)
        record_action(self.store.audit, "watch handed over", f"{name} to {sender or 'anyone'}")
        return Response(status=204)

    def reopen_start(self, name: str, incarnation: int) -> Response:
        """PATCH {"ended": null}: takes back that a start of the job has ended."""
        request.max_content_length = JSON_BYTES
        if read_json() != {"ended": None}:
            raise HttpError(400, 'send JSON {"ended": null}, which takes its end back')
        if not self.store.watches.reopen_start(self._find_watch(name).id, incarnation):
            raise HttpError(404, "start not found")
        record_action(self.store.audit, "start reopened", f"{name}, start {incarnation}")
        return Response(status=204)

    def forget_start(self, name: str, incarnation: int) -> Response:
        """DELETE: deletes what is known of a start of the job."""
        watch = self._find_watch(name)
        if incarnation not in {one.incarnation for one in watch.starts}:
            raise HttpError(404, "start not found")
        if not self.store.watches.forget_start(watch.id, incarnation):
            raise HttpError(409, "the run has no other start; delete the watched run")
        record_action(self.store.audit, "start forgotten", f"{name}, start {incarnation}")
        return Response(status=204)

    def list_watches(self) -> Response:
        """GET: the watched runs, those with the newest batches first."""
        rows = [_build_watch_row(watch) for watch in self.store.watches.list_watches()]
        return jsonify(watches=rows)

    def delete_watch(self, name: str) -> Response:
        """DELETE: deletes a watched run."""
        if not self.store.watches.delete(name):
            raise HttpError(404, "watched run not found")
        record_action(self.store.audit, "watch deleted", name)
        return Response(status=204)

    def list_alerts(self, name: str) -> Response:
        """GET: the newest alerts of a watched run, newest first."""
        self._find_watch(name)
        rows = [_build_alert_row(one) for one in self.store.alerts.list_alerts(name, _MOST_ALERTS)]
        return jsonify(alerts=rows)

    def act_on_alert(self, name: str, alert_id: int) -> Response:
        """POST {action, hours}: acknowledges an alert, or silences its run for so many hours, by
        default until the alert ends; unacknowledge and unsilence undo it."""
        request.max_content_length = JSON_BYTES
        watch = self._find_watch(name)
        if not find_sender().may_write(watch.sender):
            reason = "only the sender of this run and admins may act on its alerts"
            record_action(self.store.audit, "watch refused", f"{name}, alert {alert_id}", reason)
            raise HttpError(403, reason)
        alert = self.store.alerts.find_alert(watch.name, alert_id)
        if alert is None:
            raise HttpError(404, "alert not found")
        action = parse_alert_action(read_json())
        if action.verb == "silence" and alert.ended_unix_ns is not None:
            raise HttpError(409, "this alert has ended; only an open one can be silenced")
        alerts = self.store.alerts
        match action.verb:
            case "acknowledge":
                alerts.acknowledge(alert.id, current_user().name)
            case "unacknowledge":
                alerts.undo_acknowledge(alert.id)
            case "silence":
                alerts.silence(alert.id, action.hours)
            case "unsilence":
                alerts.end_silence(alert.id)
        target = f"{name}, alert {alert.id}{action.describe_length()}"
        record_action(self.store.audit, action.describe(), target)
        return Response(status=204)

    def _find_watch(self, name: str) -> WatchedRun:
        watch = self.store.watches.find_watch(name)
        if watch is None:
            raise HttpError(404, "watched run not found")
        return watch

    def _open_body(self) -> BinaryIO:
        request.max_content_length = self.limits.file_bytes
        return cast(BinaryIO, request.stream)

    def _receive_part(self, run_id: str, path: str, part: UploadPart, status: int) -> Response:
        require_open_upload(self._find_run(run_id).state == "uploading")
        row = receive_part(self.store, run_id, parse_relative_path(path), part, self.limits)
        answer = jsonify(path=row.path, bytes=row.received_bytes, complete=row.complete)
        answer.status_code = status
        answer.headers.update(build_offset_headers(row))
        return answer

    def _find_run_or_role(self, run_id: str) -> RunRow:
        run = self.store.find_run_or_role(run_id)
        if run is None:
            raise HttpError(404, "run not found")
        return run

    def _find_run(self, run_id: str) -> RunRow:
        run = self.store.find_run(run_id)
        if run is None:
            raise HttpError(404, "run not found")
        return run


_JOB_HINT = 'send a job.toml, or JSON with its changes: {"parallel": {"tp": 2}}'

_ERROR_LENGTH = 2_000


def _refuse_job(error: StepsplitError) -> HttpError:
    return HttpError(400, str(error)[:_ERROR_LENGTH])


def _build_list_row(run: RunRow) -> dict[str, Any]:
    """A run of the list, with the numbers of the page Runs; those are null without a report."""
    numbers = run.headline
    middle = numbers.median_step if numbers else None
    first = numbers.first_finding if numbers else None
    return {
        "id": run.id,
        "name": run.name,
        "state": run.state,
        "error": run.error,
        "roles": run.roles,
        "job": run.job_key,
        "added": format_time(run.created_unix_ns),
        "tags": {tag.key: tag.value for tag in run.tags},
        "world_size": numbers.world_size if numbers else None,
        "mesh": numbers.mesh if numbers else None,
        "median_step_ns": middle.step_ns if middle else None,
        "shares": dict(zip(BUCKETS, middle.shares, strict=True)) if middle else None,
        "bubble_fraction": numbers.bubble_fraction if numbers else None,
        "mfu": numbers.mfu if numbers else None,
        "finding": first.words if first else None,
        "finding_gain_ns": first.gain_ns if first else None,
    }


def _build_token_row(token: Token) -> dict[str, str | bool | None]:
    used_ns, expires_ns = token.last_used_unix_ns, token.expires_unix_ns
    return {
        "id": token.id,
        "name": token.name,
        "role": token.role.label,
        "created": format_time(token.created_unix_ns),
        "last_used": None if used_ns is None else format_time(used_ns),
        "expires": None if expires_ns is None else format_time(expires_ns),
        "revoked": token.revoked,
    }


def _build_watch_row(watch: WatchedRun) -> dict[str, Any]:
    ended_ns = watch.start.ended_unix_ns
    return {
        "run": watch.name,
        "sender": watch.sender,
        "world_size": watch.start.world_size,
        "incarnation": watch.start.incarnation,
        "started": format_time(watch.starts[0].first_unix_ns),
        "newest": format_time(watch.newest_unix_ns),
        "ended": None if ended_ns is None else format_time(ended_ns),
        "last_step": watch.last_step,
        "interval_steps": watch.interval_steps,
        "budget": watch.budget,
        "overhead": watch.overhead,
        "dropped": dict(watch.dropped),
    }


_MOST_ALERTS = 200


def _build_alert_row(alert: WatchAlert) -> dict[str, Any]:
    times = {
        name: None if at_ns is None else format_time(at_ns)
        for name, at_ns in (
            ("since", alert.since_unix_ns), ("opened", alert.opened_unix_ns),
            ("ended", alert.ended_unix_ns), ("acknowledged", alert.acknowledged_unix_ns),
            ("delivered", alert.delivered_unix_ns),
        )
    }  # fmt: skip
    until_ns = alert.silenced_until_unix_ns
    is_until_end = until_ns == UNTIL_END_NS
    silenced = None if until_ns is None else "its end" if is_until_end else format_time(until_ns)
    return {
        "id": alert.id,
        "metric": alert.metric,
        "incarnation": alert.incarnation,
        "step": alert.step,
        "before": alert.before,
        "after": alert.after,
        "rank": alert.rank,
        "text": alert.text,
        "cause": alert.cause,
        **times,
        "acknowledged_by": alert.acknowledged_by,
        "silenced_until": silenced,
        "tries": alert.tries,
        "failure": alert.failure,
    }


def _read_last() -> int | None:
    """The number of rows that the query asks for; None if it is no number."""
    last = request.args.get("last", str(_DEFAULT_LAST))
    return int(last) if _NUMBER.fullmatch(last) else None


def build_api_routes(api: Api) -> Blueprint:
    """The routes of the API."""
    routes = Blueprint("api", __name__)
    run = f"{RUNS}/<run_id>"
    file = f"{run}/files/<path:path>"
    routes.add_url_rule(WHO_AM_I, "who", api.read_user)
    routes.add_url_rule(ADDRESS, "describe", api.describe)
    routes.add_url_rule(RUNS, "create", api.create, methods=["POST"])
    routes.add_url_rule(RUNS, "list", api.list_runs)
    routes.add_url_rule(f"{run}/check", "check", api.record_check, methods=["POST"])
    routes.add_url_rule(file, "put", api.put, methods=["PUT"])
    routes.add_url_rule(file, "patch", api.patch, methods=["PATCH"])
    routes.add_url_rule(file, "head", api.head_file, methods=["HEAD"])
    routes.add_url_rule(file, "remove", api.remove, methods=["DELETE"])
    routes.add_url_rule(f"{run}/finish", "finish", api.finish, methods=["POST"])
    routes.add_url_rule(run, "status", api.read_status)
    routes.add_url_rule(run, "delete_run", api.delete_run, methods=["DELETE"])
    routes.add_url_rule(run, "edit", api.edit_run, methods=["PATCH"])
    routes.add_url_rule(f"{run}/analyze", "analyze", api.analyze_again, methods=["POST"])
    routes.add_url_rule(f"{run}/job", "attach_job", api.attach_job, methods=["PUT"])
    routes.add_url_rule(f"{run}/job", "read_job", api.read_job)
    form = f"{run}/job/form"
    routes.add_url_rule(form, "read_job_form", api.read_job_form, methods=["GET", "POST"])
    routes.add_url_rule(f"{run}/{REPORT_NAME}", "report", api.report)
    routes.add_url_rule(f"{run}/{HANG_NAME}", "hang", api.hang)
    routes.add_url_rule(f"{run}/{ROLES_NAME}", "roles", api.roles)
    routes.add_url_rule(AUDIT, "list_audit", api.list_audit)
    routes.add_url_rule(TOKENS, "list_tokens", api.list_tokens)
    routes.add_url_rule(TOKENS, "create_token", api.create_token, methods=["POST"])
    token = f"{TOKENS}/<token_id>"
    routes.add_url_rule(token, "revoke_token", api.revoke_token, methods=["DELETE"])
    routes.add_url_rule(SESSIONS, "end_sessions", api.end_sessions, methods=["DELETE"])
    routes.add_url_rule(WATCH, "add_watch_batch", api.add_watch_batch, methods=["POST"])
    routes.add_url_rule(WATCH, "list_watches", api.list_watches)
    watch = f"{WATCH}/<name>"
    routes.add_url_rule(watch, "delete_watch", api.delete_watch, methods=["DELETE"])
    routes.add_url_rule(watch, "hand_over_watch", api.hand_over_watch, methods=["PATCH"])
    start = f"{watch}/starts/<int(max={MAX_STARTS}):incarnation>"
    routes.add_url_rule(start, "reopen_start", api.reopen_start, methods=["PATCH"])
    routes.add_url_rule(start, "forget_start", api.forget_start, methods=["DELETE"])
    alerts = f"{watch}/alerts"
    routes.add_url_rule(alerts, "list_alerts", api.list_alerts)
    alert = f"{alerts}/<int(max={(1 << 63) - 1}):alert_id>"
    routes.add_url_rule(alert, "act_on_alert", api.act_on_alert, methods=["POST"])
    # All other addresses; else the pages, which answer every address, would answer them.
    for unknown in ("/api", "/api/", "/api/<path:path>"):
        routes.add_url_rule(unknown, "unknown", _refuse_unknown, methods=METHODS)
    return routes


def _refuse_unknown(path: str = "") -> Response:
    """Refuses a request that no other route answers: 405 if it does for another method."""
    routes = current_app.create_url_adapter(request)
    matched = [
        method for method in METHODS
        if routes is not None and routes.match(method=method)[0] != f"{request.blueprint}.unknown"
    ]  # fmt: skip
    if not matched:
        raise HttpError(404, "no such address; the API is described at /api/v1/openapi.json")
    allowed = ", ".join(matched)
    raise HttpError(405, f"the method must be one of {allowed}", {"Allow": allowed})
