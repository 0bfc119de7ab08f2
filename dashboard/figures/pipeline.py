"""The pipeline's grid: which microbatch each stage worked on, above what its schedule would do."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import plotly.graph_objects as go

from stepsplit.analyzer.report.report import Pipeline
from stepsplit.analyzer.report.tables import PHASES, Boxes
from stepsplit.analyzer.units import milliseconds, percent
from stepsplit.dashboard.figures.palette import BACKWARD, FORWARD, INK, PAPER, WEIGHT, WORSE
from stepsplit.dashboard.figures.theme import blank, in_ms

BOXES, STAGES = 4_000, 32
_ROW_PX, _HEAD_PX, _BETWEEN_PX = 30, 92, 34
_COLORS = dict(zip(PHASES, (FORWARD, BACKWARD, WEIGHT), strict=True))
_INKS = dict(zip(PHASES, (INK, PAPER, PAPER), strict=True))


@dataclass(frozen=True, slots=True)
class _Row:
    """One row of the grid: a stage, and the rank that stands for it."""

    stage: int
    rank: int

    @property
    def label(self) -> str:
        return f"stage {self.stage} (rank {self.rank})"


def one_pipeline(boxes: Boxes, step: int) -> Boxes:
    """The boxes of the step of one pipeline, by stage: of each stage those of its lowest rank."""
    own = boxes.step == step
    keep = np.zeros(len(boxes.step), dtype=np.bool_)
    for stage in np.unique(boxes.stage[own])[:STAGES]:
        of_stage = own & (boxes.stage == stage)
        keep |= of_stage & (boxes.rank == boxes.rank[of_stage].min())
    return Boxes(*(getattr(boxes, column.name)[keep][:BOXES] for column in fields(Boxes)))


def pipeline(measured: Boxes, ideal: Boxes | None) -> go.Figure:
    """The boxes of one step of one pipeline, and below them the schedule's, in ms from the first
    forward."""
    rows = _rows(measured)
    height = _ROW_PX * len(rows)
    both = height if ideal is None else 2 * height + _BETWEEN_PX
    figure = blank(_HEAD_PX + both, "ms from the first forward", "")
    _draw(figure, measured, rows, "y", "measured")
    _axis(figure, "yaxis", rows, (1 - height / both, 1), "measured")
    if ideal is not None:
        _draw(figure, ideal, rows, "y2", "ideal")
        _axis(figure, "yaxis2", rows, (0, height / both), "the schedule's ideal")
    figure.update_layout(barmode="overlay", bargap=0.16, margin={"t": 44, "b": 48})
    figure.update_layout(legend={"x": 1, "xanchor": "right"})
    figure.update_xaxes(anchor="y2" if ideal is not None else "y", rangemode="tozero")
    return figure


def _rows(boxes: Boxes) -> list[_Row]:
    first = np.unique(boxes.stage, return_index=True)[1].tolist()
    return [_Row(int(boxes.stage[at]), int(boxes.rank[at])) for at in first]


def _axis(
    figure: go.Figure, name: str, rows: list[_Row], domain: tuple[float, float], title: str
) -> None:
    axis = {
        "domain": domain,
        "autorange": "reversed",
        "categoryorder": "array",
        "categoryarray": [row.label for row in rows],
        "showgrid": False,
        "zeroline": False,
        "automargin": True,
    }
    figure.update_layout({name: axis})
    figure.add_annotation(
        text=title, x=0, xref="paper", y=domain[1], yref="paper", yanchor="bottom", xanchor="left",
        showarrow=False, font={"size": 12},
    )  # fmt: skip


def _draw(figure: go.Figure, boxes: Boxes, rows: list[_Row], axis: str, which: str) -> None:
    labels = {row.stage: row.label for row in rows}
    zero_ns = boxes.start_ns.min() if len(boxes.start_ns) else 0
    for phase, name in enumerate(PHASES):
        own = np.flatnonzero(boxes.phase == phase)
        if not len(own):
            continue
        figure.add_trace(
            go.Bar(
                name=name,
                orientation="h",
                yaxis=axis,
                legendgroup=name,
                showlegend=axis == "y",
                y=[labels[stage] for stage in boxes.stage[own]],
                base=in_ms(boxes.start_ns[own] - zero_ns),
                x=in_ms(boxes.dur_ns[own]),
                text=[str(number) for number in boxes.microbatch[own]],
                textposition="inside",
                insidetextanchor="middle",
                textangle=0,
                textfont={"color": _INKS[name], "size": 11},
                marker={"color": _COLORS[name], "line": {"color": PAPER, "width": 1}},
                customdata=[milliseconds(dur) for dur in boxes.dur_ns[own]],
                hovertemplate=f"<b>%{{y}}</b><br>{which}: {name} of microbatch %{{text}}"
                "<br>%{customdata}<extra></extra>",
            )
        )


def stage_bubbles(found: Pipeline) -> go.Figure:
    """The bubble fraction of each stage, and the ideal of its schedule as a line; percent."""
    figure = blank(230, "stage", "bubble fraction, %")
    figure.add_trace(
        go.Bar(
            x=[str(one.stage) for one in found.stages],
            y=[100 * one.bubble_fraction for one in found.stages],
            marker={"color": BACKWARD},
            customdata=[_told(one.bubble_fraction, one.bubble_ns) for one in found.stages],
            hovertemplate="<b>stage %{x}</b><br>%{customdata}<extra></extra>",
            showlegend=False,
        )
    )
    figure.update_xaxes(type="category")
    figure.update_layout(bargap=0.4, margin={"t": 24})
    if found.ideal_bubble_fraction is not None:
        ideal = 100 * found.ideal_bubble_fraction
        text = f"ideal {percent(found.ideal_bubble_fraction)}"
        figure.add_hline(y=ideal, line={"color": WORSE, "width": 2, "dash": "dash"},
                         annotation_text=text, annotation_position="top right")  # fmt: skip
    return figure


def _told(fraction: float, ns: int) -> str:
    return f"{percent(fraction)}, {milliseconds(ns)} of holes a step"
