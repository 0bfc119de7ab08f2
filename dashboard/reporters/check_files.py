"""The result of a check as files for CI: GitLab, JUnit, OpenMetrics, and benchmark trackers."""

from __future__ import annotations

import hashlib
from xml.etree import ElementTree as xml

import msgspec

from stepsplit.analyzer.regression.checks import CheckResult
from stepsplit.analyzer.regression.metrics import Unit, require_metric
from stepsplit.collectors.safe_io.safe_text import escape_controls, escape_json
from stepsplit.dashboard.reporters.verdict import format_line

# GitLab: the code quality widget, and metrics as OpenMetrics text.

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


def format_code_quality(verdict: CheckResult, path: str) -> bytes:
    """One issue per metric that did not pass.

    Issues point to the file at path, which contains the budgets or the baseline. Fingerprints are
    stable between runs, so that GitLab recognizes an issue.
    """
    issues = [
        _Issue(
            description=format_line(one),
            check_name=f"stepsplit.{one.metric}",
            fingerprint=hashlib.sha256(f"stepsplit {path} {one.metric}".encode()).hexdigest(),
            severity=_SEVERITY[one.answer],
            location=_Location(path, _Lines(1)),
        )
        for one in verdict.gated
        if one.answer != "pass"
    ]
    return _encode_json(issues)


def format_open_metrics(verdict: CheckResult) -> str:
    """The gated metrics of both sides as OpenMetrics text, in seconds, bytes and ratios."""
    lines = []
    for one in verdict.gated:
        meaning = require_metric(one.metric)
        unit, scale = _UNITS[meaning.unit], 1e-9 if meaning.unit == "ns" else 1.0
        stem = one.metric.replace(".", "_")
        name = f"stepsplit_{stem}" + ("" if stem == unit else f"_{unit}")
        lines += [f"# TYPE {name} gauge", f"# UNIT {name} {unit}"]
        for side, value in (("baseline", one.baseline), ("candidate", one.candidate)):
            if value is not None:
                lines.append(f'{name}{{side="{side}"}} {value * scale!r}')
    return "\n".join([*lines, "# EOF"]) + "\n"


# JUnit XML for GitLab, Jenkins and GitHub: one test case per gated metric. The text is repeated in
# the body, because some readers ignore attributes.

_SUITE = "stepsplit"


def format_junit(verdict: CheckResult) -> bytes:
    """The XML document; a regressed metric is a failure, an inconclusive one is skipped."""
    answers = [one.answer for one in verdict.gated]
    counts = {
        "name": _SUITE,
        "tests": str(len(answers)),
        "failures": str(answers.count("regressed")),
        "errors": "0",
        "skipped": str(answers.count("inconclusive")),
    }
    suites = xml.Element("testsuites")
    suite = xml.SubElement(suites, "testsuite", counts)
    for one in verdict.gated:
        case = xml.SubElement(suite, "testcase", name=one.metric, classname=_SUITE, time="0")
        text = escape_controls(format_line(one))
        if one.answer == "regressed":
            failure = xml.SubElement(case, "failure", message=text, type="regressed")
            failure.text = "\n".join(
                [text, *(escape_controls(cause.message) for cause in verdict.causes)]
            )
        elif one.answer == "inconclusive":
            xml.SubElement(case, "skipped", message=text)
        out = xml.SubElement(case, "system-out")
        out.text = text
    xml.indent(suites)
    body: bytes = xml.tostring(suites, "utf-8")
    return b'<?xml version="1.0" encoding="utf-8"?>\n' + body + b"\n"


# Benchmark trackers: Bencher and github-action-benchmark.


class _Measure(msgspec.Struct):
    value: float


class _Benchmark(msgspec.Struct):
    name: str
    unit: str
    value: float
    extra: str


def format_bencher(verdict: CheckResult) -> bytes:
    """The candidate's gated metrics in Bencher Metric Format.

    They are measures of one benchmark, named by world size, device and mesh.
    """
    measures = {
        one.metric.replace(".", "-"): _Measure(one.candidate)
        for one in verdict.gated
        if one.candidate is not None
    }
    return _encode_json({_name_setup(verdict): measures})


def format_benchmark_action(verdict: CheckResult) -> bytes:
    """The candidate's gated metrics as customSmallerIsBetter; skips those where more is better."""
    rows = []
    for one in verdict.gated:
        metric = require_metric(one.metric)
        if metric.worse > 0 and one.candidate is not None:
            name = f"{_name_setup(verdict)}: {one.metric}"
            rows.append(_Benchmark(name, metric.unit, one.candidate, format_line(one)))
    return _encode_json(rows)


def _name_setup(verdict: CheckResult) -> str:
    setup = verdict.candidate.setup
    return f"stepsplit {setup.world_size} x {setup.device} {setup.mesh or ''}".strip()


def _encode_json(body: object) -> bytes:
    document = msgspec.json.format(msgspec.json.encode(body).decode(), indent=1)
    return f"{escape_json(document)}\n".encode()
