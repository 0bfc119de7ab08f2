"""The headline numbers of a run, as cards."""

from __future__ import annotations

from dash import html

from stepsplit.analyzer.report.report import Report
from stepsplit.analyzer.units import milliseconds, percent
from stepsplit.dashboard.pages.parts import COLOR, card
from stepsplit.dashboard.store.headline import Headline, Middle

# The user's three words, and what is left: which buckets each stands for.
COMPUTE, COLLECTIVE = ("compute",), ("collective", "p2p", "skew")
BUBBLE, OTHER = ("bubble",), ("copy", "idle")


def cards(numbers: Headline, report: Report) -> html.Div:
    """The step, its four shares, and the schedule's bubble where there is a pipeline."""
    if numbers.middle is None:
        return html.Div([card("median step", "none", "no step was found")], className="cards")
    full = any(row.kind == "full" for row in report.steps)
    note = f"over {_counted(numbers.steps, 'step')}" + ("" if full else ", none full")
    shown = [card("median step", milliseconds(numbers.middle.step_ns), note)]
    shown += _shares(numbers.middle)
    if report.pipeline is not None:
        ideal = report.pipeline.ideal_bubble_fraction
        note = "of the schedule" if ideal is None else f"ideal {percent(ideal)}"
        shown.append(card("bubble_fraction", percent(report.pipeline.bubble_fraction), note))
    if report.mfu is not None:
        shown.append(card("MFU", percent(report.mfu), "of the dense peak"))
    return html.Div(shown, className="cards")


def _shares(middle: Middle) -> list[html.Div]:
    waits, idle = percent(middle.share("skew")), percent(middle.share("idle"))
    median = f"median {milliseconds(middle.medians.compute_ns)}"
    return [
        card("compute", percent(middle.share(*COMPUTE)), median, COLOR["compute"]),
        card(
            "collective",
            percent(middle.share(*COLLECTIVE)),
            f"of which skew {waits}",
            COLOR["collective"],
        ),
        card("bubble", percent(middle.share(*BUBBLE)), "waits for stages", COLOR["bubble"]),
        card("other", percent(middle.share(*OTHER)), f"of which idle {idle}", COLOR["copy"]),
    ]


def subtitle(report: Report) -> str:
    """What ran, in a line; what is unknown is left out."""
    run = report.run
    mesh = None if run.mesh is None else " ".join(f"{part.axis}{part.size}" for part in run.mesh)
    parts = [
        f"{len(run.ranks):,} of {run.world_size:,} ranks",
        _counted(len(run.hosts), "host"),
        run.device,
        mesh if mesh is None else f"mesh {mesh} (from {run.mesh_source or 'unknown'})",
        report.pipeline.schedule if report.pipeline else None,
        run.backend,
        None if run.torch is None else f"torch {run.torch}",
        None if run.nccl is None else f"NCCL {run.nccl}",
        None if run.profiling_slowdown is None else f"profiling {run.profiling_slowdown:+.1%}",
    ]
    return "  ·  ".join(part for part in parts if part)


def _counted(count: int, noun: str) -> str | None:
    return None if not count else f"{count:,} {noun}{'' if count == 1 else 's'}"
