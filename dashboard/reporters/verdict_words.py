"""A verdict's metrics in the words that every face shows."""

from __future__ import annotations

from stepsplit.analyzer import units
from stepsplit.analyzer.regression.check_result import Answer, Judged, Shifted, SideFacts, Verdict
from stepsplit.analyzer.regression.metrics import meaning_of

MARKS: dict[Answer, str] = {"pass": "✓", "regressed": "✗", "inconclusive": "?"}
_HEADS: dict[Answer, str] = {
    "pass": "PASS: within all budgets",
    "regressed": "REGRESSED",
    "inconclusive": "INCONCLUSIVE: these runs can neither show nor rule out a regression",
}


def headline(verdict: Verdict) -> str:
    """The answer, with the metrics that regressed."""
    over = [one.metric for one in verdict.gated if one.answer == "regressed"]
    return _HEADS[verdict.answer] + (f": {', '.join(over)}" if over else "")


def sides(verdict: Verdict) -> str:
    """Which runs were held against which."""
    setup = verdict.candidate.setup
    mesh = "" if setup.mesh is None else f", {setup.mesh}"
    told = f"candidate {_side(verdict.candidate)}"
    if verdict.baseline is not None:
        told += f" against baseline {_side(verdict.baseline)}"
    return f"{told}; {setup.world_size:,} x {setup.device}{mesh}"


def _side(side: SideFacts) -> str:
    runs, steps = len(side.runs), sum(side.steps)
    return f"of {runs:,} run{'s' if runs > 1 else ''} ({steps:,} steps)"


def value(metric: str, of: float | None) -> str:
    """The metric's value with its unit, "" where unknown."""
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
    """Candidate less baseline: points of shares, counts as they are, else percent."""
    if judged.harm is None:
        return ""
    return difference(judged.metric, meaning_of(judged.metric).worse * judged.harm, judged.baseline)


def interval(judged: Judged | Shifted) -> str:
    """The 96 % interval of the change, "" where there is none."""
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
    """The smallest harm that would be found in 4 of 5 cases, "" where nothing is tested."""
    if judged.detectable is None:
        return ""
    worse = meaning_of(judged.metric).worse
    return difference(judged.metric, worse * judged.detectable, judged.baseline)


def difference(metric: str, of: float, baseline: float | None) -> str:
    """A difference in the metric's unit, of a baseline where there is one, with its sign."""
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
    """A metric's answer in one line, for machines that show lines."""
    parts = [f"{value(judged.metric, judged.baseline)} -> " if judged.baseline is not None else ""]
    parts += [value(judged.metric, judged.candidate), f" ({change(judged)})"]
    told = f"{judged.metric} {judged.answer}: {''.join(parts)}, budget {judged.budget}"
    span = interval(judged)
    told += f", 96 % interval {span}" if span else ""
    return told + (f"; {judged.note}" if judged.note else "")
