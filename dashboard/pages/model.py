"""Page: prediction of a job with changed layout, batch or hardware."""

from __future__ import annotations

from dataclasses import dataclass

from dash import html
from dash.development.base_component import Component
from msgspec import structs

from stepsplit.analyzer.buckets import Split
from stepsplit.analyzer.errors import StepsplitError
from stepsplit.analyzer.model.config import SCHEDULES, JobConfig
from stepsplit.analyzer.model.config_decode import TomlTable
from stepsplit.analyzer.model.config_file import hardware_names, job_in
from stepsplit.analyzer.model.plan import plan
from stepsplit.analyzer.model.plan_space import Candidate
from stepsplit.analyzer.model.predict import predict
from stepsplit.analyzer.model.prediction import Prediction
from stepsplit.analyzer.report.io import job_of_report
from stepsplit.analyzer.report.report import JobTables
from stepsplit.analyzer.units import memory_size, milliseconds, percent, signed_percent
from stepsplit.dashboard.figures.run import NamedSplit, memory, splits
from stepsplit.dashboard.pages.components import (
    AddressQuery,
    Cell,
    View,
    card,
    choice,
    graph,
    led,
    nothing,
    page_url,
    section,
    share_cell,
    table,
    time_cell,
)
from stepsplit.dashboard.pages.compute import predicted_bars
from stepsplit.dashboard.pages.overview import against_the_model

# Model: change layout, batch or hardware and see the predicted step, memory and bubble.

_DOUBLINGS = 4


def model_page(view: View, chosen: AddressQuery) -> list[Component]:
    """The model page; without a job.toml, a hint on what the model needs."""
    report = view.report
    try:
        job = job_of_report(report)
    except StepsplitError as error:
        return [nothing("Cannot read this run's job.toml", str(error))]
    if job is None or report.job is None or report.gap is None:
        return list(against_the_model(report))
    changed = changed_job(report.job, chosen)
    gap = report.gap.shown
    bars = [NamedSplit("measured", gap.measured), NamedSplit("predicted", gap.predicted)]
    return [
        _controls(job, chosen),
        *_outcome(changed, bars, gap.predicted),
        *plan_of(view, changed.job, chosen),
    ]


def _controls(job: JobConfig, chosen: AddressQuery) -> html.Section:
    now = {
        "tp": job.parallel.tp, "pp": job.parallel.pp, "cp": job.parallel.cp,
        "dp_replicate": job.parallel.dp_replicate, "dp_shard": job.parallel.dp_shard,
        "micro_batch": job.training.micro_batch, "global_batch": job.training.global_batch,
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
    note = "prediction only: no job is run"
    return section("Change the job", note, html.Div(menus, className="choices"))


def _sizes(key: str, now: int, picked: int | None) -> html.Label:
    """A menu with the recorded size, its halves and doubles, and the selected size."""
    near = {now * 2**n for n in range(_DOUBLINGS + 1)} | {now // 2**n for n in range(_DOUBLINGS)}
    every = sorted({size for size in near if size >= 1} | {picked or now})
    options = {str(n): f"{n:,} (as recorded)" if n == now else f"{n:,}" for n in every}
    return choice(key, options, str(picked or now), str(now))


def _outcome(changed: Changed, bars: list[NamedSplit], before: Split) -> list[Component]:
    if changed.prediction is None or changed.job is None:
        return [nothing("Invalid job", changed.fault)]
    found, job = changed.prediction, changed.job
    return [
        _cards(found, job, before),
        html.Div(
            [
                section("Step", "slowest stage",
                        graph("splits", splits([*bars, NamedSplit("changed", found.split)]))),
                section("Memory", f"predicted peak of each stage; device memory: "
                        f"{memory_size(job.hardware.memory_bytes)}",
                        graph("memory", memory(predicted_bars(found, "changed"),
                                               job.hardware.memory_bytes))),
            ],
            className="columns",
        ),
    ]  # fmt: skip


def _cards(found: Prediction, job: JobConfig, before: Split) -> html.Div:
    step, peak = found.split.step_ns, max(one.total_bytes for one in found.memory)
    change = signed_percent(step / before.step_ns - 1) if before.step_ns else "?"
    shown = [
        card("predicted step", milliseconds(step), f"{change} compared with the recorded job"),
        card("GPUs", f"{job.parallel.world_size:,}", f"{job.microbatches:,} microbatches/rank"),
        card("bubble_fraction", percent(found.bubble_fraction), "of the schedule"),
        card("peak memory", memory_size(peak), "fits" if found.fits else "does not fit"),
        card("MFU", "unknown" if found.mfu is None else percent(found.mfu), found.confidence),
        card("tokens", f"{found.tokens_per_s_per_gpu:,.0f}", "per second and GPU"),
    ]
    return html.Div(shown, className="cards")


# A recorded job with the changes from the URL.

SIZES = ("tp", "pp", "cp", "dp_replicate", "dp_shard", "micro_batch", "global_batch")

AS_IT_IS = "as recorded"

_TABLE = {"micro_batch": "training", "global_batch": "training", "recompute": "training"}

_INSTEAD = {
    "dp_replicate": ("dp", "world_size", "gpus"),
    "dp_shard": ("dp", "world_size", "gpus"),
    "global_batch": ("microbatches",),
}
"""Alternative job.toml keys to drop when a key is changed."""


@dataclass(frozen=True, slots=True)
class Changed:
    """The changed job and its prediction, or the error that makes the job invalid."""

    job: JobConfig | None
    prediction: Prediction | None
    fault: str


def changed_job(recorded: JobTables, chosen: AddressQuery) -> Changed:
    """The recorded job.toml with the changes from the URL applied, and its prediction."""
    tables: dict[str, dict[str, object]] = {
        name: dict(own) for name, own in structs.asdict(recorded).items()
    }
    for key, value in _asked(chosen).items():
        own = tables.setdefault(_TABLE.get(key, "parallel"), {})
        own[key] = value
        for other in _INSTEAD.get(key, ()):
            own.pop(other, None)
    if (preset := chosen.text("hardware")) not in (None, AS_IT_IS):
        tables["hardware"] = {"preset": preset}
    try:
        job = job_in(TomlTable("this page", "", tables))
        return Changed(job, predict(job), "")
    except StepsplitError as error:
        return Changed(None, None, str(error))


def _asked(chosen: AddressQuery) -> dict[str, object]:
    """Changes from the URL by job.toml key."""
    asked: dict[str, object] = {
        key: number for key in SIZES if (number := chosen.whole(key)) is not None
    }
    for key in ("schedule", "recompute"):
        if (word := chosen.text(key)) not in (None, AS_IT_IS):
            asked[key] = word
    return asked


# Ranking of layouts for the same number of GPUs.

MOST_GPUS = 1_024


def plan_of(view: View, job: JobConfig | None, chosen: AddressQuery) -> list[Component]:
    """The ranking of layouts for the job's GPUs, on request only: the search takes seconds."""
    if job is None or job.parallel.world_size > MOST_GPUS:
        return []
    if chosen.text("plan") != "1":
        where = page_url(view.run_id, "model", **{**chosen.values, "plan": 1})
        asked = led(f"Rank the layouts of {job.parallel.world_size:,} GPUs", where)
        return [section("Plan", "fastest layouts that fit in memory, as predicted", html.P(asked))]
    try:
        found = plan(job, job.parallel.world_size)
    except StepsplitError as error:
        return [nothing("No plan", str(error))]
    best = found.best
    rows = [_candidate(best, best), *(_candidate(one.candidate, best) for one in found.runners_up)]
    heads = ("tp", "pp", "cp", "dp", "zero", "schedule", "microbatch", "recompute",
             "step", "slower by", "peak", "MFU")  # fmt: skip
    note = (
        f"best layout per split of {job.parallel.world_size:,} GPUs; "
        "run stepsplit plan for the reasons"
    )
    return [section("Plan", note, table(heads, rows))]


def _candidate(one: Candidate, best: Candidate) -> list[Cell]:
    layout = one.choice
    dp = layout.dp_replicate * layout.dp_shard
    counts = (layout.tp, layout.pp, layout.cp, dp, layout.zero)
    behind = one.step_ns / best.step_ns - 1
    return [
        *(Cell(str(n), number=True) for n in counts),
        Cell(layout.schedule),
        Cell(str(layout.micro_batch), number=True),
        Cell(layout.recompute),
        time_cell(one.step_ns),
        Cell("best" if one is best else signed_percent(behind), number=True),
        Cell(memory_size(one.peak_bytes), number=True),
        Cell() if one.mfu is None else share_cell(one.mfu),
    ]
