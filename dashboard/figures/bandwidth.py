"""Bus bandwidth against message size: what was measured, what the model says, the link's peak."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import log10

import plotly.graph_objects as go

from stepsplit.analyzer.units import gigabytes_per_second, size
from stepsplit.dashboard.figures.palette import AXES, MUTED, WORSE
from stepsplit.dashboard.figures.theme import blank, plain

_TICKS = [10**power for power in range(16)]
_BYTES = {"tickvals": _TICKS, "ticktext": [size(tick).replace(".00", "") for tick in _TICKS]}
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x")


@dataclass(frozen=True, slots=True)
class Point:
    """One op of one size on an axis; count is how many such calls there were."""

    axis: str
    op: str
    message_bytes: int
    busbw_bytes_per_s: float
    count: int


@dataclass(frozen=True, slots=True)
class Curve:
    """The model's busbw over sizes, of one op on an axis; link is the peak of its slowest link."""

    axis: str
    op: str
    message_bytes: tuple[float, ...]
    busbw_bytes_per_s: tuple[float, ...]
    link_bytes_per_s: float


def bandwidth(points: Sequence[Point], curves: Sequence[Curve] = ()) -> go.Figure:
    """GB/s over bytes, both logarithmic: a color an axis, a shape an op, a line the model."""
    figure = blank(380, "message size", "busbw, GB/s")
    axes = sorted({one.axis for one in points} | {one.axis for one in curves})
    ops = sorted({one.op for one in points})
    grouped: dict[tuple[str, str], list[Point]] = defaultdict(list)
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


def _measured(axis: str, op: str, own: list[Point], axes: list[str], ops: list[str]) -> go.Scatter:
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
    """The links' peaks, once each."""
    axes: dict[float, list[str]] = defaultdict(list)
    for curve in curves:
        if curve.axis not in axes[curve.link_bytes_per_s]:
            axes[curve.link_bytes_per_s].append(curve.axis)
    for peak, of in axes.items():
        text = f"link of {plain(', '.join(of))}: {gigabytes_per_second(peak)}"
        line = {"color": WORSE, "width": 1, "dash": "dash"}
        figure.add_hline(y=peak / 1e9, line=line)
        figure.add_annotation(x=0, xref="paper", y=log10(peak / 1e9), text=text, showarrow=False,
                              xanchor="left", yanchor="bottom", font={"size": 11})  # fmt: skip


def _color(axis: str, axes: list[str]) -> str:
    return AXES[axes.index(axis) % len(AXES)] if axis != "other" else MUTED


def _told(one: Point) -> str:
    rate = gigabytes_per_second(one.busbw_bytes_per_s)
    return f"{size(one.message_bytes)}, {rate}<br>{one.count:,} calls"
