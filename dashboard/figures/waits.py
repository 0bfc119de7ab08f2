"""Who waits for whom: a matrix of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from stepsplit.analyzer.report.tables import Waits
from stepsplit.dashboard.figures.theme import blank, in_ms

MOST_RANKS = 128
_SCALE = [[0.0, "rgba(204,121,167,0.06)"], [0.5, "#CC79A7"], [1.0, "#7A2F5B"]]


def waits_matrix(waits: Waits, ranks: Sequence[int], steps: int) -> go.Figure:
    """How long each rank (row) waited for each other (column), in ms of a step, skew and bubble.

    Beyond MOST_RANKS those that wait or are waited for most are shown.
    """
    known = (waits.owner >= 0) & (waits.dur_ns > 0)
    sums = np.zeros((max(ranks) + 1,) * 2)
    inside = known & (waits.owner <= max(ranks)) & (waits.rank <= max(ranks))
    np.add.at(sums, (waits.rank[inside], waits.owner[inside]), waits.dur_ns[inside])
    shown = _most(sums, ranks)
    table = in_ms(sums[np.ix_(shown, shown)] / max(steps, 1))
    labels = [f"rank {rank}" for rank in shown]
    figure = blank(max(260, min(90 + 22 * len(shown), 620)), "waited for", "waits")
    figure.add_trace(
        go.Heatmap(
            z=np.where(table > 0, table, np.nan), x=labels, y=labels,
            colorscale=_SCALE, colorbar={"title": {"text": "ms a step"}, "thickness": 12},
            hovertemplate="%{y} waits for %{x}<br>%{z:.3f} ms a step<extra></extra>",
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
