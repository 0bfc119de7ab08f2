"""Parameter counts of a model, of a layer, per token and per rank, and the FLOPs that follow."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

from stepsplit.analyzer.model.config import (
    Experts,
    JobConfig,
    LatentAttention,
    ModelConfig,
    ParallelConfig,
)
from stepsplit.analyzer.model.formulas import Formula
from stepsplit.analyzer.model.rank_layout import StageConfig, count_rerun_layers, map_unique_stages

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


def count_active_parameters(model: ModelConfig) -> int:
    """Counts the active parameters of a token: top_k of the experts and all of the rest."""
    if model.experts is None:
        return count_parameters(model)
    active_experts = model.experts.top_k * count_mlp_parameters(model, model.experts.ffn)
    return (
        _count_outside_layers(model, None)
        + _sum_dense(model)
        + model.expert_layers * active_experts
    )


def count_stage_parameters(job: JobConfig) -> tuple[StageParameters, ...]:
    """Counts the parameters of one rank of each pp coordinate."""
    return _count_stages(_Counted(job.model, job.parallel, job.padded_vocab, job))


@dataclass(frozen=True, slots=True)
class _Counted:
    """What the parameters of a job follow from, and one of the jobs that have it: a search asks
    for many that differ in their training alone."""

    model: ModelConfig
    layout: ParallelConfig
    padded_vocab: int
    job: JobConfig = field(compare=False)


@lru_cache(maxsize=64)
def _count_stages(counted: _Counted) -> tuple[StageParameters, ...]:
    layout, model = counted.layout, counted.model
    dense = count_dense_layer(model, layout.tp)
    experts = (
        count_expert_layer(model, layout.tp, layout.ep, layout.expert_tp) if model.experts else None
    )
    params = map_unique_stages(
        counted.job, lambda stage: _count_stage(counted.job, stage, dense, experts)
    )
    return tuple(each.move_to_stage(rank) for rank, each in enumerate(params))


def _count_stage(
    job: JobConfig, stage: StageConfig, dense: LayerParameters, experts: LayerParameters | None
) -> StageParameters:
    vocabulary = count_vocabulary_parameters(job)
    # Every tensor-parallel rank has all learned positions.
    embedding = vocabulary + job.model.positions * job.model.hidden if stage.embedding else 0
    # A tied head on the stage of the embedding is the embedding.
    has_head = stage.head and not (job.model.tied and stage.embedding)
    head = vocabulary if has_head else 0
    norm = count_norm_parameters(job.model) * sum(chunk.head for chunk in stage.chunks)
    # Counts a module of multi-token prediction without its layer: a projection of two hidden
    # states and three norms; embedding and head are the model's (DeepSeek-V3, section 2.2).
    mtp = stage.mtp_layers * (2 * job.model.hidden**2 + 3 * count_norm_parameters(job.model))
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


# Parameters that are trained: all, or those of low-rank adapters.

ADAPTERS = Formula(
    "parameters.adapters",
    "r (inputs + outputs) of each linear layer with an adapter, of which tp divides what it divides"
    " of the layer; torch frameworks have one for each of queries, keys, values, gate and up"
    " projection, Megatron-LM one for those that it computes together, and tp divides all of it",
    "Hu et al., LoRA, arXiv:2106.09685, section 4.1; huggingface/peft; NVIDIA-NeMo/Megatron-Bridge,"
    " peft/lora.py, peft/utils.py (ParallelLinearAdapter)",
)


@dataclass(frozen=True, slots=True)
class Adapter:
    """A low-rank adapter on a tp rank: to count linear layers of the same input, which are column-
    or row-parallel; split ranks divide its other matrix."""

    inputs: int
    outputs: int
    split: int
    count: int = 1
    is_row: bool = False

    def list_matrices(self, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Outputs and inputs of its two matrices, to the rank and back."""
        if self.is_row:
            return (self.count * rank, self.inputs), (divide_ceil(self.outputs, self.split), rank)
        return (divide_ceil(self.count * rank, self.split), self.inputs), (self.outputs, rank)

    def count_parameters(self, rank: int) -> int:
        """The parameters of both."""
        return sum(outputs * inputs for outputs, inputs in self.list_matrices(rank))


def list_adapters(job: JobConfig, expert: bool = False) -> tuple[Adapter, ...]:
    """Lists the adapters of a layer on one rank; none without LoRA."""
    if not job.training.lora_rank:
        return ()
    return (*_list_attention_adapters(job), *list_mlp_adapters(job, expert))


def _list_attention_adapters(job: JobConfig) -> tuple[Adapter, ...]:
    model, tp, targets = job.model, job.parallel.tp, job.training.lora_targets
    heads, latent, adapters = divide_ceil(model.heads, tp), model.latent, list[Adapter]()
    split = _find_adapter_split(job)
    if "qkv" in targets and latent is None:
        keys_values = 2 * divide_ceil(model.kv_heads, tp) * model.head_size
        outputs = heads * model.head_size + keys_values
        adapters.append(Adapter(model.hidden, outputs, split, 3 if _is_split(job) else 1))
    if "qkv" in targets and latent is not None:
        query_inputs = latent.query_rank or model.hidden
        if latent.query_rank:
            adapters.append(Adapter(model.hidden, latent.query_rank, split))
        adapters.append(Adapter(query_inputs, heads * (latent.nope + latent.rope), split))
        adapters.append(Adapter(model.hidden, latent.kv_rank + latent.rope, split))
        adapters.append(Adapter(latent.kv_rank, heads * (latent.nope + latent.value), split))
    if "output" in targets:
        size = model.head_size if latent is None else latent.value
        adapters.append(Adapter(heads * size, model.hidden, split, is_row=True))
    return tuple(adapters)


def list_mlp_adapters(job: JobConfig, expert: bool) -> tuple[Adapter, ...]:
    """Lists the adapters of a layer's MLP, or of the shared expert beside routed ones."""
    experts = job.model.experts if expert else None
    ffn = experts.shared_ffn if experts is not None else job.model.ffn
    if "mlp" not in job.training.lora_targets or not ffn:
        return ()
    width, gates = divide_ceil(ffn, job.parallel.tp), 2 if job.model.gated else 1
    split, count = _find_adapter_split(job), gates if _is_split(job) else 1
    first = Adapter(job.model.hidden, gates * width, split, count)
    return first, Adapter(width, job.model.hidden, split, is_row=True)


def _is_split(job: JobConfig) -> bool:
    """Whether queries, keys and values are linear layers of their own, as gate and up are."""
    return job.profile.model.adapters == "peft"


def _find_adapter_split(job: JobConfig) -> int:
    """Ranks that divide also the matrix of an adapter whose outer side the layer keeps whole."""
    return 1 if _is_split(job) else job.parallel.tp


def select_trained(job: JobConfig, params: StageParameters) -> StageParameters:
    """Selects those of a rank's parameters that are trained: all, or those of its adapters."""
    rank = job.training.lora_rank
    if not rank:
        return params
    attention = _count_adapter_parameters(_list_attention_adapters(job), rank)
    dense = _count_adapter_parameters(list_mlp_adapters(job, expert=False), rank)
    mixture = _count_adapter_parameters(list_mlp_adapters(job, expert=True), rank)
    total = params.dense_layers * (attention + dense)
    total += params.expert_layers * (attention + mixture)
    return replace(
        params, dense=total, experts=0, embedding=0, head=0, final_norm=0,
        dense_layer=LayerParameters(attention, dense, 0, 0, 0, 0),
        expert_layer=params.expert_layer and LayerParameters(attention, mixture, 0, 0, 0, 0),
        formulas=(ADAPTERS,),
    )  # fmt: skip


def count_trained_parameters(job: JobConfig) -> int:
    """Parameters of the whole model that are trained: all, or those of its adapters."""
    whole = replace(job, parallel=ParallelConfig())
    (held,) = count_stage_parameters(whole)
    return select_trained(whole, held).total


def count_updated_parameters(job: JobConfig, params: StageParameters) -> float:
    """Counts the parameters that one rank updates: its shard if ZeRO shards optimizer states."""
    return count_shards(job, select_trained(job, params))


def count_shards(job: JobConfig, params: StageParameters) -> float:
    """Counts those of a rank's parameters that are in its shard."""
    return params.dense / job.parallel.shard_size + params.experts / job.parallel.expert_shards


def _count_adapter_parameters(adapters: tuple[Adapter, ...], rank: int) -> int:
    return sum(one.count_parameters(rank) for one in adapters)


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
    count += _count_head_norms(model)
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
    return _count_head_norms(model) + (2 * model.hidden if model.biases else 0)


def _count_head_norms(model: ModelConfig) -> int:
    """Counts the norms of queries and keys, which all heads share."""
    return 2 * model.head_size * (1 if model.norm == "rms" else 2) if model.qk_norm else 0


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


# FLOPs of a step of the whole job, and of one forward pass on one rank.

RECOMPUTE = Formula(
    "flops.recompute",
    "hardware FLOPs / model FLOPs; every layer recomputed: (3 + 1)/3, of frozen weights"
    " (2 + 1)/2, and the head once; with early_stop without the last GEMM of each MLP",
    "Narayanan et al., SC'21, arXiv:2104.04473, section 3.5 and eq. 3; Korthikanti et al.,"
    " arXiv:2205.05198, eq. 8",
)

PASSES = 3
"""Forward plus backward, in forward passes: gradients of inputs and of weights cost two."""

FROZEN_PASSES = 2
"""The same of weights without gradients."""


def count_passes(job: JobConfig) -> int:
    """Counts the passes of the job's GEMMs of weights, in forward passes; adapters are left out."""
    return FROZEN_PASSES if job.training.lora_rank else PASSES


KORTHIKANTI_CORE = 3
"""Forward passes of the attention core that Korthikanti's eq. 8 adds for selective recomputation.

The term grows from s/(6h) to s/(3h); computing the core once more would give s/(4.5h).
"""


@dataclass(frozen=True, slots=True)
class StepFlops:
    """Model and hardware FLOPs of a step over all ranks, and their formulas."""

    model: int
    hardware: int
    formulas: tuple[Formula, ...]


def count_step_flops(job: JobConfig, convention: Convention = "C1") -> StepFlops:
    """Counts model and hardware FLOPs of the job's step, with their formulas."""
    recompute_formulas = (RECOMPUTE,) if job.training.recompute != "none" else ()
    formulas = (CONVENTIONS[convention], *recompute_formulas)
    return StepFlops(
        count_model_flops(job, convention), count_hardware_flops(job, convention), formulas
    )


def count_model_flops(job: JobConfig, convention: Convention = "C1") -> int:
    """Counts the model FLOPs of one step over all ranks, by a convention of CONVENTIONS.

    C1, C5 and C6 exclude recomputation; C2 and C3 include theirs, whatever the job recomputes.
    C4 counts all parameters, which is too much for a mixture of experts: use C6 there.
    """
    passes = count_passes(job)
    match convention:
        case "C2":
            return _count_job_flops(job, passes, PASSES + KORTHIKANTI_CORE)
        case "C3":
            return _count_job_flops(job, passes + 1, PASSES + 1)
        case "C4":
            return _count_flops_by_parameters(job, count_parameters(job.model), passes, PASSES)
        case "C5":
            return _count_job_flops(job, passes, PASSES, causal=True)
        case "C6":
            return _count_flops_by_parameters(
                job, count_active_parameters(job.model), passes, PASSES
            )
    return _count_job_flops(job, passes, PASSES)


def count_hardware_flops(job: JobConfig, convention: Convention = "C1") -> int:
    """Counts model FLOPs plus the FLOPs of activation recomputation (RECOMPUTE).

    selective: the attention core (C1: as in Korthikanti's eq. 8); full, every and sqrt: the forward
    pass of all layers without the head (C4 and C6, like llm-foundry: with the head).
    """
    layers, core = _count_hardware_passes(job, convention)
    if job.training.recompute_parts:
        core += "core-attention" in job.training.recompute_parts
        layers += _count_parts_share(job)
    # Weights of the GEMMs before which the recomputation of a layer stops (early_stop).
    model = job.model
    dense_layers = model.layers - model.expert_layers
    layers -= (
        compute_stopped_share(job) * dense_layers * model.ffn * model.hidden
    ) / count_layer_weights(job.model)
    match convention:
        case "C2" | "C3":
            return count_model_flops(job, convention)
        case "C4":
            return _count_flops_by_parameters(job, count_parameters(job.model), layers, core)
        case "C5":
            return _count_job_flops(job, layers, core, causal=True)
        case "C6":
            return _count_flops_by_parameters(job, count_active_parameters(job.model), layers, core)
    return _count_job_flops(job, layers, core)


def _count_hardware_passes(job: JobConfig, convention: Convention) -> tuple[float, float]:
    """Counts forward passes of the layers' GEMMs and of the attention core.

    Selective recomputation repeats an attention core that stores its scores, but not a fused one;
    torchtitan's repeats every second GEMM (count_selective_weights).
    """
    passes = count_passes(job)
    match job.training.recompute:
        case "none":
            return passes, PASSES
        case "selective" if is_selective_by_op(job):
            again = count_selective_weights(job.model) / count_layer_weights(job.model)
            return passes + again, PASSES
        case "selective" if job.training.flash_attention:
            return passes, PASSES
        case "selective":
            return passes, PASSES + (KORTHIKANTI_CORE if convention == "C1" else 1)
    again = count_rerun_layers(job, job.model.layers / job.parallel.model_stages)
    share = again * job.parallel.model_stages / job.model.layers
    return passes + share, PASSES + share


def is_selective_by_op(job: JobConfig) -> bool:
    """Whether selective recomputation is torchtitan's: every second GEMM, not attention's core."""
    return job.training.recompute == "selective" and job.profile.model.selective_ops


def count_selective_weights(model: ModelConfig) -> float:
    """Weights of the GEMMs that torchtitan's selective recomputation runs again, of all layers.

    It saves the 1st, 3rd, 5th and 7th of queries, keys, values, output, w1, w3 (if gated) and w2,
    and needs no w2 in the backward: again are keys, output and w3. Of experts and latent attention,
    whose order differs between models, half.
    """
    moe = model.expert_layers
    attention = model.hidden * model.head_size * (model.kv_heads + model.heads)
    if model.latent is not None:
        attention = count_attention_weights(model).total // 2
    mlp = model.hidden * model.ffn if model.gated else 0
    routed = count_routed_weights(model).total / 2 if moe else 0
    return model.layers * attention + (model.layers - moe) * mlp + moe * routed


def compute_stopped_share(job: JobConfig) -> float:
    """Share of the dense layers whose recomputation stops before the last GEMM (early_stop).

    Of each group of layers that is recomputed together it is the last one. Dropout needs the
    output of that GEMM, and so may the sum over experts.
    """
    training = job.training
    if not training.early_stop or training.dropout:
        return 0.0
    match training.recompute:
        case "every":
            return 1 / training.recompute_every
        case "full":
            layers = job.model.layers / job.parallel.model_stages
            return count_rerun_layers(job, layers) / layers
    return 0.0


def _count_parts_share(job: JobConfig) -> float:
    """Recomputed FLOPs of the layers' GEMMs over those of one forward pass."""
    model, parts, again = job.model, job.training.recompute_parts, 0
    if "mla-up" in parts and model.latent is not None:
        latent = model.latent
        queries = latent.query_rank * model.heads * (latent.nope + latent.rope)
        pairs = latent.kv_rank * model.heads * (latent.nope + latent.value)
        again += model.layers * (queries + pairs)
    if "mlp" in parts:
        products, last = count_mlp_weights(model, model.ffn).total, model.ffn * model.hidden
        again += (model.layers - model.expert_layers) * (products - last)
    if "experts" in parts and model.experts is not None:
        again += model.expert_layers * count_routed_weights(model).total
    return again / count_layer_weights(model)


def _count_job_flops(job: JobConfig, layers: float, core: float, causal: bool = False) -> int:
    model, seq = job.model, job.training.seq_len
    attention = core * model.layers * count_core_flops(model, seq)
    linear = layers * 2 * count_layer_weights(model)
    head = count_passes(job) * 2 * model.hidden * job.padded_vocab
    return round(_count_tokens(job) * (linear + (attention // 2 if causal else attention) + head))


def _count_flops_by_parameters(job: JobConfig, parameters: int, linear: float, core: float) -> int:
    attention = core * job.model.layers * count_core_flops(job.model, job.training.seq_len)
    return round(_count_tokens(job) * (2 * linear * parameters + attention))


def _count_tokens(job: JobConfig) -> int:
    return job.training.global_batch * job.training.seq_len


def count_layer_weights(model: ModelConfig) -> int:
    """Counts the GEMM weights of all layers that one token is multiplied with."""
    moe = model.expert_layers
    count = model.layers * count_attention_weights(model).total
    count += (model.layers - moe) * count_mlp_weights(model, model.ffn).total
    return count + (moe * count_routed_weights(model).total if moe else 0)


def count_core_flops(model: ModelConfig, tokens: int, tp: int = 1) -> int:
    """Counts forward FLOPs per token of an attention core in a sequence of so many tokens:
    2 s a (d_qk + d_v), not causal; with windows the mean of the layers."""
    latent = model.latent
    widths = 2 * model.head_size if latent is None else latent.nope + latent.rope + latent.value
    return round(2 * model.count_attended_keys(tokens) * divide_ceil(model.heads, tp) * widths)


# Conventions of counting a step's FLOPs, and their closed forms for GPT.

Convention = Literal["C1", "C2", "C3", "C4", "C5", "C6"]

SECONDS_PER_DAY = 86_400

_KORTHIKANTI = "Korthikanti et al., arXiv:2205.05198, appendix A"

_SC21 = "Narayanan et al., SC'21, arXiv:2104.04473"

_PALM = "Chowdhery et al., PaLM, arXiv:2204.02311, appendix B; mosaicml/llm-foundry benchmarking"

CONVENTIONS: dict[Convention, Formula] = {
    "C1": Formula("flops.C1", "72 B L s h^2 (1 + s/(6h) + V/(12 h L))", f"{_KORTHIKANTI}, eq. 7"),
    "C2": Formula("flops.C2", "72 B L s h^2 (1 + s/(3h) + V/(12 h L))", f"{_KORTHIKANTI}, eq. 8"),
    "C3": Formula("flops.C3", "96 B L s h^2 (1 + s/(6h) + V/(16 h L))", f"{_SC21}, eq. 3"),
    "C4": Formula("flops.C4", "(6 N + 12 L a d s) B s, N all parameters", _PALM),
    "C5": Formula(
        "flops.C5",
        "72 B L s h^2 (1 + s/(12h) + V/(12 h L)): causal attention counts half",
        "NVIDIA/Megatron-LM, num_floating_point_operations since 2026; Dao, arXiv:2307.08691",
    ),
    "C6": Formula(
        "flops.C6", "(6 N_active + 12 L a d s) B s: of the experts, top_k", f"{_PALM}; {_SC21}"
    ),
}
"""Written for GPT with full attention; other architectures are counted GEMM by GEMM."""


def compute_sc21_flops(layers: int, hidden: int, seq: int, vocab: int, batch: int) -> int:
    """Computes C3 of a GPT step in closed form (Narayanan et al., eq. 3): full recomputation."""
    per_token = 96 * layers * hidden**2 + 16 * layers * hidden * seq + 6 * hidden * vocab
    return batch * seq * per_token


def compute_training_days(
    tokens: float, flops_per_token: float, world_size: int, flops_per_s: float
) -> float:
    """Computes the days to train on tokens with flops_per_s on each of world_size GPUs (Narayanan
    et al., eq. 3 over eq. 4's n X)."""
    return tokens * flops_per_token / (world_size * flops_per_s) / SECONDS_PER_DAY


# Model FLOPs utilization.

MFU = Formula(
    "flops.mfu",
    "model FLOPs / (step time x ranks x dense peak); hfu with the FLOPs that recomputation adds",
    "Chowdhery et al., PaLM, arXiv:2204.02311, section 4.1; Korthikanti et al., arXiv:2205.05198",
)


def compute_mfu(
    flops: float, step_ns: float, world_size: int, peak_flops_per_s: float | None
) -> float | None:
    """Computes MFU (or HFU with hardware FLOPs): flops over the ranks' dense peak in step_ns.

    None if no peak is known or the step took no time.
    """
    if peak_flops_per_s is None or peak_flops_per_s <= 0 or step_ns <= 0:
        return None
    return flops / (step_ns * 1e-9 * world_size * peak_flops_per_s)
