"""Nanotron's benchmark of best configurations -> the jobs behind them."""

from __future__ import annotations

from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.spec.layout import Layout
from stepsplit.analyzer.model.spec.presets import hardware
from stepsplit.analyzer.model.spec.recipe import Recipe
from stepsplit.analyzer.model.validate.jobs.case import llama
from stepsplit.analyzer.model.validate.records import Record


def nanotron(row: Record) -> Job:
    """Llama shapes in bf16 on H100, sequence parallelism, 1F1B, nothing recomputed."""
    layout = Layout(
        tp=row.count("tp"),
        pp=row.count("pp"),
        dp_replicate=row.count("dp"),
        zero=row.count("zero_stage"),
        sequence_parallel=row.count("tp") > 1,
    )
    recipe = Recipe(
        row.count("seq"), row.count("micro_batch"), row.count("global_batch"),
        framework="nanotron", fused_loss=False,
    )  # fmt: skip
    model = llama(row, row.text("tied_embeddings") == "1")
    return Job(model, layout, recipe, hardware("h100-sxm", "efa-p5", 8))
