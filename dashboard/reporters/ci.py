"""Check results for CI systems: GitHub, GitLab, JUnit, OpenMetrics and benchmark formats."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from xml.etree import ElementTree as xml

import msgspec

from stepsplit.analyzer.regression.checks import CheckedMetric, CheckResult
from stepsplit.analyzer.regression.metrics import Unit, require_metric
from stepsplit.dashboard.reporters.verdict import format_line, format_markdown

# GitHub Actions: annotations and the job summary, within the limits of GitHub.

SUMMARY_BYTES = 1 << 20
"""GitHub rejects a larger summary of a step."""

MAX_ANNOTATIONS = 10
"""Maximum number of errors, and of warnings, per step; GitHub silently drops the rest."""


def format_annotations(verdict: CheckResult) -> list[str]:
    """Annotation lines to print.

    One error per regressed metric, one per cause, one warning per inconclusive metric.
    """
    errors = [_format_command("error", title, text) for title, text in _list_errors(verdict)]
    inconclusive = [one for one in verdict.gated if one.answer == "inconclusive"]
    warnings = [
        _format_command("warning", "stepsplit: inconclusive", format_line(one))
        for one in inconclusive
    ]
    warnings += [_format_command("warning", "stepsplit", text) for text in verdict.warnings]
    return [*errors[:MAX_ANNOTATIONS], *warnings[:MAX_ANNOTATIONS]]


def format_summary(verdict: CheckResult, existing_bytes: int = 0) -> str:
    """The markdown to append to a step summary, whose present size is given."""
    return format_markdown(verdict, SUMMARY_BYTES - existing_bytes)


def _list_errors(verdict: CheckResult) -> Iterator[tuple[str, str]]:
    for result in verdict.gated:
        if result.answer == "regressed":
            yield "stepsplit: regressed", format_line(result)
    for cause in verdict.causes:
        yield "stepsplit: cause", cause.message


def _format_command(kind: str, title: str, text: str) -> str:
    return f"::{kind} title={_escape_property(title)}::{_escape_data(text)}"


def _escape_data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escape_property(text: str) -> str:
    return _escape_data(text).replace(":", "%3A").replace(",", "%2C")


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
    issues = [_build_issue(one, path) for one in verdict.gated if one.answer != "pass"]
    return msgspec.json.format(msgspec.json.encode(issues), indent=1) + b"\n"


def _build_issue(result: CheckedMetric, path: str) -> _Issue:
    fingerprint = hashlib.sha256(f"stepsplit {path} {result.metric}".encode()).hexdigest()
    where = _Location(path, _Lines(1))
    return _Issue(
        format_line(result),
        f"stepsplit.{result.metric}",
        fingerprint,
        _SEVERITY[result.answer],
        where,
    )


def format_open_metrics(verdict: CheckResult) -> str:
    """The gated metrics of both sides as OpenMetrics text, in seconds, bytes and ratios."""
    lines = [line for one in verdict.gated for line in _format_metric(one)]
    return "\n".join([*lines, "# EOF"]) + "\n"


def _format_metric(result: CheckedMetric) -> Iterator[str]:
    meaning = require_metric(result.metric)
    unit = _UNITS[meaning.unit]
    stem = result.metric.replace(".", "_")
    name = f"stepsplit_{stem}" + ("" if stem == unit else f"_{unit}")
    scale = 1e-9 if meaning.unit == "ns" else 1.0
    yield f"# TYPE {name} gauge"
    yield f"# UNIT {name} {unit}"
    for side, value in (("baseline", result.baseline), ("candidate", result.candidate)):
        if value is not None:
            yield f'{name}{{side="{side}"}} {value * scale!r}'


# JUnit XML for GitLab, Jenkins and GitHub: one test case per gated metric. The text is repeated in
# the body, because some readers ignore attributes.

_SUITE = "stepsplit"

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


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
        _add_case(suite, one, verdict)
    xml.indent(suites)
    body: bytes = xml.tostring(suites, "utf-8")
    return b'<?xml version="1.0" encoding="utf-8"?>\n' + body + b"\n"


def _add_case(suite: xml.Element, result: CheckedMetric, verdict: CheckResult) -> None:
    case = xml.SubElement(suite, "testcase", name=result.metric, classname=_SUITE, time="0")
    text = _strip_invalid_xml(format_line(result))
    if result.answer == "regressed":
        failure = xml.SubElement(case, "failure", message=text, type="regressed")
        failure.text = "\n".join(
            [text, *(_strip_invalid_xml(cause.message) for cause in verdict.causes)]
        )
    elif result.answer == "inconclusive":
        xml.SubElement(case, "skipped", message=text)
    out = xml.SubElement(case, "system-out")
    out.text = text


def _strip_invalid_xml(text: str) -> str:
    """Replaces the characters that XML does not allow."""
    return _NOT_XML.sub("?", text)


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
    rows = [_build_benchmark(one, verdict) for one in verdict.gated if _is_smaller_better(one)]
    return _encode_json(rows)


def _build_benchmark(result: CheckedMetric, verdict: CheckResult) -> _Benchmark:
    assert result.candidate is not None
    name = f"{_name_setup(verdict)}: {result.metric}"
    return _Benchmark(
        name, require_metric(result.metric).unit, result.candidate, format_line(result)
    )


def _is_smaller_better(result: CheckedMetric) -> bool:
    return require_metric(result.metric).worse > 0 and result.candidate is not None


def _name_setup(verdict: CheckResult) -> str:
    setup = verdict.candidate.setup
    return f"stepsplit {setup.world_size} x {setup.device} {setup.mesh or ''}".strip()


def _encode_json(body: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(body), indent=1) + b"\n"
