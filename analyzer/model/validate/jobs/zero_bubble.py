"""Pipelines of the Zero Bubble paper -> the jobs behind them."""

from __future__ import annotations

from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.spec.layout import Layout, Schedule
from stepsplit.analyzer.model.spec.presets import hardware
from stepsplit.analyzer.model.spec.recipe import Recipe
from stepsplit.analyzer.model.validate.jobs.case import gpt
from stepsplit.analyzer.model.validate.records import Record

SCHEDULES: dict[str, Schedule] = {"1F1B": "1f1b", "ZB-1p": "zb-h1", "ZB-2p": "zb-h2"}
"""Interleaved is left out: its 24 chunks hold one layer each, and the ends none."""
VOCAB = 50257


def zero_bubble(row: Record) -> Job:
    """Qi et al., tables 3 and 4: Megatron-LM of 2023 on A100, one rank a stage, nothing recomputed.

    The first and the last stage have one layer fewer. The paper names no vocabulary: GPT-2's.
    """
    stages, layers = row.count("pp"), row.count("layers")
    each = (layers + 2) // stages
    layout = Layout(
        pp=stages,
        schedule=row.choice("schedule", SCHEDULES),
        layers_per_stage=(each - 1, *[each] * (stages - 2), each - 1),
    )
    sequences = row.count("micro_batch") * row.count("num_microbatches")
    recipe = Recipe(
        row.count("seq"), row.count("micro_batch"), sequences, dtype="fp16",
        activation_dtype="fp16", flash_attention=False, fused_loss=False, dropout=True,
    )  # fmt: skip
    model = gpt(layers, row.count("hidden"), row.count("heads"), VOCAB, row.count("seq"))
    return Job(model, layout, recipe, hardware("a100-sxm-80gb", "roce-200", 8))
