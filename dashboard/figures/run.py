"""Figures of one run: split, waterfall, critical path, pipeline, memory, model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go

from stepsplit.analyzer.arrays import select_rows
from stepsplit.analyzer.bucket_styles import BUCKET_STYLES
from stepsplit.analyzer.buckets import Split
from stepsplit.analyzer.regression.compare import BucketChange, RunComparison
from stepsplit.analyzer.report.headline import compute_mean_split, round_parts, round_shares
from stepsplit.analyzer.report.path_shares import compute_path_shares
from stepsplit.analyzer.report.report import UNKNOWN_HOST, Gap, Pipeline, Report
from stepsplit.analyzer.report.step_rows import StepRow, select_full_steps
from stepsplit.analyzer.report.tables import PHASES, Boxes
from stepsplit.analyzer.trace import Int64
from stepsplit.analyzer.units import (
    choose_part_unit_ns,
    format_memory_size,
    format_milliseconds,
    format_parts,
    format_percent,
    format_signed_milliseconds,
)
from stepsplit.dashboard.figures import theme
from stepsplit.dashboard.figures.communication import RankGroup

# Time split: stacked bars by rank or by step.

SPLIT_HEIGHT = 340

MAX_RANK_BARS = 64
"""Most ranks with a bar each; of more, their groups have one."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One stacked bar: axis label, tooltip heading, split; not full means a paler bar."""

    label: str
    heading: str
    split: Split
    full: bool = True


def draw_split_by_rank(report: Report) -> go.Figure:
    """One bar per rank, in ms: the mean of its full steps."""
    known = [host for host in report.run.hosts if host.host != UNKNOWN_HOST]
    hosts = {rank: host.host for host in known for rank in host.ranks}
    rows = group_steps(select_full_steps(report.steps), "rank")
    bars = []
    for rank, steps in rows:
        of_host = f" on {theme.escape_text(hosts[rank])}" if rank in hosts else ""
        heading = f"<b>rank {rank}</b>{of_host}, mean of {len(steps)} steps"
        bars.append(Bar(str(rank), heading, compute_mean_split(steps)))
    return _draw_stacked_bars(bars, "rank", "ms per step, mean of full steps")


def draw_split_by_group(report: Report, groups: Sequence[RankGroup]) -> go.Figure:
    """One bar per group of ranks, in ms: the mean over its ranks and their full steps."""
    group_of = {rank: place for place, group in enumerate(groups) for rank in group.ranks}
    rows: dict[int, list[StepRow]] = defaultdict(list)
    for row in select_full_steps(report.steps):
        if row.rank in group_of:
            rows[group_of[row.rank]].append(row)
    bars = []
    for place, steps in sorted(rows.items()):
        label = theme.escape_text(groups[place].label)
        heading = f"<b>{label}</b>, mean of {len({row.rank for row in steps}):,} ranks"
        bars.append(Bar(label, heading, compute_mean_split(steps)))
    return _draw_stacked_bars(bars, "", "ms per step, mean of full steps")


def draw_busy_grid(
    columns: Sequence[RankGroup], title: str, excess_ns: Mapping[int, float]
) -> go.Figure:
    """A cell per rank: by how much longer than usual it is busy, in ms per step.

    Args:
        columns: The ranks of each host or other group, in order.
        title: What the place in a column is.
        excess_ns: The excess in ns by rank.
    """
    shape = max(len(one.ranks) for one in columns), len(columns)
    excess, rank = np.full(shape, np.nan), np.full(shape, -1)
    for place, one in enumerate(columns):
        rank[: len(one.ranks), place] = one.ranks
        excess[: len(one.ranks), place] = [excess_ns.get(each, np.nan) for each in one.ranks]
    figure = theme.build_blank_figure(min(96 + 20 * shape[0], 480), "", title)
    figure.add_trace(
        go.Heatmap(
            z=np.round(theme.convert_to_ms(excess), 4),
            x=[theme.escape_text(one.label) for one in columns],
            y=np.arange(shape[0]),
            # Lists: the Plotly.js of plotly 6.0 finds no value of a cell in typed arrays.
            customdata=rank.tolist(),
            colorscale=_EXCESS_SCALE,
            zmid=0,
            colorbar={"title": {"text": "ms"}, "thickness": 12},
            hovertemplate="rank %{customdata} (%{x}): %{z:+.4g} ms<extra></extra>",
            hoverongaps=False,
        )
    )
    figure.update_layout(margin={"t": 8})
    figure.update_xaxes(type="category", showgrid=False, nticks=24)
    figure.update_yaxes(autorange="reversed", showgrid=False, dtick=max(1, shape[0] // 8))
    return figure


_EXCESS_SCALE = [[0.0, theme.BETTER], [0.5, "rgba(141,148,158,0.10)"], [1.0, theme.WORSE]]
"""Less than usual, usual, more."""


def draw_split_by_step(report: Report, rank: int | None = None) -> go.Figure:
    """One bar per step, in ms: of one rank, or the mean over ranks; paler if not full."""
    rows = group_steps((row for row in report.steps if rank in (None, row.rank)), "step")
    whose = "mean over ranks" if rank is None else f"rank {rank}"
    bars = []
    for step, ranks in rows:
        full = all(row.kind == "full" for row in ranks)
        kind = "full" if full else next(row.kind for row in ranks if row.kind != "full")
        label = str(step) if full else f"{step} {theme.escape_text(kind)}"
        bars.append(
            Bar(
                label,
                f"<b>step {step}</b> ({theme.escape_text(kind)}), {whose}",
                compute_mean_split(ranks),
                full,
            )
        )
    return _draw_stacked_bars(bars, "step", f"ms, {whose}")


def group_steps(rows: Iterable[StepRow], by: str) -> list[tuple[int, list[StepRow]]]:
    """The steps by this field, in the order of its values."""
    groups: dict[int, list[StepRow]] = defaultdict(list)
    for row in rows:
        groups[getattr(row, by)].append(row)
    return sorted(groups.items())


def _draw_stacked_bars(bars: Sequence[Bar], x_title: str, y_title: str) -> go.Figure:
    figure = theme.build_blank_figure(SPLIT_HEIGHT, x_title, y_title)
    texts = [_format_split(bar.split) for bar in bars]
    for index, look in enumerate(BUCKET_STYLES):
        figure.add_trace(
            go.Bar(
                name=look.bucket,
                x=[bar.label for bar in bars],
                y=theme.convert_to_ms([bar.split.buckets_ns[index] for bar in bars]),
                marker=theme.build_marker(look),
                customdata=[
                    (bar.heading, f"{look.bucket} {text[index]}")
                    for bar, text in zip(bars, texts, strict=True)
                ],
                hovertemplate="%{customdata[0]}<br>%{customdata[1]}<extra></extra>",
            )
        )
        figure.data[-1].marker.opacity = [1.0 if bar.full else 0.45 for bar in bars]
    figure.update_layout(barmode="stack", bargap=0.25 if len(bars) <= 64 else 0)
    figure.update_xaxes(type="category")
    return figure


def _format_split(split: Split) -> list[str]:
    """Each bucket with its share, such as "94.8 ms of 144.5 ms (65.6 %)"; as shown they add up."""
    unit_ns = choose_part_unit_ns(split.step_ns)
    counts = round_parts(split.buckets_ns, unit_ns)
    whole = format_parts(sum(counts), unit_ns)
    return [
        f"{format_parts(count, unit_ns)} of {whole} ({format_percent(share)})"
        for count, share in zip(counts, round_shares(split.buckets_ns), strict=True)
    ]


# Difference between two steps: predicted and measured, or of two runs.

Part = tuple[str, int, str]
"""A part of a difference: name, ns, tooltip."""

MAX_WATERFALL_PARTS = 8
"""Parts to draw; the smaller ones are drawn as one."""

_MIN_PART_SHARE = 0.003


def draw_predicted_and_measured(gap: Gap) -> go.Figure:
    """The predicted and the measured split of the compared stage, one bar each, in ms."""
    shown = gap.shown
    return draw_splits(
        [NamedSplit("predicted", shown.predicted), NamedSplit("measured", shown.measured)]
    )


def draw_waterfall(gap: Gap) -> go.Figure:
    """Waterfall from the predicted to the measured step, in ms; largest part first."""
    least = _MIN_PART_SHARE * gap.shown.measured.step_ns
    rows = sorted(gap.rows, key=lambda row: -abs(row.ns))
    large = [row for row in rows[:MAX_WATERFALL_PARTS] if abs(row.ns) >= least]
    rest = [row for row in rows if row not in large]
    # Bars of one name would be drawn over each other: such parts (calls of two sizes) are one bar.
    of_name: dict[str, tuple[int, str]] = {}
    for row in large:
        cause = row.cause.replace("_", " ")
        name = cause if row.cause == row.bucket else f"{row.bucket}: {cause}"
        # On a line of its own, as one line would take most of a phone's width.
        name += "" if row.axis is None else f"<br>({theme.escape_text(row.axis)})"
        ns, text = of_name.get(name, (0, ""))
        words = theme.escape_text(row.message)
        of_name[name] = ns + row.ns, f"{text}<br>{words}" if text else words
    parts = [(name, ns, words) for name, (ns, words) in of_name.items()]
    if any(row.ns for row in rest):
        parts.append(("smaller parts", sum(row.ns for row in rest), f"{len(rest)} together"))
    ends = gap.shown.predicted.step_ns, gap.shown.measured.step_ns
    notes = "predicted by the model", "as recorded"
    return _draw_steps(("predicted", "measured"), ends, notes, parts)


def draw_difference(comparison: RunComparison) -> go.Figure:
    """Waterfall from the baseline's to the candidate's mean step by bucket, in ms."""
    ends = comparison.baseline.mean.step_ns, comparison.candidate.mean.step_ns
    parts = [
        (row.bucket, row.difference_ns, _format_change(row))
        for row in comparison.buckets
        if row.difference_ns
    ]
    return _draw_steps(("baseline", "candidate"), ends, ("mean step", "mean step"), parts)


def _format_change(row: BucketChange) -> str:
    return f"{format_milliseconds(row.baseline_ns)} to {format_milliseconds(row.candidate_ns)}"


def _draw_steps(
    names: tuple[str, str], ends: tuple[int, int], notes: tuple[str, str], parts: Sequence[Part]
) -> go.Figure:
    """Bars that each begin where the one before ends, between the two whole steps."""
    pitch_px = 32 if any("<br>" in name for name, _, _ in parts) else 26
    figure = theme.build_blank_figure(84 + pitch_px * (len(parts) + 2), "ms of the step", "")
    widths_ms = theme.convert_to_ms([ends[0], *(ns for _, ns, _ in parts), ends[1]])
    reached_ms = np.cumsum(widths_ms[:-1])
    # The last bar is a whole step again.
    bases_ms = [0.0, *reached_ms[: len(parts)], 0.0]
    colors = [theme.WORSE if ns > 0 else theme.BETTER for _, ns, _ in parts]
    figure.add_trace(
        go.Bar(
            name=f"from {names[0]} to {names[1]}",
            orientation="h",
            y=[names[0], *(name for name, _, _ in parts), names[1]],
            x=widths_ms,
            base=bases_ms,
            marker={"color": [theme.MUTED, *colors, theme.MUTED], "line": {"width": 0}},
            text=[
                format_milliseconds(ends[0]),
                *(format_signed_milliseconds(ns) for _, ns, _ in parts),
                format_milliseconds(ends[1]),
            ],
            textposition="outside",
            cliponaxis=False,
            hovertext=[notes[0], *(words for _, _, words in parts), notes[1]],
            hovertemplate="<b>%{y}</b> %{text}<br>%{hovertext}<extra></extra>",
            showlegend=False,
        )
    )
    # Where a bar ends, the next one begins. Rows of a category axis are numbered.
    figure.update_layout(
        shapes=[
            {
                "type": "line", "layer": "below", "x0": at_ms, "x1": at_ms,
                "y0": row, "y1": row + 1,
                "line": {"color": theme.MUTED, "width": 1, "dash": "dot"},
            }
            for row, at_ms in enumerate(reached_ms.tolist())
        ],
        margin={"t": 8, "r": 36}, bargap=0.2,
    )  # fmt: skip
    # Labels are outside of the bars: a part of the axis, as a margin would take most of a phone's.
    most_ms = max(ends[1] / 1e6, *reached_ms)
    least_ms = min(0.0, *reached_ms)
    room_ms = 0.2 * (most_ms - least_ms)
    least_ms -= room_ms if any(ns < 0 for _, ns, _ in parts) and least_ms < 0 else 0
    figure.update_xaxes(range=[least_ms, most_ms + room_ms])
    figure.update_yaxes(autorange="reversed", type="category")
    return figure


# The critical path of the average step as one bar.

PATH_HEIGHT = 172

_MIN_LABEL_SHARE = 0.06
"""Smallest share of the path with a text inside its bar."""

_TEXT_STYLE = {"textposition": "inside", "insidetextanchor": "middle", "textangle": 0}


def draw_critical_path(report: Report) -> go.Figure:
    """One horizontal bar in ms: the average step's critical path by bucket and axis."""
    figure = theme.build_blank_figure(PATH_HEIGHT, "ms of the critical path", "")
    shares = compute_path_shares(report)
    for look in BUCKET_STYLES:
        own = [one for one in shares if one.bucket == look.bucket]
        if not own:
            continue
        texts, labels = [], []
        for one in own:
            share = format_percent(one.share)
            on_axis = "" if one.axis is None else f"{theme.escape_text(one.axis)} "
            texts.append("" if one.share < _MIN_LABEL_SHARE else f"{on_axis}{share}")
            labels.append(
                f"<b>{theme.escape_text(one.label)}</b> {format_milliseconds(one.ns)} "
                f"({share} of the path)<br>{one.ranks_text}"
            )
        bar = go.Bar(
            name=look.bucket,
            orientation="h",
            y=[""] * len(own),
            x=theme.convert_to_ms([one.ns for one in own]),
            marker=theme.build_marker(look),
            text=texts,
            customdata=labels,
            # The rank with most of it.
            meta={"keys": [one.ranks[0][0] for one in own]},
            hovertemplate="%{customdata}<extra></extra>",
            showlegend=True,
            **_TEXT_STYLE,
        )
        # Parts of one bucket have one color: a line separates the axes.
        bar.marker.line = {"color": theme.PAPER, "width": 1}
        figure.add_trace(bar)
    figure.update_layout(barmode="stack", bargap=0.1, margin_l=12)
    figure.update_yaxes(visible=False)
    return figure


# The pipeline grid: measured microbatches of each stage, above the schedule's ideal.

BOXES, STAGES = 4_000, 32

_ROW_PX, _HEAD_PX, _TITLE_PX, _BETWEEN_PX = 30, 110, 18, 34

_COLORS = dict(zip(PHASES, (theme.FORWARD, theme.BACKWARD, theme.WEIGHT), strict=True))

_INKS = dict(zip(PHASES, (theme.INK, theme.PAPER, theme.PAPER), strict=True))


@dataclass(frozen=True, slots=True)
class _GridRow:
    """One row of the grid: a stage and the rank that represents it."""

    stage: int
    rank: int

    @property
    def label(self) -> str:
        return f"stage {self.stage} (rank {self.rank})"


def select_pipeline(boxes: Boxes, step: int) -> Boxes:
    """The boxes of one step and one pipeline: for each stage those of its lowest rank."""
    own = boxes.step == step
    keep = np.zeros(len(boxes.step), dtype=np.bool_)
    for stage in np.unique(boxes.stage[own])[:STAGES]:
        of_stage = own & (boxes.stage == stage)
        keep |= of_stage & (boxes.rank == boxes.rank[of_stage].min())
    return select_rows(boxes, np.flatnonzero(keep)[:BOXES])


def draw_pipeline(
    measured: Boxes, ideal: Boxes | None, keys: Sequence[str] | None = None
) -> go.Figure:
    """The microbatch grid of one step, with the ideal grid below it, in ms from the first
    forward. keys: for each measured box, where it leads."""
    first = np.unique(measured.stage, return_index=True)[1].tolist()
    rows = [_GridRow(int(measured.stage[at]), int(measured.rank[at])) for at in first]
    height = _ROW_PX * len(rows)
    both = height if ideal is None else 2 * height + _BETWEEN_PX
    figure = theme.build_blank_figure(_HEAD_PX + both, "ms from the first forward", "")
    _draw_boxes(figure, measured, rows, "y", "measured", keys)
    _add_stage_axis(figure, "yaxis", rows, (1 - height / both, 1), "measured")
    if ideal is not None:
        _draw_boxes(figure, ideal, rows, "y2", "ideal")
        _add_stage_axis(figure, "yaxis2", rows, (0, height / both), "the schedule's ideal")
    figure.update_layout(barmode="overlay", bargap=0.16, margin={"t": 44 + _TITLE_PX, "b": 48})
    # Above the title of the upper part, beside which a phone has no room.
    figure.update_layout(legend={"y": 1 + _TITLE_PX / both})
    figure.update_xaxes(anchor="y2" if ideal is not None else "y", rangemode="tozero")
    return figure


def _add_stage_axis(
    figure: go.Figure, name: str, rows: list[_GridRow], domain: tuple[float, float], title: str
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


def _draw_boxes(
    figure: go.Figure, boxes: Boxes, rows: list[_GridRow], axis: str, which: str,
    keys: Sequence[str] | None = None,
) -> None:  # fmt: skip
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
                base=theme.convert_to_ms(boxes.start_ns[own] - zero_ns),
                x=theme.convert_to_ms(boxes.dur_ns[own]),
                text=[str(number) for number in boxes.microbatch[own]],
                textposition="inside",
                insidetextanchor="middle",
                textangle=0,
                textfont={"color": _INKS[name], "size": 11},
                marker={"color": _COLORS[name], "line": {"color": theme.PAPER, "width": 1}},
                customdata=[format_milliseconds(dur) for dur in boxes.dur_ns[own]],
                meta={"keys": [keys[i] for i in own.tolist()]} if keys else None,
                hovertemplate=f"<b>%{{y}}</b><br>{which}: {name} of microbatch %{{text}}"
                "<br>%{customdata}<extra></extra>",
            )
        )


def draw_stage_bubbles(pipeline_report: Pipeline) -> go.Figure:
    """The bubble fraction of each stage in percent, with the schedule's ideal as a dashed line."""
    figure = theme.build_blank_figure(230, "stage", "bubble / window, %")
    figure.add_trace(
        go.Bar(
            x=[str(one.stage) for one in pipeline_report.stages],
            y=[100 * one.bubble_fraction for one in pipeline_report.stages],
            marker={"color": theme.BACKWARD},
            customdata=[
                f"{format_percent(one.bubble_fraction)}, {format_milliseconds(one.bubble_ns)} idle"
                " per step"
                for one in pipeline_report.stages
            ],
            hovertemplate="<b>stage %{x}</b><br>%{customdata}<extra></extra>",
            showlegend=False,
        )
    )
    figure.update_xaxes(type="category")
    figure.update_layout(bargap=0.4, margin={"t": 24})
    if pipeline_report.ideal_bubble_fraction is not None:
        line = {"color": theme.WORSE, "width": 2, "dash": "dash"}
        figure.add_hline(y=100 * pipeline_report.ideal_bubble_fraction, line=line)
    return figure


# Memory by stage or rank: measured, predicted, and the device limit.

CATEGORIES = tuple(theme.MEMORY_COLORS)

_MIB, _GIB = 2**20, 2**30

_MAX_LIMIT_RATIO = 20
"""The limit is not drawn if it is this many times as high as any bar."""


@dataclass(frozen=True, slots=True)
class MemoryBar:
    """A bar: the memory of a rank or stage by category in bytes; rest_bytes is uncategorized."""

    label: str
    parts: tuple[tuple[str, int], ...]
    rest_bytes: int = 0
    rank: int | None = None

    @property
    def total_bytes(self) -> int:
        return sum(part for _, part in self.parts) + self.rest_bytes


def draw_memory(bars: Sequence[MemoryBar], limit_bytes: int | None = None) -> go.Figure:
    """One stacked bar per rank or stage, in MiB or GiB; the limit as a line."""
    fullest = max((bar.total_bytes for bar in bars), default=0)
    unit_bytes = _MIB if fullest < _GIB else _GIB
    unit = "MiB" if unit_bytes == _MIB else "GiB"
    figure = theme.build_blank_figure(max(200, 130 + 30 * len(bars)), unit, "")
    labels = [theme.escape_text(bar.label) for bar in bars]
    for category in (*CATEGORIES, "uncategorized"):
        values = [
            dict(bar.parts).get(category, 0) if category in CATEGORIES else bar.rest_bytes
            for bar in bars
        ]
        if not any(values):
            continue
        figure.add_trace(
            go.Bar(
                name=category,
                orientation="h",
                y=labels,
                x=[value / unit_bytes for value in values],
                marker={
                    "color": theme.MEMORY_COLORS.get(category, theme.MUTED),
                    "line": {"width": 0},
                },
                customdata=[
                    f"{category} {format_memory_size(value)} of "
                    f"{format_memory_size(bar.total_bytes)}"
                    for value, bar in zip(values, bars, strict=True)
                ],
                meta={"keys": [bar.rank for bar in bars]},
                hovertemplate="<b>%{y}</b><br>%{customdata}<extra></extra>",
            )
        )
    if limit_bytes and limit_bytes < _MAX_LIMIT_RATIO * fullest:
        figure.add_vline(
            x=limit_bytes / unit_bytes,
            line={"color": theme.WORSE, "width": 2, "dash": "dash"},
            annotation_text=f"device memory: {format_memory_size(limit_bytes)}",
            annotation_position="top left",
        )
    figure.update_layout(barmode="stack", bargap=0.3)
    figure.update_yaxes(autorange="reversed", type="category")
    return figure


# Memory of one rank over time.


@dataclass(frozen=True, slots=True)
class MemoryOverTime:
    """Memory of a rank over time, with the steps and, in a pipeline, the passes of one step.

    Attributes:
        time_ns: Times from the report's t0, in ns.
        allocated_bytes: Bytes of live tensors.
        reserved_bytes: Reserved bytes, -1 if unknown.
        steps: Number and begin of each step, in ns.
        passes: Begin and end of each forward (0) and backward (1, 2) pass, with its phase.
    """

    time_ns: Int64
    allocated_bytes: Int64
    reserved_bytes: Int64
    steps: Sequence[tuple[int, int]]
    passes: Sequence[tuple[int, int, int]]


def draw_memory_over_time(line: MemoryOverTime) -> go.Figure:
    """Allocated and reserved memory in MiB or GiB, over ms since the first step."""
    fullest = int(max(line.allocated_bytes.max(), line.reserved_bytes.max()))
    unit_bytes, unit = (_MIB, "MiB") if fullest < _GIB else (_GIB, "GiB")
    figure = theme.build_blank_figure(300, "ms since the first step", unit)
    lines = [("allocated", line.allocated_bytes, theme.BACKWARD)]
    if (line.reserved_bytes >= 0).all():
        lines.append(("reserved", line.reserved_bytes, theme.MUTED))
    for name, sizes, color in lines:
        figure.add_trace(
            go.Scatter(
                name=name, mode="lines", x=line.time_ns / 1e6, y=sizes / unit_bytes,
                line={"color": color, "width": 1.5, "shape": "hv"},
                hovertemplate=f"{name} %{{y:.2f}} {unit} at %{{x:.2f}} ms<extra></extra>",
            )
        )  # fmt: skip
    at = int(line.allocated_bytes.argmax())
    figure.add_trace(
        go.Scatter(
            name="peak", mode="markers", x=[line.time_ns[at] / 1e6],
            y=[line.allocated_bytes[at] / unit_bytes],
            marker={"size": 10, "color": theme.WORSE, "symbol": "diamond"},
            hovertemplate=f"peak %{{y:.2f}} {unit} at %{{x:.2f}} ms<extra></extra>",
        )
    )  # fmt: skip
    # The passes as a strip at the bottom, where no step has its name.
    shapes: list[dict[str, Any]] = [
        {
            "type": "rect", "xref": "x", "yref": "paper", "x0": begin / 1e6, "x1": end / 1e6,
            "y0": 0.0, "y1": 0.03, "line": {"width": 0},
            "fillcolor": theme.BACKWARD if phase else theme.FORWARD,
        }
        for begin, end, phase in line.passes
    ]  # fmt: skip
    shapes += [
        {
            "type": "line", "xref": "x", "yref": "y domain", "x0": begin / 1e6, "x1": begin / 1e6,
            "y0": 0, "y1": 1, "line": {"color": theme.MUTED, "width": 1, "dash": "dot"},
        }
        for _, begin in line.steps
    ]  # fmt: skip
    # Of many steps only each so many has its name, or they overlap.
    labels = [
        {
            "x": begin / 1e6, "xref": "x", "xanchor": "left", "y": 1, "yref": "y domain",
            "yanchor": "top", "showarrow": False, "text": f"step {number}",
        }
        for number, begin in line.steps[:: -(-len(line.steps) // _MOST_STEP_LABELS) or 1]
    ]  # fmt: skip
    # All at once: Plotly checks those that a figure has again with each that is added.
    figure.update_layout(shapes=shapes, annotations=labels)
    return figure


_MOST_STEP_LABELS = 20


# Splits as horizontal bars: measured, predicted, changed.


@dataclass(frozen=True, slots=True)
class NamedSplit:
    """A split with the label of its bar; run_id of the run that the bar leads to."""

    name: str
    split: Split
    run_id: str = ""


def draw_splits(bars: Sequence[NamedSplit]) -> go.Figure:
    """One horizontal bar per split, in ms."""
    figure = theme.build_blank_figure(104 + 40 * len(bars), "ms per step", "")
    texts = [_format_split(bar.split) for bar in bars]
    for index, look in enumerate(BUCKET_STYLES):
        parts = [bar.split.buckets_ns[index] for bar in bars]
        if any(parts):
            figure.add_trace(
                go.Bar(
                    name=look.bucket,
                    orientation="h",
                    y=[theme.escape_text(bar.name) for bar in bars],
                    x=theme.convert_to_ms(parts),
                    marker=theme.build_marker(look),
                    customdata=[text[index] for text in texts],
                    meta={"keys": [bar.run_id for bar in bars]},
                    hovertemplate=f"<b>%{{y}}</b><br>{look.bucket} %{{customdata}}<extra></extra>",
                )
            )
    figure.update_layout(barmode="stack", bargap=0.28)
    figure.update_yaxes(autorange="reversed", type="category")
    return figure
