"""Nanotron's benchmark of best configurations -> the jobs behind them."""

from __future__ import annotations

from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.spec.layout import Layout
from stepsplit.analyzer.model.spec.presets import hardware
from stepsplit.analyzer.model.spec.recipe import Recipe
from stepsplit.analyzer.model.spec.transformer import Transformer
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
    return Job(_model(row), layout, recipe, hardware("h100-sxm", "efa-p5", 8))


def _model(row: Record) -> Transformer:
    return Transformer(
        layers=row.count("layers"),
        hidden=row.count("hidden"),
        heads=row.count("heads"),
        kv_heads=row.count("kv_heads"),
        head_size=row.count("hidden") // row.count("heads"),
        ffn=row.count("ffn"),
        vocab=row.count("vocab"),
        gated=True,
        tied=row.text("tied_embeddings") == "1",
        norm="rms",
        biases=False,
    )
