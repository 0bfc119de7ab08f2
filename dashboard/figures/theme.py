"""The theme of all figures: colors, axes, numbers and names."""

from __future__ import annotations

from html import escape
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go

from stepsplit.analyzer.bucket_styles import (
    BLUE,
    BUCKET_STYLES,
    GRAY,
    GREEN,
    ORANGE,
    PALETTE,
    PURPLE,
    SKY,
    VERMILION,
    BucketStyle,
)

# Shared by all figures: background, axes, fonts, conversion of numbers and names.

CLEAR = "rgba(0,0,0,0)"

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"

GRAPH_CONFIG: Final[Any] = {
    "displaylogo": False,
    "modeBarButtons": [["toImage", "resetScale2d"]],
    "plotlyServerURL": "",
}
"""Plotly's options for all figures. Its other buttons include the upload to Plotly Cloud."""

_LEGEND = {
    "orientation": "h",
    "traceorder": "normal",
    # Left of the plot by a hair: plotly then gives it the width of the labels of the axis as well,
    # without which it has one column on a phone, and a scroll bar.
    "x": -1e-4,
    "xanchor": "left",
    "y": 1,
    "yanchor": "bottom",
    "font": {"size": 11},
    "itemwidth": 30,
}


def build_blank_figure(height: int, x_title: str, y_title: str) -> go.Figure:
    """An empty figure with a transparent background; axis titles include their unit."""
    axis = {"gridcolor": GRID, "zeroline": False, "linecolor": GRID, "automargin": True}
    title = {"font": {"size": 12, "color": MUTED}, "standoff": 8}
    # As one dict, which is checked once: update_layout takes ten times as long.
    layout = {
        "template": "none",
        "height": height,
        "margin": {"l": 56, "r": 12, "t": 40, "b": 44},
        # The page shows through, light or dark; style.css gives texts and lines its own colors.
        "paper_bgcolor": CLEAR,
        "plot_bgcolor": CLEAR,
        "font": {"family": FONT, "size": 12, "color": INK},
        "legend": _LEGEND,
        "hoverlabel": {
            "bgcolor": PAPER,
            "bordercolor": GRID,
            "font": {"family": FONT, "color": INK},
        },
        "xaxis": {**axis, "title": {**title, "text": x_title}},
        "yaxis": {**axis, "title": {**title, "text": y_title}},
    }
    return go.Figure(layout=layout)


def build_marker(look: BucketStyle) -> go.bar.Marker:
    """The fill of a bucket's bars, hatched for waiting."""
    if not look.hatched:
        return go.bar.Marker(color=look.color.light, line_width=0)
    pattern = {
        "shape": "/",
        "size": 5,
        "solidity": 0.28,
        "fgcolor": PAPER,
        "bgcolor": look.color.light,
    }
    return go.bar.Marker(color=look.color.light, line_width=0, pattern=pattern)


def convert_to_ms(ns: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Times in ns as numbers in ms, for an axis."""
    return np.asarray(ns, dtype=np.float64) / 1e6


def escape_text(name: object) -> str:
    """A name from an uploaded file, escaped because plotly interprets HTML tags such as links."""
    return escape(str(name), quote=False)


def build_bucket_css() -> str:
    """The colors of the buckets for the page, in addition to style.css: a variable for each, such
    as --compute, and the fills of figures in the dark theme."""
    light = [f"  --{look.bucket}: {look.color.light.lower()};" for look in BUCKET_STYLES]
    dark = [f"    --{look.bucket}: {look.color.dark.lower()};" for look in BUCKET_STYLES]
    # A figure has the light colors in it: only the style of its paths can follow the theme.
    fills = [
        f'  :root[data-theme="dark"] .js-plotly-plot path[style*="fill: rgb({rgb})"]'
        f" {{ fill: {color.dark.lower()} !important; }}"
        for color in dict.fromkeys([*PALETTE, *(look.color for look in BUCKET_STYLES)])
        if color.dark != color.light
        for rgb in [", ".join(str(part) for part in bytes.fromhex(color.light[1:]))]
    ]
    # Paper is light.
    screen = ["@media screen {", '  :root[data-theme="dark"] {', *dark, "  }", *fills, "}"]
    return "\n".join([":root {", *light, "}", *screen]) + "\n"


# All three are compute, hence shades of blue that differ in lightness.
FORWARD, BACKWARD, WEIGHT = "#A9D5F0", "#3D8CC2", "#17507D"

INK, MUTED, GRID, PAPER = "#1B2430", "#5B6675", "#E3E7EC", "#FFFFFF"

SPREAD = "rgba({},{},{},0.35)".format(*bytes.fromhex(SKY.light[1:]))
"""The area that holds most of something."""

WORSE, BETTER = VERMILION.light, GREEN.light
"""Colors of a longer and of a shorter time than the reference."""

AXIS_COLORS = tuple(color.light for color in (BLUE, ORANGE, GREEN, PURPLE, VERMILION, SKY))
"""Colors of mesh axes, by their order."""

MEMORY_COLORS = {
    "weights": BLUE.light,
    "gradients": SKY.light,
    "optimizer": GREEN.light,
    "activations": ORANGE.light,
    "transient": PURPLE.light,
    "other": GRAY.light,
}
"""Colors of memory categories."""
