"""What lies between two steps: the predicted and the measured one, or those of two runs."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from stepsplit.analyzer.regression.compare import BucketChange, RunComparison
from stepsplit.analyzer.report.report import Gap, GapRow
from stepsplit.analyzer.units import milliseconds, signed_milliseconds
from stepsplit.dashboard.figures.model import NamedSplit, splits
from stepsplit.dashboard.figures.palette import BETTER, MUTED, WORSE
from stepsplit.dashboard.figures.theme import blank, in_ms, plain

Part = tuple[str, int, str]
"""A part of a difference: its name, ns, and words about it."""
PARTS = 8
"""The rest of the rows is drawn as one."""
_LEAST = 0.003


def sides(gap: Gap) -> go.Figure:
    """The predicted and the measured split of the gap's stage, one bar each, in ms."""
    shown = gap.shown
    return splits(
        [NamedSplit("predicted", shown.predicted), NamedSplit("measured", shown.measured)]
    )


def waterfall(gap: Gap) -> go.Figure:
    """From the predicted step, part by part, to the measured one, in ms; the largest part first."""
    ends = gap.shown.predicted.step_ns, gap.shown.measured.step_ns
    told = "what the model expects", "as recorded"
    return _steps(("predicted", "measured"), ends, told, _drawn(gap))


def difference(found: RunComparison) -> go.Figure:
    """From the baseline's mean step, bucket by bucket, to the candidate's, in ms."""
    ends = found.baseline.mean.step_ns, found.candidate.mean.step_ns
    parts = [
        (row.bucket, row.difference_ns, _from_to(row)) for row in found.buckets if row.difference_ns
    ]
    return _steps(("baseline", "candidate"), ends, ("its mean step", "its mean step"), parts)


def _from_to(row: BucketChange) -> str:
    return f"{milliseconds(row.baseline_ns)} to {milliseconds(row.candidate_ns)}"


def _steps(
    names: tuple[str, str], ends: tuple[int, int], told: tuple[str, str], parts: Sequence[Part]
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
            hovertext=[told[0], *(words for _, _, words in parts), told[1]],
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
    """Name, ns and words of each part that is drawn: the names are distinct."""
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
