"""The theme of all figures: colors, axes, numbers and names."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go

from stepsplit.analyzer.buckets import Bucket

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
    "x": 0,
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
        return go.bar.Marker(color=look.color, line_width=0)
    pattern = {"shape": "/", "size": 5, "solidity": 0.28, "fgcolor": PAPER, "bgcolor": look.color}
    return go.bar.Marker(color=look.color, line_width=0, pattern=pattern)


def convert_to_ms(ns: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Times in ns as numbers in ms, for an axis."""
    return np.asarray(ns, dtype=np.float64) / 1e6


def escape_text(name: object) -> str:
    """A name from an uploaded file, escaped because plotly interprets HTML tags such as links."""
    return escape(str(name), quote=False)


# The look of the seven buckets, the same in every figure and page.
#
# Okabe and Ito's colors, distinguishable with any color vision; waiting is also hatched, and idle
# time is pale.


@dataclass(frozen=True, slots=True)
class BucketStyle:
    """The style of a bucket: color in the light and the dark theme, and whether it is hatched."""

    bucket: str
    color: str
    dark: str
    hatched: bool


_STYLES: dict[Bucket, tuple[str, str, bool]] = {
    Bucket.COMPUTE: ("#0072B2", "#3B9AD9", False),
    Bucket.COLLECTIVE: ("#E69F00", "#E69F00", False),
    Bucket.P2P: ("#D55E00", "#E8743B", False),
    Bucket.SKEW: ("#CC79A7", "#CC79A7", True),
    Bucket.BUBBLE: ("#8D949E", "#8D949E", True),
    Bucket.COPY: ("#009E73", "#22B68C", False),
    Bucket.IDLE: ("#E6E9EE", "#39424E", False),
}

BUCKET_STYLES = tuple(BucketStyle(bucket.label, *_STYLES[bucket]) for bucket in Bucket)


def build_bucket_css() -> str:
    """The colors of the buckets for the page, in addition to style.css: a variable for each, such
    as --compute, and the fills of figures in the dark theme."""
    dark = [look for look in BUCKET_STYLES if look.dark != look.color]
    lines = [":root {", *(f"  --{look.bucket}: {look.color.lower()};" for look in BUCKET_STYLES)]
    # Paper is light.
    lines += ["}", "@media screen {", '  :root[data-theme="dark"] {']
    lines += [*(f"    --{look.bucket}: {look.dark.lower()};" for look in dark), "  }", "}"]
    # A figure has the light colors in it: only the style of its paths can follow the theme.
    for look in dark:
        rgb = ", ".join(str(part) for part in bytes.fromhex(look.color[1:]))
        path = f'.js-plotly-plot path[style*="fill: rgb({rgb})"]'
        lines.append(f"{path} {{ fill: var(--{look.bucket}) !important; }}")
    return "\n".join(lines) + "\n"


# All three are compute, hence shades of blue that differ in lightness.
FORWARD, BACKWARD, WEIGHT = "#A9D5F0", "#3D8CC2", "#17507D"

INK, MUTED, GRID, PAPER = "#1B2430", "#5B6675", "#E3E7EC", "#FFFFFF"

WORSE, BETTER = "#D55E00", "#009E73"
"""Colors of a longer and of a shorter time than the reference."""

AXIS_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")
"""Colors of mesh axes, by their order."""

MEMORY_COLORS = {
    "weights": "#0072B2",
    "gradients": "#56B4E9",
    "optimizer": "#009E73",
    "activations": "#E69F00",
    "transient": "#CC79A7",
    "other": "#8D949E",
}
"""Colors of memory categories."""
