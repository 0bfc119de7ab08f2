"""Pipeline: the measured grid of microbatches above the ideal one, and each stage's bubble."""

from __future__ import annotations

import numpy as np
from dash import html
from dash.development.base_component import Component

from stepsplit.analyzer.diagnose.what_if import ideal_grid
from stepsplit.analyzer.report.report import Pipeline, Report
from stepsplit.analyzer.report.tables import Boxes
from stepsplit.analyzer.units import milliseconds, percent
from stepsplit.dashboard.figures.pipeline import one_pipeline, pipeline, stage_bubbles
from stepsplit.dashboard.pages.address import Chosen
from stepsplit.dashboard.pages.parts import card, choice, graph, nothing, section
from stepsplit.dashboard.pages.view import View


def pipeline_page(view: View, chosen: Chosen) -> list[Component]:
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


def _grid(view: View, found: Pipeline, chosen: Chosen) -> list[Component]:
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
