"""Parameter counts: of a model, of a layer, per token, and per rank."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from stepsplit.analyzer.model.config import (
    Experts,
    JobConfig,
    LatentAttention,
    ModelConfig,
    StageConfig,
    each_once,
)
from stepsplit.analyzer.model.formulas import Formula

# How many parameters a model has, how many a token uses, how many each rank holds.

TOTAL = Formula(
    "parameters.total",
    "sum of layers + V h (embedding) + positions h + V h (head, unless tied) + final norm;"
    " GPT: 12 L h^2 (1 + 13/(12h) + (V + s)/(12 L h))",
    "Narayanan et al., SC'21, arXiv:2104.04473, eq. 2",
)

STAGE = Formula(
    "parameters.stage",
    "(attention + MLP)/t, experts/(e e_t), norms and row-parallel biases whole;"
    " first stage + V'h/t, last stage + V'h/t",
    "Shoeybi et al., arXiv:1909.08053, section 3; Narayanan et al., SC'21, arXiv:2104.04473",
)


@dataclass(frozen=True, slots=True)
class StageParameters:
    """What one rank of a pipeline stage holds, before any sharding over data parallelism.

    dense counts all parameters whose gradients the dense data-parallel group sums: embedding,
    head and final_norm are among them. experts have a group of their own (expert_dp).
    dense_layer and expert_layer are one layer of each kind, dense_layers and expert_layers how
    many of them there are. embedding holds learned positions too; a tied head that lies on another
    rank than the embedding is a copy of it, on the same rank it counts once, as embedding.
    """

    stage: int
    dense: int
    experts: int
    embedding: int
    head: int
    final_norm: int
    dense_layer: LayerParameters
    expert_layer: LayerParameters | None
    dense_layers: int
    expert_layers: int
    formulas: tuple[Formula, ...] = field(default=(), compare=False, repr=False)

    @property
    def total(self) -> int:
        return self.dense + self.experts

    @property
    def replicated(self) -> int:
        """Of the layers and the final norm, what every tensor-parallel rank holds whole."""
        count = self.final_norm + self.dense_layers * self.dense_layer.replicated
        if self.expert_layer is not None:
            count += self.expert_layers * self.expert_layer.replicated
        return count

    @property
    def largest_layer(self) -> int:
        """All parameters of the larger kind of layer that the rank holds; 0 without layers."""
        dense = self.dense_layer.total if self.dense_layers else 0
        return max(dense, self.expert_layer.total if self.expert_layer else 0)


def total_parameters(model: ModelConfig, vocab: int | None = None) -> int:
    """All parameters; vocab replaces the model's own where it is padded."""
    return _outside_layers(model, vocab) + _dense_sum(model) + _experts_sum(model)


def active_parameters(model: ModelConfig, vocab: int | None = None) -> int:
    """The parameters that one token passes: top_k of the experts, all of the rest."""
    if model.experts is None:
        return total_parameters(model, vocab)
    used = model.experts.top_k * mlp_parameters(model, model.experts.ffn)
    return _outside_layers(model, vocab) + _dense_sum(model) + model.expert_layers * used


def stage_parameters(job: JobConfig) -> tuple[StageParameters, ...]:
    """One entry a pp coordinate: the parameters of one of its ranks."""
    layout, model = job.parallel, job.model
    dense = dense_layer(model, layout.tp)
    experts = expert_layer(model, layout.tp, layout.ep, layout.expert_tp) if model.experts else None
    held = each_once(job, lambda stage: _stage(job, stage, dense, experts))
    return tuple(
        each if each.stage == rank else replace(each, stage=rank) for rank, each in enumerate(held)
    )


def _stage(
    job: JobConfig, stage: StageConfig, dense: LayerParameters, experts: LayerParameters | None
) -> StageParameters:
    embedding, head = _embedding(job, stage), _head(job, stage)
    norm = norm_parameters(job.model) * sum(chunk.head for chunk in stage.chunks)
    in_layers = stage.dense_layers * dense.dense
    if experts is not None:
        in_layers += stage.expert_layers * experts.dense
    return StageParameters(
        stage=stage.index,
        dense=in_layers + embedding + head + norm,
        experts=stage.expert_layers * experts.experts if experts is not None else 0,
        embedding=embedding,
        head=head,
        final_norm=norm,
        dense_layer=dense,
        expert_layer=experts if stage.expert_layers else None,
        dense_layers=stage.dense_layers,
        expert_layers=stage.expert_layers,
        formulas=(STAGE, *(dense if experts is None else experts).formulas),
    )


def vocabulary_share(job: JobConfig) -> int:
    """The embedding, or the head, of one tensor-parallel rank: V'h/t."""
    return share(job.padded_vocab, job.parallel.vocab_split) * job.model.hidden


def _embedding(job: JobConfig, stage: StageConfig) -> int:
    """Learned positions are whole on every tensor-parallel rank."""
    if not stage.embedding:
        return 0
    return vocabulary_share(job) + job.model.positions * job.model.hidden


def _head(job: JobConfig, stage: StageConfig) -> int:
    if not stage.head or (job.model.tied and stage.embedding):
        return 0
    return vocabulary_share(job)


def _outside_layers(model: ModelConfig, vocab: int | None) -> int:
    words = model.vocab if vocab is None else vocab
    copies = 1 if model.tied else 2
    return (copies * words + model.positions) * model.hidden + norm_parameters(model)


def _dense_sum(model: ModelConfig) -> int:
    moe = model.expert_layers
    count = (model.layers - moe) * dense_layer(model).dense
    return count + (moe * expert_layer(model).dense if moe else 0)


def _experts_sum(model: ModelConfig) -> int:
    if not model.expert_layers:
        return 0
    experts = of_experts(model)
    return model.expert_layers * experts.count * mlp_parameters(model, experts.ffn)


# The parameters of one layer, whole or as one rank of tensor and expert parallelism holds it.

LAYER_PARAMETERS = Formula(
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

EXPERT_PARAMETERS = Formula(
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
    formulas: tuple[Formula, ...] = field(default=(), compare=False, repr=False)

    @property
    def dense(self) -> int:
        """All but the experts."""
        return self.attention + self.mlp + self.norms + self.router

    @property
    def total(self) -> int:
        return self.dense + self.experts


def dense_layer(model: ModelConfig, tp: int = 1) -> LayerParameters:
    """A layer with the model's own MLP, as one of tp ranks holds it."""
    attention, norms = attention_parameters(model, tp), 2 * norm_parameters(model)
    mlp = mlp_parameters(model, model.ffn, tp)
    replicated, formulas = norms + _replicated(model), _layer_formulas(model)
    return LayerParameters(attention, mlp, norms, 0, 0, replicated, formulas)


def expert_layer(
    model: ModelConfig, tp: int = 1, ep: int = 1, expert_tp: int = 1
) -> LayerParameters:
    """A mixture-of-experts layer on one rank; the model must have experts."""
    experts = of_experts(model)
    attention, norms = attention_parameters(model, tp), 2 * norm_parameters(model)
    shared = mlp_parameters(model, experts.shared_ffn, tp) if experts.shared_ffn else 0
    router = model.hidden * experts.count
    own = share(experts.count, ep) * mlp_parameters(model, experts.ffn, expert_tp)
    replicated = norms + router + _replicated(model)
    formulas = (*_layer_formulas(model), EXPERT_PARAMETERS)
    return LayerParameters(attention, shared, norms, router, own, replicated, formulas)


def _layer_formulas(model: ModelConfig) -> tuple[Formula, ...]:
    """What attention, MLP and norms are counted by."""
    return (LAYER_PARAMETERS,) if model.latent is None else (LAYER_PARAMETERS, LATENT)


def attention_parameters(model: ModelConfig, tp: int = 1) -> int:
    """Projections of one layer's attention with their biases and, if latent, inner norms."""
    count = attention_weights(model, tp).total
    if model.latent is not None:
        return count + model.latent.query_rank + model.latent.kv_rank
    if model.biases or model.qkv_biases:
        count += (share(model.heads, tp) + 2 * share(model.kv_heads, tp)) * model.head_size
    return count + (model.hidden if model.biases else 0)


def mlp_parameters(model: ModelConfig, ffn: int, tp: int = 1) -> int:
    """Two products, three where gated, with their biases."""
    biases = (2 if model.gated else 1) * share(ffn, tp) + model.hidden if model.biases else 0
    return mlp_weights(model, ffn, tp).total + biases


def norm_parameters(model: ModelConfig) -> int:
    """One norm: a scale, and with layer norm a shift."""
    return model.hidden * (1 if model.norm == "rms" else 2)


def _replicated(model: ModelConfig) -> int:
    """Of a layer's two parts, without norms: the biases of both outputs or what is compressed."""
    if model.latent is not None:
        inner = model.latent.query_rank + model.latent.kv_rank
        return attention_weights(model).whole + inner
    return 2 * model.hidden if model.biases else 0


# The matrix products of one layer: how many weights a token meets on one tensor-parallel rank.


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


def attention_weights(model: ModelConfig, tp: int = 1) -> Weights:
    """Projections of one layer's attention. Keys and values are copied where tp exceeds them."""
    if model.latent is not None:
        return _latent_weights(model, model.latent, tp)
    heads = 2 * share(model.heads, tp) + 2 * share(model.kv_heads, tp)
    return Weights(model.hidden * model.head_size * heads)


def _latent_weights(model: ModelConfig, latent: LatentAttention, tp: int) -> Weights:
    """Down projections are whole on every rank, what widens heads is divided."""
    heads, h = share(model.heads, tp), model.hidden
    down = h * (latent.query_rank + latent.kv_rank + latent.rope)
    queries = (latent.query_rank or h) * heads * (latent.nope + latent.rope)
    pairs = latent.kv_rank * heads * (latent.nope + latent.value)
    return Weights(queries + pairs + heads * latent.value * h, down)


def mlp_weights(model: ModelConfig, ffn: int, tp: int = 1) -> Weights:
    """Two products, three where gated."""
    return Weights((3 if model.gated else 2) * model.hidden * share(ffn, tp))


def routed_weights(model: ModelConfig, tp: int = 1) -> Weights:
    """What a token meets in a mixture of experts: router, shared expert and its top_k experts.

    With balanced routing a rank's part does not depend on how experts are spread: all tokens of
    its tensor-parallel group meet top_k experts, and tp ranks share that.
    """
    experts = of_experts(model)
    routed = share(experts.top_k * mlp_weights(model, experts.ffn).divided, tp)
    shared = mlp_weights(model, experts.shared_ffn, tp)
    return Weights(routed, model.hidden * experts.count) + shared


def of_experts(model: ModelConfig) -> Experts:
    """The model's experts, where the caller knows that it has some."""
    assert model.experts is not None, "an expert layer needs experts"
    return model.experts
