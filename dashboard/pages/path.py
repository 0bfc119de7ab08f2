"""What the step's end hangs on, and which steps took plainly longer."""

from __future__ import annotations

from collections import Counter

from dash import html
from dash.development.base_component import Component

from stepsplit.analyzer.report.report import Report
from stepsplit.analyzer.split.steps import SlowStep
from stepsplit.analyzer.units import milliseconds
from stepsplit.dashboard.figures.critical_path import critical_path, path_shares
from stepsplit.dashboard.pages.address import page_url
from stepsplit.dashboard.pages.parts import (
    Cell,
    graph,
    led,
    section,
    share_cell,
    table,
    time_cell,
)
from stepsplit.dashboard.pages.view import View

PARTS, STEPS = 6, 8


def path(view: View) -> list[html.Section]:
    """The critical path of the average step, and the slow steps in a sentence each."""
    report = view.report
    shown = [*_path(report), *_slow_steps(view)]
    return [section("What the step's end hangs on", _note(report), *shown)] if shown else []


def _path(report: Report) -> list[Component]:
    """Nothing for one rank alone: its path is its split."""
    shares = path_shares(report) if len(report.run.ranks) > 1 else ()
    if not shares:
        return []
    largest = sorted(shares, key=lambda one: -one.ns)[:PARTS]
    rows = [
        [Cell(one.label), Cell(one.whose), share_cell(one.share), time_cell(one.ns)]
        for one in largest
    ]
    heads = ("bucket", "ranks that have most of it", "of the path", "a step")
    return [graph("critical-path", critical_path(report)), table(heads, rows)]


def _note(report: Report) -> str:
    """Which rank ends the step."""
    last = Counter(one.last_rank for one in report.path_steps)
    if not last or len(report.run.ranks) < 2:
        return ""
    rank, often = last.most_common(1)[0]
    return f"rank {rank} ends last in {often:,} of {last.total():,} steps"


def _slow_steps(view: View) -> list[Component]:
    report = view.report
    if not report.slow_steps:
        return []
    worst = sorted(report.slow_steps, key=lambda one: -one.excess_ns)[:STEPS]
    left = len(report.slow_steps) - len(worst)
    items = [_sentence(one, view.run_id) for one in worst]
    items += [html.Li(f"{left:,} more are in report.json")] if left else []
    head = [html.H3("Steps that took plainly longer"), html.Span(_usual(report), className="note")]
    return [html.Div([*head, html.Ul(items)], className="slow-steps")]


def _usual(report: Report) -> str:
    """How long the run's steps take, each as long as on its slowest rank."""
    run = next((one for one in report.step_times if one.rank is None), None)
    if run is None:
        return ""
    return f"than {milliseconds(run.median_ns)}, the median of {run.steps:,} on their slowest rank"


def _sentence(one: SlowStep, run_id: str) -> html.Li:
    where = page_url(run_id, "timeline", step=one.step, rank=one.rank)
    link = led(f"step {one.step}", where if run_id else None)
    began = f"rank {one.rank} {one.bucket} +{milliseconds(one.excess_in_bucket_ns)}"
    longer = f"{milliseconds(one.step_ns)}, {milliseconds(one.excess_ns)} longer"
    return html.Li([link, f" took {longer}: {began}"])
