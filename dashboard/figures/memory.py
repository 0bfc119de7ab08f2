"""Memory by stage or rank: what was measured beside what the model says, and the device's limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from stepsplit.analyzer.units import memory_size
from stepsplit.dashboard.figures.palette import MEMORY, MUTED, WORSE
from stepsplit.dashboard.figures.theme import blank, plain

CATEGORIES = tuple(MEMORY)
_MIB, _GIB = 2**20, 2**30
_FAR = 20
"""A limit so many times as high as any bar is no part of the picture."""


@dataclass(frozen=True, slots=True)
class Held:
    """A bar: what a rank or stage held, by category in bytes; rest is what nobody named."""

    label: str
    parts: tuple[tuple[str, int], ...]
    rest_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return sum(part for _, part in self.parts) + self.rest_bytes


def memory(bars: Sequence[Held], limit_bytes: int | None = None) -> go.Figure:
    """A stacked bar each, in GiB; the limit as a line."""
    fullest = max((bar.total_bytes for bar in bars), default=0)
    one = _MIB if fullest < _GIB else _GIB
    unit = "MiB" if one == _MIB else "GiB"
    figure = blank(max(200, 130 + 30 * len(bars)), unit, "")
    labels = [plain(bar.label) for bar in bars]
    for category in (*CATEGORIES, "not told apart"):
        values = [_of(bar, category) for bar in bars]
        if any(values):
            figure.add_trace(_layer(category, labels, values, bars, one))
    if limit_bytes and limit_bytes < _FAR * fullest:
        figure.add_vline(x=limit_bytes / one, line={"color": WORSE, "width": 2, "dash": "dash"},
                         annotation_text=f"the device's {memory_size(limit_bytes)}",
                         annotation_position="top left")  # fmt: skip
    figure.update_layout(barmode="stack", bargap=0.3)
    figure.update_yaxes(autorange="reversed", type="category")
    return figure


def _of(bar: Held, category: str) -> int:
    return dict(bar.parts).get(category, 0) if category in CATEGORIES else bar.rest_bytes


def _layer(
    category: str, labels: list[str], values: list[int], bars: Sequence[Held], one: int
) -> go.Bar:
    return go.Bar(
        name=category,
        orientation="h",
        y=labels,
        x=[value / one for value in values],
        marker={"color": MEMORY.get(category, MUTED), "line": {"width": 0}},
        customdata=[
            f"{category} {memory_size(value)} of {memory_size(bar.total_bytes)}"
            for value, bar in zip(values, bars, strict=True)
        ],
        hovertemplate="<b>%{y}</b><br>%{customdata}<extra></extra>",
    )
