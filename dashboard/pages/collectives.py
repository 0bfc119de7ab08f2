"""Collectives: how fast data moved and could have, who waits for whom, and every call's numbers."""

from __future__ import annotations

from dash import html
from dash.development.base_component import Component

from stepsplit.analyzer.gap.comm_gap import modelled_busbw
from stepsplit.analyzer.report.report import CollectiveRow, Report
from stepsplit.analyzer.units import size
from stepsplit.dashboard.figures.bandwidth import Curve, Point, bandwidth
from stepsplit.dashboard.figures.waits import Call, wait_against_transfer, waits_matrix
from stepsplit.dashboard.pages.details import blame, collectives, exposed, taken_ns
from stepsplit.dashboard.pages.parts import graph, nothing, section
from stepsplit.dashboard.pages.stragglers import overlap, stragglers
from stepsplit.dashboard.pages.view import View

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
        Point(axes.get(row.group, "other"), row.op, row.message_bytes, row.busbw_bytes_per_s,
              row.count)
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
    calls = [Call(words, r.transfer_ns_median, r.wait_ns_median) for words, r in largest]
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
