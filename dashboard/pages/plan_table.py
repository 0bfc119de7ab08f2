"""The ranking of layouts for as many GPUs as a job has."""

from __future__ import annotations

from dash import html
from dash.development.base_component import Component

from stepsplit.analyzer.errors import StepsplitError
from stepsplit.analyzer.model.config import Job
from stepsplit.analyzer.model.plan import plan
from stepsplit.analyzer.model.plan_space import Candidate
from stepsplit.analyzer.units import memory_size, signed_percent
from stepsplit.dashboard.pages.address import Chosen, page_url
from stepsplit.dashboard.pages.parts import (
    Cell,
    led,
    nothing,
    section,
    share_cell,
    table,
    time_cell,
)
from stepsplit.dashboard.pages.view import View

MOST_GPUS = 1_024


def plan_of(view: View, job: Job | None, chosen: Chosen) -> list[Component]:
    """The ranking of layouts of as many GPUs, when it is asked for: the search takes seconds."""
    if job is None or job.layout.world_size > MOST_GPUS:
        return []
    if chosen.text("plan") != "1":
        where = page_url(view.run_id, "model", **{**chosen.values, "plan": 1})
        asked = led(f"Rank the layouts of {job.layout.world_size:,} GPUs", where)
        return [section("Plan", "what fits and is fastest, by the model", html.P(asked))]
    try:
        found = plan(job, job.layout.world_size)
    except StepsplitError as error:
        return [nothing("No plan", str(error))]
    best = found.best
    rows = [_candidate(best, best), *(_candidate(one.candidate, best) for one in found.runners_up)]
    heads = ("tp", "pp", "cp", "dp", "zero", "schedule", "microbatch", "recompute",
             "step", "behind", "peak", "MFU")  # fmt: skip
    note = f"the best of each split of {job.layout.world_size:,} GPUs; stepsplit plan says why"
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
