"""Figures of communication: bandwidth, waits, and metrics over runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import log10
from statistics import median

import numpy as np
import plotly.graph_objects as go

from stepsplit.analyzer.report.tables import Waits
from stepsplit.analyzer.units import gigabytes_per_second, milliseconds, size
from stepsplit.dashboard.figures.theme import (
    AXES,
    BACKWARD,
    LOOKS,
    MUTED,
    WORSE,
    blank,
    in_ms,
    marker,
    plain,
)

# Bus bandwidth over message size: measured, modelled, and the peak of the link.

_TICKS = [10**power for power in range(16)]

_BYTES = {"tickvals": _TICKS, "ticktext": [size(tick).replace(".00", "") for tick in _TICKS]}

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


def bandwidth(points: Sequence[BandwidthPoint], curves: Sequence[Curve] = ()) -> go.Figure:
    """GB/s over bytes on log scales: one color per axis, one symbol per op, a line for the
    model."""
    figure = blank(380, "message size", "busbw, GB/s")
    axes = sorted({one.axis for one in points} | {one.axis for one in curves})
    ops = sorted({one.op for one in points})
    grouped: dict[tuple[str, str], list[BandwidthPoint]] = defaultdict(list)
    for one in points:
        grouped[one.axis, one.op].append(one)
    for (axis, op), own in sorted(grouped.items()):
        figure.add_trace(_measured(axis, op, own, axes, ops))
    for curve in curves:
        figure.add_trace(_modelled(curve, axes))
    figure.update_yaxes(type="log", dtick="D2")
    figure.update_xaxes(type="log", **_BYTES)
    _peaks(figure, curves)
    figure.update_layout(legend={"orientation": "v", "x": 1.02, "y": 1, "yanchor": "top"})
    return figure


def _measured(
    axis: str, op: str, own: list[BandwidthPoint], axes: list[str], ops: list[str]
) -> go.Scatter:
    return go.Scatter(
        name=f"{plain(op)} on {plain(axis)}",
        mode="markers",
        x=[one.message_bytes for one in own],
        y=[one.busbw_bytes_per_s / 1e9 for one in own],
        marker={
            "color": _color(axis, axes), "size": 10, "opacity": 0.85,
            "symbol": SYMBOLS[ops.index(op) % len(SYMBOLS)],
        },
        customdata=[_told(one) for one in own],
        hovertemplate="<b>%{fullData.name}</b><br>%{customdata}<extra></extra>",
    )  # fmt: skip


def _modelled(curve: Curve, axes: list[str]) -> go.Scatter:
    return go.Scatter(
        name=f"model: {plain(curve.op)} on {plain(curve.axis)}",
        mode="lines",
        x=curve.message_bytes,
        y=[value / 1e9 for value in curve.busbw_bytes_per_s],
        line={"color": _color(curve.axis, axes), "width": 1.5, "dash": "dot"},
        hovertemplate="<b>%{fullData.name}</b><br>%{y:.3g} GB/s<extra></extra>",
    )


def _peaks(figure: go.Figure, curves: Sequence[Curve]) -> None:
    """One horizontal line per distinct link peak."""
    axes: dict[float, list[str]] = defaultdict(list)
    for curve in curves:
        if curve.axis not in axes[curve.link_bytes_per_s]:
            axes[curve.link_bytes_per_s].append(curve.axis)
    for peak, names in axes.items():
        text = f"link of {plain(', '.join(names))}: {gigabytes_per_second(peak)}"
        line = {"color": WORSE, "width": 1, "dash": "dash"}
        figure.add_hline(y=peak / 1e9, line=line)
        figure.add_annotation(x=0, xref="paper", y=log10(peak / 1e9), text=text, showarrow=False,
                              xanchor="left", yanchor="bottom", font={"size": 11})  # fmt: skip


def _color(axis: str, axes: list[str]) -> str:
    return AXES[axes.index(axis) % len(AXES)] if axis != "other" else MUTED


def _told(one: BandwidthPoint) -> str:
    rate = gigabytes_per_second(one.busbw_bytes_per_s)
    return f"{size(one.message_bytes)}, {rate}<br>{one.count:,} calls"


# Waiting: waits between ranks, and wait against transfer time of calls.

MOST_RANKS = 128

_SCALE = [[0.0, "rgba(204,121,167,0.06)"], [0.5, "#CC79A7"], [1.0, "#7A2F5B"]]


def waits_matrix(waits: Waits, ranks: Sequence[int], steps: int) -> go.Figure:
    """Heatmap of the time each rank (row) waits for each other rank (column), in ms per step.

    Skew and bubble are included. With more than MOST_RANKS ranks, those with most waiting are
    shown.
    """
    known = (waits.owner >= 0) & (waits.dur_ns > 0)
    sums = np.zeros((max(ranks) + 1,) * 2)
    inside = known & (waits.owner <= max(ranks)) & (waits.rank <= max(ranks))
    np.add.at(sums, (waits.rank[inside], waits.owner[inside]), waits.dur_ns[inside])
    shown = _most(sums, ranks)
    table = in_ms(sums[np.ix_(shown, shown)] / max(steps, 1))
    labels = [f"rank {rank}" for rank in shown]
    figure = blank(max(260, min(90 + 22 * len(shown), 620)), "rank waited for", "waiting rank")
    figure.add_trace(
        go.Heatmap(
            z=np.where(table > 0, table, np.nan), x=labels, y=labels,
            colorscale=_SCALE, colorbar={"title": {"text": "ms per step"}, "thickness": 12},
            hovertemplate="%{y} waits for %{x}<br>%{z:.3f} ms per step<extra></extra>",
            xgap=1, ygap=1,
        )
    )  # fmt: skip
    figure.update_xaxes(type="category", showgrid=False)
    figure.update_yaxes(type="category", autorange="reversed", showgrid=False)
    return figure


def _most(sums: np.typing.NDArray[np.float64], ranks: Sequence[int]) -> list[int]:
    total = sums.sum(axis=0) + sums.sum(axis=1)
    most = sorted(ranks, key=lambda rank: -total[rank])[:MOST_RANKS]
    return sorted(most)


@dataclass(frozen=True, slots=True)
class MedianCall:
    """The median call of a kind: transfer and wait time in ns."""

    words: str
    transfer_ns: int
    wait_ns: int


def wait_against_transfer(calls: Sequence[MedianCall]) -> go.Figure:
    """One bar per kind of call, in ms: transfer, and wait (hatched)."""
    figure = blank(110 + 26 * len(calls), "ms of the median call", "")
    words = [plain(call.words) for call in calls]
    moving, waiting = (next(k for k in LOOKS if k.bucket == b) for b in ("collective", "skew"))
    for name, look, times in (
        ("transfer", moving, [call.transfer_ns for call in calls]),
        ("wait", waiting, [call.wait_ns for call in calls]),
    ):
        figure.add_trace(
            go.Bar(
                name=name,
                orientation="h",
                y=words,
                x=in_ms(times),
                marker=marker(look),
                customdata=[milliseconds(ns) for ns in times],
                hovertemplate=f"<b>%{{y}}</b><br>{name} %{{customdata}}<extra></extra>",
            )
        )
    figure.update_layout(barmode="stack", bargap=0.25)
    figure.update_yaxes(autorange="reversed", type="category")
    return figure


# A metric over runs: points, the typical range, level changes and the budget.

NEAR, FEWEST = 9, 6
"""Neighboring runs that define the typical range of a run; fewest runs for such a range."""

MAD_TO_SD = 1.4826

_BAND_SDS = 3


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """A run's value, in the displayed unit; words is the name of the run."""

    words: str
    unix_ns: int
    value: float


@dataclass(frozen=True, slots=True)
class Usual:
    """The typical range around a run: the median plus and minus three robust standard
    deviations."""

    middle: float
    low: float
    high: float

    def holds(self, value: float) -> bool:
        """Whether the value is within the range."""
        return self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class Level:
    """A level of the metric: index of its first run, value in the unit of the points, and a text
    on the change from the previous level."""

    first: int
    value: float
    words: str = ""


def usual(values: Sequence[float], at: int) -> Usual | None:
    """The typical range at a run, from its neighbors without itself; None with fewer than FEWEST
    runs."""
    if len(values) < FEWEST:
        return None
    low = max(0, min(at - NEAR // 2, len(values) - NEAR))
    near = [value for i, value in enumerate(values[low : low + NEAR], low) if i != at]
    middle = median(near)
    spread = _BAND_SDS * MAD_TO_SD * median(abs(value - middle) for value in near)
    return Usual(middle, middle - spread, middle + spread)


def history(
    points: Sequence[HistoryPoint],
    title: str,
    budget: float | None = None,
    levels: Sequence[Level] = (),
) -> go.Figure:
    """Points by time of upload, with outliers highlighted."""
    figure = blank(420, "", title)
    when = [datetime.fromtimestamp(one.unix_ns / 1e9, UTC) for one in points]
    values = [one.value for one in points]
    around = [near for i in range(len(values)) if (near := usual(values, i))]
    odd = [not around[i].holds(value) if around else False for i, value in enumerate(values)]
    if around:
        figure.add_trace(_edge(when, [near.high for near in around], None))
        figure.add_trace(_edge(when, [near.low for near in around], "tonexty"))
    figure.add_trace(
        go.Scatter(
            name="runs",
            mode="lines+markers",
            x=when,
            y=values,
            line={"color": BACKWARD, "width": 1},
            marker={
                "size": [11 if one else 8 for one in odd],
                "color": [WORSE if one else BACKWARD for one in odd],
                "symbol": ["diamond" if one else "circle" for one in odd],
            },
            customdata=[plain(one.words) for one in points],
            hovertemplate="<b>%{customdata}</b><br>%{y:.4g}<br>%{x|%Y-%m-%d %H:%M} UTC"
            "<extra></extra>",
            showlegend=False,
        )
    )
    if levels:
        _draw_levels(figure, when, levels)
    if budget is not None:
        line = {"color": WORSE, "width": 2, "dash": "dash"}
        figure.add_hline(y=budget, line=line, annotation_text="budget")
    return figure


def _draw_levels(figure: go.Figure, when: Sequence[datetime], levels: Sequence[Level]) -> None:
    figure.add_trace(
        go.Scatter(
            name="level",
            mode="lines",
            x=[*(when[one.first] for one in levels), when[-1]],
            y=[*(one.value for one in levels), levels[-1].value],
            line={"color": AXES[1], "width": 2, "shape": "hv"},
            hoverinfo="skip",
        )
    )
    look = {"showarrow": False, "xanchor": "left", "yanchor": "bottom", "xshift": 6, "yshift": 10}
    for one in levels:
        if one.words:
            figure.add_annotation(x=when[one.first], y=one.value, text=plain(one.words), **look)


def _edge(when: Sequence[datetime], values: Sequence[float], fill: str | None) -> go.Scatter:
    return go.Scatter(
        name="typical range: median of neighboring runs, 3 standard deviations",
        mode="lines",
        x=list(when),
        y=list(values),
        line={"color": MUTED, "width": 0, "shape": "hvh"},
        fill=fill,
        fillcolor="rgba(141,148,158,0.22)",
        hoverinfo="skip",
        showlegend=fill is not None,
    )
