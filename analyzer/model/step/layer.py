"""How long one rank computes one layer of one microbatch."""

from __future__ import annotations

from dataclasses import dataclass

from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.spec.transformer import Experts
from stepsplit.analyzer.model.step.products import (
    Product,
    attention_products,
    expert_products,
    mlp_products,
    routed_tokens,
)
from stepsplit.analyzer.model.step.ring import pieces_ns
from stepsplit.analyzer.model.step.speed import BACKWARD_ATTENTION, Speed
from stepsplit.analyzer.model.step.traffic import Traffic, traffic_of
from stepsplit.analyzer.model.work.weights import share

FUSED_BACKWARD = 2.5
"""FLOPs of fused attention's backward over its forward: it forms the scores again (Dao, 2022)."""
ELEMENTWISE_KERNELS = 6
"""Kernels a layer that only move data: two norms, two residuals, activation, rotation."""


@dataclass(frozen=True, slots=True)
class Pass:
    """Compute of one microbatch in ns: forward, gradient of the input, gradient of the weights.

    core_ns is attention's core, a part of the forward.
    """

    forward_ns: float
    input_ns: float
    weight_ns: float
    core_ns: float = 0.0

    def __add__(self, other: Pass) -> Pass:
        return Pass(
            self.forward_ns + other.forward_ns, self.input_ns + other.input_ns,
            self.weight_ns + other.weight_ns, self.core_ns + other.core_ns,
        )  # fmt: skip

    def __mul__(self, times: float) -> Pass:
        return Pass(
            self.forward_ns * times, self.input_ns * times,
            self.weight_ns * times, self.core_ns * times,
        )  # fmt: skip


def dense_layer(job: Job, speed: Speed) -> Pass:
    """A layer with an MLP of the model's own width."""
    products = (*attention_products(job), *mlp_products(job, job.model.ffn))
    mlp_width = share(job.model.ffn, job.layout.tp)
    return _layer(job, speed, products, job.tokens * mlp_width)


def expert_layer(job: Job, speed: Speed, experts: Experts) -> Pass:
    """A mixture-of-experts layer, every expert with its fair share of the tokens."""
    products = (*attention_products(job), *expert_products(job, experts))
    routed = routed_tokens(job, experts)
    wide = routed * share(experts.ffn, job.layout.expert_tp)
    wide += job.tokens * share(experts.shared_ffn, job.layout.tp)
    moved = speed.moved_ns(4 * routed * job.model.hidden * job.recipe.activation_bytes, 4)
    return _layer(job, speed, products, wide) + Pass(moved, moved, 0.0)


def _layer(job: Job, speed: Speed, products: tuple[Product, ...], activations: float) -> Pass:
    traffic = traffic_of(job)
    return (
        _linear(speed, products, traffic)
        + _core(job, speed, traffic)
        + _elementwise(job, speed, traffic, activations)
    )


def _linear(speed: Speed, products: tuple[Product, ...], traffic: Traffic) -> Pass:
    weights = sum(product.parameters for product in products)
    return Pass(
        sum(product.forward_ns(speed) for product in products),
        sum(product.input_ns(speed) for product in products),
        sum(product.weight_ns(speed) for product in products)
        + speed.moved_ns(weights * traffic.accumulate_bytes),
    )


def _core(job: Job, speed: Speed, traffic: Traffic) -> Pass:
    """Scores, softmax and weighted values; a causal kernel skips half of a fused one's work."""
    heads = share(job.model.heads, job.layout.tp)
    scores = float(job.tokens) * job.recipe.seq_len * heads
    work = 2 * scores * _head_width(job)
    if job.recipe.flash_attention:
        forward = work / 2 / speed.attention_flops_per_ns + speed.launch_ns
        backward = forward * FUSED_BACKWARD / BACKWARD_ATTENTION
        merged, merged_back = pieces_ns(job, speed)
        return Pass(forward + merged, backward + merged_back, 0.0, forward)
    size = job.recipe.activation_bytes
    softmax = traffic.elementwise * ((5 if job.recipe.dropout else 4) * size + job.recipe.dropout)
    forward = work / speed.attention_flops_per_ns + speed.moved_ns(scores * softmax, 5)
    backward = 2 * work / speed.attention_flops_per_ns + speed.moved_ns(
        scores * (softmax + 2 * size), 6
    )
    return Pass(forward, backward, 0.0, forward)


def _head_width(job: Job) -> int:
    """Width of a head's query and value together."""
    latent = job.model.latent
    if latent is None:
        return 2 * job.model.head_size
    return latent.nope + latent.rope + latent.value


def _elementwise(job: Job, speed: Speed, traffic: Traffic, activations: float) -> Pass:
    """Norms, residuals with dropout, rotation and activation: bytes read and written."""
    model, size = job.model, job.recipe.activation_bytes
    whole = job.tokens * model.hidden / job.layout.sequence_split
    rotated = 0 if model.positions else 2 * _rotated(job)
    gates = 2 if model.gated else 1
    forward = 2 * 5 * whole + (gates + 1) * activations + rotated
    backward = 2 * 6 * whole + (2 * gates + 1) * activations + rotated
    masks = 2 * whole * job.recipe.dropout
    kernels = ELEMENTWISE_KERNELS
    return Pass(
        speed.moved_ns((forward * size + masks) * traffic.elementwise, kernels),
        speed.moved_ns((backward * size + masks) * traffic.elementwise, kernels + 2),
        0.0,
    )


def _rotated(job: Job) -> float:
    """Numbers of queries and keys that rotary positions turn."""
    model, heads = job.model, share(job.model.heads, job.layout.tp)
    if model.latent is not None:
        return job.tokens * (heads + 1) * model.latent.rope
    return job.tokens * (heads + share(model.kv_heads, job.layout.tp)) * model.head_size
