"""The figure of a model's structure: its layers and parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from stepsplit.analyzer.report.part_rows import name_part
from stepsplit.analyzer.units import format_percent
from stepsplit.dashboard.figures import theme

Place = tuple[int | None, str]
"""A layer, None outside of the layers, and the identifier of a part."""


def draw_part_grid(ns: Mapping[Place, int], parts: Sequence[str], step_ns: int) -> go.Figure:
    """A cell per layer (row) and part (column) with its time in ms, and in the tooltip its share.

    Args:
        ns: The time of each place in ns.
        parts: The columns, as identifiers.
        step_ns: The step of which the shares are.
    """
    layers = sorted({layer for layer, _ in ns if layer is not None})
    rows: list[int | None] = [None, *layers] if any(layer is None for layer, _ in ns) else [*layers]
    shape = len(rows), len(parts)
    time, shares, leads = np.full(shape, np.nan), np.full(shape, ""), np.full(shape, "")
    shares, leads = shares.astype(object), leads.astype(object)
    for row, layer in enumerate(rows):
        for column, part in enumerate(parts):
            if one := ns.get((layer, part)):
                time[row, column] = one
                shares[row, column] = format_percent(one / step_ns if step_ns else 0.0)
                leads[row, column] = format_place(layer, part)
    figure = theme.build_blank_figure(min(190 + 20 * shape[0], 900), "", "layer")
    figure.add_trace(
        go.Heatmap(
            z=np.round(theme.convert_to_ms(time), 6),
            x=[name_part(part) for part in parts],
            y=["outside" if layer is None else str(layer) for layer in rows],
            text=shares,
            customdata=leads,
            colorscale=_TIME_SCALE,
            zmin=0,
            colorbar={"title": {"text": "ms"}, "thickness": 12, "nticks": 4},
            hovertemplate="layer %{y}, %{x}: %{z:.4g} ms, %{text} of the step<extra></extra>",
            hoverongaps=False,
            xgap=1,
            ygap=1,
        )
    )
    figure.update_layout(margin={"t": 8})
    figure.update_xaxes(type="category", showgrid=False)
    step = max(1, shape[0] // 32)
    figure.update_yaxes(type="category", autorange="reversed", showgrid=False, dtick=step)
    return figure


_TIME_SCALE = [[0.0, "rgba(61,140,194,0.06)"], [1.0, theme.BACKWARD]]
"""Short, long: more of one blue, behind which the page shows, light or dark."""


def format_place(layer: int | None, part: str) -> str:
    """The place as a part of an address."""
    return f"part={part}" if layer is None else f"layer={layer}&part={part}"
