"""A stage's predicted compute as its constants multiply it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from stepsplit.analyzer.model.comm_ops import rounds
from stepsplit.analyzer.model.config import Efficiency, Job, Stage, stages_of
from stepsplit.analyzer.model.layer_time import (
    Product,
    Speed,
    attention_products,
    expert_products,
    head_product,
    launches,
    mlp_products,
    speed_of,
)
from stepsplit.analyzer.model.parameters import StageParameters, stage_parameters
from stepsplit.analyzer.model.step_time import stage_time

_FREE = Speed(math.inf, math.inf, math.inf, math.inf, 0.0)


@dataclass(frozen=True, slots=True)
class Parts:
    """One step of a stage's rank: compute = products / gemm + core / attention + (product_moves +
    other_moves) / memory + (product_launches + other_launches) x launch_ns; times in ns at the
    peaks. host counts launches of a layer's forward.
    """

    products: float
    core: float
    product_moves: float
    other_moves: float
    product_launches: float
    other_launches: float
    host: float


def parts_of(job: Job) -> tuple[Parts, ...]:
    """The parts of every stage, in order."""
    held = stage_parameters(job)
    both = zip(stages_of(job), held, strict=True)
    return tuple(_parts(job, stage, parameters) for stage, parameters in both)


def _parts(job: Job, stage: Stage, held: StageParameters) -> Parts:
    peak = speed_of(_at_peak(job))
    work = replace(
        _FREE,
        linear_flops_per_ns=peak.linear_flops_per_ns,
        head_flops_per_ns=peak.head_flops_per_ns,
        tile=peak.tile,
        multiprocessors=peak.multiprocessors,
    )
    core = replace(_FREE, attention_flops_per_ns=peak.attention_flops_per_ns)
    moves, starts = replace(_FREE, bytes_per_ns=peak.bytes_per_ns), replace(_FREE, launch_ns=1.0)
    product_moves, product_starts = (_products_ns(job, stage, each) for each in (moves, starts))
    return Parts(
        products=_compute_ns(job, stage, held, work),
        core=_compute_ns(job, stage, held, core),
        product_moves=product_moves,
        other_moves=_compute_ns(job, stage, held, moves) - product_moves,
        product_launches=product_starts,
        other_launches=_compute_ns(job, stage, held, starts) - product_starts,
        host=rounds(job) * sum(_launches(job, chunk.layers) for chunk in stage.chunks),
    )


def _at_peak(job: Job) -> Job:
    known = job.hardware.efficiency
    peak = Efficiency(1.0, 1.0, 1.0, 1.0, 0.0, tile=known.tile)
    return replace(job, hardware=replace(job.hardware, efficiency=peak))


def _compute_ns(job: Job, stage: Stage, held: StageParameters, speed: Speed) -> float:
    found = stage_time(job, speed, stage, held, ())
    return rounds(job) * found.compute_ns + found.optimizer_ns


def _products_ns(job: Job, stage: Stage, speed: Speed) -> float:
    """The matrix products alone, recomputed ones again."""
    again = job.recipe.recompute in ("full", "every", "sqrt")
    dense = (*attention_products(job), *mlp_products(job, job.model.ffn))
    found = stage.dense_layers * _passes_ns(dense, speed, again)
    if job.model.experts is not None:
        mixture = (*attention_products(job), *expert_products(job, job.model.experts))
        found += stage.expert_layers * _passes_ns(mixture, speed, again)
    if stage.head:
        found += _passes_ns((head_product(job),), speed, False)
    return rounds(job) * found


def _passes_ns(products: tuple[Product, ...], speed: Speed, again: bool) -> float:
    return sum(
        (2 if again else 1) * one.forward_ns(speed) + one.input_ns(speed) + one.weight_ns(speed)
        for one in products
    )


def _launches(job: Job, layers: int) -> float:
    unit = replace(job.hardware.efficiency, host_ns=1.0)
    found = launches(replace(job, hardware=replace(job.hardware, efficiency=unit)), layers)
    return found.forward_ns + found.input_ns
