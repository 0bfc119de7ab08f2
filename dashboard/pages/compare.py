"""Pages: comparison of two runs, history of a metric."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from statistics import NormalDist, fmean, median, variance

import numpy as np
from dash import html
from dash.development.base_component import Component

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.regression.compare import (
    CallsChange,
    CallStats,
    Change,
    RunComparison,
    compare_reports,
)
from stepsplit.analyzer.regression.statistics import difference
from stepsplit.analyzer.units import (
    gigabytes_per_second,
    memory_size,
    milliseconds,
    percent,
    signed_milliseconds,
    signed_percent,
    size,
)
from stepsplit.dashboard.figures.communication import FEWEST as FEWEST_USUAL
from stepsplit.dashboard.figures.communication import MAD_TO_SD, HistoryPoint, Level, history, usual
from stepsplit.dashboard.figures.run import NamedSplit, difference_figure, splits
from stepsplit.dashboard.pages.components import (
    AddressQuery,
    Cell,
    View,
    card,
    choice,
    entry,
    graph,
    led,
    left_out,
    nothing,
    page_url,
    section,
    table,
    time_cell,
)
from stepsplit.dashboard.store.metrics import MetricPoint

# Compare: differences between two runs by bucket, axis, call and kernel.

COMPARE_ROWS = 20

_NOISE = {
    True: "within step-to-step noise",
    False: "beyond step-to-step noise",
    None: "too few steps to estimate noise",
}


def compare_page(baseline: View, candidate: View) -> list[Component]:
    """The page that compares the candidate with the baseline."""
    try:
        found = compare_reports(baseline.report, candidate.report)
    except UsageError as error:
        return [nothing("These runs cannot be compared", str(error))]
    bars = [
        NamedSplit("baseline", found.baseline.mean),
        NamedSplit("candidate", found.candidate.mean),
    ]
    return [
        _names(baseline, candidate),
        _cards(found),
        *_settings(found),
        html.Div(
            [
                section("Mean step", "over ranks and full steps",
                        graph("splits", splits(bars))),
                section("Difference by bucket", "mean step",
                        graph("difference", difference_figure(found))),
            ],
            className="columns",
        ),
        html.Div([*_exposed(found), *_kernels(found)], className="columns"),
        *_calls(found),
    ]  # fmt: skip


def _names(baseline: View, candidate: View) -> html.P:
    return html.P(
        [
            "baseline ", html.B(led(baseline.name, page_url(baseline.run_id))),
            "   candidate ", html.B(led(candidate.name, page_url(candidate.run_id))), "   ",
            led("swap", f"/compare?baseline={candidate.run_id}&candidate={baseline.run_id}"),
        ],
        className="subtitle",
    )  # fmt: skip


def _cards(found: RunComparison) -> html.Div:
    one, other = found.baseline, found.candidate
    change = "unknown" if found.ratio is None else signed_percent(found.ratio - 1)
    shown = [
        card("median step", change, _NOISE[found.within_noise]),
        card("baseline", milliseconds(one.median_ns), f"{one.steps} full steps"),
        card("candidate", milliseconds(other.median_ns), f"{other.steps} full steps"),
    ]
    if one.bubble_fraction is not None and other.bubble_fraction is not None:
        was = f"was {percent(one.bubble_fraction)}"
        shown.append(card("bubble_fraction", percent(other.bubble_fraction), was))
    if one.peak_allocated_bytes and other.peak_allocated_bytes:
        was = f"was {memory_size(one.peak_allocated_bytes)}"
        shown.append(card("peak memory", memory_size(other.peak_allocated_bytes), was))
    if one.mfu is not None and other.mfu is not None:
        shown.append(card("MFU", percent(other.mfu), f"was {percent(one.mfu)}"))
    return html.Div(shown, className="cards")


def _settings(found: RunComparison) -> list[html.Section]:
    if not found.settings:
        return []
    rows = [
        [Cell(one.name), Cell(one.baseline or "unknown"), Cell(one.candidate or "unknown")]
        for one in found.settings
    ]
    shown = table(("setting", "baseline", "candidate"), rows)
    return [section("Configuration differences", "may explain other differences", shown)]


def _exposed(found: RunComparison) -> list[html.Section]:
    rows = [
        [Cell(row.axis or "other"), Cell(row.bucket), *_change(row)]
        for row in found.exposed[:COMPARE_ROWS]
    ]
    if not rows:
        return []
    heads = ("axis", "bucket", "baseline", "candidate", "difference")
    note = "mean step" + left_out(found.exposed, COMPARE_ROWS)
    return [section("Exposed communication by axis", note, table(heads, rows))]


def _kernels(found: RunComparison) -> list[html.Section]:
    changed = [row for row in found.kernels if row.baseline_ns != row.candidate_ns]
    if not changed:
        return []
    rows = [
        [Cell(row.family), _count(row.baseline_count), _count(row.candidate_count), *_change(row)]
        for row in changed[:COMPARE_ROWS]
    ]
    heads = ("family", "calls before", "calls after", "baseline", "candidate", "difference")
    note = "per rank and step" + left_out(changed, COMPARE_ROWS)
    return [section("Kernel families", note, table(heads, rows))]


def _calls(found: RunComparison) -> list[html.Section]:
    changed = [row for row in found.collectives if row.baseline != row.candidate]
    if not changed:
        return []
    heads = ("axis", "op", "size", "run", "per step", "transfer", "wait", "busbw")
    rows = [cells for row in changed[:COMPARE_ROWS] for cells in _call(row)]
    note = "medians per call; largest change first" + left_out(changed, COMPARE_ROWS)
    return [section("Collectives and messages", note, table(heads, rows))]


def _call(row: CallsChange) -> list[list[Cell]]:
    bytes_ = "unknown" if row.message_bytes is None else size(row.message_bytes)
    op = row.op if row.dtype is None else f"{row.op} {row.dtype}"
    head = [Cell(row.axis or "other"), Cell(op), Cell(bytes_, number=True)]
    sides = (("baseline", row.baseline), ("candidate", row.candidate))
    return [[*head, Cell(name), *_side(calls)] for name, calls in sides]


def _side(calls: CallStats | None) -> list[Cell]:
    if calls is None:
        return [Cell("none", number=True), *(Cell(number=True) for _ in range(3))]
    busbw = calls.busbw_bytes_per_s
    return [
        _count(calls.count),
        time_cell(calls.transfer_ns),
        time_cell(calls.wait_ns),
        Cell("unknown" if busbw is None else gigabytes_per_second(busbw), number=True),
    ]


def _change(row: Change) -> list[Cell]:
    return [
        time_cell(row.baseline_ns),
        time_cell(row.candidate_ns),
        Cell(signed_milliseconds(row.difference_ns), number=True),
    ]


def _count(number: float) -> Cell:
    return Cell(f"{number:,.1f}".removesuffix(".0"), number=True)


# History: a metric over all runs, with outliers, level changes and a budget.

HISTORY_ROWS = 50

FEWEST_POINTS = 2


@dataclass(frozen=True, slots=True)
class HistoryMetric:
    """How a metric is shown: label, unit, and the size of one unit in the stored unit."""

    words: str
    unit: str
    one: float


METRICS: Mapping[str, HistoryMetric] = {
    "step_ns": HistoryMetric("median step", "ms", 1e6),
    "exposed_comm": HistoryMetric("exposed communication", "% of step time", 0.01),
    "skew": HistoryMetric("skew", "% of step time", 0.01),
    "bubble": HistoryMetric("bubble", "% of step time", 0.01),
    "idle": HistoryMetric("idle", "% of step time", 0.01),
    "bubble_fraction": HistoryMetric("bubble fraction of the schedule", "%", 0.01),
    "mfu": HistoryMetric("MFU", "%", 0.01),
    "peak_memory_bytes": HistoryMetric("peak memory (largest rank)", "GiB", float(2**30)),
}


def metric_of(chosen: AddressQuery) -> str:
    """The metric named in the URL; by default the step time."""
    name = chosen.text("metric")
    return name if name is not None and name in METRICS else "step_ns"


def history_page(
    points: Sequence[MetricPoint], tags: Sequence[str], chosen: AddressQuery
) -> list[Component]:
    """The history of the chosen metric.

    points: values of the runs with the chosen tag, oldest first; tags: all tags, as key=value.
    """
    name = metric_of(chosen)
    metric = METRICS[name]
    shown = [HistoryPoint(p.name, p.created_unix_ns, p.value / metric.one) for p in points]
    if len(shown) < FEWEST_POINTS:
        hint = "A history needs at least two runs: upload more, or choose another metric or tag."
        return [_controls(name, tags, chosen), nothing("Too few runs", hint)]
    title = f"{metric.words}, {metric.unit}"
    changed = changes([one.value for one in shown])
    levels = _levels(changed, len(shown))
    figure = graph("history", history(shown, title, _number(chosen.text("budget")), levels))
    note = "◆ outlier: beyond 3 σ of the neighboring runs"  # noqa: RUF001
    if len(shown) < FEWEST_USUAL:
        note = f"outliers are marked from {FEWEST_USUAL} runs on"
    return [
        _controls(name, tags, chosen),
        section(metric.words.capitalize(), note, figure),
        _changes_section(points, changed, metric),
        _table(points, shown, metric, _number(chosen.text("budget"))),
    ]


def _controls(name: str, tags: Sequence[str], chosen: AddressQuery) -> html.Section:
    tag = chosen.text("tag")
    every = {"": "all runs", **{one: one for one in tags}}
    menus = [
        choice("metric", {key: one.words for key, one in METRICS.items()}, name, "step_ns"),
        choice("tag", every, tag if tag in every else "", ""),
        entry("budget", chosen.text("budget") or "", "budget", "none"),
    ]
    note = "finished runs only; choose a tag to compare like with like"
    return section("Metric and runs", note, html.Div(menus, className="choices"))


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None


def _levels(changed: Sequence[LevelChange], count: int) -> list[Level]:
    if not changed:
        return []
    first = Level(max(0, count - LOOKED_AT), changed[0].before)
    return [first, *(Level(one.at, one.after, _moved(one)) for one in changed)]


def _moved(change: LevelChange) -> str:
    return "from zero" if change.ratio is None else signed_percent(change.ratio)


def _changes_section(
    points: Sequence[MetricPoint], changed: Sequence[LevelChange], metric: HistoryMetric
) -> html.Section:
    note = "significant changes that last three runs or more; for information, not used by check"
    if not changed:
        none = f"No lasting change in {min(len(points), LOOKED_AT):,} runs."
        return section("Changes", note, html.P(none, className="message"))
    heads = ("first run of the new level", "before", "after", "change")
    rows = [_change_row(points[one.at], one, metric) for one in reversed(changed)]
    return section("Changes", note, table(heads, rows))


def _change_row(point: MetricPoint, change: LevelChange, metric: HistoryMetric) -> list[Cell]:
    return [
        Cell(led(point.name, page_url(point.run_id))),
        Cell(_with_unit(change.before, metric), number=True),
        Cell(_with_unit(change.after, metric), number=True),
        Cell(_moved(change), number=True),
    ]


def _with_unit(value: float, metric: HistoryMetric) -> str:
    return f"{value:,.4g} {metric.unit.split()[0]}"


def _table(
    points: Sequence[MetricPoint],
    shown: Sequence[HistoryPoint],
    metric: HistoryMetric,
    budget: float | None,
) -> html.Section:
    values = [one.value for one in shown]
    rows = [_row(points[i], values, i, metric, budget) for i in reversed(range(len(values)))]
    heads = ("run", metric.words, "typical", "difference", "remark")
    return section("Runs", "newest first", table(heads, rows[:HISTORY_ROWS]))


def _row(
    point: MetricPoint,
    values: Sequence[float],
    at: int,
    metric: HistoryMetric,
    budget: float | None,
) -> list[Cell]:
    near, value = usual(values, at), values[at]
    change = signed_percent(value / near.middle - 1) if near and near.middle else ""
    remarks = ["outlier"] if near and not near.holds(value) else []
    remarks += ["over budget"] if budget is not None and value > budget else []
    return [
        Cell(led(point.name, page_url(point.run_id))),
        Cell(_with_unit(value, metric), number=True),
        Cell(f"{near.middle:,.4g}" if near else "", number=True),
        Cell(change, number=True),
        Cell(html.Span(", ".join(remarks), className="pill failed") if remarks else ""),
    ]


# Lasting changes of a metric over runs; shown on the page only, not used by the check command.
#
# Change points are proposed by PELT (R. Killick, P. Fearnhead, I. Eckley, J. Amer. Stat. Assoc.
# 107, 2012) and kept if the levels before and after differ significantly, corrected for the number
# of places tested.

FEWEST_OF_LEVEL = 3
"""Fewest runs of a level: one or two may be outliers."""

LEAST = 0.01
"""Changes below this fraction of the previous level are ignored."""

LOOKED_AT = 200
"""Newest runs to search: with more, no permutation test reaches the corrected significance."""

ALPHA = 0.05
"""Probability of any false change over all places tested."""

_PENALTY = 3.0
"""PELT penalty per level, in units of variance times the logarithm of the number of runs."""


@dataclass(frozen=True, slots=True)
class LevelChange:
    """A lasting change: `at` is the index of the first run of the new level; before and after are
    the means of the two levels, in the unit of the values."""

    at: int
    before: float
    after: float

    @property
    def ratio(self) -> float | None:
        """Relative change of the level; None if it was zero before."""
        return (self.after - self.before) / abs(self.before) if self.before else None


def changes(values: Sequence[float]) -> tuple[LevelChange, ...]:
    """Lasting changes among the newest LOOKED_AT values, oldest first."""
    older = max(0, len(values) - LOOKED_AT)
    newest = _level_changes(tuple(values[older:]))
    return tuple(LevelChange(older + one.at, one.before, one.after) for one in newest)


@lru_cache(maxsize=64)
def _level_changes(values: tuple[float, ...]) -> tuple[LevelChange, ...]:
    if len(values) < 2 * FEWEST_OF_LEVEL:
        return ()
    level = ALPHA / (len(values) - 2 * FEWEST_OF_LEVEL + 1)
    edges = [0, *_proposed(values), len(values)]
    while len(edges) > 2:
        chances = [_chance(before, after, level) for before, after in _sides(values, edges)]
        if max(chances) <= level:
            break
        del edges[1 + chances.index(max(chances))]
    sides = _sides(values, edges)
    return tuple(
        LevelChange(at, fmean(before), fmean(after))
        for at, (before, after) in zip(edges[1:-1], sides, strict=True)
    )


def _sides(
    values: Sequence[float], edges: Sequence[int]
) -> list[tuple[Sequence[float], Sequence[float]]]:
    """For each inner edge, the values of the level before it and of the level after it."""
    levels = [values[low:high] for low, high in pairwise(edges)]
    return list(pairwise(levels))


def _proposed(values: Sequence[float]) -> list[int]:
    """Indices at which a new level may begin, without 0."""
    from ruptures import KernelCPD  # takes seconds to load

    penalty = _PENALTY * _noise(values) ** 2 * math.log(len(values))
    signal = np.array(values, dtype=np.float64)[:, None]
    found = KernelCPD("linear", min_size=FEWEST_OF_LEVEL).fit(signal).predict(pen=penalty)
    return [int(edge) for edge in found[:-1]]


def _noise(values: Sequence[float]) -> float:
    """Standard deviation of a run, from consecutive differences so that level changes do not
    contribute. Never zero."""
    apart = median(abs(other - one) for one, other in pairwise(values))
    least = 0.1 * LEAST * max(map(abs, values))
    return max(MAD_TO_SD * apart / math.sqrt(2), least, 1e-12)


def _chance(before: Sequence[float], after: Sequence[float], level: float) -> float:
    """The p value of the difference between two levels; 1 if it is too small to matter or to be
    significant."""
    moved = fmean(after) - fmean(before)
    error = math.sqrt(variance(before) / len(before) + variance(after) / len(after))
    # The normal test is a lower bound for the t test; it avoids slow permutations.
    surely = NormalDist().inv_cdf(1 - level) * error
    if abs(moved) <= max(surely, LEAST * abs(fmean(before)), 1e-12):
        return 1.0
    return _rise(before, after) if moved > 0 else _rise(after, before)


def _rise(low: Sequence[float], high: Sequence[float]) -> float:
    found = difference(low, high)
    return 1.0 if found is None else max(found.p, found.dealt)
