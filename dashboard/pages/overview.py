"""Overview: the numbers, the model beside them, the causes, and where each rank's steps went."""

from __future__ import annotations

from dash import html
from dash.development.base_component import Component

from stepsplit.analyzer.report.report import NO_MODEL, Report
from stepsplit.analyzer.units import milliseconds, milliseconds_between, signed_percent
from stepsplit.dashboard.figures.split import by_rank, by_step
from stepsplit.dashboard.figures.waterfall import sides, waterfall
from stepsplit.dashboard.pages.coverage import holds
from stepsplit.dashboard.pages.details import exposed, findings, warnings
from stepsplit.dashboard.pages.numbers import cards, subtitle
from stepsplit.dashboard.pages.parts import graph, section
from stepsplit.dashboard.pages.path import path
from stepsplit.dashboard.pages.view import View
from stepsplit.dashboard.store.headline import headline


def overview(view: View) -> list[Component]:
    """Everything that one should know first."""
    report = view.report
    return [
        html.P(subtitle(report), className="subtitle"),
        cards(headline(report), report),
        html.Div([_first(view), _second(view)], className="columns"),
        *path(view),
        *holds(report),
        *warnings(report),
    ]


def against_the_model(report: Report) -> list[html.Section]:
    """The predicted step, what lies between, and the measured step; or what to tell the model."""
    gap = report.gap
    if gap is None:
        return _unmodelled(report)
    shown = gap.shown
    measured, predicted = shown.measured.step_ns, shown.predicted.step_ns
    stage = f" of stage {gap.stage}" if len(gap.stages) > 1 else ""
    difference = signed_percent(measured / predicted - 1) if predicted else "?"
    note = (
        f"the step{stage} took {milliseconds(measured)}, {difference} of "
        f"{milliseconds(predicted)} predicted ({milliseconds_between(gap.low_ns, gap.high_ns)}, "
        f"confidence {gap.confidence})"
    )
    doubts = [html.P(f"doubt: {one}", className="note") for one in gap.notes]
    figures = graph("sides", sides(gap)), graph("waterfall", waterfall(gap))
    return [section("Against the model", note, *figures, *doubts)]


def _unmodelled(report: Report) -> list[html.Section]:
    told = next((one.message for one in report.warnings if one.code == NO_MODEL), None)
    text = "This report was made without a prediction to compare with."
    mend = "Put a run.toml beside the traces, or run: stepsplit analyze RUN --run run.toml"
    words = [html.P(told or text), html.P(mend, className="note")]
    return [section("Against the model", "not compared", *words)]


def _first(view: View) -> html.Div:
    """What to mend, and where the time goes by rank and by step."""
    ranks = graph("by-rank", by_rank(view.report))
    steps = graph("by-step", by_step(view.report))
    led = "; click a bar for its timeline" if view.run_id else ""
    return html.Div(
        [
            *findings(view),
            section("By rank", f"each bucket's median over full steps{led}", ranks),
            section("By step", f"mean over ranks; pale steps enter no median{led}", steps),
        ]
    )


def _second(view: View) -> html.Div:
    """What the model says, and what communication costs where."""
    return html.Div([*against_the_model(view.report), *exposed(view.report)])
