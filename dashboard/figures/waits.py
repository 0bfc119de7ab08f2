"""Waiting: who waits for whom, and how long calls wait before they move data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go

from stepsplit.analyzer.report.tables import Waits
from stepsplit.analyzer.units import milliseconds
from stepsplit.dashboard.figures.palette import LOOKS
from stepsplit.dashboard.figures.theme import blank, in_ms, marker, plain

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


@dataclass(frozen=True, slots=True)
class Call:
    """The median call of a kind: how long it waits, and how long it then moves data, in ns."""

    words: str
    transfer_ns: int
    wait_ns: int


def wait_against_transfer(calls: Sequence[Call]) -> go.Figure:
    """A bar a kind of call, in ms: its transfer, and hatched its wait."""
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
