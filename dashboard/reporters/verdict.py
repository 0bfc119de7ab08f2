"""Terminal screen and markdown summary of check."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stepsplit.analyzer import units
from stepsplit.analyzer.regression.checks import Answer, Judged, Shifted, SideFacts, Verdict
from stepsplit.analyzer.regression.metrics import meaning_of
from stepsplit.dashboard.reporters.tables import bare_table

# The screen of check.

STYLE: dict[Answer, str] = {"pass": "green", "regressed": "red", "inconclusive": "yellow"}

_DIM = "bright_black"

_LOW = "low confidence: a side has only one run; record 3 to 5 runs per side"


def verdict_screen(verdict: Verdict) -> RenderableType:
    """Builds the screen of a check result for a rich console of any width."""
    parts: list[RenderableType] = [
        Text(headline(verdict), style=f"bold {STYLE[verdict.answer]}"),
        Text(sides(verdict), _DIM),
        *(Text(one, "yellow") for one in verdict.warnings),
        *([Text(_LOW, "yellow")] if verdict.low_confidence else []),
        Text(),
        _gated_table(verdict),
        *_notes(verdict),
        *_causes(verdict),
        *_others(verdict),
    ]
    return Group(*parts)


def _gated_table(verdict: Verdict) -> Table:
    table = bare_table("  metric", "budget", "baseline", "candidate", "change", "96 % interval")
    for one in verdict.gated:
        table.add_row(
            Text(f"{MARKS[one.answer]} {one.metric}", STYLE[one.answer]), one.budget,
            value(one.metric, one.baseline), value(one.metric, one.candidate), change(one),
            interval(one),
        )  # fmt: skip
    return table


def _notes(verdict: Verdict) -> list[Text]:
    noted = (one for one in verdict.gated if one.note or one.answer != "pass")
    notes = [Text(_note(one), STYLE[one.answer]) for one in noted]
    shown = [f"{one.metric} {text}" for one in verdict.gated if (text := detectable(one))]
    told = f"minimum detectable change (80 % power): {', '.join(shown)}"
    return [*notes, *([Text(told, _DIM)] if shown else [])]


def _note(one: Judged) -> str:
    told = f"{MARKS[one.answer]} {one.metric} {one.answer}"
    return f"{told}: {one.note}" if one.note else told


def _causes(verdict: Verdict) -> list[RenderableType]:
    if not verdict.causes:
        return []
    lines = [Text(f"{i}  {one.message}") for i, one in enumerate(verdict.causes, 1)]
    link = [] if verdict.compare_url is None else [Text(f"comparison: {verdict.compare_url}", _DIM)]
    return [Text(), Text("CAUSES", "bold"), *lines, *link]


def _others(verdict: Verdict) -> list[RenderableType]:
    if not verdict.others:
        return []
    heading = "other significant changes (no budget)"
    table = bare_table(heading, "baseline", "candidate", "change", "96 % interval")
    for one in verdict.others:
        table.add_row(
            one.metric, value(one.metric, one.baseline), value(one.metric, one.candidate),
            change(one), interval(one),
        )  # fmt: skip
    return [Text(), table]


# Markdown for a pull request comment, or for the summary of a workflow step.

COMMENT_BYTES = 64 << 10
"""GitHub rejects longer comments."""

_CUT = "\n\n(truncated: the complete result is in the JSON file)\n"

_GATED = ("metric", "budget", "baseline", "candidate", "change", "96 % interval", "detectable", "")

_CALLS = ("calls per step", "size", "baseline", "candidate")

_MOST_CALLS = 20


def markdown(verdict: Verdict, most_bytes: int = COMMENT_BYTES) -> str:
    """The check result as markdown, truncated to most_bytes."""
    blocks = [
        f"### stepsplit {MARKS[verdict.answer]} {_plain(headline(verdict))}",
        _plain(sides(verdict)),
        *(f"> {_plain(one)}" for one in verdict.warnings),
        _table(_GATED, [_gated_row(one) for one in verdict.gated]),
        *(f"{_code(one.metric)}: {_plain(one.note)}" for one in verdict.gated if one.note),
        *_causes_markdown(verdict),
        *_calls(verdict),
    ]
    return _cut("\n\n".join(blocks) + "\n", most_bytes)


def _gated_row(one: Judged) -> list[str]:
    return [
        _code(one.metric), _code(one.budget), value(one.metric, one.baseline),
        value(one.metric, one.candidate), change(one), interval(one), detectable(one),
        f"{MARKS[one.answer]} {one.answer}",
    ]  # fmt: skip


def _causes_markdown(verdict: Verdict) -> list[str]:
    if not verdict.causes:
        return []
    told = [f"{i}. {_plain(cause.message)}" for i, cause in enumerate(verdict.causes, 1)]
    url = verdict.compare_url
    link = [] if url is None else [f"[Comparison in the dashboard]({url})"]
    return ["**Causes**", "\n".join(told), *link]


def _calls(verdict: Verdict) -> list[str]:
    rows = [
        [_code(f"{row.axis} {row.op}"), value("bytes", row.message_bytes), f"{row.baseline:,}",
         f"{row.candidate:,}"]
        for row in verdict.calls[:_MOST_CALLS]
    ]  # fmt: skip
    return [_table(_CALLS, rows)] if rows else []


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _code(text: str) -> str:
    kept = (letter for letter in text if letter.isprintable() and letter not in "`|")
    return f"`{''.join(kept)}`"


def _plain(text: str) -> str:
    """Escapes text of a recording, so that it cannot become markup, links or mentions."""
    text = "".join(letter if letter.isprintable() else " " for letter in text)
    for mark in "\\`*_[]<>|#@":
        text = text.replace(mark, f"\\{mark}" if mark not in "<>@" else f"&#{ord(mark)};")
    return " ".join(text.split())


def _cut(text: str, most_bytes: int) -> str:
    body = text.encode()
    if len(body) <= most_bytes:
        return text
    if most_bytes < len(_CUT.encode()):
        return ""
    kept = body[: most_bytes - len(_CUT.encode())].decode(errors="ignore")
    return kept.rpartition("\n")[0] + _CUT


# Texts that all outputs of check share.

MARKS: dict[Answer, str] = {"pass": "✓", "regressed": "✗", "inconclusive": "?"}

_HEADS: dict[Answer, str] = {
    "pass": "PASS: within all budgets",
    "regressed": "REGRESSED",
    "inconclusive": "INCONCLUSIVE: these runs neither confirm nor rule out a regression",
}


def headline(verdict: Verdict) -> str:
    """The result, with the metrics that regressed."""
    over = [one.metric for one in verdict.gated if one.answer == "regressed"]
    return _HEADS[verdict.answer] + (f": {', '.join(over)}" if over else "")


def sides(verdict: Verdict) -> str:
    """The number of runs and steps of both sides, and the setup."""
    setup = verdict.candidate.setup
    mesh = "" if setup.mesh is None else f", {setup.mesh}"
    told = f"candidate: {_side(verdict.candidate)}"
    if verdict.baseline is not None:
        told += f", baseline: {_side(verdict.baseline)}"
    return f"{told}; {setup.world_size:,} x {setup.device}{mesh}"


def _side(side: SideFacts) -> str:
    runs, steps = len(side.runs), sum(side.steps)
    return f"{runs:,} run{'s' if runs > 1 else ''} ({steps:,} steps)"


def value(metric: str, of: float | None) -> str:
    """The value of a metric with its unit, "" if unknown."""
    if of is None:
        return ""
    unit = meaning_of(metric).unit
    if unit == "share":
        return units.percent(of)
    if unit == "ns":
        return units.milliseconds(of)
    if unit == "bytes_per_s":
        return units.gigabytes_per_second(of)
    return units.size(of) if unit == "bytes" else f"{of:,.0f}"


def change(judged: Judged | Shifted) -> str:
    """Candidate minus baseline: in points for shares, as a number for counts, else in percent."""
    if judged.harm is None:
        return ""
    return difference(judged.metric, meaning_of(judged.metric).worse * judged.harm, judged.baseline)


def interval(judged: Judged | Shifted) -> str:
    """The 96 % interval of the change, "" if there is none."""
    if judged.low is None or judged.high is None:
        return ""
    worse = meaning_of(judged.metric).worse
    low, high = sorted((worse * judged.low, worse * judged.high))
    if meaning_of(judged.metric).unit == "share":
        return units.signed_between(low, high, "pt")
    if judged.baseline:
        return units.signed_between(low / judged.baseline, high / judged.baseline, "%")
    return " to ".join(difference(judged.metric, end, None) for end in (low, high))


def detectable(judged: Judged) -> str:
    """The minimum detectable change at 80 % power, "" if the metric is not tested."""
    if judged.detectable is None:
        return ""
    worse = meaning_of(judged.metric).worse
    return difference(judged.metric, worse * judged.detectable, judged.baseline)


def difference(metric: str, of: float, baseline: float | None) -> str:
    """A signed difference: in percent of the baseline if there is one, else in the unit."""
    unit = meaning_of(metric).unit
    if unit == "share":
        return units.signed_points(of)
    if unit == "count":
        return f"{of:+,.0f}"
    if baseline:
        return units.signed_percent(of / baseline)
    sign = "-" if of < 0 else "+"
    return f"{sign}{value(metric, abs(of))}"


def one_line(judged: Judged) -> str:
    """The result of a metric in one line."""
    parts = [f"{value(judged.metric, judged.baseline)} -> " if judged.baseline is not None else ""]
    parts += [value(judged.metric, judged.candidate), f" ({change(judged)})"]
    told = f"{judged.metric} {judged.answer}: {''.join(parts)}, budget {judged.budget}"
    span = interval(judged)
    told += f", 96 % interval {span}" if span else ""
    return told + (f"; {judged.note}" if judged.note else "")
