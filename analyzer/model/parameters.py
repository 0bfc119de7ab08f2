"""Parameter counts of a model, of a layer, per token and per rank."""

from __future__ import annotations

from dataclasses import dataclass, field

from stepsplit.analyzer.model.config import (
    Experts,
    JobConfig,
    LatentAttention,
    ModelConfig,
    StageConfig,
    map_unique_stages,
)
from stepsplit.analyzer.model.formulas import Formula

# Parameters of a model, active parameters of a token, and parameters of each rank.

TOTAL = Formula(
    "parameters.total",
    "sum of layers + V h (embedding) + positions h + V h (head, unless tied) + final norm;"
    " GPT: 12 L h^2 (1 + 13/(12h) + (V + s)/(12 L h))",
    "Narayanan et al., SC'21, arXiv:2104.04473, eq. 2",
)

STAGE = Formula(
    "parameters.stage",
    "(attention + MLP)/t, experts/(e e_t), norms and row-parallel biases replicated;"
    " first stage + V'h/t, last stage + V'h/t",
    "Shoeybi et al., arXiv:1909.08053, section 3; Narayanan et al., SC'21, arXiv:2104.04473",
)


@dataclass(frozen=True, slots=True)
class StageParameters:
    """Parameters of one rank of a pipeline stage, before sharding over data parallelism.

    dense counts all parameters that the dense data-parallel group reduces, including embedding,
    head and final_norm. experts are reduced in their own group (expert_dp). dense_layer and
    expert_layer are one layer of each kind, dense_layers and expert_layers their numbers.
    embedding includes learned positions. A tied head on another rank than the embedding is a copy
    of it; on the same rank it counts once, as embedding.
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
        """Parameters of the layers and the final norm that are replicated over tp."""
        count = self.final_norm + self.dense_layers * self.dense_layer.replicated
        if self.expert_layer is not None:
            count += self.expert_layers * self.expert_layer.replicated
        return count

    def move_to_stage(self, stage: int) -> StageParameters:
        """Returns the same parameters on another stage; dataclasses.replace is slower."""
        if self.stage == stage:
            return self
        return StageParameters(
            stage, self.dense, self.experts, self.embedding, self.head, self.final_norm,
            self.dense_layer, self.expert_layer, self.dense_layers, self.expert_layers,
            self.formulas,
        )  # fmt: skip

    @property
    def largest_layer(self) -> int:
        """Parameters of the larger kind of layer on the rank; 0 without layers."""
        dense = self.dense_layer.total if self.dense_layers else 0
        return max(dense, self.expert_layer.total if self.expert_layer else 0)


def count_parameters(model: ModelConfig, vocab: int | None = None) -> int:
    """Counts all parameters; vocab replaces the model's own if it is padded."""
    return _count_outside_layers(model, vocab) + _sum_dense(model) + _sum_experts(model)


def count_active_parameters(model: ModelConfig, vocab: int | None = None) -> int:
    """Counts the active parameters of a token: top_k of the experts and all of the rest."""
    if model.experts is None:
        return count_parameters(model, vocab)
    active_experts = model.experts.top_k * count_mlp_parameters(model, model.experts.ffn)
    return (
        _count_outside_layers(model, vocab)
        + _sum_dense(model)
        + model.expert_layers * active_experts
    )


def count_stage_parameters(job: JobConfig) -> tuple[StageParameters, ...]:
    """Counts the parameters of one rank of each pp coordinate."""
    layout, model = job.parallel, job.model
    dense = count_dense_layer(model, layout.tp)
    experts = (
        count_expert_layer(model, layout.tp, layout.ep, layout.expert_tp) if model.experts else None
    )
    params = map_unique_stages(job, lambda stage: _count_stage(job, stage, dense, experts))
    return tuple(each.move_to_stage(rank) for rank, each in enumerate(params))


def _count_stage(
    job: JobConfig, stage: StageConfig, dense: LayerParameters, experts: LayerParameters | None
) -> StageParameters:
    embedding, head = _count_embedding(job, stage), _count_head(job, stage)
    norm = count_norm_parameters(job.model) * sum(chunk.head for chunk in stage.chunks)
    mtp = stage.mtp_layers * count_mtp_parameters(job.model)
    in_layers = stage.dense_layers * dense.dense
    if experts is not None:
        in_layers += stage.expert_layers * experts.dense
    return StageParameters(
        stage=stage.index,
        dense=in_layers + embedding + head + norm + mtp,
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


def count_vocabulary_parameters(job: JobConfig) -> int:
    """Counts the embedding (or head) parameters of one tensor-parallel rank: V'h/t."""
    return divide_ceil(job.padded_vocab, job.parallel.vocab_split) * job.model.hidden


def count_mtp_parameters(model: ModelConfig) -> int:
    """Counts a module of multi-token prediction without its layer: a projection of two hidden
    states and three norms; embedding and head are the model's (DeepSeek-V3, section 2.2)."""
    return 2 * model.hidden**2 + 3 * count_norm_parameters(model)


def _count_embedding(job: JobConfig, stage: StageConfig) -> int:
    """Counts the embedding of a rank; learned positions are replicated over tp."""
    if not stage.embedding:
        return 0
    return count_vocabulary_parameters(job) + job.model.positions * job.model.hidden


def _count_head(job: JobConfig, stage: StageConfig) -> int:
    if not stage.head or (job.model.tied and stage.embedding):
        return 0
    return count_vocabulary_parameters(job)


def _count_outside_layers(model: ModelConfig, vocab: int | None) -> int:
    words = model.vocab if vocab is None else vocab
    copies = 1 if model.tied else 2
    return (copies * words + model.positions) * model.hidden + count_norm_parameters(model)


def _sum_dense(model: ModelConfig) -> int:
    moe = model.expert_layers
    count = (model.layers - moe) * count_dense_layer(model).dense
    return count + (moe * count_expert_layer(model).dense if moe else 0)


def _sum_experts(model: ModelConfig) -> int:
    if not model.expert_layers:
        return 0
    experts = require_experts(model)
    return model.expert_layers * experts.count * count_mlp_parameters(model, experts.ffn)


# Parameters of one layer, of the whole layer or of one tp and ep rank.

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
    """Parameters of one layer. mlp is the dense MLP, or the shared expert of a mixture.

    replicated is the part of dense that is replicated over tp: norms, router, compressed
    projections, and biases added after the all_reduce.
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
        """All parameters except the experts."""
        return self.attention + self.mlp + self.norms + self.router

    @property
    def total(self) -> int:
        return self.dense + self.experts


def count_dense_layer(model: ModelConfig, tp: int = 1) -> LayerParameters:
    """Counts the parameters of a dense layer on one of tp ranks."""
    attention, norms = count_attention_parameters(model, tp), 2 * count_norm_parameters(model)
    mlp = count_mlp_parameters(model, model.ffn, tp)
    replicated, formulas = norms + _count_replicated(model), _list_layer_formulas(model)
    return LayerParameters(attention, mlp, norms, 0, 0, replicated, formulas)


def count_expert_layer(
    model: ModelConfig, tp: int = 1, ep: int = 1, expert_tp: int = 1
) -> LayerParameters:
    """Counts the parameters of a mixture-of-experts layer on one rank."""
    experts = require_experts(model)
    attention, norms = count_attention_parameters(model, tp), 2 * count_norm_parameters(model)
    shared = count_mlp_parameters(model, experts.shared_ffn, tp) if experts.shared_ffn else 0
    router = model.hidden * experts.count
    own = divide_ceil(experts.count, ep) * count_mlp_parameters(model, experts.ffn, expert_tp)
    replicated = norms + router + _count_replicated(model)
    formulas = (*_list_layer_formulas(model), EXPERT_PARAMETERS)
    return LayerParameters(attention, shared, norms, router, own, replicated, formulas)


def _list_layer_formulas(model: ModelConfig) -> tuple[Formula, ...]:
    """Lists the formulas of attention, MLP and norms."""
    return (LAYER_PARAMETERS,) if model.latent is None else (LAYER_PARAMETERS, LATENT)


def count_attention_parameters(model: ModelConfig, tp: int = 1) -> int:
    """Counts the attention projections of a layer with biases and, if latent, inner norms."""
    count = count_attention_weights(model, tp).total
    if model.latent is not None:
        return count + model.latent.query_rank + model.latent.kv_rank
    if model.biases or model.qkv_biases:
        count += (
            divide_ceil(model.heads, tp) + 2 * divide_ceil(model.kv_heads, tp)
        ) * model.head_size
    return count + (model.hidden if model.biases else 0)


def count_mlp_parameters(model: ModelConfig, ffn: int, tp: int = 1) -> int:
    """Counts the weights and biases of an MLP: two products, three if gated."""
    biases = (2 if model.gated else 1) * divide_ceil(ffn, tp) + model.hidden if model.biases else 0
    return count_mlp_weights(model, ffn, tp).total + biases


def count_norm_parameters(model: ModelConfig) -> int:
    """Counts one norm: a scale, and a shift for layer norm."""
    return model.hidden * (1 if model.norm == "rms" else 2)


def _count_replicated(model: ModelConfig) -> int:
    """Counts what tp replicates without norms: output biases or compressed projections."""
    if model.latent is not None:
        inner = model.latent.query_rank + model.latent.kv_rank
        return count_attention_weights(model).whole + inner
    return 2 * model.hidden if model.biases else 0


# The GEMMs of one layer: the weights that one token is multiplied with on one tp rank.


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights on a tp rank: divided is its share of the sharded ones, whole the replicated."""

    divided: int
    whole: int = 0

    @property
    def total(self) -> int:
        return self.divided + self.whole

    def __add__(self, other: Weights) -> Weights:
        return Weights(self.divided + other.divided, self.whole + other.whole)


def divide_ceil(count: int, ranks: int) -> int:
    """Divides count over the ranks, rounding up: the largest share of a rank."""
    return -(-count // ranks)


def count_attention_weights(model: ModelConfig, tp: int = 1) -> Weights:
    """Counts attention projections. Key-value heads are replicated if tp exceeds their number."""
    if model.latent is not None:
        return _count_latent_weights(model, model.latent, tp)
    heads = 2 * divide_ceil(model.heads, tp) + 2 * divide_ceil(model.kv_heads, tp)
    return Weights(model.hidden * model.head_size * heads)


def _count_latent_weights(model: ModelConfig, latent: LatentAttention, tp: int) -> Weights:
    """Counts MLA projections: down projections are replicated over tp, up projections sharded."""
    heads, h = divide_ceil(model.heads, tp), model.hidden
    down = h * (latent.query_rank + latent.kv_rank + latent.rope)
    queries = (latent.query_rank or h) * heads * (latent.nope + latent.rope)
    pairs = latent.kv_rank * heads * (latent.nope + latent.value)
    return Weights(queries + pairs + heads * latent.value * h, down)


def count_mlp_weights(model: ModelConfig, ffn: int, tp: int = 1) -> Weights:
    """Counts the weights of an MLP: two products, three if gated."""
    return Weights((3 if model.gated else 2) * model.hidden * divide_ceil(ffn, tp))


def count_routed_weights(model: ModelConfig, tp: int = 1) -> Weights:
    """Counts the active weights of a token in a mixture: router, shared and top_k experts.

    With balanced routing a rank's share does not depend on the placement of the experts: all
    tokens of its tp group pass top_k experts, and the tp ranks share that work.
    """
    experts = require_experts(model)
    routed = divide_ceil(experts.top_k * count_mlp_weights(model, experts.ffn).divided, tp)
    shared = count_mlp_weights(model, experts.shared_ffn, tp)
    return Weights(routed, model.hidden * experts.count) + shared


def require_experts(model: ModelConfig) -> Experts:
    """Returns the experts of a model that must have some."""
    assert model.experts is not None, "an expert layer needs experts"
    return model.experts
