"""A job changed on paper: its predicted split beside that of the run as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from stepsplit.analyzer.buckets import Split
from stepsplit.analyzer.units import milliseconds, percent
from stepsplit.dashboard.figures.palette import LOOKS
from stepsplit.dashboard.figures.theme import blank, in_ms, marker, plain


@dataclass(frozen=True, slots=True)
class NamedSplit:
    """A split with the words that stand beside its bar."""

    name: str
    split: Split


def splits(bars: Sequence[NamedSplit]) -> go.Figure:
    """One horizontal bar a split, in ms."""
    figure = blank(104 + 40 * len(bars), "ms a step", "")
    for index, look in enumerate(LOOKS):
        parts = [bar.split.buckets_ns[index] for bar in bars]
        if any(parts):
            figure.add_trace(
                go.Bar(
                    name=look.bucket,
                    orientation="h",
                    y=[plain(bar.name) for bar in bars],
                    x=in_ms(parts),
                    marker=marker(look),
                    customdata=[_told(index, bar.split) for bar in bars],
                    hovertemplate=f"<b>%{{y}}</b><br>{look.bucket} %{{customdata}}<extra></extra>",
                )
            )
    figure.update_layout(barmode="stack", bargap=0.28)
    figure.update_yaxes(autorange="reversed", type="category")
    return figure


def _told(index: int, split: Split) -> str:
    part = split.buckets_ns[index]
    return f"{milliseconds(part)} ({percent(part / split.step_ns) if split.step_ns else '?'})"
