"""Who comes last to communication, and how much of it compute hides."""

from __future__ import annotations

from collections.abc import Sequence

from dash import html
from dash.development.base_component import Component

from stepsplit.analyzer.report.report import Report
from stepsplit.analyzer.split.attribute import Overlap, overlaps_together
from stepsplit.analyzer.split.lateness import Lateness
from stepsplit.dashboard.pages.averages import summed_steps
from stepsplit.dashboard.pages.parts import (
    Cell,
    count_cell,
    left_out,
    on_demand,
    section,
    share_cell,
    table,
    time_cell,
)

MOST_LATE, MOST_KINDS = 8, 16
_HEADS = (
    "rank",
    "axis",
    "verdict",
    "calls",
    "came last",
    "by chance",
    "late (median)",
    "late (sum)",
)


def stragglers(report: Report) -> list[html.Section]:
    """The stragglers, then who else was late; messages on demand, as the schedule orders them."""
    late = [one for one in report.lateness if one.last]
    calls, messages = (_latest(late, message=kind) for kind in (False, True))
    parts: list[Component] = []
    if calls:
        parts.append(table(_HEADS, [_late_row(one) for one in calls[:MOST_LATE]]))
    if messages:
        told = "messages: here the schedule decides which end waits"
        rows = [_late_row(one) for one in messages[:MOST_LATE]]
        parts.append(on_demand(told + left_out(messages, MOST_LATE), table(_HEADS, rows)))
    note = _found(calls) + left_out(calls, MOST_LATE)
    return [section("Stragglers", note, *parts)] if parts else []


def _latest(rows: Sequence[Lateness], *, message: bool) -> list[Lateness]:
    own = [one for one in rows if one.message == message]
    return sorted(own, key=lambda one: (not one.straggler, -one.late_ns_total))


def _found(calls: Sequence[Lateness]) -> str:
    if not calls:
        return "no rank came last to a collective"
    if not any(one.straggler for one in calls):
        return "no rank comes last so often and so late that it is more than chance"
    return "a straggler comes last more often than chance has it, and late enough to matter"


def _late_row(one: Lateness) -> list[Cell]:
    pill = html.Span("straggler", className="pill failed") if one.straggler else ""
    return [
        Cell(f"rank {one.rank}"),
        Cell(one.axis or "other"),
        Cell(pill),
        count_cell(one.calls),
        share_cell(one.last_fraction),
        share_cell(1 / one.members),
        time_cell(one.late_ns_median),
        time_cell(one.late_ns_total),
    ]


def overlap(report: Report) -> list[html.Section]:
    """Which part of the moving of data compute hides, by axis and op."""
    steps = summed_steps(report).total()
    own = [one for one in report.overlap if one.rank is not None]
    kinds = [one for one in overlaps_together(own) if one.moved_ns]
    if not kinds or not steps:
        return []
    rows = [_overlap_row(one, steps) for one in kinds[:MOST_KINDS]]
    heads = ("axis", "op", "moves data a step", "hidden", "exposed", "efficiency")
    note = "transfers under compute, mean over ranks and full steps; efficiency is hidden / moved"
    note += left_out(kinds, MOST_KINDS)
    return [section("Overlap", note, table(heads, rows))]


def _overlap_row(one: Overlap, steps: int) -> list[Cell]:
    return [
        Cell(one.axis or "other"),
        Cell(one.op),
        time_cell(one.moved_ns / steps),
        time_cell(one.hidden_ns / steps),
        time_cell(one.exposed_ns / steps),
        share_cell(one.efficiency),
    ]
