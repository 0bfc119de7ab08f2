"""Model: change layout, batch or hardware on paper, and see step, memory and bubble move."""

from __future__ import annotations

from dash import html
from dash.development.base_component import Component

from stepsplit.analyzer.buckets import Split
from stepsplit.analyzer.errors import StepsplitError
from stepsplit.analyzer.model.config import SCHEDULES, Job
from stepsplit.analyzer.model.config_file import hardware_names
from stepsplit.analyzer.model.prediction import Prediction
from stepsplit.analyzer.report.io import job_of_report
from stepsplit.analyzer.units import memory_size, milliseconds, percent, signed_percent
from stepsplit.dashboard.figures.memory import memory
from stepsplit.dashboard.figures.model import NamedSplit, splits
from stepsplit.dashboard.pages.address import Chosen
from stepsplit.dashboard.pages.changed_job import AS_IT_IS, SIZES, Changed, changed_job
from stepsplit.dashboard.pages.memory import predicted_bars
from stepsplit.dashboard.pages.overview import against_the_model
from stepsplit.dashboard.pages.parts import card, choice, graph, nothing, section
from stepsplit.dashboard.pages.plan_table import plan_of
from stepsplit.dashboard.pages.view import View

_DOUBLINGS = 4


def model_page(view: View, chosen: Chosen) -> list[Component]:
    """Without a job there is nothing to change: then what the model must be told."""
    report = view.report
    try:
        job = job_of_report(report)
    except StepsplitError as error:
        return [nothing("The model cannot read this run's job", str(error))]
    if job is None or report.gap is None:
        return list(against_the_model(report))
    values = report.job or {}
    changed = changed_job(values, chosen)
    gap = report.gap.shown
    bars = [NamedSplit("measured", gap.measured), NamedSplit("predicted", gap.predicted)]
    return [
        _controls(job, chosen),
        *_outcome(changed, bars, gap.predicted),
        *plan_of(view, changed.job, chosen),
    ]


def _controls(job: Job, chosen: Chosen) -> html.Section:
    now = {
        "tp": job.layout.tp, "pp": job.layout.pp, "cp": job.layout.cp,
        "dp_replicate": job.layout.dp_replicate, "dp_shard": job.layout.dp_shard,
        "micro_batch": job.recipe.micro_batch, "global_batch": job.recipe.global_batch,
    }  # fmt: skip
    menus = [_sizes(key, now[key], chosen.whole(key)) for key in SIZES]
    words = {
        "schedule": (AS_IT_IS, *SCHEDULES),
        "recompute": (AS_IT_IS, "none", "selective", "full"),
        "hardware": (AS_IT_IS, *hardware_names()),
    }
    for key, every in words.items():
        picked = chosen.text(key)
        shown = picked if picked in every else AS_IT_IS
        menus.append(choice(key, {w: w for w in every}, shown, AS_IT_IS))
    note = "what changes is only predicted: nothing is run"
    return section("Change the job", note, html.Div(menus, className="choices"))


def _sizes(key: str, now: int, picked: int | None) -> html.Label:
    """The recorded size, halves and doubles of it, and what was asked for."""
    near = {now * 2**n for n in range(_DOUBLINGS + 1)} | {now // 2**n for n in range(_DOUBLINGS)}
    every = sorted({size for size in near if size >= 1} | {picked or now})
    options = {str(n): f"{n:,} (as recorded)" if n == now else f"{n:,}" for n in every}
    return choice(key, options, str(picked or now), str(now))


def _outcome(changed: Changed, bars: list[NamedSplit], before: Split) -> list[Component]:
    if changed.prediction is None or changed.job is None:
        return [nothing("There can be no such job", changed.fault)]
    found, job = changed.prediction, changed.job
    return [
        _cards(found, job, before),
        html.Div(
            [
                section("Step", "the slowest stage",
                        graph("splits", splits([*bars, NamedSplit("changed", found.split)]))),
                section("Memory", f"predicted peak of each stage; the device holds "
                        f"{memory_size(job.hardware.memory_bytes)}",
                        graph("memory", memory(predicted_bars(found, "changed"),
                                               job.hardware.memory_bytes))),
            ],
            className="columns",
        ),
    ]  # fmt: skip


def _cards(found: Prediction, job: Job, before: Split) -> html.Div:
    step, peak = found.split.step_ns, max(one.total_bytes for one in found.memory)
    change = signed_percent(step / before.step_ns - 1) if before.step_ns else "?"
    shown = [
        card("predicted step", milliseconds(step), f"{change} against the recorded job"),
        card("GPUs", f"{job.layout.world_size:,}", f"microbatches: {job.microbatches:,} a rank"),
        card("bubble_fraction", percent(found.bubble_fraction), "of the schedule"),
        card("peak memory", memory_size(peak), "fits" if found.fits else "does not fit"),
        card("MFU", "unknown" if found.mfu is None else percent(found.mfu), found.confidence),
        card("tokens", f"{found.tokens_per_s_per_gpu:,.0f}", "a second and GPU"),
    ]
    return html.Div(shown, className="cards")
