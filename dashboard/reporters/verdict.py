"""Check results: the terminal screen, the markdown summary, and files for CI systems."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from xml.etree import ElementTree as xml

import msgspec
from rich.console import Group, RenderableType

from stepsplit.analyzer import units
from stepsplit.analyzer.regression.checks import (
    Answer,
    CheckedMetric,
    CheckedSide,
    CheckResult,
    ShiftedMetric,
)
from stepsplit.analyzer.regression.metrics import Unit, require_metric
from stepsplit.analyzer.significance import MOST_RUNS
from stepsplit.collectors.safe_io.safe_text import (
    escape_controls,
    escape_json,
    format_workflow_command,
)
from stepsplit.dashboard.reporters.console import DIM, Text
from stepsplit.dashboard.reporters.tables import build_table

# The screen of check.

STYLE: dict[Answer, str] = {"pass": "green", "regressed": "red", "inconclusive": "yellow"}

_LOW = "low confidence: a side has only one run; record 3 to 5 runs per side"


def build_verdict_screen(verdict: CheckResult) -> RenderableType:
    """Builds the screen of a check result for a rich console of any width."""
    gated = build_table("  metric", "budget", "baseline", "candidate", "change", "96 % interval")
    for result in sort_exact_first(verdict.gated):
        name = Text(f"{MARKS[result.answer]} {result.metric}", STYLE[result.answer])
        gated.add_row(name, result.budget, *_format_numbers(result))
    parts: list[RenderableType] = [
        Text(format_headline(verdict), style=f"bold {STYLE[verdict.answer]}"),
        Text(format_sides(verdict), DIM),
        *(Text(one, "yellow") for one in verdict.warnings),
        *([Text(_LOW, "yellow")] if verdict.low_confidence else []),
        Text(),
        gated,
        *_list_notes(verdict),
    ]
    if verdict.causes:
        parts += [Text(), Text("CAUSES", "bold")]
        parts += (Text(f"{i}  {one.message}") for i, one in enumerate(verdict.causes, 1))
        if verdict.compare_url is not None:
            parts.append(Text(f"comparison: {verdict.compare_url}", DIM))
    if verdict.others:
        others = build_table("metric", "baseline", "candidate", "change", "96 % interval")
        for other in verdict.others:
            of_kind = f"{other.metric}: {other.kind}" if other.kind else other.metric
            others.add_row(of_kind, *_format_numbers(other))
        parts += [Text(), Text("OTHER SIGNIFICANT CHANGES (no budget)", "bold"), others]
    return Group(*parts)


def _format_numbers(judged: CheckedMetric | ShiftedMetric) -> tuple[str, str, str, str]:
    """The cells of a metric: baseline, candidate, change and its interval."""
    return (
        format_value(judged.metric, judged.baseline),
        format_value(judged.metric, judged.candidate),
        format_change(judged),
        format_interval(judged),
    )


def _list_notes(verdict: CheckResult) -> list[Text]:
    notes = []
    for one in verdict.gated:
        if one.note or one.answer != "pass":
            text = f"{MARKS[one.answer]} {one.metric} {one.answer}"
            notes.append(Text(f"{text}: {one.note}" if one.note else text, STYLE[one.answer]))
    shown = [f"{one.metric} {text}" for one in verdict.gated if (text := format_detectable(one))]
    minimum = f"minimum detectable change (80 % power): {', '.join(shown)}"
    needs = [Text(text, "yellow") for one in verdict.gated if (text := format_needs(one))]
    return [*notes, *needs, *([Text(minimum, DIM)] if shown else [])]


# Markdown for a pull request comment, or for the summary of a workflow step.

COMMENT_BYTES = 64 << 10
"""GitHub rejects longer comments."""

_CUT = "\n\n(truncated: the complete result is in the JSON file)\n"

_GATED_COLUMNS = (
    "metric",
    "budget",
    "baseline",
    "candidate",
    "change",
    "96 % interval",
    "detectable",
    "",
)

_CALLS_COLUMNS = ("calls per step", "size", "baseline", "candidate")

_MOST_CALLS = 20


def format_markdown(verdict: CheckResult, most_bytes: int = COMMENT_BYTES) -> str:
    """The check result as markdown, truncated to most_bytes."""
    gated = [
        [
            _escape_code(one.metric),
            _escape_code(one.budget),
            *_format_numbers(one),
            format_detectable(one),
            f"{MARKS[one.answer]} {one.answer}",
        ]
        for one in sort_exact_first(verdict.gated)
    ]
    blocks = [
        f"### stepsplit {MARKS[verdict.answer]} {_escape_text(format_headline(verdict))}",
        _escape_text(format_sides(verdict)),
        *(f"> {_escape_text(one)}" for one in verdict.warnings),
        _format_table(_GATED_COLUMNS, gated),
        *(
            f"{_escape_code(one.metric)}: {_escape_text(one.note)}"
            for one in verdict.gated
            if one.note
        ),
        *(_escape_text(text) for one in verdict.gated if (text := format_needs(one))),
    ]
    if verdict.causes:
        lines = (f"{i}. {_escape_text(one.message)}" for i, one in enumerate(verdict.causes, 1))
        blocks += ["**Causes**", "\n".join(lines)]
        if verdict.compare_url is not None:
            blocks.append(f"[Comparison in the dashboard]({verdict.compare_url})")
    if verdict.calls:
        calls = [
            [
                _escape_code(f"{row.axis} {row.op}"),
                format_value("bytes", row.message_bytes),
                f"{row.baseline:,}",
                f"{row.candidate:,}",
            ]
            for row in verdict.calls[:_MOST_CALLS]
        ]
        blocks.append(_format_table(_CALLS_COLUMNS, calls))
    text = "\n\n".join(blocks) + "\n"
    if len(text.encode()) <= most_bytes:
        return text
    # GitHub and GitLab refuse a longer one: it is cut after its last whole line, and says so.
    n_kept = most_bytes - len(_CUT.encode())
    if n_kept < 0:
        return ""
    kept = text.encode()[:n_kept].decode(errors="ignore")
    return kept.rpartition("\n")[0] + _CUT


def _format_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _escape_code(text: str) -> str:
    return f"`{escape_controls(text).translate({ord('`'): None, ord('|'): None})}`"


def _escape_text(text: str) -> str:
    """Escapes text of a recording, so that it cannot become markup, links or mentions."""
    return " ".join(escape_controls(text).translate(_ESCAPED).split())


_ESCAPED = str.maketrans(
    {mark: f"\\{mark}" for mark in "\\`*_[]|#"} | {mark: f"&#{ord(mark)};" for mark in "<>@"}
)


# Texts that all outputs of check share.

MARKS: dict[Answer, str] = {"pass": "✓", "regressed": "✗", "inconclusive": "?"}

_HEADLINES: dict[Answer, str] = {
    "pass": "PASS: within all budgets",
    "regressed": "REGRESSED",
    "inconclusive": "INCONCLUSIVE: these runs neither confirm nor rule out a regression",
}


def format_headline(verdict: CheckResult) -> str:
    """The result, with the metrics that regressed, and the exact ones first."""
    gated = sort_exact_first(verdict.gated)
    regressed = [
        f"{one.metric}: {one.kind}" if one.kind else one.metric
        for one in gated
        if one.answer == "regressed"
    ]
    if regressed:
        return f"{_HEADLINES[verdict.answer]}: {', '.join(regressed)}"
    exact = [one.metric for one in gated if _is_exact(one) and one.answer == "pass"]
    if verdict.answer == "pass" or not exact:
        return _HEADLINES[verdict.answer]
    undecided = [one.metric for one in gated if one.answer == "inconclusive"]
    return (
        f"INCONCLUSIVE: {' and '.join(exact)} within budget (exact);"
        f" {', '.join(undecided)} not decided by these runs"
    )


def sort_exact_first(gated: Sequence[CheckedMetric]) -> list[CheckedMetric]:
    """The counted metrics, which one run decides, before the measured ones."""
    return sorted(gated, key=lambda one: not _is_exact(one))


def _is_exact(result: CheckedMetric) -> bool:
    return require_metric(result.metric).exact


def format_needs(result: CheckedMetric) -> str:
    """What would decide an inconclusive metric at this noise, "" if that is not known."""
    if result.decidable is None:
        return ""
    runs = f"more than {MOST_RUNS}" if result.runs_needed is None else f"{result.runs_needed:,}"
    budget = format_difference(result.metric, result.decidable, result.baseline).lstrip("+")
    return (
        f"to decide {result.metric} at this noise (4 of 5 times): {runs} runs per side, or a budget"
        f" of {budget} with as many as now"
    )


def format_sides(verdict: CheckResult) -> str:
    """The number of runs and steps of both sides, and the setup."""
    setup = verdict.candidate.setup
    mesh = "" if setup.mesh is None else f", {setup.mesh}"
    text = f"candidate: {_format_side(verdict.candidate)}"
    if verdict.baseline is not None:
        text += f", baseline: {_format_side(verdict.baseline)}"
    return f"{text}; {setup.world_size:,} x {setup.device}{mesh}"


def _format_side(side: CheckedSide) -> str:
    runs, steps = len(side.runs), sum(side.steps)
    return f"{runs:,} run{'s' if runs > 1 else ''} ({steps:,} steps)"


def format_value(metric: str, number: float | None) -> str:
    """The value of a metric with its unit, "" if unknown."""
    if number is None:
        return ""
    meaning = require_metric(metric)
    unit = meaning.unit
    if unit == "share":
        return units.format_percent(number)
    if meaning.is_short:
        return units.format_microseconds(number)
    if unit == "ns":
        return units.format_milliseconds(number)
    if unit == "bytes_per_s":
        return units.format_gigabytes_per_second(number)
    return units.format_size(number) if unit == "bytes" else f"{number:,.0f}"


def format_change(judged: CheckedMetric | ShiftedMetric) -> str:
    """Candidate minus baseline: in points for shares, as a number for counts, else in percent."""
    if judged.harm is None:
        return ""
    return format_difference(
        judged.metric, require_metric(judged.metric).worse * judged.harm, judged.baseline
    )


def format_interval(judged: CheckedMetric | ShiftedMetric) -> str:
    """The 96 % interval of the change, "" if there is none."""
    if judged.low is None or judged.high is None:
        return ""
    worse = require_metric(judged.metric).worse
    low, high = sorted((worse * judged.low, worse * judged.high))
    if require_metric(judged.metric).unit == "share":
        return units.format_signed_range(low, high, "pt")
    if judged.baseline:
        return units.format_signed_range(low / judged.baseline, high / judged.baseline, "%")
    return " to ".join(format_difference(judged.metric, end, None) for end in (low, high))


def format_detectable(judged: CheckedMetric) -> str:
    """The minimum detectable change at 80 % power, "" if the metric is not tested."""
    if judged.detectable is None:
        return ""
    worse = require_metric(judged.metric).worse
    return format_difference(judged.metric, worse * judged.detectable, judged.baseline)


def format_difference(metric: str, delta: float, baseline: float | None) -> str:
    """A signed difference: in percent of the baseline if there is one, else in the unit."""
    unit = require_metric(metric).unit
    if unit == "share":
        return units.format_signed_points(delta)
    if unit == "count":
        return f"{delta:+,.0f}"
    if baseline:
        return units.format_signed_percent(delta / baseline)
    sign = "-" if delta < 0 else "+"
    return f"{sign}{format_value(metric, abs(delta))}"


def format_line(judged: CheckedMetric) -> str:
    """The result of a metric in one line."""
    parts = [
        f"{format_value(judged.metric, judged.baseline)} -> " if judged.baseline is not None else ""
    ]
    parts += [format_value(judged.metric, judged.candidate), f" ({format_change(judged)})"]
    line = f"{judged.metric} {judged.answer}: {''.join(parts)}, budget {judged.budget}"
    span = format_interval(judged)
    line += f", 96 % interval {span}" if span else ""
    return line + (f"; {judged.note}" if judged.note else "")


# GitHub Actions: annotations and the job summary, within the limits of GitHub.

SUMMARY_BYTES = 1 << 20
"""GitHub rejects a larger summary of a step."""

MAX_ANNOTATIONS = 10
"""Maximum number of errors, and of warnings, per step; GitHub silently drops the rest."""


def format_annotations(verdict: CheckResult) -> list[str]:
    """Annotation lines to print.

    One error per regressed metric, one per cause, one warning per inconclusive metric.
    """
    errors, warnings = [], []
    for one in verdict.gated:
        if one.answer == "regressed":
            errors.append(
                format_workflow_command("error", "stepsplit: regressed", format_line(one))
            )
        elif one.answer == "inconclusive":
            text = format_line(one)
            warnings.append(format_workflow_command("warning", "stepsplit: inconclusive", text))
    errors += [
        format_workflow_command("error", "stepsplit: cause", cause.message)
        for cause in verdict.causes
    ]
    warnings += [format_workflow_command("warning", "stepsplit", text) for text in verdict.warnings]
    return [*errors[:MAX_ANNOTATIONS], *warnings[:MAX_ANNOTATIONS]]


def format_summary(verdict: CheckResult, existing_bytes: int = 0) -> str:
    """The markdown to append to a step summary, whose present size is given."""
    return format_markdown(verdict, SUMMARY_BYTES - existing_bytes)


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
