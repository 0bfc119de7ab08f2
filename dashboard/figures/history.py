"""A metric over runs: a point a run, the band of its noise, its levels, and the budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median

import plotly.graph_objects as go

from stepsplit.dashboard.figures.palette import AXES, BACKWARD, MUTED, WORSE
from stepsplit.dashboard.figures.theme import blank, plain

NEAR, FEWEST = 9, 6
"""How many runs around a run say what is usual there."""
_MAD_TO_SD = 1.4826
_BAND_SDS = 3


@dataclass(frozen=True, slots=True)
class Measured:
    """A run's value, in the unit that people read; words name the run."""

    words: str
    unix_ns: int
    value: float


@dataclass(frozen=True, slots=True)
class Usual:
    """What is usual around a run: the median, and three robust standard deviations either way."""

    middle: float
    low: float
    high: float

    def holds(self, value: float) -> bool:
        """Whether the value is nothing unusual."""
        return self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class Level:
    """A level of the metric: the index of its first run, its value in the unit of the points, and
    words on how it differs from the one before."""

    first: int
    value: float
    words: str = ""


def usual(values: Sequence[float], at: int) -> Usual | None:
    """What is usual at that run, from the runs nearest to it, itself left out; None with fewer
    than FEWEST runs, which tell nothing."""
    if len(values) < FEWEST:
        return None
    low = max(0, min(at - NEAR // 2, len(values) - NEAR))
    near = [value for i, value in enumerate(values[low : low + NEAR], low) if i != at]
    middle = median(near)
    spread = _BAND_SDS * _MAD_TO_SD * median(abs(value - middle) for value in near)
    return Usual(middle, middle - spread, middle + spread)


def history(
    points: Sequence[Measured],
    title: str,
    budget: float | None = None,
    levels: Sequence[Level] = (),
) -> go.Figure:
    """The points by time of upload; those outside of the band of noise stand out."""
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
        name="usual: the median of the runs around it, and three standard deviations",
        mode="lines",
        x=list(when),
        y=list(values),
        line={"color": MUTED, "width": 0, "shape": "hvh"},
        fill=fill,
        fillcolor="rgba(141,148,158,0.22)",
        hoverinfo="skip",
        showlegend=fill is not None,
    )
