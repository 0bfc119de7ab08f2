"""Figures of communication: bandwidth, waits; and of metrics over runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import inf
from typing import Any

import numpy as np
import plotly.graph_objects as go

from stepsplit.analyzer.bucket_styles import BUCKET_STYLES
from stepsplit.analyzer.buckets import Bucket
from stepsplit.analyzer.significance import SIGMA_OF_MAD, compute_median_and_mad
from stepsplit.analyzer.trace import Int64
from stepsplit.analyzer.units import format_gigabytes_per_second, format_milliseconds, format_size
from stepsplit.dashboard.figures import theme

# Bus bandwidth over message size: measured, modelled, and the peak of the link.

SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x")


@dataclass(frozen=True, slots=True)
class BandwidthPoint:
    """Bus bandwidth of one op of one size on an axis; count is the number of calls."""

    axis: str
    op: str
    message_bytes: int
    busbw_bytes_per_s: float
    count: int


@dataclass(frozen=True, slots=True)
class Curve:
    """The model's bus bandwidth of one op on an axis over message sizes; link_bytes_per_s is the
    peak of the slowest link."""

    axis: str
    op: str
    message_bytes: tuple[float, ...]
    busbw_bytes_per_s: tuple[float, ...]
    link_bytes_per_s: float


def draw_bandwidth(
    points: Sequence[BandwidthPoint],
    curves: Sequence[Curve] = (),
    keys: Mapping[tuple[str, str], str] | None = None,
) -> go.Figure:
    """GB/s over bytes on log scales: one color per axis, one symbol per op, a line for the
    model. keys: by op and axis, where its points lead."""
    figure = theme.build_blank_figure(380, "message size", "busbw, GB/s")
    axes = sorted({one.axis for one in points} | {one.axis for one in curves})
    ops = sorted({one.op for one in points})
    grouped: dict[tuple[str, str], list[BandwidthPoint]] = defaultdict(list)
    for one in points:
        grouped[one.axis, one.op].append(one)
    for (axis, op), own in sorted(grouped.items()):
        figure.add_trace(_draw_points(axis, op, own, axes, ops))
        if key := (keys or {}).get((op, axis)):
            figure.data[-1].meta = {"keys": [key] * len(own)}
    for curve in curves:
        figure.add_trace(
            go.Scatter(
                name=f"model: {theme.escape_text(curve.op)} on {theme.escape_text(curve.axis)}",
                mode="lines",
                x=curve.message_bytes,
                y=[value / 1e9 for value in curve.busbw_bytes_per_s],
                line={"color": _choose_axis_color(curve.axis, axes), "width": 1.5, "dash": "dot"},
                hovertemplate="<b>%{fullData.name}</b><br>%{y:.3g} GB/s<extra></extra>",
            )
        )
    rates = [one.busbw_bytes_per_s / 1e9 for one in points]
    rates += [value / 1e9 for one in curves for value in one.busbw_bytes_per_s]
    sizes = [float(one.message_bytes) for one in points]
    sizes += [value for one in curves for value in one.message_bytes]
    figure.update_yaxes(type="log", **_choose_ticks(rates, "{:,g}".format))
    figure.update_xaxes(type="log", **_choose_ticks(sizes, _format_size_tick))
    by_peak: dict[float, list[Curve]] = defaultdict(list)
    for curve in curves:
        by_peak[curve.link_bytes_per_s].append(curve)
    for peak, own_curves in by_peak.items():
        names = ", ".join(dict.fromkeys(curve.axis for curve in own_curves))
        along = [size for curve in own_curves for size in curve.message_bytes]
        figure.add_trace(
            go.Scatter(
                name=f"link of {theme.escape_text(names)}: {format_gigabytes_per_second(peak)}",
                mode="lines",
                x=[min(along), max(along)],
                y=[peak / 1e9] * 2,
                line={"color": theme.WORSE, "width": 1, "dash": "dash"},
                hovertemplate="<b>%{fullData.name}</b><extra></extra>",
            )
        )
    # Room for the legend above: narrow pages have one entry in each line of it.
    figure.update_layout(height=300 + 18 * len(figure.data))
    return figure


def _choose_ticks(values: Sequence[float], describe: Callable[[float], str]) -> dict[str, Any]:
    """Ticks of a log axis: powers of 10, and 2 and 5 times them if there are less than two."""
    known = [value for value in values if value > 0]
    is_wide = bool(known) and max(known) > 100 * min(known)
    times = (1,) if is_wide else (1, 2, 5)
    ticks = [one * 10.0**power for power in range(-6, 16) for one in times]
    return {"tickvals": ticks, "ticktext": [describe(tick) for tick in ticks]}


def _format_size_tick(size: float) -> str:
    return format_size(size).replace(".00", "").replace(".0 ", " ")


def _draw_points(
    axis: str, op: str, own: list[BandwidthPoint], axes: list[str], ops: list[str]
) -> go.Scatter:
    return go.Scatter(
        name=f"{theme.escape_text(op)} on {theme.escape_text(axis)}",
        mode="markers",
        x=[one.message_bytes for one in own],
        y=[one.busbw_bytes_per_s / 1e9 for one in own],
        marker={
            "color": _choose_axis_color(axis, axes), "size": 10, "opacity": 0.85,
            "symbol": SYMBOLS[ops.index(op) % len(SYMBOLS)],
        },
        customdata=[_format_point(one) for one in own],
        hovertemplate="<b>%{fullData.name}</b><br>%{customdata}<extra></extra>",
    )  # fmt: skip


def _choose_axis_color(axis: str, axes: list[str]) -> str:
    return (
        theme.AXIS_COLORS[axes.index(axis) % len(theme.AXIS_COLORS)]
        if axis != "other"
        else theme.MUTED
    )


def _format_point(one: BandwidthPoint) -> str:
    rate = format_gigabytes_per_second(one.busbw_bytes_per_s)
    return f"{format_size(one.message_bytes)}, {rate}<br>{one.count:,} calls"


# Waiting: waits between ranks, and wait against transfer time of calls.

_SKEW = BUCKET_STYLES[Bucket.SKEW].color.light

_SKEW_RGB = ",".join(str(part) for part in bytes.fromhex(_SKEW[1:]))

_SCALE = [[0.0, f"rgba({_SKEW_RGB},0.08)"], [0.25, f"rgba({_SKEW_RGB},0.45)"], [1.0, _SKEW]]
"""From the background to one color, so that more is darker on white and lighter on black."""


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Ranks that are shown together: one, or several."""

    label: str
    ranks: tuple[int, ...]


def draw_waits_matrix(sums_ns: Int64, groups: Sequence[RankGroup], steps: int) -> go.Figure:
    """Heatmap of the time that each group of ranks (row) waits for each other one (column).

    Skew and bubble are included, in ms per step, as the mean over the ranks of the row.

    Args:
        sums_ns: Time in ns that each rank (row) waits for each rank (column).
        groups: The rows and columns.
        steps: Number of steps in the sums.
    """
    # A rank waits for all ranks of a group, so these add up; the ranks of a row wait at the same
    # time, so they are averaged.
    columns = np.column_stack([sums_ns[:, list(one.ranks)].sum(axis=1) for one in groups])
    means = np.stack([columns[list(one.ranks)].mean(axis=0) for one in groups])
    table = theme.convert_to_ms(means / max(steps, 1))
    kind = find_label_start(groups)
    labels = [theme.escape_text(one.label.removeprefix(kind)) for one in groups]
    of_kind, kind = f" ({theme.escape_text(kind.strip())})" if kind else "", theme.escape_text(kind)
    figure = theme.build_blank_figure(
        max(260, min(90 + 22 * len(groups), 620)), f"waited for{of_kind}", f"waiting{of_kind}"
    )
    gap = 1 if len(groups) <= _MAX_GAPS else 0
    figure.add_trace(
        go.Heatmap(
            z=np.where(table > 0, table, np.nan), x=labels, y=labels,
            colorscale=_SCALE, colorbar={"title": {"text": "ms per step"}, "thickness": 12},
            hovertemplate=f"{kind}%{{y}} waits for {kind}%{{x}}<br>%{{z:.3f}} ms per step"
            "<extra></extra>",
            hoverongaps=False, xgap=gap, ygap=gap,
        )
    )  # fmt: skip
    figure.update_xaxes(type="category", showgrid=False)
    figure.update_yaxes(type="category", autorange="reversed", showgrid=False)
    return figure


_MAX_GAPS = 32
"""Groups whose cells have gaps between them: of more, a cell on a phone is two pixels wide."""


def find_label_start(groups: Sequence[RankGroup]) -> str:
    """The words before the last one, such as "tp group ", if all labels have the same ones: said
    once in the titles of the axes, as in each label they would leave no room for the cells."""
    starts = {one.label[: one.label.rfind(" ") + 1] for one in groups}
    return starts.pop() if len(starts) == 1 else ""


@dataclass(frozen=True, slots=True)
class MedianCall:
    """The median call of a kind: transfer and wait time in ns."""

    label: str
    transfer_ns: int
    wait_ns: int


def draw_wait_against_transfer(
    calls: Sequence[MedianCall], keys: Sequence[str] | None = None
) -> go.Figure:
    """One bar per kind of call, in ms: transfer, and wait (hatched). keys: where each leads."""
    figure = theme.build_blank_figure(110 + 34 * len(calls), "ms of the median call", "")
    # On two lines, which leaves bars some width on a phone.
    words = [theme.escape_text(call.label).replace(", ", ",<br>") for call in calls]
    moving, waiting = (BUCKET_STYLES[bucket] for bucket in (Bucket.COLLECTIVE, Bucket.SKEW))
    for name, look, times in (
        ("transfer", moving, [call.transfer_ns for call in calls]),
        ("wait", waiting, [call.wait_ns for call in calls]),
    ):
        figure.add_trace(
            go.Bar(
                name=name,
                orientation="h",
                y=words,
                x=theme.convert_to_ms(times),
                marker=theme.build_marker(look),
                customdata=[format_milliseconds(ns) for ns in times],
                meta={"keys": list(keys)} if keys else None,
                hovertemplate=f"<b>%{{y}}</b><br>{name} %{{customdata}}<extra></extra>",
            )
        )
    figure.update_layout(barmode="stack", bargap=0.25)
    figure.update_yaxes(autorange="reversed", type="category")
    return figure


# A metric over runs: points, the typical range, level changes and the budget.

NEAR, FEWEST = 9, 6
"""Neighboring runs that define the typical range of a run; fewest runs for such a range."""

_BAND_SDS = 3

JOB_COLORS = (*theme.AXIS_COLORS, "#7A2F5B", "#8D949E")

JOB_SYMBOLS = (*SYMBOLS, "triangle-down", "star")

MAX_JOBS = len(JOB_COLORS)
"""Jobs in one figure: there are as many colors and symbols."""

_HISTORY_HOVER = "<b>%{customdata}</b><br>%{y:.4g}<br>%{x|%Y-%m-%d %H:%M} UTC<extra></extra>"


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """A run's value, in the displayed unit, with name and id of the run."""

    label: str
    unix_ns: int
    value: float
    run_id: str = ""


@dataclass(frozen=True, slots=True)
class TypicalRange:
    """The typical range around a run: the median plus and minus three robust standard
    deviations, not below 0 if no neighboring run is."""

    median: float
    low: float
    high: float

    def is_typical(self, value: float) -> bool:
        """Whether the value is within the range."""
        return self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class Level:
    """A level of the metric: index of its first run, value in the unit of the points, and a text
    on the change from the previous level."""

    first: int
    value: float
    label: str = ""


def compute_typical_range(values: Sequence[float], at: int) -> TypicalRange | None:
    """The typical range at a run, from its neighbors without itself; None with fewer than FEWEST
    runs."""
    if len(values) < FEWEST:
        return None
    # At both ends of the history as many neighbors as in its middle.
    low = max(0, min(at - NEAR // 2, len(values) - NEAR))
    # Without itself: an outlier would widen the range that it is judged by.
    near = [value for i, value in enumerate(values[low : low + NEAR], low) if i != at]
    middle, mad = compute_median_and_mad(near)
    spread = _BAND_SDS * SIGMA_OF_MAD * mad
    lowest = 0.0 if min(near) >= 0 else -inf
    return TypicalRange(middle, max(lowest, middle - spread), middle + spread)


def draw_history(
    points: Sequence[HistoryPoint],
    title: str,
    budget: float | None = None,
    levels: Sequence[Level] = (),
) -> go.Figure:
    """Points by time of upload, with outliers highlighted."""
    figure = theme.build_blank_figure(420, "", title)
    when = _list_dates(points)
    values = [one.value for one in points]
    bands = [near for i in range(len(values)) if (near := compute_typical_range(values, i))]
    is_outlier = [
        not bands[i].is_typical(value) if bands else False for i, value in enumerate(values)
    ]
    if bands:
        figure.add_trace(_draw_band_edge(when, [near.high for near in bands], None))
        figure.add_trace(_draw_band_edge(when, [near.low for near in bands], "tonexty"))
    figure.add_trace(
        go.Scatter(
            name="runs",
            mode="lines+markers",
            x=when,
            y=values,
            line={"color": theme.BACKWARD, "width": 1},
            marker={
                "size": [11 if one else 8 for one in is_outlier],
                "color": [theme.WORSE if one else theme.BACKWARD for one in is_outlier],
                "symbol": ["diamond" if one else "circle" for one in is_outlier],
            },
            customdata=[theme.escape_text(one.label) for one in points],
            meta={"keys": [one.run_id for one in points]},
            hovertemplate=_HISTORY_HOVER,
            showlegend=False,
        )
    )
    if levels:
        _draw_levels(figure, when, levels)
    _finish_history(figure, values, budget)
    return figure


@dataclass(frozen=True, slots=True)
class JobHistory:
    """The values of one job's runs, oldest first, with the name of the job."""

    label: str
    points: tuple[HistoryPoint, ...]


def draw_job_histories(
    jobs: Sequence[JobHistory], title: str, budget: float | None = None
) -> go.Figure:
    """A line for each of at most MAX_JOBS jobs by time of upload; no typical range, which is that
    of one job."""
    figure = theme.build_blank_figure(420 + 18 * len(jobs), "", title)
    for job, color, symbol in zip(jobs, JOB_COLORS, JOB_SYMBOLS, strict=False):
        figure.add_trace(
            go.Scatter(
                name=theme.escape_text(job.label),
                mode="lines+markers",
                x=_list_dates(job.points),
                y=[one.value for one in job.points],
                line={"color": color, "width": 1},
                marker={"size": 8, "color": color, "symbol": symbol},
                customdata=[theme.escape_text(one.label) for one in job.points],
                meta={"keys": [one.run_id for one in job.points]},
                hovertemplate=_HISTORY_HOVER.replace("<br>", "<br>%{fullData.name}<br>", 1),
                showlegend=True,
            )
        )
    _finish_history(figure, [one.value for job in jobs for one in job.points], budget)
    return figure


def _list_dates(points: Sequence[HistoryPoint]) -> list[datetime]:
    return [datetime.fromtimestamp(one.unix_ns / 1e9, UTC) for one in points]


def _finish_history(figure: go.Figure, values: Sequence[float], budget: float | None) -> None:
    """Draws the budget; the axis has no negative part that no value needs."""
    if min(values, default=0.0) >= 0:
        figure.update_yaxes(rangemode="nonnegative")
    if budget is not None:
        line = {"color": theme.WORSE, "width": 2, "dash": "dash"}
        figure.add_hline(y=budget, line=line, annotation_text="budget")


def _draw_levels(figure: go.Figure, when: Sequence[datetime], levels: Sequence[Level]) -> None:
    figure.add_trace(
        go.Scatter(
            name="level",
            mode="lines",
            x=[*(when[one.first] for one in levels), when[-1]],
            y=[*(one.value for one in levels), levels[-1].value],
            line={"color": theme.AXIS_COLORS[1], "width": 2, "shape": "hv"},
            hoverinfo="skip",
        )
    )
    look = {"showarrow": False, "xanchor": "left", "yanchor": "bottom", "xshift": 6, "yshift": 10}
    for one in levels:
        if one.label:
            figure.add_annotation(
                x=when[one.first], y=one.value, text=theme.escape_text(one.label), **look
            )


def _draw_band_edge(
    when: Sequence[datetime], values: Sequence[float], fill: str | None
) -> go.Scatter:
    return go.Scatter(
        name="typical range",
        mode="lines",
        x=list(when),
        y=list(values),
        line={"color": theme.MUTED, "width": 0, "shape": "hvh"},
        fill=fill,
        fillcolor="rgba(141,148,158,0.22)",
        hoverinfo="skip",
        showlegend=fill is not None,
    )
