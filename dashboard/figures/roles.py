"""Figures of a job of several roles: its phases on one clock, and the batch of its generation."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from stepsplit.analyzer.bucket_styles import (
    BLUE,
    GRAY,
    GREEN,
    ORANGE,
    PALE,
    PURPLE,
    SKY,
    VERMILION,
    Color,
)
from stepsplit.analyzer.report.rl_step import TailRow, name_phase
from stepsplit.analyzer.report.roles import RoleJob
from stepsplit.analyzer.units import format_milliseconds
from stepsplit.collectors.formats.rl_marks import PHASES
from stepsplit.dashboard.figures import theme

MAX_ROWS = 48
"""Ranks with a row each; of more, those on the critical path come first."""

_COLORS: dict[str, Color] = dict(zip(PHASES, (SKY, PURPLE, GREEN, BLUE, ORANGE, GRAY), strict=True))

_ROW_PX = 30


def draw_phases(job: RoleJob, step: int) -> go.Figure:
    """The phases of each rank in one RL step, and below each row where the critical path is."""
    begin_ns = next(one.start_ns for one in job.steps if one.step == step)
    links = [one for one in job.path_links if one.step == step]
    on_path = {(one.role, one.rank) for one in links}
    ranks = [(role.name, rank) for role in job.roles for rank in role.ranks]
    if len(ranks) > MAX_ROWS:
        kept = sorted(ranks, key=lambda one: one not in on_path)[:MAX_ROWS]
        ranks = [one for one in ranks if one in set(kept)]
    rows = {one: theme.escape_text(f"{one[0]}/{one[1]}") for one in ranks}
    figure = theme.build_blank_figure(110 + _ROW_PX * len(rows), "ms since the RL step began", "")
    spans = [one for one in job.spans if one.step == step and (one.role, one.rank) in rows]
    for phase in dict.fromkeys([*PHASES, *(one.phase for one in spans)]):
        own = [one for one in spans if one.phase == phase]
        if not own:
            continue
        name = theme.escape_text(name_phase(phase))
        durations = [one.end_ns - one.start_ns for one in own]
        figure.add_trace(
            go.Bar(
                name=name,
                orientation="h",
                y=[rows[one.role, one.rank] for one in own],
                base=theme.convert_to_ms([one.start_ns - begin_ns for one in own]),
                x=theme.convert_to_ms(durations),
                width=0.56,
                marker={"color": _COLORS.get(phase, PALE).light, "line_width": 0},
                customdata=[format_milliseconds(ns) for ns in durations],
                hovertemplate=f"<b>%{{y}}</b><br>{name} %{{customdata}}<extra></extra>",
            )
        )
    path = [one for one in links if (one.role, one.rank) in rows]
    figure.add_trace(
        go.Bar(
            name="critical path",
            orientation="h",
            y=[rows[one.role, one.rank] for one in path],
            base=theme.convert_to_ms([one.start_ns - begin_ns for one in path]),
            x=theme.convert_to_ms([one.time.window_ns for one in path]),
            width=0.14,
            offset=0.3,
            marker={"color": VERMILION.light, "line_width": 0},
            customdata=[format_milliseconds(one.time.window_ns) for one in path],
            hovertemplate="<b>%{y}</b><br>critical path %{customdata}<extra></extra>",
        )
    )
    figure.update_layout(barmode="overlay")
    order = list(rows.values())
    # Ranks without a mark have a row too: a range of its own shows those that have no bar.
    figure.update_yaxes(
        range=[len(order) - 0.4, -0.6],
        type="category",
        categoryorder="array",
        categoryarray=order,
    )
    return figure


def draw_batches(rows: Sequence[TailRow]) -> go.Figure:
    """How many sequences each of these generations decodes for over its time."""
    figure = theme.build_blank_figure(260, "ms since the generation began", "sequences")
    for row, color in zip(rows, theme.AXIS_COLORS, strict=False):
        name = theme.escape_text(f"{row.role}/{row.rank}, step {row.step}")
        width_ns = row.decode_ns / max(len(row.batch), 1)
        figure.add_trace(
            go.Scatter(
                name=name,
                x=theme.convert_to_ms([width_ns * at for at in range(len(row.batch) + 1)]),
                y=[*row.batch, row.batch[-1] if row.batch else 0],
                mode="lines",
                line={"shape": "hv", "color": color, "width": 2},
                hovertemplate=f"<b>{name}</b><br>%{{y}} sequences at %{{x:.1f}} ms<extra></extra>",
                showlegend=True,
            )
        )
    figure.update_yaxes(rangemode="tozero")
    return figure
