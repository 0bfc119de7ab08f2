"""Terminal screen and markdown summary of check."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stepsplit.analyzer import units
from stepsplit.analyzer.regression.checks import (
    Answer,
    CheckedMetric,
    CheckedSide,
    CheckResult,
    ShiftedMetric,
)
from stepsplit.analyzer.regression.metrics import require_metric
from stepsplit.analyzer.regression.statistics import MOST_RUNS
from stepsplit.dashboard.reporters.tables import build_table

# The screen of check.

STYLE: dict[Answer, str] = {"pass": "green", "regressed": "red", "inconclusive": "yellow"}

_DIM = "bright_black"

_LOW = "low confidence: a side has only one run; record 3 to 5 runs per side"


def build_verdict_screen(verdict: CheckResult) -> RenderableType:
    """Builds the screen of a check result for a rich console of any width."""
    parts: list[RenderableType] = [
        Text(format_headline(verdict), style=f"bold {STYLE[verdict.answer]}"),
        Text(format_sides(verdict), _DIM),
        *(Text(one, "yellow") for one in verdict.warnings),
        *([Text(_LOW, "yellow")] if verdict.low_confidence else []),
        Text(),
        _build_gated_table(verdict),
        *_list_notes(verdict),
        *_list_causes(verdict),
        *_build_other_changes(verdict),
    ]
    return Group(*parts)


def _build_gated_table(verdict: CheckResult) -> Table:
    table = build_table("  metric", "budget", "baseline", "candidate", "change", "96 % interval")
    for result in sort_exact_first(verdict.gated):
        table.add_row(
            Text(f"{MARKS[result.answer]} {result.metric}", STYLE[result.answer]),
            result.budget,
            format_value(result.metric, result.baseline),
            format_value(result.metric, result.candidate),
            format_change(result),
            format_interval(result),
        )
    return table


def _list_notes(verdict: CheckResult) -> list[Text]:
    noted = (one for one in verdict.gated if one.note or one.answer != "pass")
    notes = [Text(_format_note(one), STYLE[one.answer]) for one in noted]
    shown = [f"{one.metric} {text}" for one in verdict.gated if (text := format_detectable(one))]
    minimum = f"minimum detectable change (80 % power): {', '.join(shown)}"
    needs = [Text(text, "yellow") for one in verdict.gated if (text := format_needs(one))]
    return [*notes, *needs, *([Text(minimum, _DIM)] if shown else [])]


def _format_note(result: CheckedMetric) -> str:
    text = f"{MARKS[result.answer]} {result.metric} {result.answer}"
    return f"{text}: {result.note}" if result.note else text


def _list_causes(verdict: CheckResult) -> list[RenderableType]:
    if not verdict.causes:
        return []
    lines = [Text(f"{i}  {one.message}") for i, one in enumerate(verdict.causes, 1)]
    link = [] if verdict.compare_url is None else [Text(f"comparison: {verdict.compare_url}", _DIM)]
    return [Text(), Text("CAUSES", "bold"), *lines, *link]


def _build_other_changes(verdict: CheckResult) -> list[RenderableType]:
    if not verdict.others:
        return []
    heading = "other significant changes (no budget)"
    table = build_table(heading, "baseline", "candidate", "change", "96 % interval")
    for result in verdict.others:
        table.add_row(
            result.metric,
            format_value(result.metric, result.baseline),
            format_value(result.metric, result.candidate),
            format_change(result),
            format_interval(result),
        )
    return [Text(), table]


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
    gated = sort_exact_first(verdict.gated)
    blocks = [
        f"### stepsplit {MARKS[verdict.answer]} {_escape_text(format_headline(verdict))}",
        _escape_text(format_sides(verdict)),
        *(f"> {_escape_text(one)}" for one in verdict.warnings),
        _format_table(_GATED_COLUMNS, [_format_gated_row(one) for one in gated]),
        *(
            f"{_escape_code(one.metric)}: {_escape_text(one.note)}"
            for one in verdict.gated
            if one.note
        ),
        *(_escape_text(text) for one in verdict.gated if (text := format_needs(one))),
        *_format_causes(verdict),
        *_format_calls(verdict),
    ]
    return _truncate("\n\n".join(blocks) + "\n", most_bytes)


def _format_gated_row(result: CheckedMetric) -> list[str]:
    return [
        _escape_code(result.metric),
        _escape_code(result.budget),
        format_value(result.metric, result.baseline),
        format_value(result.metric, result.candidate),
        format_change(result),
        format_interval(result),
        format_detectable(result),
        f"{MARKS[result.answer]} {result.answer}",
    ]


def _format_causes(verdict: CheckResult) -> list[str]:
    if not verdict.causes:
        return []
    lines = [f"{i}. {_escape_text(cause.message)}" for i, cause in enumerate(verdict.causes, 1)]
    url = verdict.compare_url
    link = [] if url is None else [f"[Comparison in the dashboard]({url})"]
    return ["**Causes**", "\n".join(lines), *link]


def _format_calls(verdict: CheckResult) -> list[str]:
    rows = [
        [
            _escape_code(f"{row.axis} {row.op}"),
            format_value("bytes", row.message_bytes),
            f"{row.baseline:,}",
            f"{row.candidate:,}",
        ]
        for row in verdict.calls[:_MOST_CALLS]
    ]
    return [_format_table(_CALLS_COLUMNS, rows)] if rows else []


def _format_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _escape_code(text: str) -> str:
    letters = (letter for letter in text if letter.isprintable() and letter not in "`|")
    return f"`{''.join(letters)}`"


def _escape_text(text: str) -> str:
    """Escapes text of a recording, so that it cannot become markup, links or mentions."""
    text = "".join(letter if letter.isprintable() else " " for letter in text)
    for mark in "\\`*_[]<>|#@":
        text = text.replace(mark, f"\\{mark}" if mark not in "<>@" else f"&#{ord(mark)};")
    return " ".join(text.split())


def _truncate(text: str, most_bytes: int) -> str:
    body = text.encode()
    if len(body) <= most_bytes:
        return text
    if most_bytes < len(_CUT.encode()):
        return ""
    kept = body[: most_bytes - len(_CUT.encode())].decode(errors="ignore")
    return kept.rpartition("\n")[0] + _CUT


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
    regressed = [one.metric for one in gated if one.answer == "regressed"]
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
    unit = require_metric(metric).unit
    if unit == "share":
        return units.format_percent(number)
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
