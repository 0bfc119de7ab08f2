"""The description of the API as OpenAPI 3.1, from its routes and their docstrings."""

from __future__ import annotations

import inspect
import re
from importlib.metadata import version
from typing import Any

from flask import Flask, request
from werkzeug.routing import Rule

from stepsplit.dashboard.web.auth import find_needed_role
from stepsplit.dashboard.web.http_error import HttpError

ADDRESS = "/api/v1/openapi.json"

_RANGE = {"from": "begin in ns of the timeline", "to": "end in ns of the timeline"}
_RANKS = {"ranks": "ranks, separated by commas"}

_QUERIES: dict[str, dict[str, str]] = {
    "api.list": {
        "tag": "KEY=VALUE; runs have all that are given",
        "job": "key of a job",
        "state": "uploading, queued, running, done or failed",
        "last": "number of runs, by default 100",
    },
    "api.list_audit": {
        "since": "date or time of the oldest entry, such as 2026-11-30",
        "last": "number of entries, by default 100",
    },
    "html_export.export_run": {"note": "a note of the timeline; may be repeated"},
    "timeline.window": {
        **_RANGE,
        **_RANKS,
        "slots": "most slices of a row",
        "compact": "most slices of the row of a rank that is not open, by default slots",
        "open": "ranks with all their lanes, separated by commas",
        "q": "text that the names of marked slices contain",
    },
    "timeline.search": {
        **_RANGE,
        **_RANKS,
        "q": "text that the names contain",
        "at": "number of the first match of the answer",
        "near": "time in ns from which on the first match of the answer starts",
        "limit": "number of matches in the answer",
    },
    "timeline.measure": {**_RANGE, **_RANKS},
    "timeline.names": {**_RANGE, **_RANKS},
    "timeline.slice": {
        "rank": "rank",
        "lane": "name of the lane",
        "depth": "depth on the lane, from 0",
        "start": "begin in ns",
    },
    "timeline.name": {**_RANGE, "rank": "rank", "bucket": "number of the bucket, from 0"},
}
"""The query parameters of the addresses that are read with some, by endpoint."""

_OF_WHOLE_RUNS = {"api.hang", "api.read_job", "api.read_job_form", "api.roles"}
"""What is read of a run alone, and not of a role of it."""

_JSON = {"application/json": {"schema": {"type": "object"}}}

_ERROR = {
    "description": "what is wrong, in one sentence",
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "properties": {"error": {"type": "string"}},
                "required": ["error"],
            }
        }
    },
}


def refuse_unknown_parameters() -> None:
    """Raises HttpError if an address of the API is read with a parameter that it does not know: a
    misspelled filter would give everything."""
    rule = request.url_rule
    if (
        request.method not in ("GET", "HEAD")
        or rule is None
        or not rule.rule.startswith("/api/v1/")
    ):
        return
    known = _QUERIES.get(rule.endpoint, {})
    if unknown := sorted(set(request.args) - set(known)):
        words = f"known are {', '.join(known)}" if known else "this address has none"
        raise HttpError(400, f"unknown parameters {', '.join(unknown)}; {words}")


def describe_api(app: Flask) -> dict[str, Any]:
    """The document: each address with its methods, parameters, and the role that it needs."""
    paths: dict[str, dict[str, Any]] = {}
    for rule in sorted(app.url_map.iter_rules(), key=lambda rule: rule.rule):
        is_api = rule.rule.startswith("/api/v1/") and rule.endpoint != "api.unknown"
        if not is_api:
            continue
        path = re.sub(r"<(?:[^:<>]*(?:\([^)]*\))?:)?(\w+)>", r"{\1}", rule.rule)
        methods = sorted((rule.methods or set()) - {"OPTIONS"})
        if "GET" in methods:
            methods.remove("HEAD")
        for method in methods:
            paths.setdefault(path, {})[method.lower()] = _describe_operation(app, rule, method)
    return {
        "openapi": "3.1.0",
        "info": {"title": "stepsplit dashboard", "version": version("stepsplit")},
        "paths": paths,
        "components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "security": [{"token": []}, {}],
    }


def _describe_operation(app: Flask, rule: Rule, method: str) -> dict[str, Any]:
    view = app.view_functions[rule.endpoint]
    summary = " ".join((inspect.getdoc(view) or rule.endpoint).split("\n\n")[0].split())
    role = find_needed_role(rule.endpoint, method).label
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in sorted(rule.arguments)
    ]
    for parameter in parameters:
        if parameter["name"] == "run_id":
            has_roles = method == "GET" and rule.endpoint not in _OF_WHOLE_RUNS
            role_words = "; ID.N is the role number N, from 0, of a run of several roles"
            parameter["description"] = "id of a run" + role_words * has_roles
    for name, words in _QUERIES.get(rule.endpoint, {}).items():
        schema = {"type": "string"}
        parameters.append({"name": name, "in": "query", "description": words, "schema": schema})
    described: dict[str, Any] = {
        "operationId": f"{rule.endpoint}.{method.lower()}",
        "summary": summary,
        "description": f"Needs the role {role}.",
        "parameters": parameters,
        "responses": {"2XX": {"description": "done"}, "4XX": _ERROR},
    }
    if method in ("POST", "PUT", "PATCH"):
        described["requestBody"] = {"content": _JSON}
    return described
