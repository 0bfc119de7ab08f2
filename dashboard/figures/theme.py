"""What all figures share: paper, ink, axes, and the way to put numbers and names on them."""

from __future__ import annotations

from html import escape

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go

from stepsplit.dashboard.figures.palette import GRID, INK, MUTED, PAPER, Look

CLEAR = "rgba(0,0,0,0)"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"

_LEGEND = {
    "orientation": "h",
    "traceorder": "normal",
    "x": 0,
    "y": 1,
    "yanchor": "bottom",
    "font": {"size": 11},
    "itemwidth": 30,
}


def blank(height: int, x_title: str, y_title: str) -> go.Figure:
    """An empty figure on nothing; the axis titles name their unit."""
    axis = {"gridcolor": GRID, "zeroline": False, "linecolor": GRID, "automargin": True}
    title = {"font": {"size": 12, "color": MUTED}, "standoff": 8}
    figure = go.Figure()
    figure.update_layout(
        template="none",
        height=height,
        margin={"l": 56, "r": 12, "t": 40, "b": 44},
        # The page shows through, light or dark; style.css gives texts and lines its own colors.
        paper_bgcolor=CLEAR,
        plot_bgcolor=CLEAR,
        font={"family": FONT, "size": 12, "color": INK},
        legend=_LEGEND,
        hoverlabel={"bgcolor": PAPER, "bordercolor": GRID, "font": {"family": FONT, "color": INK}},
        xaxis={**axis, "title": {**title, "text": x_title}},
        yaxis={**axis, "title": {**title, "text": y_title}},
    )
    return figure


def marker(look: Look) -> go.bar.Marker:
    """The fill of a bucket's bars."""
    if not look.hatched:
        return go.bar.Marker(color=look.color, line_width=0)
    pattern = {"shape": "/", "size": 5, "solidity": 0.28, "fgcolor": PAPER, "bgcolor": look.color}
    return go.bar.Marker(color=look.color, line_width=0, pattern=pattern)


def in_ms(ns: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Numbers for an axis in ms: a plot cannot zoom on text."""
    return np.asarray(ns, dtype=np.float64) / 1e6


def plain(name: object) -> str:
    """A name from a file, safe in plotly's text: its tags would make links of what was uploaded."""
    return escape(str(name), quote=False)
