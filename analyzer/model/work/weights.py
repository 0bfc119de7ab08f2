"""The matrix products of one layer: how many weights a token meets on one tensor-parallel rank."""

from __future__ import annotations

from dataclasses import dataclass

from stepsplit.analyzer.model.spec.transformer import Experts, LatentAttention, Transformer


@dataclass(frozen=True, slots=True)
class Weights:
    """divided is a rank's part of what tensor parallelism divides, whole what it leaves whole."""

    divided: int
    whole: int = 0

    @property
    def total(self) -> int:
        return self.divided + self.whole

    def __add__(self, other: Weights) -> Weights:
        return Weights(self.divided + other.divided, self.whole + other.whole)


def share(count: int, ranks: int) -> int:
    """The largest part of count things that one of the ranks gets."""
    return -(-count // ranks)


def attention_weights(model: Transformer, tp: int = 1) -> Weights:
    """Projections of one layer's attention. Keys and values are copied where tp exceeds them."""
    if model.latent is not None:
        return _latent_weights(model, model.latent, tp)
    heads = 2 * share(model.heads, tp) + 2 * share(model.kv_heads, tp)
    return Weights(model.hidden * model.head_size * heads)


def _latent_weights(model: Transformer, latent: LatentAttention, tp: int) -> Weights:
    """Down projections are whole on every rank, what widens heads is divided."""
    heads, h = share(model.heads, tp), model.hidden
    down = h * (latent.query_rank + latent.kv_rank + latent.rope)
    queries = (latent.query_rank or h) * heads * (latent.nope + latent.rope)
    pairs = latent.kv_rank * heads * (latent.nope + latent.value)
    return Weights(queries + pairs + heads * latent.value * h, down)


def mlp_weights(model: Transformer, ffn: int, tp: int = 1) -> Weights:
    """Two products, three where gated."""
    return Weights((3 if model.gated else 2) * model.hidden * share(ffn, tp))


def routed_weights(model: Transformer, tp: int = 1) -> Weights:
    """What a token meets in a mixture of experts: router, shared expert and its top_k experts.

    With balanced routing a rank's part does not depend on how experts are spread: all tokens of
    its tensor-parallel group meet top_k experts, and tp ranks share that.
    """
    experts = of_experts(model)
    routed = share(experts.top_k * mlp_weights(model, experts.ffn).divided, tp)
    shared = mlp_weights(model, experts.shared_ffn, tp)
    return Weights(routed, model.hidden * experts.count) + shared


def of_experts(model: Transformer) -> Experts:
    """The model's experts, where the caller knows that it has some."""
    assert model.experts is not None, "an expert layer needs experts"
    return model.experts
