"""A verdict as JUnit XML: a test case a gated metric, as GitLab, Jenkins and GitHub's actions read
it. What matters stands in the body: some readers pass attributes over."""

from __future__ import annotations

import re
from xml.etree import ElementTree as xml

from stepsplit.analyzer.regression.check_result import Judged, Verdict
from stepsplit.dashboard.reporters.verdict_words import one_line

_SUITE = "stepsplit"
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(verdict: Verdict) -> bytes:
    """The document; a regressed metric is a failure, an inconclusive one is skipped."""
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
    told = _text(one_line(one))
    if one.answer == "regressed":
        failure = xml.SubElement(case, "failure", message=told, type="regressed")
        failure.text = "\n".join([told, *(_text(cause.message) for cause in verdict.causes)])
    elif one.answer == "inconclusive":
        xml.SubElement(case, "skipped", message=told)
    out = xml.SubElement(case, "system-out")
    out.text = told


def _text(text: str) -> str:
    """Without characters that XML forbids."""
    return _NOT_XML.sub("?", text)
