"""Measured steps and peaks of Megatron-LM on one node of B200 -> the jobs behind them."""

from __future__ import annotations

from dataclasses import replace

from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.spec.layout import Layout
from stepsplit.analyzer.model.spec.presets import hardware, transformer
from stepsplit.analyzer.model.spec.recipe import Recipe
from stepsplit.analyzer.model.spec.transformer import Transformer
from stepsplit.analyzer.model.validate.jobs.case import Case, Family, llama
from stepsplit.analyzer.model.validate.records import Record

TABLE = "simumax_b200_measured"
MIXTURES = {"deepseekv2": "deepseek-v2", "deepseekv3": "deepseek-v3"}
DENSE_LAYERS = 1
"""The published launcher keeps the first layer dense, of whichever model it cuts."""


def simumax(row: Record) -> Case:
    """SimuMax docs/b200: bf16, fp32 gradients, distributed optimizer, nothing recomputed.

    Sequence parallelism with tensor parallelism, no dropout, no overlap, fused loss; context
    parallelism by all-to-all, the one kind that SimuMax models.
    """
    family: Family = "B200 experts" if row.known("experts") else "B200 dense"
    job = Job(_model(row), _layout(row), _recipe(row), hardware("b200-sxm"))
    return Case(row.table, row.id, family, job, row.number("real_iter_ms") * 1e6)


def _layout(row: Record) -> Layout:
    return Layout(
        tp=row.count("tp"),
        pp=row.count("pp"),
        dp_replicate=row.count("dp"),
        cp=row.count("cp"),
        ep=row.count("ep"),
        sequence_parallel=row.count("tp") > 1,
        zero=1,
        context_kind="ulysses",
    )


def _recipe(row: Record) -> Recipe:
    sequences = row.count("micro_batch") * row.count("num_microbatches") * row.count("dp")
    return Recipe(row.count("seq"), row.count("micro_batch"), sequences)


def _model(row: Record) -> Transformer:
    return _mixture(row) if row.known("experts") else llama(row)


def _mixture(row: Record) -> Transformer:
    model = transformer(row.choice("model_family", MIXTURES))
    assert model.experts is not None, f"{model.name} has experts"
    experts = replace(model.experts, dense_layers=DENSE_LAYERS)
    return replace(model, layers=row.count("layers"), experts=experts)
