"""What every rank was doing: a band of buckets a rank, over time."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go

from stepsplit.analyzer.report.tables import Segments, Tables
from stepsplit.analyzer.units import milliseconds
from stepsplit.dashboard.figures.detail import Band, coarse
from stepsplit.dashboard.figures.palette import LOOKS
from stepsplit.dashboard.figures.theme import blank, in_ms, marker

SHAPES = 5_000
ROWS = 64


def timeline(tables: Tables, step: int | None = None) -> go.Figure:
    """The bands of one step, or of all, in ms from the first rank's start.

    Beyond 64 ranks evenly spaced ones are shown; a long band is drawn as its slots' largest bucket.
    """
    segments = _chosen(tables.segments, step)
    ranks = np.unique(segments.rank)
    shown = ranks[np.linspace(0, len(ranks) - 1, min(len(ranks), ROWS)).astype(int)]
    figure = blank(110 + max(18, 44 - len(shown)) * len(shown), "ms from the start", "rank")
    if len(shown):
        bands = {int(rank): coarse(_band(segments, rank), SHAPES // len(shown)) for rank in shown}
        _draw(figure, bands, int(segments.start_ns.min()))
    figure.update_layout(barmode="overlay", bargap=0.18)
    figure.update_yaxes(type="category", autorange="reversed", showgrid=False)
    return figure


def _chosen(segments: Segments, step: int | None) -> Segments:
    keep = slice(None) if step is None else segments.step == step
    return Segments(
        segments.rank[keep],
        segments.step[keep],
        segments.bucket[keep],
        segments.start_ns[keep],
        segments.dur_ns[keep],
    )


def _band(segments: Segments, rank: int) -> Band:
    own = segments.rank == rank
    bucket = segments.bucket[own].astype(np.int64)
    return Band(bucket, segments.start_ns[own], segments.dur_ns[own])


def _draw(figure: go.Figure, bands: dict[int, Band], zero_ns: int) -> None:
    """One trace a bucket, so that the legend hides it everywhere at once."""
    rows = [str(rank) for rank, band in bands.items() for _ in band.bucket]
    bucket = np.concatenate([band.bucket for band in bands.values()])
    start = np.concatenate([band.start_ns for band in bands.values()]) - zero_ns
    dur = np.concatenate([band.dur_ns for band in bands.values()])
    for index, look in enumerate(LOOKS):
        own = np.flatnonzero(bucket == index)
        figure.add_trace(
            go.Bar(
                name=look.bucket,
                orientation="h",
                y=[rows[i] for i in own],
                base=in_ms(start[own]),
                x=in_ms(dur[own]),
                marker=marker(look),
                customdata=[(milliseconds(dur[i]), milliseconds(start[i])) for i in own],
                hovertemplate=f"<b>rank %{{y}}</b><br>{look.bucket} %{{customdata[0]}}"
                "<br>from %{customdata[1]}<extra></extra>",
                showlegend=True,
            )
        )
    # A rank whose first bucket is rare must not decide the order of the rows.
    figure.update_yaxes(categoryorder="array", categoryarray=[str(rank) for rank in bands])
