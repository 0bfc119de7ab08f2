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

# Collectives: bus bandwidth, waits between ranks, and a table of all kinds of calls.

KINDS, WIDER = 10, 8
"""Kinds of calls to draw; factor by which the model's curve extends the measured sizes."""


def collectives_page(view: View) -> list[Component]:
    """The collectives page; sections without data in the recording are left out."""
    report = view.report
    if not report.collectives:
        hint = "The recording has no collectives and no messages: was it a single-process job?"
        return [nothing("No communication", hint)]
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
    model = "dotted: model" if curves else "no model to compare with"
    note = f"over the transfer part only, without waiting for stragglers; {model}"
    return [section("Bus bandwidth", note, graph("bandwidth", bandwidth(points, curves)))]


def _waiting(view: View) -> list[html.Section]:
    return [*_waits(view), *_against_transfer(view.report)]


def _against_transfer(report: Report) -> list[html.Section]:
    """The kinds of calls with the largest total time, by the median call of the slowest group."""
    axes = {group.id: group.axis or "other" for group in report.groups}
    kinds: dict[str, CollectiveRow] = {}
    for row in sorted(report.collectives, key=taken_ns):
        kinds[_words(row, axes.get(row.group, "other"))] = row
    largest = sorted(kinds.items(), key=lambda item: -taken_ns(item[1]))[:KINDS]
    calls = [MedianCall(words, r.transfer_ns_median, r.wait_ns_median) for words, r in largest]
    note = "median call of the slowest group"
    figure = graph("wait-transfer", wait_against_transfer(calls))
    return [section("Wait and transfer time", note, figure)]


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
    return [section("Waits between ranks", note, graph("waits", figure))]


# Stragglers (ranks that arrive last), and overlapped communication.

MOST_LATE, MOST_KINDS = 8, 16

_HEADS = (
    "rank",
    "axis",
    "verdict",
    "calls",
    "arrived last",
    "expected",
    "delay (median)",
    "delay (sum)",
)


def stragglers(report: Report) -> list[html.Section]:
    """Stragglers, then other late ranks; messages collapsed, as the schedule decides who waits."""
    late = [one for one in report.lateness if one.last]
    calls, messages = (_latest(late, message=kind) for kind in (False, True))
    parts: list[Component] = []
    if calls:
        parts.append(table(_HEADS, [_late_row(one) for one in calls[:MOST_LATE]]))
    if messages:
        label = "messages (the schedule decides which end waits)"
        rows = [_late_row(one) for one in messages[:MOST_LATE]]
        parts.append(on_demand(label + left_out(messages, MOST_LATE), table(_HEADS, rows)))
    note = _found(calls) + left_out(calls, MOST_LATE)
    return [section("Stragglers", note, *parts)] if parts else []


def _latest(rows: Sequence[Lateness], *, message: bool) -> list[Lateness]:
    own = [one for one in rows if one.message == message]
    return sorted(own, key=lambda one: (not one.straggler, -one.late_ns_total))


def _found(calls: Sequence[Lateness]) -> str:
    if not calls:
        return "no late arrivals at collectives"
    if not any(one.straggler for one in calls):
        return "no straggler: no rank is significantly later than its peers"
    return "a straggler arrives last more often than expected by chance, by a significant delay"


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
    """Overlapped and exposed transfer time by axis and op."""
    steps = summed_steps(report).total()
    own = [one for one in report.overlap if one.rank is not None]
    kinds = [one for one in overlaps_together(own) if one.moved_ns]
    if not kinds or not steps:
        return []
    rows = [_overlap_row(one, steps) for one in kinds[:MOST_KINDS]]
    heads = ("axis", "op", "transfer per step", "overlapped", "exposed", "efficiency")
    note = "mean over ranks and full steps; efficiency is overlapped / transfer time"
    note += left_out(kinds, MOST_KINDS)
    return [section("Overlapped communication", note, table(heads, rows))]


def _overlap_row(one: Overlap, steps: int) -> list[Cell]:
    return [
        Cell(one.axis or "other"),
        Cell(one.op),
        time_cell(one.moved_ns / steps),
        time_cell(one.hidden_ns / steps),
        time_cell(one.exposed_ns / steps),
        share_cell(one.efficiency),
    ]


# Pipeline: measured and ideal microbatch grid, and the bubble of each stage.


def pipeline_page(view: View, chosen: AddressQuery) -> list[Component]:
    """The pipeline page: the grid of one step, or why there is none."""
    found = view.report.pipeline
    if found is None:
        return [nothing(*_why_none(view.report))]
    return [_cards(found), *_grid(view, found, chosen), _bubbles(found)]


def _why_none(report: Report) -> tuple[str, str]:
    unmarked = next((one.message for one in report.warnings if one.code == "no_grid"), None)
    if unmarked:
        return "No microbatch grid", unmarked
    return "No pipeline", "One pipeline stage was detected in this recording."


def _cards(found: Pipeline) -> html.Div:
    ideal = found.ideal_bubble_fraction
    shown = [
        card("schedule", found.schedule or "unknown", f"{found.microbatches} microbatches/step"),
        card("stages", str(len(found.stages)), "of the model"),
        card("bubble_fraction", percent(found.bubble_fraction), "idle / window, measured"),
        card("ideal", "unknown" if ideal is None else percent(ideal), "for equal stages"),
        card("bubble_overhead", percent(found.bubble_overhead), "idle / useful time, measured"),
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
        return f"{took}; no ideal grid for this schedule"
    ideal_ms = milliseconds(_window_ns(ideal))
    return (
        f"{took} from first forward to last backward; "
        f"{ideal_ms} with equal stages and free communication"
    )


def _window_ns(boxes: Boxes) -> int:
    return int((boxes.start_ns + boxes.dur_ns).max() - boxes.start_ns.min())


def steps_with_boxes(report: Report, boxes: Boxes) -> list[int]:
    """Full steps that have a grid, or all steps that have one if none is full."""
    drawn = set(np.unique(boxes.step).tolist())
    full = {row.step for row in report.steps if row.kind == "full"} & drawn
    return sorted(full or drawn)


def _bubbles(found: Pipeline) -> html.Section:
    note = "from first forward to last backward; medians over full steps"
    return section("Bubble by stage", note, graph("stage-bubbles", stage_bubbles(found)))
