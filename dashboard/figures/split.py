"""Where the step went: stacked bars, one a rank or one a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import plotly.graph_objects as go

from stepsplit.analyzer.buckets import Split
from stepsplit.analyzer.report.report import Report, StepRow, full_steps
from stepsplit.analyzer.units import milliseconds, percent
from stepsplit.dashboard.figures.palette import LOOKS
from stepsplit.dashboard.figures.theme import blank, in_ms, marker, plain

HEIGHT = 340


@dataclass(frozen=True, slots=True)
class Bar:
    """One stacked bar: its label on the axis, what the pointer tells of it, its split."""

    label: str
    heading: str
    split: Split
    full: bool = True


def by_rank(report: Report) -> go.Figure:
    """A bar a rank, in ms: each bucket's median over the steps that medians are taken of."""
    hosts = {rank: host.host for host in report.run.hosts for rank in host.ranks}
    rows = _grouped(full_steps(report.steps), "rank")
    bars = []
    for rank, steps in rows:
        of_host = f" on {plain(hosts[rank])}" if rank in hosts else ""
        heading = f"<b>rank {rank}</b>{of_host}, median of {len(steps)} steps"
        bars.append(Bar(str(rank), heading, _median(steps)))
    return _stack(bars, "rank", "ms a step, median of full steps")


def by_step(report: Report, rank: int | None = None) -> go.Figure:
    """A bar a step, in ms: of one rank, or the mean over ranks; paler where it is not full."""
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
    figure = blank(HEIGHT, x_title, y_title)
    for index, look in enumerate(LOOKS):
        figure.add_trace(
            go.Bar(
                name=look.bucket,
                x=[bar.label for bar in bars],
                y=in_ms([bar.split.buckets_ns[index] for bar in bars]),
                marker=marker(look),
                customdata=[_told(bar, index) for bar in bars],
                hovertemplate="%{customdata[0]}<br>%{customdata[1]}<extra></extra>",
            )
        )
        figure.data[-1].marker.opacity = [1.0 if bar.full else 0.45 for bar in bars]
    figure.update_layout(barmode="stack", bargap=0.25 if len(bars) <= 64 else 0)
    figure.update_xaxes(type="category")
    return figure


def _told(bar: Bar, index: int) -> tuple[str, str]:
    part, whole = bar.split.buckets_ns[index], bar.split.step_ns
    share = percent(part / whole) if whole else percent(0)
    of = f"{milliseconds(part)} of {milliseconds(whole)} ({share})"
    return bar.heading, f"{LOOKS[index].bucket} {of}"
