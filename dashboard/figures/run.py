"""Figures of one run: split, waterfall, critical path, pipeline, memory, model."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from statistics import fmean, median

import numpy as np
import plotly.graph_objects as go

from stepsplit.analyzer.buckets import BUCKETS, Split
from stepsplit.analyzer.regression.compare import BucketChange, RunComparison
from stepsplit.analyzer.report.report import Gap, GapRow, Pipeline, Report, StepRow, full_steps
from stepsplit.analyzer.report.tables import PHASES, Boxes
from stepsplit.analyzer.units import memory_size, milliseconds, percent, signed_milliseconds
from stepsplit.dashboard.figures.theme import (
    BACKWARD,
    BETTER,
    FORWARD,
    INK,
    LOOKS,
    MEMORY,
    MUTED,
    PAPER,
    WEIGHT,
    WORSE,
    Look,
    blank,
    in_ms,
    marker,
    plain,
)

# Time split: stacked bars by rank or by step.

SPLIT_HEIGHT = 340


@dataclass(frozen=True, slots=True)
class Bar:
    """One stacked bar: axis label, tooltip heading, split; not full means a paler bar."""

    label: str
    heading: str
    split: Split
    full: bool = True


def by_rank(report: Report) -> go.Figure:
    """One bar per rank, in ms: the median of each bucket over full steps."""
    hosts = {rank: host.host for host in report.run.hosts for rank in host.ranks}
    rows = _grouped(full_steps(report.steps), "rank")
    bars = []
    for rank, steps in rows:
        of_host = f" on {plain(hosts[rank])}" if rank in hosts else ""
        heading = f"<b>rank {rank}</b>{of_host}, median of {len(steps)} steps"
        bars.append(Bar(str(rank), heading, _median(steps)))
    return _stack(bars, "rank", "ms per step, median of full steps")


def by_step(report: Report, rank: int | None = None) -> go.Figure:
    """One bar per step, in ms: of one rank, or the mean over ranks; paler if not full."""
    rows = _grouped((row for row in report.steps if rank in (None, row.rank)), "step")
    whose = "mean over ranks" if rank is None else f"rank {rank}"
    bars = []
    for step, ranks in rows:
        full = all(row.kind == "full" for row in ranks)
        kind = "full" if full else next(row.kind for row in ranks if row.kind != "full")
        label = str(step) if full else f"{step} {plain(kind)}"
        bars.append(Bar(label, f"<b>step {step}</b> ({plain(kind)}), {whose}", _mean(ranks), full))
    return _stack(bars, "step", f"ms, {whose}")


def _grouped(rows: Iterable[StepRow], by: str) -> list[tuple[int, list[StepRow]]]:
    groups: dict[int, list[StepRow]] = defaultdict(list)
    for row in rows:
        groups[getattr(row, by)].append(row)
    return sorted(groups.items())


def _median(rows: Sequence[StepRow]) -> Split:
    columns = zip(*(row.split.buckets_ns for row in rows), strict=True)
    return Split(*(round(median(column)) for column in columns))


def _mean(rows: Sequence[StepRow]) -> Split:
    columns = zip(*(row.split.buckets_ns for row in rows), strict=True)
    return Split(*(round(fmean(column)) for column in columns))


def _stack(bars: Sequence[Bar], x_title: str, y_title: str) -> go.Figure:
    figure = blank(SPLIT_HEIGHT, x_title, y_title)
    for index, look in enumerate(LOOKS):
        figure.add_trace(
            go.Bar(
                name=look.bucket,
                x=[bar.label for bar in bars],
                y=in_ms([bar.split.buckets_ns[index] for bar in bars]),
                marker=marker(look),
                customdata=[_bar_label(bar, index) for bar in bars],
                hovertemplate="%{customdata[0]}<br>%{customdata[1]}<extra></extra>",
            )
        )
        figure.data[-1].marker.opacity = [1.0 if bar.full else 0.45 for bar in bars]
    figure.update_layout(barmode="stack", bargap=0.25 if len(bars) <= 64 else 0)
    figure.update_xaxes(type="category")
    return figure


def _bar_label(bar: Bar, index: int) -> tuple[str, str]:
    part, whole = bar.split.buckets_ns[index], bar.split.step_ns
    share = percent(part / whole) if whole else percent(0)
    of = f"{milliseconds(part)} of {milliseconds(whole)} ({share})"
    return bar.heading, f"{LOOKS[index].bucket} {of}"


# Difference between two steps: predicted and measured, or of two runs.

Part = tuple[str, int, str]
"""A part of a difference: name, ns, tooltip."""

PARTS = 8
"""Parts to draw; the smaller ones are drawn as one."""

_LEAST = 0.003


def sides(gap: Gap) -> go.Figure:
    """The predicted and the measured split of the compared stage, one bar each, in ms."""
    shown = gap.shown
    return splits(
        [NamedSplit("predicted", shown.predicted), NamedSplit("measured", shown.measured)]
    )


def waterfall(gap: Gap) -> go.Figure:
    """Waterfall from the predicted to the measured step, in ms; largest part first."""
    ends = gap.shown.predicted.step_ns, gap.shown.measured.step_ns
    notes = "predicted by the model", "as recorded"
    return _steps(("predicted", "measured"), ends, notes, _drawn(gap))


def difference_figure(found: RunComparison) -> go.Figure:
    """Waterfall from the baseline's to the candidate's mean step by bucket, in ms."""
    ends = found.baseline.mean.step_ns, found.candidate.mean.step_ns
    parts = [
        (row.bucket, row.difference_ns, _from_to(row)) for row in found.buckets if row.difference_ns
    ]
    return _steps(("baseline", "candidate"), ends, ("mean step", "mean step"), parts)


def _from_to(row: BucketChange) -> str:
    return f"{milliseconds(row.baseline_ns)} to {milliseconds(row.candidate_ns)}"


def _steps(
    names: tuple[str, str], ends: tuple[int, int], notes: tuple[str, str], parts: Sequence[Part]
) -> go.Figure:
    figure = blank(84 + 26 * (len(parts) + 2), "ms of the step", "")
    figure.add_trace(
        go.Waterfall(
            orientation="h",
            y=[names[0], *(name for name, _, _ in parts), names[1]],
            x=in_ms([ends[0], *(ns for _, ns, _ in parts), ends[1]]),
            measure=["absolute", *("relative" for _ in parts), "total"],
            text=[milliseconds(ends[0]), *(signed_milliseconds(ns) for _, ns, _ in parts),
                  milliseconds(ends[1])],
            textposition="outside",
            cliponaxis=False,
            hovertext=[notes[0], *(words for _, _, words in parts), notes[1]],
            hovertemplate="<b>%{y}</b> %{text}<br>%{hovertext}<extra></extra>",
            connector={"line": {"color": MUTED, "width": 1, "dash": "dot"}},
            increasing={"marker": {"color": WORSE}},
            decreasing={"marker": {"color": BETTER}},
            totals={"marker": {"color": MUTED}},
            showlegend=False,
        )
    )  # fmt: skip
    figure.update_layout(margin={"t": 8, "r": 80})
    figure.update_yaxes(autorange="reversed")
    return figure


def _drawn(gap: Gap) -> list[Part]:
    """The parts to draw, with distinct names."""
    least = _LEAST * gap.shown.measured.step_ns
    rows = sorted(gap.rows, key=lambda row: -abs(row.ns))
    large = [row for row in rows[:PARTS] if abs(row.ns) >= least]
    rest = [row for row in rows if row not in large]
    drawn = [(_name(row), row.ns, plain(row.message)) for row in large]
    if any(row.ns for row in rest):
        drawn.append(("smaller parts", sum(row.ns for row in rest), f"{len(rest)} together"))
    return drawn


def _name(row: GapRow) -> str:
    cause = row.cause.replace("_", " ")
    words = cause if row.cause == row.bucket else f"{row.bucket}: {cause}"
    return words if row.axis is None else f"{words} ({plain(row.axis)})"


# The critical path of the average step as one bar.

PATH_HEIGHT = 172

RANKS = 3

_ROOM = 0.06
"""Smallest share of the path with a text inside its bar."""

_PLAIN = {"textposition": "inside", "insidetextanchor": "middle", "textangle": 0}


@dataclass(frozen=True, slots=True)
class PathShare:
    """A bucket (of one axis, for communication) on the critical path of the average step.

    share: fraction of the path, 0..1. ranks: the ranks with most of it, each with its fraction of
    this part; others: the number of further ranks.
    """

    bucket: str
    axis: str | None
    ns: float
    share: float
    ranks: tuple[tuple[int, float], ...]
    others: int

    @property
    def label(self) -> str:
        return self.bucket if self.axis is None else f"{self.bucket} on {self.axis}"

    @property
    def whose(self) -> str:
        """The ranks with most of it, as text."""
        named = ", ".join(f"rank {rank} {percent(part)}" for rank, part in self.ranks)
        return f"{named}, {self.others:,} more" if self.others else named


def path_shares(report: Report) -> tuple[PathShare, ...]:
    """The critical path by bucket (in the order of BUCKETS) and axis (largest first)."""
    sums: dict[tuple[str, str | None], Counter[int]] = defaultdict(Counter)
    for part in report.critical_path:
        sums[part.bucket, part.axis][part.rank] += part.ns
    steps = len({part.step for part in report.critical_path})
    total = sum(ranks.total() for ranks in sums.values())
    found = [_share(*kind, ranks, steps, total) for kind, ranks in sums.items() if ranks.total()]
    return tuple(sorted(found, key=lambda one: (BUCKETS.index(one.bucket), -one.ns)))


def _share(bucket: str, axis: str | None, ranks: Counter[int], steps: int, total: int) -> PathShare:
    own = ranks.total()
    most = tuple((rank, ns / own) for rank, ns in ranks.most_common(RANKS))
    return PathShare(bucket, axis, own / steps, own / total, most, len(ranks) - len(most))


def critical_path(report: Report) -> go.Figure:
    """One horizontal bar in ms: the average step's critical path by bucket and axis."""
    figure = blank(
        PATH_HEIGHT,
        "ms of the critical path, from the first start to the last end over all ranks",
        "",
    )
    shares = path_shares(report)
    for look in LOOKS:
        own = [one for one in shares if one.bucket == look.bucket]
        if own:
            figure.add_trace(_bar(look, own))
    figure.update_layout(barmode="stack", bargap=0.1, margin_l=12)
    figure.update_yaxes(visible=False)
    return figure


def _bar(look: Look, shares: list[PathShare]) -> go.Bar:
    """The bucket's parts one after the other, separated by a line between axes."""
    bar = go.Bar(
        name=look.bucket,
        orientation="h",
        y=[""] * len(shares),
        x=in_ms([one.ns for one in shares]),
        marker=marker(look),
        text=[_text(one) for one in shares],
        customdata=[_path_label(one) for one in shares],
        hovertemplate="%{customdata}<extra></extra>",
        showlegend=True,
        **_PLAIN,
    )
    bar.marker.line = {"color": PAPER, "width": 1}
    return bar


def _text(one: PathShare) -> str:
    if one.share < _ROOM:
        return ""
    return percent(one.share) if one.axis is None else f"{plain(one.axis)} {percent(one.share)}"


def _path_label(one: PathShare) -> str:
    head = f"<b>{plain(one.label)}</b> {milliseconds(one.ns)} ({percent(one.share)} of the path)"
    return f"{head}<br>{one.whose}"


# The pipeline grid: measured microbatches of each stage, above the schedule's ideal.

BOXES, STAGES = 4_000, 32

_ROW_PX, _HEAD_PX, _BETWEEN_PX = 30, 92, 34

_COLORS = dict(zip(PHASES, (FORWARD, BACKWARD, WEIGHT), strict=True))

_INKS = dict(zip(PHASES, (INK, PAPER, PAPER), strict=True))


@dataclass(frozen=True, slots=True)
class _Row:
    """One row of the grid: a stage and the rank that represents it."""

    stage: int
    rank: int

    @property
    def label(self) -> str:
        return f"stage {self.stage} (rank {self.rank})"


def one_pipeline(boxes: Boxes, step: int) -> Boxes:
    """The boxes of one step and one pipeline: for each stage those of its lowest rank."""
    own = boxes.step == step
    keep = np.zeros(len(boxes.step), dtype=np.bool_)
    for stage in np.unique(boxes.stage[own])[:STAGES]:
        of_stage = own & (boxes.stage == stage)
        keep |= of_stage & (boxes.rank == boxes.rank[of_stage].min())
    return Boxes(*(getattr(boxes, column.name)[keep][:BOXES] for column in fields(Boxes)))


def pipeline(measured: Boxes, ideal: Boxes | None) -> go.Figure:
    """The microbatch grid of one step, with the ideal grid below it, in ms from the first
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
    """The bubble fraction of each stage in percent, with the schedule's ideal as a line."""
    figure = blank(230, "stage", "bubble fraction, %")
    figure.add_trace(
        go.Bar(
            x=[str(one.stage) for one in found.stages],
            y=[100 * one.bubble_fraction for one in found.stages],
            marker={"color": BACKWARD},
            customdata=[_bubble_label(one.bubble_fraction, one.bubble_ns) for one in found.stages],
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


def _bubble_label(fraction: float, ns: int) -> str:
    return f"{percent(fraction)}, {milliseconds(ns)} idle per step"


# Memory by stage or rank: measured, predicted, and the device limit.

CATEGORIES = tuple(MEMORY)

_MIB, _GIB = 2**20, 2**30

_FAR = 20
"""The limit is not drawn if it is this many times as high as any bar."""


@dataclass(frozen=True, slots=True)
class MemoryBar:
    """A bar: the memory of a rank or stage by category in bytes; rest_bytes is uncategorized."""

    label: str
    parts: tuple[tuple[str, int], ...]
    rest_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return sum(part for _, part in self.parts) + self.rest_bytes


def memory(bars: Sequence[MemoryBar], limit_bytes: int | None = None) -> go.Figure:
    """One stacked bar per rank or stage, in MiB or GiB; the limit as a line."""
    fullest = max((bar.total_bytes for bar in bars), default=0)
    one = _MIB if fullest < _GIB else _GIB
    unit = "MiB" if one == _MIB else "GiB"
    figure = blank(max(200, 130 + 30 * len(bars)), unit, "")
    labels = [plain(bar.label) for bar in bars]
    for category in (*CATEGORIES, "uncategorized"):
        values = [_of(bar, category) for bar in bars]
        if any(values):
            figure.add_trace(_layer(category, labels, values, bars, one))
    if limit_bytes and limit_bytes < _FAR * fullest:
        figure.add_vline(x=limit_bytes / one, line={"color": WORSE, "width": 2, "dash": "dash"},
                         annotation_text=f"device memory: {memory_size(limit_bytes)}",
                         annotation_position="top left")  # fmt: skip
    figure.update_layout(barmode="stack", bargap=0.3)
    figure.update_yaxes(autorange="reversed", type="category")
    return figure


def _of(bar: MemoryBar, category: str) -> int:
    return dict(bar.parts).get(category, 0) if category in CATEGORIES else bar.rest_bytes


def _layer(
    category: str, labels: list[str], values: list[int], bars: Sequence[MemoryBar], one: int
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


# Splits as horizontal bars: measured, predicted, changed.


@dataclass(frozen=True, slots=True)
class NamedSplit:
    """A split with the label of its bar."""

    name: str
    split: Split


def splits(bars: Sequence[NamedSplit]) -> go.Figure:
    """One horizontal bar per split, in ms."""
    figure = blank(104 + 40 * len(bars), "ms per step", "")
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
                    customdata=[_bucket_label(index, bar.split) for bar in bars],
                    hovertemplate=f"<b>%{{y}}</b><br>{look.bucket} %{{customdata}}<extra></extra>",
                )
            )
    figure.update_layout(barmode="stack", bargap=0.28)
    figure.update_yaxes(autorange="reversed", type="category")
    return figure


def _bucket_label(index: int, split: Split) -> str:
    part = split.buckets_ns[index]
    return f"{milliseconds(part)} ({percent(part / split.step_ns) if split.step_ns else '?'})"
