"""Check results for CI systems: GitHub, GitLab, JUnit, OpenMetrics and benchmark formats."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from xml.etree import ElementTree as xml

import msgspec

from stepsplit.analyzer.regression.checks import Judged, Verdict
from stepsplit.analyzer.regression.metrics import Unit, meaning_of
from stepsplit.dashboard.reporters.verdict import markdown, one_line

# GitHub Actions: annotations and the job summary, within the limits of GitHub.

SUMMARY_BYTES = 1 << 20
"""GitHub rejects a larger summary of a step."""

MOST = 10
"""Maximum number of errors, and of warnings, per step; GitHub silently drops the rest."""


def workflow_commands(verdict: Verdict) -> list[str]:
    """Annotation lines to print.

    One error per regressed metric, one per cause, one warning per inconclusive metric.
    """
    errors = [_command("error", title, text) for title, text in _errors(verdict)]
    unsure = [one for one in verdict.gated if one.answer == "inconclusive"]
    warnings = [_command("warning", "stepsplit: inconclusive", one_line(one)) for one in unsure]
    warnings += [_command("warning", "stepsplit", text) for text in verdict.warnings]
    return [*errors[:MOST], *warnings[:MOST]]


def summary(verdict: Verdict, held_bytes: int = 0) -> str:
    """The markdown to append to a step summary, whose present size is given."""
    return markdown(verdict, SUMMARY_BYTES - held_bytes)


def _errors(verdict: Verdict) -> Iterator[tuple[str, str]]:
    for one in verdict.gated:
        if one.answer == "regressed":
            yield "stepsplit: regressed", one_line(one)
    for cause in verdict.causes:
        yield "stepsplit: cause", cause.message


def _command(kind: str, title: str, text: str) -> str:
    return f"::{kind} title={_property(title)}::{_data(text)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


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


def code_quality(verdict: Verdict, path: str) -> bytes:
    """One issue per metric that did not pass.

    Issues point to the file at path, which contains the budgets or the baseline. Fingerprints are
    stable between runs, so that GitLab recognizes an issue.
    """
    issues = [_issue(one, path) for one in verdict.gated if one.answer != "pass"]
    return msgspec.json.format(msgspec.json.encode(issues), indent=1) + b"\n"


def _issue(one: Judged, path: str) -> _Issue:
    same = hashlib.sha256(f"stepsplit {path} {one.metric}".encode()).hexdigest()
    where = _Location(path, _Lines(1))
    return _Issue(one_line(one), f"stepsplit.{one.metric}", same, _SEVERITY[one.answer], where)


def open_metrics(verdict: Verdict) -> str:
    """The gated metrics of both sides as OpenMetrics text, in seconds, bytes and ratios."""
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


# JUnit XML for GitLab, Jenkins and GitHub: one test case per gated metric. The text is repeated in
# the body, because some readers ignore attributes.

_SUITE = "stepsplit"

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(verdict: Verdict) -> bytes:
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
        _case(suite, one, verdict)
    xml.indent(suites)
    body: bytes = xml.tostring(suites, "utf-8")
    return b'<?xml version="1.0" encoding="utf-8"?>\n' + body + b"\n"


def _case(suite: xml.Element, one: Judged, verdict: Verdict) -> None:
    case = xml.SubElement(suite, "testcase", name=one.metric, classname=_SUITE, time="0")
    told = _xml_text(one_line(one))
    if one.answer == "regressed":
        failure = xml.SubElement(case, "failure", message=told, type="regressed")
        failure.text = "\n".join([told, *(_xml_text(cause.message) for cause in verdict.causes)])
    elif one.answer == "inconclusive":
        xml.SubElement(case, "skipped", message=told)
    out = xml.SubElement(case, "system-out")
    out.text = told


def _xml_text(text: str) -> str:
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


def bencher(verdict: Verdict) -> bytes:
    """The candidate's gated metrics in Bencher Metric Format.

    They are measures of one benchmark, named by world size, device and mesh.
    """
    measures = {
        one.metric.replace(".", "-"): _Measure(one.candidate)
        for one in verdict.gated
        if one.candidate is not None
    }
    return _json_bytes({_name(verdict): measures})


def benchmark_action(verdict: Verdict) -> bytes:
    """The candidate's gated metrics as customSmallerIsBetter; skips those where more is better."""
    rows = [_row(one, verdict) for one in verdict.gated if _smaller_is_better(one)]
    return _json_bytes(rows)


def _row(one: Judged, verdict: Verdict) -> _Benchmark:
    assert one.candidate is not None
    name = f"{_name(verdict)}: {one.metric}"
    return _Benchmark(name, meaning_of(one.metric).unit, one.candidate, one_line(one))


def _smaller_is_better(one: Judged) -> bool:
    return meaning_of(one.metric).worse > 0 and one.candidate is not None


def _name(verdict: Verdict) -> str:
    setup = verdict.candidate.setup
    return f"stepsplit {setup.world_size} x {setup.device} {setup.mesh or ''}".strip()


def _json_bytes(body: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(body), indent=1) + b"\n"
