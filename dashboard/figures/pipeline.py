"""The pipeline's grid: which microbatch each stage worked on, and where its holes are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go

from stepsplit.analyzer.report.tables import PHASES, Boxes, Tables
from stepsplit.analyzer.units import milliseconds
from stepsplit.dashboard.figures.palette import BACKWARD, FORWARD, INK, PAPER, WEIGHT
from stepsplit.dashboard.figures.theme import blank, in_ms

Mask = npt.NDArray[np.bool_]
Indexes = npt.NDArray[np.intp]
BOXES = 4_000
_COLORS = dict(zip(PHASES, (FORWARD, BACKWARD, WEIGHT), strict=True))
_INKS = dict(zip(PHASES, (INK, PAPER, PAPER), strict=True))


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the grid: a stage, and the rank that stands for it."""

    stage: int
    rank: int

    @property
    def label(self) -> str:
        return f"stage {self.stage} (rank {self.rank})"


def pipeline(tables: Tables, step: int | None = None) -> go.Figure:
    """The boxes of a step or of all, a row a stage (its lowest rank), in ms from the first box."""
    boxes = tables.boxes
    rows = _rows(boxes, step)
    figure = blank(120 + 46 * len(rows), "ms from the first forward", "")
    if rows:
        kept = [np.flatnonzero(_of_row(boxes, step, row))[: BOXES // len(rows)] for row in rows]
        _draw(figure, boxes, np.concatenate(kept), {row.stage: row.label for row in rows})
    figure.update_layout(barmode="overlay", bargap=0.22)
    labels = [row.label for row in rows]
    figure.update_yaxes(autorange="reversed", categoryorder="array", categoryarray=labels)
    figure.update_yaxes(showgrid=False)
    return figure


def _rows(boxes: Boxes, step: int | None) -> list[Row]:
    own = _of_step(boxes, step)
    lowest = []
    for stage in np.unique(boxes.stage[own]):
        lowest.append(Row(int(stage), int(boxes.rank[own & (boxes.stage == stage)].min())))
    return lowest


def _of_step(boxes: Boxes, step: int | None) -> Mask:
    mask: Mask = np.full(len(boxes.step), True) if step is None else boxes.step == step
    return mask


def _of_row(boxes: Boxes, step: int | None, row: Row) -> Mask:
    mask: Mask = (boxes.stage == row.stage) & (boxes.rank == row.rank)
    return _of_step(boxes, step) & mask


def _draw(figure: go.Figure, boxes: Boxes, shown: Indexes, labels: dict[int, str]) -> None:
    zero_ns = boxes.start_ns[shown].min()
    for phase, name in enumerate(PHASES):
        own = shown[boxes.phase[shown] == phase]
        if not len(own):
            continue
        figure.add_trace(
            go.Bar(
                name=name,
                orientation="h",
                y=[labels[stage] for stage in boxes.stage[own]],
                base=in_ms(boxes.start_ns[own] - zero_ns),
                x=in_ms(boxes.dur_ns[own]),
                text=[str(number) for number in boxes.microbatch[own]],
                textposition="inside",
                insidetextanchor="middle",
                textangle=0,
                textfont={"color": _INKS[name]},
                marker={"color": _COLORS[name], "line": {"color": PAPER, "width": 1}},
                customdata=[milliseconds(dur) for dur in boxes.dur_ns[own]],
                hovertemplate=f"<b>%{{y}}</b><br>{name} of microbatch %{{text}}"
                "<br>%{customdata}<extra></extra>",
                showlegend=True,
            )
        )
