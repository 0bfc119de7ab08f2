"""Pages: collectives, stragglers, pipeline."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from dash import html
from dash.development.base_component import Component

from stepsplit.analyzer.diagnose.what_if import ideal_grid
from stepsplit.analyzer.gap.comm_gap import modelled_busbw
from stepsplit.analyzer.report.report import Pipeline, Report
from stepsplit.analyzer.report.tables import Boxes
from stepsplit.analyzer.split.attribute import Overlap, overlaps_together
from stepsplit.analyzer.split.bandwidth import CollectiveRow
from stepsplit.analyzer.split.lateness import Lateness
from stepsplit.analyzer.units import milliseconds, percent, size
from stepsplit.dashboard.figures.communication import (
    BandwidthPoint,
    Curve,
    MedianCall,
    bandwidth,
    wait_against_transfer,
    waits_matrix,
)
from stepsplit.dashboard.figures.run import one_pipeline, pipeline, stage_bubbles
from stepsplit.dashboard.pages.components import (
    AddressQuery,
    Cell,
    View,
    card,
    choice,
    count_cell,
    graph,
    left_out,
    nothing,
    on_demand,
    section,
    share_cell,
    summed_steps,
    table,
    time_cell,
)
from stepsplit.dashboard.pages.overview import blame, collectives, exposed, taken_ns

# Collectives: how fast data moved and could have, who waits for whom, and every call's numbers.

KINDS, WIDER = 10, 8
"""Kinds of calls that are drawn, and how far the model's curve goes beyond the measured sizes."""


def collectives_page(view: View) -> list[Component]:
    """Absent parts are those that the recording does not tell."""
    report = view.report
    if not report.collectives:
        told = "The recording holds no collective and no message: was the job of one process?"
        return [nothing("No communication", told)]
    return [
        html.Div([html.Div(_bandwidth(report)), html.Div(_waiting(view))], className="columns"),
        *exposed(report),
        *collectives(report),
        *stragglers(report),
        *overlap(report),
        *blame(report),
    ]


def _bandwidth(report: Report) -> list[html.Section]:
    axes = {group.id: group.axis or "other" for group in report.groups}
    points = [
        BandwidthPoint(
            axes.get(row.group, "other"), row.op, row.message_bytes, row.busbw_bytes_per_s,
            row.count,
        )
        for row in report.collectives if row.message_bytes and row.busbw_bytes_per_s
    ]  # fmt: skip
    if not points:
        return []
    asked = sorted({(one.axis, one.op) for one in points})
    sizes = [one.message_bytes for one in points]
    low, high = min(sizes) // WIDER, max(sizes) * WIDER
    lines = [modelled_busbw(report, axis, op, low, high) for axis, op in asked]
    curves = [
        Curve(axis, op, line.message_bytes, line.busbw_bytes_per_s, line.link_bytes_per_s)
        for (axis, op), line in zip(asked, lines, strict=True) if line is not None
    ]  # fmt: skip
    model = "dotted: the model" if curves else "no model to compare with"
    note = f"over the transfer alone, so that a straggler makes no link look slow; {model}"
    return [section("Bus bandwidth", note, graph("bandwidth", bandwidth(points, curves)))]


def _waiting(view: View) -> list[html.Section]:
    return [*_waits(view), *_against_transfer(view.report)]


def _against_transfer(report: Report) -> list[html.Section]:
    """The kinds of calls that take most together, by the median call of their slowest group."""
    axes = {group.id: group.axis or "other" for group in report.groups}
    kinds: dict[str, CollectiveRow] = {}
    for row in sorted(report.collectives, key=taken_ns):
        kinds[_words(row, axes.get(row.group, "other"))] = row
    largest = sorted(kinds.items(), key=lambda item: -taken_ns(item[1]))[:KINDS]
    calls = [MedianCall(words, r.transfer_ns_median, r.wait_ns_median) for words, r in largest]
    note = "the median call of the group that takes most"
    figure = graph("wait-transfer", wait_against_transfer(calls))
    return [section("Wait against transfer", note, figure)]


def _words(row: CollectiveRow, axis: str) -> str:
    bytes_ = "size unknown" if row.message_bytes is None else size(row.message_bytes)
    return f"{row.op} on {axis}, {bytes_}"


def _waits(view: View) -> list[html.Section]:
    waits = None if view.tables is None else view.tables.waits
    if waits is None or not (waits.owner >= 0).any():
        return []
    steps = len({row.step for row in view.report.steps})
    figure = waits_matrix(waits, view.report.run.ranks, steps)
    note = "a bright column is a rank that others wait for"
    return [section("Who waits for whom", note, graph("waits", figure))]


# Who comes last to communication, and how much of it compute hides.

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


# Pipeline: the measured grid of microbatches above the ideal one, and each stage's bubble.


def pipeline_page(view: View, chosen: AddressQuery) -> list[Component]:
    """The grid of one step; a sentence where the job has no pipeline, or its work is not marked."""
    found = view.report.pipeline
    if found is None:
        return [nothing(*_why_none(view.report))]
    return [_cards(found), *_grid(view, found, chosen), _bubbles(found)]


def _why_none(report: Report) -> tuple[str, str]:
    unmarked = next((one.message for one in report.warnings if one.code == "no_grid"), None)
    if unmarked:
        return "No grid can be drawn", unmarked
    return "No pipeline", "This job has one pipeline stage, as far as its recording tells."


def _cards(found: Pipeline) -> html.Div:
    ideal = found.ideal_bubble_fraction
    shown = [
        card("schedule", found.schedule or "unknown", f"{found.microbatches} microbatches a step"),
        card("stages", str(len(found.stages)), "of the model"),
        card("bubble_fraction", percent(found.bubble_fraction), "holes / window, measured"),
        card("ideal", "unknown" if ideal is None else percent(ideal), "of equal stages"),
        card("bubble_overhead", percent(found.bubble_overhead), "holes / useful time, measured"),
    ]
    return html.Div(shown, className="cards")


def _grid(view: View, found: Pipeline, chosen: AddressQuery) -> list[Component]:
    if view.tables is None or not len(view.tables.boxes.step):
        return []
    steps = steps_with_boxes(view.report, view.tables.boxes)
    usual = steps[len(steps) // 2]
    step = chosen.whole("step")
    step = step if step in steps else usual
    measured = one_pipeline(view.tables.boxes, step)
    ideal = ideal_grid(measured, found.schedule, found.microbatches)
    words = {str(n): f"step {n}" for n in steps}
    menu = [choice("step", words, str(step), str(usual))] if view.run_id else []
    figure = graph("pipeline", pipeline(measured, ideal))
    return [section("Microbatches", _note(step, measured, ideal), *menu, figure)]


def _note(step: int, measured: Boxes, ideal: Boxes | None) -> str:
    took = f"step {step} took {milliseconds(_window_ns(measured))}"
    if ideal is None:
        return f"{took}; what the schedule would take is not modelled for it"
    could = milliseconds(_window_ns(ideal))
    return f"{took} from first forward to last backward, {could} with equal stages and free links"


def _window_ns(boxes: Boxes) -> int:
    return int((boxes.start_ns + boxes.dur_ns).max() - boxes.start_ns.min())


def steps_with_boxes(report: Report, boxes: Boxes) -> list[int]:
    """The full steps of which there is a grid, or all such steps where none is full."""
    drawn = set(np.unique(boxes.step).tolist())
    full = {row.step for row in report.steps if row.kind == "full"} & drawn
    return sorted(full or drawn)


def _bubbles(found: Pipeline) -> html.Section:
    note = "from first forward to last backward; medians over full steps"
    return section("Bubble by stage", note, graph("stage-bubbles", stage_bubbles(found)))
