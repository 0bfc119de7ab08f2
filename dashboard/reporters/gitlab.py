"""A verdict for GitLab: the code quality widget, and metrics as OpenMetrics text."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import msgspec

from stepsplit.analyzer.regression.check_result import Judged, Verdict
from stepsplit.analyzer.regression.metrics import Unit, meaning_of
from stepsplit.dashboard.reporters.verdict_words import one_line

_UNITS: dict[Unit, str] = {
    "share": "ratio",
    "ns": "seconds",
    "bytes": "bytes",
    "bytes_per_s": "bytes_per_second",
    "count": "count",
}
_SEVERITY = {"regressed": "major", "inconclusive": "info"}


class _Lines(msgspec.Struct):
    begin: int


class _Location(msgspec.Struct):
    path: str
    lines: _Lines


class _Issue(msgspec.Struct):
    description: str
    check_name: str
    fingerprint: str
    severity: str
    location: _Location


def code_quality(verdict: Verdict, path: str) -> bytes:
    """An issue a metric that did not pass, told of the file at path, which holds the budgets or the
    baseline. Fingerprints stay the same from run to run, so that an issue is one issue."""
    issues = [_issue(one, path) for one in verdict.gated if one.answer != "pass"]
    return msgspec.json.format(msgspec.json.encode(issues), indent=1) + b"\n"


def _issue(one: Judged, path: str) -> _Issue:
    same = hashlib.sha256(f"stepsplit {path} {one.metric}".encode()).hexdigest()
    where = _Location(path, _Lines(1))
    return _Issue(one_line(one), f"stepsplit.{one.metric}", same, _SEVERITY[one.answer], where)


def open_metrics(verdict: Verdict) -> str:
    """The gated metrics of both sides, in seconds, bytes and ratios."""
    lines = [line for one in verdict.gated for line in _metric(one)]
    return "\n".join([*lines, "# EOF"]) + "\n"


def _metric(one: Judged) -> Iterator[str]:
    meaning = meaning_of(one.metric)
    unit = _UNITS[meaning.unit]
    stem = one.metric.replace(".", "_")
    name = f"stepsplit_{stem}" + ("" if stem == unit else f"_{unit}")
    scale = 1e-9 if meaning.unit == "ns" else 1.0
    yield f"# TYPE {name} gauge"
    yield f"# UNIT {name} {unit}"
    for side, value in (("baseline", one.baseline), ("candidate", one.candidate)):
        if value is not None:
            yield f'{name}{{side="{side}"}} {value * scale!r}'
