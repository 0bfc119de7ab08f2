"""The screen of check, and the texts that all of its outputs share."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType

from stepsplit.analyzer import units
from stepsplit.analyzer.regression.checks import (
    Answer,
    CheckedMetric,
    CheckedSide,
    CheckResult,
    ShiftedMetric,
)
from stepsplit.analyzer.regression.metrics import require_metric
from stepsplit.analyzer.significance import MOST_RUNS
from stepsplit.dashboard.reporters.console import DIM, Text
from stepsplit.dashboard.reporters.tables import build_table

STYLE: dict[Answer, str] = {"pass": "green", "regressed": "red", "inconclusive": "yellow"}

_LOW = "low confidence: a side has only one run; record 3 to 5 runs per side"


def build_verdict_screen(verdict: CheckResult) -> RenderableType:
    """Builds the screen of a check result for a rich console of any width."""
    gated = build_table("  metric", "budget", "baseline", "candidate", "change", "96 % interval")
    for result in sort_exact_first(verdict.gated):
        name = Text(f"{MARKS[result.answer]} {result.metric}", STYLE[result.answer])
        gated.add_row(name, result.budget, *format_numbers(result))
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
            others.add_row(of_kind, *format_numbers(other))
        parts += [Text(), Text("OTHER SIGNIFICANT CHANGES (no budget)", "bold"), others]
    return Group(*parts)


def format_numbers(judged: CheckedMetric | ShiftedMetric) -> tuple[str, str, str, str]:
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
