"""Page: prediction of a job with changed layout, batch or hardware."""

from __future__ import annotations

from dataclasses import dataclass

from dash import html
from dash.development.base_component import Component
from msgspec import structs

from stepsplit.analyzer.errors import DataError, StepsplitError, UsageError
from stepsplit.analyzer.model.config import JobConfig
from stepsplit.analyzer.model.config_decode import TomlTable
from stepsplit.analyzer.model.config_file import decode_job
from stepsplit.analyzer.model.features import KEY_FEATURES
from stepsplit.analyzer.model.plan_space import Candidate, Plan
from stepsplit.analyzer.model.prediction import Prediction
from stepsplit.analyzer.model.prediction_process import predict_in_process
from stepsplit.analyzer.model.preset_names import list_hardware_names
from stepsplit.analyzer.model.schedule_names import SCHEDULES
from stepsplit.analyzer.model.unstated import SHOWN, describe_unstated
from stepsplit.analyzer.report.headline import compute_mean_step_ns
from stepsplit.analyzer.report.io import extract_job
from stepsplit.analyzer.report.report import ComparedStage, Gap, JobTables
from stepsplit.analyzer.units import (
    format_memory_size,
    format_microbatches,
    format_milliseconds,
    format_milliseconds_range,
    format_percent,
    format_rate,
    format_signed_percent,
)
from stepsplit.dashboard.figures.of_report import build_predicted_bars
from stepsplit.dashboard.figures.run import NamedSplit, draw_memory, draw_splits
from stepsplit.dashboard.pages.address import AddressQuery, build_page_url
from stepsplit.dashboard.pages.components import (
    View,
    build_card,
    build_empty_card,
    build_graph,
    build_link,
    build_menu,
    build_section,
    format_mean_step,
)
from stepsplit.dashboard.pages.overview import build_caveats, build_mismatch, build_model_comparison
from stepsplit.dashboard.pages.page import RunPage
from stepsplit.dashboard.pages.run_actions import build_job_button
from stepsplit.dashboard.pages.tables import (
    Cell,
    build_count_cell,
    build_memory_cell,
    build_number_cell,
    build_share_cell,
    build_share_change_cell,
    build_table,
    build_time_cell,
)

# Model: change layout, batch or hardware and see the predicted step, memory and bubble.

_DOUBLINGS = 4


def build_model_page(view: View, chosen: AddressQuery) -> list[Component]:
    """The model page; without a job.toml, a hint on what the model needs.

    Raises NoPrediction if the prediction exceeds a limit.
    """
    report = view.report
    try:
        job = extract_job(report)
    except StepsplitError as error:
        return [build_empty_card("Cannot read this run's job.toml", str(error))]
    if job is None or report.job is None or report.gap is None:
        return list(build_model_comparison(view))
    changed = apply_changes(report.job, chosen)
    gap = report.gap.shown
    bars = [NamedSplit("measured", gap.measured), NamedSplit("predicted", gap.predicted)]
    return [
        _build_controls(view, job, report.gap, chosen, changed),
        *_build_outcome(changed, bars, gap, compute_mean_step_ns(report.steps)),
        *build_plan(view, changed, chosen),
    ]


def _build_controls(
    view: View, job: JobConfig, gap: Gap, chosen: AddressQuery, changed: ChangedJob
) -> html.Section:
    now = {
        "tp": job.parallel.tp, "pp": job.parallel.pp, "cp": job.parallel.cp,
        "dp_replicate": job.parallel.dp_replicate, "dp_shard": job.parallel.dp_shard,
        "micro_batch": job.training.micro_batch, "global_batch": job.training.global_batch,
    }  # fmt: skip
    menus = []
    if "interleaved" in (chosen.find_text("schedule"), job.parallel.schedule):
        now["chunks"] = job.parallel.chunks
    for key, recorded in now.items():
        # Of chunks at least two, as apply_changes takes them, whatever was recorded.
        least = 2 if key == "chunks" else 1
        usual = max(recorded, least)
        picked_size = chosen.parse_int(key) or usual
        # The usual size, its halves and doubles, and the selected one.
        near = {usual * 2**n for n in range(_DOUBLINGS + 1)}
        near |= {usual // 2**n for n in range(_DOUBLINGS)}
        sizes = sorted({size for size in near if size >= least} | {picked_size})
        names = {str(n): f"{n:,} (as recorded)" if n == recorded else f"{n:,}" for n in sizes}
        menus.append(build_menu(key, names, str(picked_size), str(usual)))
    options = {
        "schedule": (UNCHANGED, *SCHEDULES),
        "recompute": (UNCHANGED, "none", "selective", "full"),
        "hardware": (UNCHANGED, *list_hardware_names()),
    }
    for key, values in options.items():
        picked = chosen.find_text(key)
        shown = picked if picked in values else UNCHANGED
        menus.append(build_menu(key, {w: w for w in values}, shown, UNCHANGED))
    note = "prediction only: no job is run"
    parts: list[Component] = [
        *build_mismatch(view.report),
        html.Div(menus, className="choices"),
        *_build_open_menus(changed, chosen),
        *(html.P(f"read {one}", className="note") for one in job.notes),
        *build_caveats(view.report, gap),
    ]
    if view.offers_job:
        words = "to correct what was inferred or given of the recorded job"
        button = build_job_button(view.run_id, view.name)
        parts.append(html.P([button, html.Span(f" {words}", className="note")]))
    return build_section("Change the job", note, *parts)


def _build_open_menus(changed: ChangedJob, chosen: AddressQuery) -> list[Component]:
    """What the job does not state and moves its step most, to be stated here."""
    unstated = () if changed.prediction is None else changed.prediction.unstated
    asked = [one.key for one in unstated[:SHOWN]]
    menus = []
    for feature in KEY_FEATURES:
        choices, picked = feature.list_choices(), chosen.find_text(feature.key)
        has_menu = feature.name in _TABLE
        if choices and not has_menu and (feature.key in asked or picked in choices):
            names = {UNSTATED: UNSTATED, **{word: word for word in choices}}
            shown = picked if picked in choices else UNSTATED
            label = feature.key.rpartition(".")[2].replace("_", " ")
            menus.append(build_menu(feature.key, names, shown, UNSTATED, label))
    words = describe_unstated(unstated)
    parts: list[Component] = [html.P(words, className="note")] if words else []
    return [*parts, *([html.Div(menus, className="choices")] if menus else [])]


def _build_outcome(
    changed: ChangedJob, bars: list[NamedSplit], gap: ComparedStage, mean_step_ns: int
) -> list[Component]:
    if changed.prediction is None or changed.job is None:
        return [build_empty_card("Invalid job", changed.error)]
    prediction, job = changed.prediction, changed.job
    if changed.differs:
        bars = [*bars, NamedSplit("changed", prediction.split)]
    return [
        _build_cards(prediction, job, gap, mean_step_ns),
        html.Div(
            [
                build_section(
                    "Step",
                    f"slowest stage; measured: its median step, step {gap.step} of rank {gap.rank}",
                    build_graph("splits", draw_splits(bars)),
                ),
                build_section(
                    "Memory",
                    f"predicted peak of each stage; device memory: "
                    f"{format_memory_size(job.hardware.memory_bytes)}",
                    build_graph(
                        "memory",
                        draw_memory(
                            build_predicted_bars(
                                prediction, "changed" if changed.differs else "model"
                            ),
                            job.hardware.memory_bytes,
                        ),
                    ),
                ),
            ],
            className="columns",
        ),
        *_build_compute(prediction),
    ]


def _build_compute(prediction: Prediction) -> list[Component]:
    """The compute of the slowest stage by kinds of kernels, with the rate taken for each."""
    rows = [
        [
            Cell(part.name),
            build_time_cell(part.ns),
            Cell(format_rate(part.rate, part.unit)),
            Cell() if part.peak is None else build_share_cell(part.rate / part.peak),
        ]
        for part in prediction.compute_parts
    ]
    heads = ("kind", "time", "at", "of peak")
    note = "predicted, of the slowest stage; the host's is idle time"
    return [build_section("Compute", note, build_table(heads, rows))] if rows else []


def _build_cards(
    prediction: Prediction, job: JobConfig, gap: ComparedStage, mean_step_ns: int
) -> html.Div:
    step, peak = prediction.split.step_ns, max(one.total_bytes for one in prediction.memory)
    # How far the model is off is taken to be the same with the changes.
    ratio = step / gap.predicted.step_ns if gap.predicted.step_ns else 1.0
    note = f"of the mean step of {format_mean_step(mean_step_ns)}"
    note += f": {format_mean_step(round(mean_step_ns * ratio))}"
    fit, chance = "fits" if prediction.fits else "does not fit", prediction.fit_chance
    sure = None if chance is None else chance if prediction.fits else 1 - chance
    # Beyond that a card has no room for a doubt that small.
    if sure is not None and sure < 0.995:
        fit += f", {format_percent(sure)} sure"
    # The least time by physics alone, which an older prediction does not have.
    bound = prediction.bound
    shown = [
        build_card("step", format_signed_percent(ratio - 1), f"{note}, by the model's ratio"),
        build_card(
            "predicted step",
            format_milliseconds(step),
            f"expected {format_milliseconds_range(prediction.low_ns, prediction.high_ns)}",
        ),
        *(
            []
            if bound is None
            else [
                build_card(
                    "bound",
                    format_milliseconds(bound.ns),
                    f"{bound.resource} at the peak of the data sheet",
                )
            ]
        ),
        build_card(
            "ranks",
            f"{job.parallel.world_size:,}",
            f"{format_microbatches(job.microbatches)}/rank",
        ),
        build_card(
            "pipeline bubble", format_percent(prediction.bubble_fraction), "of the schedule"
        ),
        build_card("peak memory", format_memory_size(peak), fit),
        build_card(
            "MFU",
            "unknown" if prediction.mfu is None else format_percent(prediction.mfu),
            f"confidence {prediction.confidence}",
        ),
        build_card("tokens", f"{prediction.tokens_per_s_per_gpu:,.0f}", "per second and rank"),
    ]
    return html.Div(shown, className="cards")


# A recorded job with the changes from the URL.

_WHERE = "this page"

SIZES = ("tp", "pp", "cp", "dp_replicate", "dp_shard", "micro_batch", "global_batch")

UNCHANGED = "as recorded"

UNSTATED = "not stated"

_TABLE = {"micro_batch": "training", "global_batch": "training", "recompute": "training"}

_ALIASES = {
    "dp_replicate": ("dp", "world_size", "gpus", "nodes"),
    "dp_shard": ("dp", "world_size", "gpus", "nodes"),
    "global_batch": ("microbatches",),
}
"""Alternative job.toml keys to drop when a key is changed."""


@dataclass(frozen=True, slots=True)
class ChangedJob:
    """The changed job and its prediction, or the error that makes the job invalid; on request the
    plan of its layout, or the error that leaves none; and whether it differs from the recorded."""

    job: JobConfig | None = None
    prediction: Prediction | None = None
    error: str = ""
    plan: Plan | None = None
    plan_error: str = ""
    differs: bool = False


def apply_changes(recorded: JobTables, chosen: AddressQuery) -> ChangedJob:
    """The recorded job.toml with the changes from the URL applied, and its prediction.

    Raises NoPrediction if that exceeds a limit: anyone who may see the page chooses the job.
    """
    tables: dict[str, dict[str, object]] = {
        name: dict(own) for name, own in structs.asdict(recorded).items()
    }
    asked: dict[str, object] = {
        key: number for key in (*SIZES, "chunks") if (number := chosen.parse_int(key)) is not None
    }
    for key in ("schedule", "recompute"):
        if (word := chosen.find_text(key)) not in (None, UNCHANGED):
            asked[key] = word
    for key, value in asked.items():
        own = tables.setdefault(_TABLE.get(key, "parallel"), {})
        own[key] = value
        for alias in _ALIASES.get(key, ()):
            own.pop(alias, None)
    for feature in KEY_FEATURES:
        if (word := chosen.find_text(feature.key)) in feature.list_choices():
            section, _, key = feature.key.partition(".")
            is_flag = word in ("true", "false")
            tables.setdefault(section, {})[key] = word == "true" if is_flag else word
    # Only an interleaved pipeline has chunks, of which it needs two.
    parallel = tables.setdefault("parallel", {})
    is_interleaved = parallel.get("schedule") == "interleaved" and parallel.get("pp") != 1
    if is_interleaved and asked.keys() & {"schedule", "pp"}:
        parallel["chunks"] = max(2, int(str(parallel.get("chunks", 1))))
    elif not is_interleaved and asked.keys() & {"schedule", "pp", "chunks"}:
        parallel.pop("chunks", None)
    if (preset := chosen.find_text("hardware")) not in (None, UNCHANGED):
        tables["hardware"] = {"preset": preset}
    try:
        job = decode_job(TomlTable(_WHERE, "", tables))
        wants_plan = chosen.find_text("plan") == "1" and job.parallel.world_size <= MAX_PLAN_RANKS
        answer = predict_in_process(tables, _WHERE, wants_plan)
        differs = tables != structs.asdict(recorded)
        return ChangedJob(job, answer.prediction, "", answer.plan, answer.plan_error, differs)
    except (DataError, UsageError) as error:
        return ChangedJob(error=str(error))


# Ranking of layouts for the same number of ranks.

MAX_PLAN_RANKS = 1_024


def build_plan(view: View, changed: ChangedJob, chosen: AddressQuery) -> list[Component]:
    """The ranking of layouts for the job's ranks, on request only: the search takes seconds."""
    job = changed.job
    if job is None or job.parallel.world_size > MAX_PLAN_RANKS:
        return []
    if chosen.find_text("plan") != "1":
        where = build_page_url(view.run_id, "model", **{**chosen.values, "plan": 1})
        link = build_link(f"Compare the layouts of {job.parallel.world_size:,} ranks", where)
        return [
            build_section("Plan", "fastest layouts that fit in memory, as predicted", html.P(link))
        ]
    if changed.plan is None:
        return [build_empty_card("No plan", changed.plan_error)]
    best = changed.plan.best
    rows = [
        _build_candidate_row(best, best),
        *(_build_candidate_row(one.candidate, best) for one in changed.plan.runners_up),
    ]
    heads = ("tp", "pp", "cp", "dp", "zero", "schedule", "microbatch", "recompute",
             "step", "slower by", "peak", "MFU")  # fmt: skip
    note = f"best layout per split of {job.parallel.world_size:,} ranks"
    return [build_section("Plan", note, build_table(heads, rows))]


def _build_candidate_row(candidate: Candidate, best: Candidate) -> list[Cell]:
    layout = candidate.choice
    dp = layout.dp_replicate * layout.dp_shard
    counts = (layout.tp, layout.pp, layout.cp, dp, layout.zero)
    behind = candidate.step_ns / best.step_ns - 1
    return [
        *map(build_count_cell, counts),
        Cell(layout.schedule),
        build_count_cell(layout.micro_batch),
        Cell(layout.recompute),
        build_time_cell(candidate.step_ns),
        build_number_cell("best", 0.0, "ratio")
        if candidate is best
        else build_share_change_cell(behind),
        build_memory_cell(candidate.peak_bytes),
        Cell() if candidate.mfu is None else build_share_cell(candidate.mfu),
    ]


PAGE = RunPage("model", build_model_page, predicts=True)
