"""Figures of a watched run over time: step times, split, exposed communication, and ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go

from stepsplit.analyzer.bucket_styles import BUCKET_STYLES
from stepsplit.analyzer.trace import Int64
from stepsplit.analyzer.units import format_milliseconds, format_percent
from stepsplit.dashboard.figures import theme

Float64 = npt.NDArray[np.float64]

_HEIGHT, _LANE_HEIGHT = 300, 20

_HOURS, _DAYS = "%H:%M\n%b %d", "%b %d\n%Y"

_TICKS = (
    (300, _HOURS), (900, _HOURS), (3_600, _HOURS), (6 * 3_600, _HOURS), (86_400, _DAYS),
    (2 * 86_400, _DAYS), (7 * 86_400, _DAYS), (30 * 86_400, _DAYS), (90 * 86_400, _DAYS),
)  # fmt: skip
"""Distances of the ticks in s, with their format; plotly's own are at the middle of bars."""

_MARGIN = {"l": 56, "r": 12, "t": 12, "b": 44}

_WAIT_SCALE = [[0.0, "rgba(204,121,167,0.10)"], [0.25, "rgba(204,121,167,0.5)"], [1.0, "#B0357F"]]
"""From the background to one color, so that more is stronger in the light and the dark theme."""

# Marks of events, in a lane for each kind above the chart.


@dataclass(frozen=True, slots=True)
class EventMark:
    """An event at a time in s since 1970; the lane is the label of its kind, text one sentence."""

    lane: str
    unix_s: float
    text: str
    is_problem: bool = False


@dataclass(frozen=True, slots=True)
class TimeAxis:
    """The range of time of a chart, in s since 1970; charts of one page have the same."""

    first_unix_s: float
    last_unix_s: float


def _convert_to_dates(unix_s: npt.ArrayLike) -> npt.NDArray[np.datetime64]:
    milliseconds = np.round(np.asarray(unix_s, dtype=np.float64) * 1_000)
    return milliseconds.astype("datetime64[ms]")


def _build_figure(title: str, axis: TimeAxis, marks: Sequence[EventMark] = ()) -> go.Figure:
    """An empty chart over the time, with the lanes of the marks above it."""
    lanes = list(dict.fromkeys(one.lane for one in marks))
    height = _HEIGHT + _LANE_HEIGHT * len(lanes)
    figure = theme.build_blank_figure(height, "", title)
    first, last = _convert_to_dates([axis.first_unix_s, axis.last_unix_s])
    # A dragged range is a choice of the address, which assets/watch.js makes: one of time only.
    length_s = axis.last_unix_s - axis.first_unix_s
    figure.update_layout(margin=_MARGIN, dragmode="zoom")
    figure.update_yaxes(fixedrange=True)
    tick_s, words = next((one for one in _TICKS if one[0] >= length_s / 5), _TICKS[-1])
    figure.update_xaxes(
        type="date", range=[str(first), str(last)], hoverformat="%Y-%m-%d %H:%M",
        tick0="2020-01-01", dtick=1_000 * tick_s, tickformat=words, tickangle=0,
    )  # fmt: skip
    if lanes:
        plot_height = height - _MARGIN["t"] - _MARGIN["b"]
        base = 1 - (_LANE_HEIGHT * len(lanes) - 8) / plot_height
        figure.update_layout(
            yaxis={"domain": [0, base - 12 / plot_height]},
            yaxis2={
                "domain": [base, 1], "range": [len(lanes) - 0.5, -0.5], "showgrid": False,
                "tickvals": list(range(len(lanes))), "ticktext": lanes, "zeroline": False,
                "automargin": True, "fixedrange": True, "tickfont": {"size": 11},
            },
        )  # fmt: skip
        for number, lane in enumerate(lanes):
            own = [one for one in marks if one.lane == lane]
            figure.add_trace(_draw_marks(own, number))
    return figure


def _draw_marks(own: Sequence[EventMark], number: int) -> go.Scatter:
    is_problem = own[0].is_problem
    return go.Scatter(
        name=own[0].lane,
        mode="markers",
        x=_convert_to_dates([one.unix_s for one in own]),
        y=[number] * len(own),
        yaxis="y2",
        marker={
            "symbol": "x-thin" if is_problem else "diamond",
            "size": 8,
            "color": theme.WORSE if is_problem else theme.BACKWARD,
            "line": {"width": 2 if is_problem else 0, "color": theme.WORSE},
        },
        customdata=[theme.escape_text(one.text) for one in own],
        hovertemplate="<b>%{fullData.name}</b><br>%{customdata}<br>%{x} UTC<extra></extra>",
        showlegend=False,
    )


# Step times: the median over the ranks, its spread, and the shortest and the longest step.


@dataclass(frozen=True, slots=True)
class StepCurve:
    """Step times of one start of the job, in ns, by slots of time; NaN where there is a gap.

    p10_ns and p90_ns: of the medians of parts of the slot; the median itself where there are none.
    """

    unix_s: Float64
    low_ns: Float64
    median_ns: Float64
    high_ns: Float64
    p10_ns: Float64
    p90_ns: Float64
    notes: tuple[str, ...]


def draw_step_times(
    lines: Sequence[StepCurve], marks: Sequence[EventMark], axis: TimeAxis
) -> go.Figure:
    """The median step over time with its spread, and thin lines for the shortest and the longest
    step; a line for each start of the job."""
    figure = _build_figure("ms", axis, marks)
    for line in lines:
        when = _convert_to_dates(line.unix_s)
        figure.add_trace(_draw_band(line))
        for name, own in (("shortest step", line.low_ns), ("longest step", line.high_ns)):
            figure.add_trace(
                go.Scatter(
                    name=name, mode="lines", x=when, y=theme.convert_to_ms(own),
                    line={"color": theme.MUTED, "width": 0.8, "dash": "dot"}, connectgaps=False,
                    hoverinfo="skip", showlegend=False,
                )
            )  # fmt: skip
        figure.add_trace(
            go.Scatter(
                name="median step",
                mode="lines+markers" if len(when) < 100 else "lines",
                x=when,
                y=theme.convert_to_ms(line.median_ns),
                line={"color": theme.BACKWARD, "width": 2},
                marker={"size": 4, "color": theme.BACKWARD},
                connectgaps=False,
                customdata=line.notes,
                hovertemplate="%{customdata}<br>%{x} UTC<extra></extra>",
                showlegend=False,
            )
        )
    for line in lines[1:]:
        begin = str(_convert_to_dates(line.unix_s[:1])[0])
        figure.add_vline(x=begin, line={"color": theme.MUTED, "width": 1, "dash": "dot"})
    if lines:
        low, high = _choose_range(lines)
        figure.layout.yaxis.range = [low / 1e6, high / 1e6]
    return figure


def _draw_band(line: StepCurve) -> go.Scatter:
    """The area of the spread, as a polygon for each part without a gap: a fill between two lines is
    wrong where these have gaps."""
    known = np.isfinite(line.median_ns)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], known, [False]]).astype(np.int8)))
    when, ms = [], []
    for first, end in edges.reshape(-1, 2).tolist():
        part = line.unix_s[first:end]
        when.append(np.concatenate([part, part[::-1], part[:1]]))
        low, high = line.p10_ns[first:end], line.p90_ns[first:end]
        ms.append(np.concatenate([high, low[::-1], [np.nan]]))
    return go.Scatter(
        name="spread of the median",
        mode="lines",
        x=_convert_to_dates(np.concatenate(when)),
        y=theme.convert_to_ms(np.concatenate(ms)),
        line={"color": theme.MUTED, "width": 0},
        fill="toself",
        fillcolor=theme.SPREAD,
        connectgaps=False,
        hoverinfo="skip",
        showlegend=False,
    )


def _choose_range(lines: Sequence[StepCurve]) -> tuple[float, float]:
    """The range of the axis: that of the medians with some of the band, so that one long step does
    not hide all changes of the median."""
    medians = np.concatenate([line.median_ns for line in lines])
    low, high = float(np.nanmin(medians)), float(np.nanmax(medians))
    room = max(0.6 * (high - low), 0.08 * high)
    shortest = min(float(np.nanmin(line.low_ns)) for line in lines)
    longest = max(float(np.nanmax(line.high_ns)) for line in lines)
    edge = 0.01 * high
    return max(0.0, low - room, shortest - edge), min(high + room, longest + edge)


# The split of the samples, and exposed communication by axis.


@dataclass(frozen=True, slots=True)
class SplitBins:
    """The mean step of the sampled ranks in bins of time.

    buckets_ns: the seven buckets (row) of each bin, NaN in a bin without data; notes: a text for
    each bin.
    """

    start_unix_s: Int64
    bin_s: int
    buckets_ns: Float64
    notes: tuple[str, ...]


def draw_split_over_time(
    bins: SplitBins, marks: Sequence[EventMark], axis: TimeAxis, *, as_share: bool
) -> go.Figure:
    """Stacked bars of the seven buckets, in ms or as share of the step; no bar where no sample has
    data."""
    figure = _build_figure("% of the step" if as_share else "ms", axis, marks)
    total = bins.buckets_ns.sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        values = 100 * bins.buckets_ns / total if as_share else bins.buckets_ns / 1e6
    known = np.flatnonzero(np.isfinite(total))
    when = _convert_to_dates(bins.start_unix_s[known] + bins.bin_s / 2)
    for row, look in enumerate(BUCKET_STYLES):
        own = bins.buckets_ns[row, known]
        texts = [
            f"{look.bucket} {format_milliseconds(ns)}, {format_percent(ns / all_ns)}<br>{note}"
            for ns, all_ns, note in zip(
                own, total[known], (bins.notes[i] for i in known), strict=True
            )
        ]
        figure.add_trace(
            go.Bar(
                name=look.bucket,
                x=when,
                y=values[row, known],
                width=1_000.0 * bins.bin_s,
                marker=theme.build_marker(look),
                customdata=texts,
                hovertemplate="%{customdata}<br>%{x} UTC<extra></extra>",
            )
        )
    figure.update_layout(barmode="stack", bargap=0, showlegend=False)
    if as_share:
        figure.layout.yaxis.range = [0, 100]
    return figure


def draw_exposed_over_time(
    unix_s: Float64, exposed_ns: Mapping[str, Float64], axis: TimeAxis
) -> go.Figure:
    """Exposed communication of the mean step by axis, in ms; NaN where there is a gap."""
    figure = _build_figure("ms", axis)
    figure.update_layout(margin={**_MARGIN, "t": 36})
    when = _convert_to_dates(unix_s)
    for number, (name, values) in enumerate(sorted(exposed_ns.items())):
        color = theme.AXIS_COLORS[number % len(theme.AXIS_COLORS)]
        figure.add_trace(
            go.Scatter(
                name=theme.escape_text(name or "unknown"),
                mode="lines+markers",
                x=when,
                y=theme.convert_to_ms(values),
                line={"color": color, "width": 1.5},
                marker={"size": 4, "color": color},
                connectgaps=False,
                hovertemplate="<b>%{fullData.name}</b> %{y:.4g} ms<br>%{x} UTC<extra></extra>",
                showlegend=True,
            )
        )
    figure.update_yaxes(rangemode="tozero")
    return figure


# Heat maps by rank.

MAX_ROWS = 128
"""Rows of a heat map: more ranks share a row, which shows the one with the largest value."""


@dataclass(frozen=True, slots=True)
class _RankRows:
    labels: list[str]
    largest_ns: Float64
    rank: Int64


def draw_rank_grid(
    start_unix_s: Int64, bin_s: int, mean_ns: Float64, axis: TimeAxis, sentence: str
) -> go.Figure:
    """A number of each rank (row) over time; empty where there is no data.

    Args:
        start_unix_s: The starts of the bins, in s since 1970.
        bin_s: Their length in s.
        mean_ns: The number in ns by rank and bin; NaN without data.
        axis: The range of time.
        sentence: What is said of a cell, with {ms} and {rank}.
    """
    rows = _group_ranks(mean_ns)
    words = sentence.format(ms="%{z:.4g} ms", rank="%{customdata}")
    figure = _build_figure("rank", axis)
    figure.add_trace(
        go.Heatmap(
            z=np.round(rows.largest_ns / 1e6, 4).astype(np.float32),
            x=_convert_to_dates(start_unix_s + bin_s / 2),
            y=rows.labels,
            # Lists: the Plotly.js of plotly 6.0 finds no value of a cell in typed arrays.
            customdata=rows.rank.tolist(),
            colorscale=_WAIT_SCALE,
            zmin=0,
            # Above, so that the times are below those of the other charts.
            colorbar={
                "title": {"text": "ms", "side": "right"}, "orientation": "h", "thickness": 10,
                "nticks": 3, "tickangle": 0, "len": 0.5, "x": 1, "xanchor": "right",
                "y": 1, "yanchor": "bottom",
            },
            hovertemplate=f"{words}<br>%{{x}} UTC<extra></extra>",
            hoverongaps=False,
        )
    )  # fmt: skip
    height = max(240, min(120 + 16 * len(rows.labels), 640))
    figure.update_layout(height=height, margin={**_MARGIN, "t": 48})
    figure.update_xaxes(showgrid=False)
    figure.update_yaxes(type="category", autorange="reversed", showgrid=False)
    return figure


def _group_ranks(mean_ns: Float64) -> _RankRows:
    """The ranks in at most MAX_ROWS rows, with the largest number of each row and its rank."""
    ranks, bins = mean_ns.shape
    size = max(1, -(-ranks // MAX_ROWS))
    padded = np.full((-(-ranks // size) * size, bins), np.nan)
    padded[:ranks] = mean_ns
    parts = padded.reshape(-1, size, bins)
    place = np.argmax(np.where(np.isnan(parts), -1.0, parts), axis=1)
    largest = np.take_along_axis(parts, place[:, None], axis=1)[:, 0]
    first = np.arange(len(parts), dtype=np.int64) * size
    labels = [f"{rank}" if size == 1 else f"{rank}+" for rank in first.tolist()]
    return _RankRows(labels, largest, place + first[:, None])
