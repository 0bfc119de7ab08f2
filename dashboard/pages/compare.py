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
from stepsplit.analyzer.regression.statistics import compute_difference
from stepsplit.analyzer.units import (
    format_gigabytes_per_second,
    format_memory_size,
    format_milliseconds,
    format_percent,
    format_signed_milliseconds,
    format_signed_percent,
    format_size,
)
from stepsplit.dashboard.figures.communication import FEWEST as FEWEST_USUAL
from stepsplit.dashboard.figures.communication import (
    MAD_TO_SD,
    HistoryPoint,
    Level,
    compute_typical_range,
    draw_history,
)
from stepsplit.dashboard.figures.run import NamedSplit, draw_difference, draw_splits
from stepsplit.dashboard.pages.components import (
    AddressQuery,
    Cell,
    View,
    build_card,
    build_empty_card,
    build_graph,
    build_link,
    build_menu,
    build_page_url,
    build_section,
    build_table,
    build_text_field,
    build_time_cell,
    format_hidden_rows,
)
from stepsplit.dashboard.store.metrics import MetricPoint

# Compare: differences between two runs by bucket, axis, call and kernel.

MAX_COMPARE_ROWS = 20

_NOISE = {
    True: "within step-to-step noise",
    False: "beyond step-to-step noise",
    None: "too few steps to estimate noise",
}


def compare_page(baseline: View, candidate: View) -> list[Component]:
    """The page that compares the candidate with the baseline."""
    try:
        comparison = compare_reports(baseline.report, candidate.report)
    except UsageError as error:
        return [build_empty_card("These runs cannot be compared", str(error))]
    bars = [
        NamedSplit("baseline", comparison.baseline.mean),
        NamedSplit("candidate", comparison.candidate.mean),
    ]
    return [
        _build_names(baseline, candidate),
        _build_cards(comparison),
        *_build_settings(comparison),
        *_build_findings(comparison),
        html.Div(
            [
                build_section("Mean step", "over ranks and full steps",
                        build_graph("splits", draw_splits(bars))),
                build_section("Difference by bucket", "mean step",
                        build_graph("difference", draw_difference(comparison))),
            ],
            className="columns",
        ),
        html.Div([*_build_exposed(comparison), *_build_kernels(comparison)], className="columns"),
        *_build_calls(comparison),
    ]  # fmt: skip


def _build_names(baseline: View, candidate: View) -> html.P:
    return html.P(
        [
            "baseline ",
            html.B(build_link(baseline.name, build_page_url(baseline.run_id))),
            "   candidate ",
            html.B(build_link(candidate.name, build_page_url(candidate.run_id))),
            "   ",
            build_link("swap", f"/compare?baseline={candidate.run_id}&candidate={baseline.run_id}"),
        ],
        className="subtitle",
    )


def _build_work_cards(comparison: RunComparison) -> list[html.Div]:
    """The change for the same work, where the work of a step differs."""
    baseline, candidate = comparison.baseline, comparison.candidate
    if comparison.token_ratio is not None:
        was = f"{baseline.tokens_per_s:,.0f} to {candidate.tokens_per_s:,.0f}"
        change = format_signed_percent(comparison.token_ratio - 1)
        return [build_card("tokens/s per GPU", change, f"{was}; steps of other sizes")]
    if comparison.microbatch_ratio is not None:
        was = f"{baseline.microbatches} to {candidate.microbatches} microbatches a step"
        change = format_signed_percent(comparison.microbatch_ratio - 1)
        return [build_card("time per microbatch", change, was)]
    return []


def _build_cards(comparison: RunComparison) -> html.Div:
    baseline, candidate = comparison.baseline, comparison.candidate
    change = "unknown" if comparison.ratio is None else format_signed_percent(comparison.ratio - 1)
    shown = [
        *_build_work_cards(comparison),
        build_card("median step", change, _NOISE[comparison.within_noise]),
        build_card(
            "baseline", format_milliseconds(baseline.median_ns), f"{baseline.steps} full steps"
        ),
        build_card(
            "candidate", format_milliseconds(candidate.median_ns), f"{candidate.steps} full steps"
        ),
    ]
    if baseline.bubble_fraction is not None and candidate.bubble_fraction is not None:
        was = f"was {format_percent(baseline.bubble_fraction)}"
        shown.append(build_card("bubble_fraction", format_percent(candidate.bubble_fraction), was))
    if baseline.peak_allocated_bytes and candidate.peak_allocated_bytes:
        was = f"was {format_memory_size(baseline.peak_allocated_bytes)}"
        shown.append(
            build_card("peak memory", format_memory_size(candidate.peak_allocated_bytes), was)
        )
    if baseline.mfu is not None and candidate.mfu is not None:
        shown.append(
            build_card("MFU", format_percent(candidate.mfu), f"was {format_percent(baseline.mfu)}")
        )
    return html.Div(shown, className="cards")


def _build_findings(comparison: RunComparison) -> list[html.Section]:
    changed = comparison.changed_findings
    if not changed:
        return []
    rows = [
        [
            Cell(one.message if one.candidate_ns else f"no longer: {one.message}"),
            *_build_change_cells(one),
        ]
        for one in changed
    ]
    shown = build_table(("bottleneck", "baseline", "candidate", "difference"), rows)
    return [build_section("Bottlenecks that changed", "estimated saving per step", shown)]


def _build_settings(comparison: RunComparison) -> list[html.Section]:
    if not comparison.settings:
        return []
    rows = [
        [Cell(one.name), Cell(one.baseline or "unknown"), Cell(one.candidate or "unknown")]
        for one in comparison.settings
    ]
    shown = build_table(("setting", "baseline", "candidate"), rows)
    return [build_section("Configuration differences", "may explain other differences", shown)]


def _build_exposed(comparison: RunComparison) -> list[html.Section]:
    rows = [
        [Cell(row.axis or "other"), Cell(row.bucket), *_build_change_cells(row)]
        for row in comparison.exposed[:MAX_COMPARE_ROWS]
    ]
    if not rows:
        return []
    heads = ("axis", "bucket", "baseline", "candidate", "difference")
    note = "mean step" + format_hidden_rows(comparison.exposed, MAX_COMPARE_ROWS)
    return [build_section("Exposed communication by axis", note, build_table(heads, rows))]


def _build_kernels(comparison: RunComparison) -> list[html.Section]:
    changed = [row for row in comparison.kernels if row.baseline_ns != row.candidate_ns]
    if not changed:
        return []
    rows = [
        [
            Cell(row.family),
            _build_count_cell(row.baseline_count),
            _build_count_cell(row.candidate_count),
            *_build_change_cells(row),
        ]
        for row in changed[:MAX_COMPARE_ROWS]
    ]
    heads = ("family", "calls before", "calls after", "baseline", "candidate", "difference")
    note = "per rank and step" + format_hidden_rows(changed, MAX_COMPARE_ROWS)
    return [build_section("Kernel families", note, build_table(heads, rows))]


def _build_calls(comparison: RunComparison) -> list[html.Section]:
    changed = [row for row in comparison.collectives if row.baseline != row.candidate]
    if not changed:
        return []
    heads = ("axis", "op", "size", "run", "per step", "transfer", "wait", "busbw")
    rows = [cells for row in changed[:MAX_COMPARE_ROWS] for cells in _build_call_rows(row)]
    note = "medians per call; largest change first" + format_hidden_rows(changed, MAX_COMPARE_ROWS)
    return [build_section("Collectives and messages", note, build_table(heads, rows))]


def _build_call_rows(row: CallsChange) -> list[list[Cell]]:
    bytes_ = "unknown" if row.message_bytes is None else format_size(row.message_bytes)
    op = row.op if row.dtype is None else f"{row.op} {row.dtype}"
    head = [Cell(row.axis or "other"), Cell(op), Cell(bytes_, number=True)]
    sides = (("baseline", row.baseline), ("candidate", row.candidate))
    return [[*head, Cell(name), *_build_call_cells(calls)] for name, calls in sides]


def _build_call_cells(calls: CallStats | None) -> list[Cell]:
    if calls is None:
        return [Cell("none", number=True), *(Cell(number=True) for _ in range(3))]
    busbw = calls.busbw_bytes_per_s
    return [
        _build_count_cell(calls.count),
        build_time_cell(calls.transfer_ns),
        build_time_cell(calls.wait_ns),
        Cell("unknown" if busbw is None else format_gigabytes_per_second(busbw), number=True),
    ]


def _build_change_cells(row: Change) -> list[Cell]:
    return [
        build_time_cell(row.baseline_ns),
        build_time_cell(row.candidate_ns),
        Cell(format_signed_milliseconds(row.difference_ns), number=True),
    ]


def _build_count_cell(number: float) -> Cell:
    return Cell(f"{number:,.1f}".removesuffix(".0"), number=True)


# History: a metric over all runs, with outliers, level changes and a budget.

MAX_HISTORY_ROWS = 50

MIN_POINTS = 2


@dataclass(frozen=True, slots=True)
class HistoryMetric:
    """How a metric is shown: label, unit, and the size of one unit in the stored unit."""

    label: str
    unit: str
    scale: float


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


def choose_metric(chosen: AddressQuery) -> str:
    """The metric named in the URL; by default the step time."""
    name = chosen.find_text("metric")
    return name if name is not None and name in METRICS else "step_ns"


def build_history_page(
    points: Sequence[MetricPoint], tags: Sequence[str], chosen: AddressQuery
) -> list[Component]:
    """The history of the chosen metric.

    points: values of the runs with the chosen tag, oldest first; tags: all tags, as key=value.
    """
    name = choose_metric(chosen)
    metric = METRICS[name]
    shown = [HistoryPoint(p.name, p.created_unix_ns, p.value / metric.scale) for p in points]
    if len(shown) < MIN_POINTS:
        hint = "A history needs at least two runs: upload more, or choose another metric or tag."
        return [_build_controls(name, tags, chosen), build_empty_card("Too few runs", hint)]
    title = f"{metric.label}, {metric.unit}"
    changed = find_level_changes([one.value for one in shown])
    levels = _build_levels(changed, len(shown))
    figure = build_graph(
        "history", draw_history(shown, title, _parse_number(chosen.find_text("budget")), levels)
    )
    note = "◆ outlier: beyond 3 σ of the neighboring runs"  # noqa: RUF001
    if len(shown) < FEWEST_USUAL:
        note = f"outliers are marked from {FEWEST_USUAL} runs on"
    return [
        _build_controls(name, tags, chosen),
        build_section(metric.label.capitalize(), note, figure),
        _build_changes(points, changed, metric),
        _build_table(points, shown, metric, _parse_number(chosen.find_text("budget"))),
    ]


def _build_controls(name: str, tags: Sequence[str], chosen: AddressQuery) -> html.Section:
    tag = chosen.find_text("tag")
    tag_options = {"": "all runs", **{one: one for one in tags}}
    menus = [
        build_menu("metric", {key: one.label for key, one in METRICS.items()}, name, "step_ns"),
        build_menu("tag", tag_options, tag if tag in tag_options else "", ""),
        build_text_field("budget", chosen.find_text("budget") or "", "budget", "none"),
    ]
    note = "finished runs only; choose a tag to compare like with like"
    return build_section("Metric and runs", note, html.Div(menus, className="choices"))


def _parse_number(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None


def _build_levels(changed: Sequence[LevelChange], count: int) -> list[Level]:
    if not changed:
        return []
    first = Level(max(0, count - MAX_RUNS), changed[0].before)
    return [first, *(Level(one.at, one.after, _format_change(one)) for one in changed)]


def _format_change(change: LevelChange) -> str:
    return "from zero" if change.ratio is None else format_signed_percent(change.ratio)


def _build_changes(
    points: Sequence[MetricPoint], changed: Sequence[LevelChange], metric: HistoryMetric
) -> html.Section:
    note = "significant changes that last three runs or more; for information, not used by check"
    if not changed:
        none = f"No lasting change in {min(len(points), MAX_RUNS):,} runs."
        return build_section("Changes", note, html.P(none, className="message"))
    heads = ("first run of the new level", "before", "after", "change")
    rows = [_build_change_row(points[one.at], one, metric) for one in reversed(changed)]
    return build_section("Changes", note, build_table(heads, rows))


def _build_change_row(point: MetricPoint, change: LevelChange, metric: HistoryMetric) -> list[Cell]:
    return [
        Cell(build_link(point.name, build_page_url(point.run_id))),
        Cell(_format_with_unit(change.before, metric), number=True),
        Cell(_format_with_unit(change.after, metric), number=True),
        Cell(_format_change(change), number=True),
    ]


def _format_with_unit(value: float, metric: HistoryMetric) -> str:
    return f"{value:,.4g} {metric.unit.split()[0]}"


def _build_table(
    points: Sequence[MetricPoint],
    shown: Sequence[HistoryPoint],
    metric: HistoryMetric,
    budget: float | None,
) -> html.Section:
    values = [one.value for one in shown]
    rows = [_build_row(points[i], values, i, metric, budget) for i in reversed(range(len(values)))]
    heads = ("run", metric.label, "typical", "difference", "remark")
    return build_section("Runs", "newest first", build_table(heads, rows[:MAX_HISTORY_ROWS]))


def _build_row(
    point: MetricPoint,
    values: Sequence[float],
    at: int,
    metric: HistoryMetric,
    budget: float | None,
) -> list[Cell]:
    typical, value = compute_typical_range(values, at), values[at]
    change = format_signed_percent(value / typical.median - 1) if typical and typical.median else ""
    remarks = ["outlier"] if typical and not typical.is_typical(value) else []
    remarks += ["over budget"] if budget is not None and value > budget else []
    return [
        Cell(build_link(point.name, build_page_url(point.run_id))),
        Cell(_format_with_unit(value, metric), number=True),
        Cell(f"{typical.median:,.4g}" if typical else "", number=True),
        Cell(change, number=True),
        Cell(html.Span(", ".join(remarks), className="pill failed") if remarks else ""),
    ]


# Lasting changes of a metric over runs; shown on the page only, not used by the check command.
#
# Change points are proposed by PELT (R. Killick, P. Fearnhead, I. Eckley, J. Amer. Stat. Assoc.
# 107, 2012) and kept if the levels before and after differ significantly, corrected for the number
# of places tested.

MIN_LEVEL_RUNS = 3
"""Fewest runs of a level: one or two may be outliers."""

MIN_CHANGE = 0.01
"""Changes below this fraction of the previous level are ignored."""

MAX_RUNS = 200
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


def find_level_changes(values: Sequence[float]) -> tuple[LevelChange, ...]:
    """Lasting changes among the newest LOOKED_AT values, oldest first."""
    older = max(0, len(values) - MAX_RUNS)
    newest = _detect_changes(tuple(values[older:]))
    return tuple(LevelChange(older + one.at, one.before, one.after) for one in newest)


@lru_cache(maxsize=64)
def _detect_changes(values: tuple[float, ...]) -> tuple[LevelChange, ...]:
    if len(values) < 2 * MIN_LEVEL_RUNS:
        return ()
    level = ALPHA / (len(values) - 2 * MIN_LEVEL_RUNS + 1)
    edges = [0, *_propose_edges(values), len(values)]
    while len(edges) > 2:
        chances = [
            _compute_p_value(before, after, level)
            for before, after in _split_at_edges(values, edges)
        ]
        if max(chances) <= level:
            break
        del edges[1 + chances.index(max(chances))]
    sides = _split_at_edges(values, edges)
    return tuple(
        LevelChange(at, fmean(before), fmean(after))
        for at, (before, after) in zip(edges[1:-1], sides, strict=True)
    )


def _split_at_edges(
    values: Sequence[float], edges: Sequence[int]
) -> list[tuple[Sequence[float], Sequence[float]]]:
    """For each inner edge, the values of the level before it and of the level after it."""
    levels = [values[low:high] for low, high in pairwise(edges)]
    return list(pairwise(levels))


def _propose_edges(values: Sequence[float]) -> list[int]:
    """Indices at which a new level may begin, without 0."""
    from ruptures import KernelCPD  # takes seconds to load

    penalty = _PENALTY * _estimate_noise(values) ** 2 * math.log(len(values))
    signal = np.array(values, dtype=np.float64)[:, None]
    found = KernelCPD("linear", min_size=MIN_LEVEL_RUNS).fit(signal).predict(pen=penalty)
    return [int(edge) for edge in found[:-1]]


def _estimate_noise(values: Sequence[float]) -> float:
    """Standard deviation of a run, from consecutive differences so that level changes do not
    contribute. Never zero."""
    median_diff = median(abs(other - one) for one, other in pairwise(values))
    min_noise = 0.1 * MIN_CHANGE * max(map(abs, values))
    return max(MAD_TO_SD * median_diff / math.sqrt(2), min_noise, 1e-12)


def _compute_p_value(before: Sequence[float], after: Sequence[float], level: float) -> float:
    """The p value of the difference between two levels; 1 if it is too small to matter or to be
    significant."""
    shift = fmean(after) - fmean(before)
    error = math.sqrt(variance(before) / len(before) + variance(after) / len(after))
    # The normal test is a lower bound for the t test; it avoids slow permutations.
    min_shift = NormalDist().inv_cdf(1 - level) * error
    if abs(shift) <= max(min_shift, MIN_CHANGE * abs(fmean(before)), 1e-12):
        return 1.0
    return (
        _compute_rise_p_value(before, after) if shift > 0 else _compute_rise_p_value(after, before)
    )


def _compute_rise_p_value(low: Sequence[float], high: Sequence[float]) -> float:
    test = compute_difference(low, high)
    return 1.0 if test is None else max(test.p, test.p_permutation)
