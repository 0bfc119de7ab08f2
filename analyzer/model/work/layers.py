"""The parameters of one layer, whole or as one rank of tensor and expert parallelism holds it."""

from __future__ import annotations

from dataclasses import dataclass

from stepsplit.analyzer.model.formula import Formula
from stepsplit.analyzer.model.spec.transformer import Transformer
from stepsplit.analyzer.model.work.weights import (
    attention_weights,
    mlp_weights,
    of_experts,
    share,
)

LAYER = Formula(
    "parameters.layer",
    "h d (2a + 2k) + G h f + norms + biases; GPT: 12 h^2 + 13 h"
    " (a heads, k key-value heads of size d, G = 3 gated or 2)",
    "Narayanan et al., SC'21, arXiv:2104.04473, eq. 2; Ainslie et al., arXiv:2305.13245;"
    " Shazeer, arXiv:2002.05202",
)
LATENT = Formula(
    "parameters.latent_attention",
    "h r_q + r_q a (d_n + d_r) + h (r_kv + d_r) + r_kv a (d_n + d_v) + a d_v h",
    "DeepSeek-V2, arXiv:2405.04434, section 2.1",
)
EXPERTS = Formula(
    "parameters.experts",
    "E G h f_e + h E (router) + G h f_s (shared)",
    "Fedus et al., arXiv:2101.03961; DeepSeek-V3, arXiv:2412.19437, section 2.1.2",
)


@dataclass(frozen=True, slots=True)
class LayerParameters:
    """Counts of one layer. mlp is what every token passes (the shared expert of a mixture).

    replicated is the part of dense that every tensor-parallel rank holds whole: norms, router,
    compressed projections and biases added after the ranks' results are summed.
    """

    attention: int
    mlp: int
    norms: int
    router: int
    experts: int
    replicated: int

    @property
    def dense(self) -> int:
        """All but the experts."""
        return self.attention + self.mlp + self.norms + self.router

    @property
    def total(self) -> int:
        return self.dense + self.experts


def dense_layer(model: Transformer, tp: int = 1) -> LayerParameters:
    """A layer with the model's own MLP, as one of tp ranks holds it."""
    attention, norms = attention_parameters(model, tp), 2 * norm_parameters(model)
    mlp = mlp_parameters(model, model.ffn, tp)
    return LayerParameters(attention, mlp, norms, 0, 0, norms + _replicated(model))


def expert_layer(
    model: Transformer, tp: int = 1, ep: int = 1, expert_tp: int = 1
) -> LayerParameters:
    """A mixture-of-experts layer on one rank; the model must have experts."""
    experts = of_experts(model)
    attention, norms = attention_parameters(model, tp), 2 * norm_parameters(model)
    shared = mlp_parameters(model, experts.shared_ffn, tp) if experts.shared_ffn else 0
    router = model.hidden * experts.count
    own = share(experts.count, ep) * mlp_parameters(model, experts.ffn, expert_tp)
    replicated = norms + router + _replicated(model)
    return LayerParameters(attention, shared, norms, router, own, replicated)


def attention_parameters(model: Transformer, tp: int = 1) -> int:
    """Projections of one layer's attention with their biases and, if latent, inner norms."""
    count = attention_weights(model, tp).total
    if model.latent is not None:
        return count + model.latent.query_rank + model.latent.kv_rank
    if model.biases or model.qkv_biases:
        count += (share(model.heads, tp) + 2 * share(model.kv_heads, tp)) * model.head_size
    return count + (model.hidden if model.biases else 0)


def mlp_parameters(model: Transformer, ffn: int, tp: int = 1) -> int:
    """Two products, three where gated, with their biases."""
    biases = (2 if model.gated else 1) * share(ffn, tp) + model.hidden if model.biases else 0
    return mlp_weights(model, ffn, tp).total + biases


def norm_parameters(model: Transformer) -> int:
    """One norm: a scale, and with layer norm a shift."""
    return model.hidden * (1 if model.norm == "rms" else 2)


def _replicated(model: Transformer) -> int:
    """Of a layer's two parts, without norms: the biases of both outputs or what is compressed."""
    if model.latent is not None:
        inner = model.latent.query_rank + model.latent.kv_rank
        return attention_weights(model).whole + inner
    return 2 * model.hidden if model.biases else 0
