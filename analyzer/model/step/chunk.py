"""How long one rank computes one model stage for one microbatch, recomputation included."""

from __future__ import annotations

from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.spec.stages import Chunk
from stepsplit.analyzer.model.step.layer import Pass, dense_layer, expert_layer
from stepsplit.analyzer.model.step.products import head_product
from stepsplit.analyzer.model.step.speed import Speed
from stepsplit.analyzer.model.step.traffic import traffic_of

LOSS_FORWARD_BYTES = 8
LOSS_BACKWARD_BYTES = 6
"""Bytes moved a logit: the loss reads and writes it in fp32, its backward reads and writes again
in the training dtype."""


def chunk_passes(job: Job, speed: Speed, chunks: tuple[Chunk, ...]) -> tuple[Pass, ...]:
    """The compute of each chunk, in order."""
    dense = dense_layer(job, speed)
    experts = None if job.model.experts is None else expert_layer(job, speed, job.model.experts)
    found = []
    for chunk in chunks:
        layers = dense * chunk.dense_layers
        if experts is not None:
            layers += experts * chunk.expert_layers
        found.append(_recomputed(job, layers) + _ends(job, speed, chunk))
    return tuple(found)


def _recomputed(job: Job, layers: Pass) -> Pass:
    """Every layer between two kept inputs runs its forward again, however far apart they are."""
    match job.recipe.recompute:
        case "none":
            return layers
        case "selective":
            return layers + Pass(0.0, _selected_ns(job, layers), 0.0)
    return layers + Pass(0.0, layers.forward_ns, 0.0)


def _selected_ns(job: Job, layers: Pass) -> float:
    """Attention's core, of which fused attention keeps nothing; torchtitan's policy repeats every
    second product instead, and what is computed between them."""
    if job.recipe.framework == "fsdp2":
        return (layers.forward_ns - layers.core_ns) / 2
    return 0.0 if job.recipe.flash_attention else layers.core_ns


def _ends(job: Job, speed: Speed, chunk: Chunk) -> Pass:
    """Embedding before the layers, head and loss behind them."""
    nothing = Pass(0.0, 0.0, 0.0)
    found = nothing
    if chunk.embedding:
        copied = speed.moved_ns(3 * job.tokens * job.model.hidden * job.recipe.activation_bytes, 2)
        found += Pass(copied, 0.0, copied)
    return found + (_head(job, speed) if chunk.head else nothing)


def _head(job: Job, speed: Speed) -> Pass:
    product, wide = head_product(job), speed.of_head
    logits = product.rows * product.columns
    gradients = product.parameters * traffic_of(job).accumulate_bytes
    return Pass(
        product.forward_ns(wide) + speed.moved_ns(logits * LOSS_FORWARD_BYTES, 4),
        product.input_ns(wide) + speed.moved_ns(logits * LOSS_BACKWARD_BYTES, 2),
        product.weight_ns(wide) + speed.moved_ns(gradients),
    )
