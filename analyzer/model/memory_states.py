"""Memory of weights, gradients and optimizer states, and of saved activations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from stepsplit.analyzer.model.comm_ops import (
    count_dense_layer_pairs,
    count_expert_layer_pairs,
    is_gathered_again,
    is_gathered_in_fp8,
)
from stepsplit.analyzer.model.config import GemmDtype, JobConfig, TrainingConfig, UnfusedPart
from stepsplit.analyzer.model.formulas import Formula
from stepsplit.analyzer.model.parameters import (
    StageParameters,
    list_adapters,
    list_mlp_adapters,
    select_trained,
)
from stepsplit.analyzer.model.profile import SavedBytes, load_framework
from stepsplit.analyzer.model.rank_layout import StageConfig, count_rerun_layers
from stepsplit.analyzer.model.schedule import count_in_flight

# Weights, gradients and optimizer states of one rank.

STATES = Formula(
    "memory.states",
    "(2 + 2 + 12) P; ZeRO-1 4P + 12P/N, ZeRO-2 2P + 14P/N, ZeRO-3 16P/N"
    " (16-bit weights and gradients; fp32 weights and Adam's two moments)",
    "Rajbhandari et al., ZeRO, SC'20, arXiv:1910.02054, section 3.1 and figure 1",
)

MEGATRON = Formula(
    "memory.states_megatron",
    "bf16 with fp32 gradients 18P -> 6P + 12P/N, fp16 20P -> 4P + 16P/N, fp32 16P -> 8P + 8P/N;"
    " of gradients in 16 bits the optimizer makes an fp32 copy, 4P/N, and frees it after its step",
    "Megatron-Core docs, distrib_optimizer.md; core/optimizer/distrib_optimizer.py,"
    " _copy_model_grads_to_main_grads and zero_grad",
)

DEEPSPEED = Formula(
    "memory.states_deepspeed",
    "ZeRO-2 4P + 16P/N; ZeRO-3 4 largest layer + 18P/N",
    "DeepSpeed docs, memory.rst",
)

FSDP_STATES = Formula(
    "memory.states_fsdp",
    "(4 + 4 + 8) P/N, all of them fp32 shards; without fp32 weights (2 + 2 + m) P/N",
    "Zhao et al., PyTorch FSDP, arXiv:2304.11277; torchtitan, arXiv:2410.06511",
)

MASTER_BYTES = 4
"""Of an fp32 weight."""

MOMENTS_BYTES = {
    "adam": 8, "adam-8bit": 2, "sgd": 0, "sgd-momentum": 4, "muon": 4, "lion": 4,
}  # fmt: skip
"""Bytes of optimizer moments per parameter. Adam has two, fp32 or 8 bits (Dettmers et al.,
arXiv:2110.02861, without its scales, 3 % of that); SGD with momentum, Muon and Lion have one."""

HALF_BYTES = 2
"""Bytes of a number in 16 bits."""


STATES_FORMULAS = {each.id: each for each in (STATES, MEGATRON, DEEPSPEED, FSDP_STATES)}
"""The formulas that a framework can follow, by name."""


@dataclass(frozen=True, slots=True)
class ParameterBytes:
    """Bytes of one parameter before sharding.

    The fp32 copy of 16-bit weights counts with the optimizer, that of gradients where it stays;
    gradient_copy exists in the optimizer step alone. extra_adam is the extra of Muon for a
    parameter outside the layers' matrices, which Adam trains (Jordan et al., 2024).
    """

    weights: int
    gradients: int
    optimizer: int
    extra_adam: int = 0
    formula: Formula = field(default=STATES, compare=False, repr=False)
    gradient_copy: int = 0


@dataclass(frozen=True, slots=True)
class States:
    """Weights, gradients and optimizer states of one rank, in bytes; frozen_bytes are those of the
    weights that are not trained."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    frozen_bytes: int = 0
    formulas: tuple[Formula, ...] = field(default=(), compare=False, repr=False)

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes

    def __add__(self, other: States) -> States:
        return States(
            self.weights_bytes + other.weights_bytes,
            self.gradients_bytes + other.gradients_bytes,
            self.optimizer_bytes + other.optimizer_bytes,
            self.frozen_bytes + other.frozen_bytes,
            self.formulas,
        )


def count_moments_bytes(training: TrainingConfig) -> int:
    """Bytes of the optimizer's moments per parameter, half as many in bf16."""
    size = MOMENTS_BYTES[training.optimizer]
    halved = training.moments_dtype == "bf16" and training.optimizer != "adam-8bit"
    return size // 2 if halved else size


def uses_foreach(training: TrainingConfig) -> bool:
    """Whether Adam runs operation by operation on lists of tensors."""
    return training.optimizer == "adam" and not training.fused_optimizer


def compute_parameter_bytes(training: TrainingConfig) -> ParameterBytes:
    """Bytes of one parameter, unsharded, in the framework's convention."""
    memory = load_framework(training.framework).memory
    moments = count_moments_bytes(training)
    extra_adam = 0
    if training.optimizer == "muon":
        extra_adam = count_moments_bytes(replace(training, optimizer="adam")) - moments
    formula = STATES_FORMULAS[memory.states]
    if training.dtype == "fp32" or not memory.copies_weights:
        size = count_updated_bytes(training)
        return ParameterBytes(size, size, moments, extra_adam, formula)
    gradients = memory.gradient_bytes or training.gradient_bytes
    optimizer = moments + (MASTER_BYTES if training.master_weights else 0)
    copy = 0
    if memory.gradient_copy == "kept":
        optimizer += MASTER_BYTES
    elif memory.gradient_copy == "step" and gradients < MASTER_BYTES:
        # An optimizer with moments in bf16 (precision-aware) needs no copy.
        copy = MASTER_BYTES if training.moments_dtype == "fp32" else 0
    return ParameterBytes(training.weight_bytes, gradients, optimizer, extra_adam, formula, copy)


def has_buckets(job: JobConfig) -> bool:
    """Whether DistributedDataParallel copies gradients to its buckets and back."""
    layout, wraps = job.parallel, job.profile.messages.wraps_replicas
    is_wrapped = wraps == "always" or (wraps == "replicated" and layout.gradient_ranks > 1)
    return is_wrapped and layout.zero < 2


def count_updated_bytes(training: TrainingConfig) -> int:
    """Bytes of a weight as the optimizer updates it."""
    return MASTER_BYTES if training.master_weights else training.weight_bytes


def count_update_traffic_bytes(training: TrainingConfig) -> int:
    """Bytes per parameter that an update in one pass reads and writes."""
    states = count_updated_bytes(training) + count_moments_bytes(training)
    copies_weights = load_framework(training.framework).memory.copies_weights
    is_copied = training.dtype != "fp32" and copies_weights
    written = training.weight_bytes if is_copied and training.master_weights else 0
    return 2 * states + training.gradient_bytes + written


def shard_states(
    parameters: int, shards: int, per_parameter: ParameterBytes, training: TrainingConfig, zero: int
) -> States:
    """States per rank of parameters sharded over N = shards ranks as the ZeRO stage says."""
    shards_gradients = load_framework(training.framework).memory.shards_gradients
    weights = shards if zero >= 3 else 1
    gradients = shards if zero >= 2 and shards_gradients else 1
    optimizer = shards if zero >= 1 else 1
    return States(
        _divide_ceil(parameters * per_parameter.weights, weights),
        0
        if zero >= 3 and not shards_gradients
        else _divide_ceil(parameters * per_parameter.gradients, gradients),
        _divide_ceil(parameters * per_parameter.optimizer, optimizer),
        formulas=(per_parameter.formula,),
    )


def compute_states(job: JobConfig, parameters: StageParameters) -> States:
    """Weights, gradients and optimizer states of one rank of a stage between steps.

    Dense parameters and experts are sharded over different groups (ParallelConfig.shard_size, and
    N_e = d c t / (e e_t)). FSDP shards everything at ZeRO-2 too (SHARD_GRAD_OP only keeps the
    gathered weights until the end of the backward pass). Includes the Adam states that Muon keeps
    for embedding, head and norms.
    """
    per_parameter, zero = compute_parameter_bytes(job.training), find_sharding_stage(job)
    if job.training.lora_rank:
        return _compute_adapted_states(job, parameters, per_parameter)
    dense = shard_states(
        parameters.dense, job.parallel.shard_size, per_parameter, job.training, zero
    )
    experts = shard_states(
        parameters.experts, job.parallel.expert_shards, per_parameter, job.training, zero
    )
    outside_layers = parameters.embedding + parameters.head + parameters.final_norm
    return (
        dense
        + experts
        + States(
            0, 0, _divide_ceil(outside_layers * per_parameter.extra_adam, job.parallel.shard_size)
        )
    )


ADAPTED = Formula(
    "memory.states_lora",
    "w P for the frozen weights, sharded over N by ZeRO-3, and (w + g + o) A for A parameters of"
    " adapters, sharded as those of a model that is trained whole",
    "Hu et al., LoRA, arXiv:2106.09685, section 4.2",
)


def _compute_adapted_states(
    job: JobConfig, parameters: StageParameters, per_parameter: ParameterBytes
) -> States:
    """The states of a model of which adapters alone are trained (ADAPTED)."""
    layout, zero, adapters = job.parallel, find_sharding_stage(job), select_trained(job, parameters)
    frozen = ParameterBytes(per_parameter.weights, 0, 0)
    held = shard_states(parameters.dense, layout.shard_size, frozen, job.training, zero)
    held += shard_states(parameters.experts, layout.expert_shards, frozen, job.training, zero)
    trained = shard_states(adapters.dense, layout.shard_size, per_parameter, job.training, zero)
    states = held + trained
    return replace(states, frozen_bytes=held.weights_bytes, formulas=(ADAPTED, *adapters.formulas))


def find_sharding_stage(job: JobConfig) -> int:
    """The ZeRO stage by which states are sharded; with FSDP2, stage 2 shards them like stage 3."""
    return 3 if job.is_fsdp else job.parallel.zero


def _divide_ceil(count: int, shards: int) -> int:
    return -(-count // shards)


# Saved activations of a stage, and memory of the recomputation.

FULL = Formula(
    "memory.recompute_full",
    "2sbh per layer in flight (2sbh/t with sequence parallelism) + all of one layer",
    "Korthikanti et al., arXiv:2205.05198, table 2; Chen et al., arXiv:1604.06174",
)

EVERY = Formula(
    "memory.recompute_every",
    "c A_input + (l/c) A_layer for c inputs kept of l layers, least at c = sqrt(l A_layer/A_input)",
    "Narayanan et al., SC'21, arXiv:2104.04473, section 3.5",
)


@dataclass(frozen=True, slots=True)
class StageActivations:
    """saved_bytes are saved for one microbatch in one chunk between its forward and backward;
    recompute_bytes are needed while a group of layers is recomputed."""

    saved_bytes: int
    recompute_bytes: int
    formula: Formula


def compute_stage_activations(
    job: JobConfig, stage: StageConfig, layers: LayersByKind | None = None
) -> StageActivations:
    """Saved activations of one chunk of the stage (mean of its chunks).

    layers are those of the job, computed here if the caller does not have them.
    """
    layers = layers or compute_layers_by_kind(job)
    count, chunks = max(1, stage.layers), len(stage.chunks)
    experts = layers.expert.total_bytes * stage.expert_layers if layers.expert else 0
    all_layers_bytes = layers.dense.total_bytes * stage.dense_layers + experts
    if job.training.recompute in ("none", "selective"):
        rerun_bytes = max((0, *(one.rerun for one in _list_kinds(stage, layers))))
        return StageActivations(all_layers_bytes // chunks, rerun_bytes, layers.dense.formula)
    rerun = count_rerun_layers(job, count / chunks)
    saved_inputs = count_saved_inputs(job, rerun, all_layers_bytes / count)
    group = math.ceil(rerun / saved_inputs)
    if job.training.recompute == "every":
        group = math.ceil(min(rerun, job.training.recompute_every))
    largest_bytes = max((one.total_bytes for one in _list_kinds(stage, layers)), default=0)
    recompute_bytes = largest_bytes * group
    formula = FULL if job.training.recompute == "full" else EVERY
    whole_bytes = (count / chunks - rerun) * all_layers_bytes / count
    return StageActivations(
        round(saved_inputs * compute_input_bytes(job) + whole_bytes), recompute_bytes, formula
    )


def find_offloaded_share(job: JobConfig, stage: StageConfig) -> float:
    """The share of a rank's saved activations that goes to the host."""
    if "activations" not in job.offloaded:
        return 0.0
    most = job.training.offload_layers
    return min(1.0, most / stage.layers) if most and stage.layers else 1.0


def count_saved_inputs(job: JobConfig, layers: float, layer_bytes: float) -> float:
    """Number of layer inputs saved in a chunk of layers: all, every k-th, or the optimum."""
    match job.training.recompute:
        case "every":
            return math.ceil(layers / job.training.recompute_every)
        case "sqrt":
            best = math.sqrt(layers * layer_bytes / compute_input_bytes(job))
            return min(layers, max(1, round(best)))
    return layers


def _list_kinds(stage: StageConfig, layers: LayersByKind) -> list[LayerActivations]:
    """The kinds of layers that the stage has."""
    counts = ((layers.dense, stage.dense_layers), (layers.expert, stage.expert_layers))
    return [one for one, count in counts if one is not None and count]


# Saved activations of a layer, item by item.

PARTS = Formula(
    "memory.recompute_parts",
    "not kept: mla-up 2 T a (2 d_qk + d_v)/t; norms their outputs, also of the compressed forms;"
    " activation the input of the last GEMM, in experts too; mlp its first GEMMs' outputs as well;"
    " experts all but their tokens before dispatch; core-attention its scores",
    "NVIDIA/Megatron-LM, recompute_modules; NVIDIA, Megatron-Core MoE report, arXiv:2603.07685,"
    " section 4; DeepSeek-V3, arXiv:2412.19437, section 3.2.3",
)

LAYER_ACTIVATIONS = Formula(
    "memory.activations",
    "8h (norms; /t with sequence parallelism, but 4h of inputs of GEMMs where the backward does not"
    " gather them again) + 2d(2a + 2k)/t + 4a/t + 2f(G-1)/t + 2f/t bytes per token, times T = sb/c",
    "Korthikanti et al., arXiv:2205.05198, section 4, with flash attention, gated MLP and GQA",
)

KORTHIKANTI = Formula(
    "memory.activations_gpt",
    "sbh(10 + 24/t + 5as/(ht)); with sequence parallelism sbh/t (34 + 5as/h); selective 34sbh/t",
    "Korthikanti et al., arXiv:2205.05198, table 2",
)

MASK_BYTES = 1
"""A dropout mask has one byte per element."""


@dataclass(frozen=True, slots=True)
class LayerActivations:
    """Saved activations of one layer, microbatch and rank, in bytes.

    heads: queries, keys and values (with MLA also their compressed forms); attention: the output of
    attention and its log-sum-exp or scores; routed: the tokens' activations in the experts, and the
    router; adapters: what lies between the two matrices of each. rerun: what is not kept but made
    again for the layer's backward.
    """

    norms: int
    heads: int
    attention: int
    masks: int
    mlp: int
    routed: int
    adapters: int = 0
    rerun: int = 0
    formula: Formula = field(default=LAYER_ACTIVATIONS, compare=False, repr=False)

    @property
    def total_bytes(self) -> int:
        kept = self.norms + self.heads + self.attention + self.masks + self.mlp + self.routed
        return kept + self.adapters


@dataclass(frozen=True, slots=True)
class LayersByKind:
    """One layer with an MLP, and one with experts if the model has any."""

    dense: LayerActivations
    expert: LayerActivations | None


def compute_layers_by_kind(job: JobConfig) -> LayersByKind:
    """Saved activations of one layer of each kind."""
    expert = _compute_layer(job, expert=True) if job.model.experts is not None else None
    return LayersByKind(_compute_layer(job, expert=False), expert)


def _compute_layer(job: JobConfig, expert: bool) -> LayerActivations:
    """A layer with what recomputation of its parts makes again."""
    kept, training = compute_layer_activations(job, expert), job.training
    if training.recompute != "selective" and not training.recompute_parts:
        return kept
    training = replace(training, recompute="none", recompute_parts=frozenset())
    whole = compute_layer_activations(replace(job, training=training), expert)
    return replace(kept, rerun=whole.total_bytes - kept.total_bytes)


def compute_layer_activations(job: JobConfig, expert: bool = False) -> LayerActivations:
    """Saved activations of one layer and microbatch on one rank, without full recomputation.

    Without flash attention, with dropout and G = 2, these are the formulas of Korthikanti et al.,
    table 2. What selective recomputation drops is in the framework's coefficients.
    """
    saved, routed, mlp = select_saved_bytes(job), 0, 0
    parts = job.training.recompute_parts
    if not expert or job.model.experts is None:
        mlp = 0 if "mlp" in parts else _compute_mlp(job, saved, job.model.ffn)
    elif "experts" not in parts:
        # top_k copies of every token through an expert, and fp32 logits of the router (4E).
        # Balanced routing: each rank receives as many copies as it sends.
        copies = job.tokens * job.model.experts.top_k / job.parallel.sequence_split
        hidden = HALF_BYTES * _compute_input_ratio(job, job.profile.saved) * job.model.hidden
        unit_bytes = _compute_first_bytes(job, saved)
        if job.training.lora_rank:
            # Frozen experts need no inputs of their GEMMs.
            hidden *= saved.routed_output
        else:
            hidden *= 2 if saved.routed_output else 1
            unit_bytes = _compute_mlp_unit_bytes(job, saved)
        inside = job.model.experts.ffn / job.parallel.expert_tp * unit_bytes
        router = 4.0 * job.model.experts.count * job.tokens / job.parallel.sequence_split
        width = FP32_EXPERTS if has_fp32_experts(job) else 1
        routed = round(copies * width * (hidden * _compute_scale(job) + inside) + router)
        mlp = _compute_mlp(job, saved, job.model.experts.shared_ffn)
    pairs = count_expert_layer_pairs(job) if expert else count_dense_layer_pairs(job)
    if expert and has_fp32_experts(job):
        # Experts read what the norm returns in fp32; a dense MLP casts it twice.
        saved = replace(saved, norm_output=saved.norm_output - 1.0)
    # The layers of Korthikanti et al. save the attention scores, and have none of the others.
    is_other = job.training.flash_attention or job.model.gated or job.model.experts
    return LayerActivations(
        norms=_compute_norms(job, saved, pairs, expert),
        heads=_compute_heads(job, saved),
        attention=_compute_attention(job, saved),
        masks=2 * MASK_BYTES * count_hidden(job) if job.training.dropout else 0,
        mlp=mlp,
        routed=routed,
        # The inputs of the second matrices of a layer's adapters.
        adapters=job.tokens
        * sum(one.count for one in list_adapters(job, expert))
        * job.training.lora_rank
        * job.training.activation_bytes,
        formula=PARTS if parts else LAYER_ACTIVATIONS if is_other else KORTHIKANTI,
    )


def select_saved_bytes(job: JobConfig) -> SavedBytes:
    """What the framework saves of a layer with the job's recomputation."""
    training, is_latent = job.training, job.model.latent is not None
    saved = _select_saved(
        job.profile.name,
        _find_variant(job),
        training.recompute == "selective",
        training.recompute_parts,
        is_latent,
    )
    unfused = find_known_unfused(job)
    saved = saved if unfused is None else _replace_unfused(job, saved, unfused)
    is_eager = job.profile.model.eager and not training.compile
    is_norm_unfused = training.unfused is None or "norms" in training.unfused
    is_op_by_op = job.model.norm == "rms" and is_eager and is_norm_unfused
    if training.lora_rank and is_op_by_op and saved.norm_input:
        # The normalized input, which only the gradient of the norm's weight needs.
        normalized = 4.0 if is_autocast(job) else 2.0
        saved = replace(saved, norm_input=saved.norm_input - normalized)
    if job.model.gated or not job.profile.memory.input_of_activation:
        return saved
    return replace(saved, mlp_first=_count_activation_bytes(job, saved.mlp_first))


GELU_NEW = (14.0, 8.0)
"""What the single operations of transformers' gelu_new save per element, besides the result: under
autocast, which computes the power in 32 bits, and otherwise."""


def _count_activation_bytes(job: JobConfig, input_bytes: float) -> float:
    """What the activation function of an MLP that is not gated saves per element, besides its
    result: its input, or nothing, as ReLU's backward reads the result."""
    if job.model.activation == "relu":
        return 0.0
    if job.model.activation == "gelu_new" and job.runs_transformers and not job.training.compile:
        return GELU_NEW[0] if is_autocast(job) else GELU_NEW[1]
    return input_bytes


def find_known_unfused(job: JobConfig) -> frozenset[UnfusedPart] | None:
    """The parts that the job states as unfused; None if it states nothing, but of clamped SwiGLU,
    which programs other than torch's are taken not to fuse (elementwise.CLAMPED)."""
    training = job.training
    if training.unfused is None and is_clamped(job) and not job.profile.model.eager:
        return frozenset({"activation"})
    return training.unfused


def is_clamped(job: JobConfig) -> bool:
    """Whether the activation is SwiGLU with clamps."""
    return job.model.activation == "swiglu-clamped"


CLAMPED_SAVED = 10.0
"""What its single operations save per element, besides their input and the result: the clamped gate
and its sigmoid, their product, the other half plus one, and the result before the router's weight
(tests/model/test_eager_layers.py)."""


def _replace_unfused(
    job: JobConfig, saved: SavedBytes, unfused: frozenset[UnfusedPart]
) -> SavedBytes:
    """What is saved by parts that are not fused, and by the others fused.

    An RMS norm of torch operations saves an fp32 copy of its input, a gated activation silu(gate),
    a softmax its scores in fp32 beside the 16-bit ones.
    """
    changed = dict[str, Any]()
    if job.model.norm == "rms" and saved.norm_input:
        input_bytes = 4.0 if is_autocast(job) else 2.0
        changed["norm_input"] = input_bytes + (4.0 if "norms" in unfused else 0.0)
    if job.model.gated:
        gate_bytes = CLAMPED_SAVED if is_clamped(job) else 2.0
        is_kept = "activation" in unfused - job.training.recompute_parts
        changed["mlp_gate"] = gate_bytes if is_kept else 0.0
    if saved.scores:
        changed["scores"] = 6.0 if "softmax" in unfused else 2.0
    return replace(saved, **changed)


def _find_variant(job: JobConfig) -> str:
    """The table of what differs from the framework's saved bytes (VARIANTS)."""
    is_cast, casts_by_torch = is_autocast(job), job.profile.model.casts == "autocast"
    if job.model.norm == "layer":
        return "half_layer_norm" if casts_by_torch and not is_cast else "layer_norm"
    if not casts_by_torch:
        is_single = job.training.activation_bytes == 4
        return "" if job.training.compile else "single" if is_single else "eager"
    if job.training.compile:
        return "compiled" if is_cast else "half_compiled"
    return "" if is_cast else "single" if job.training.activation_bytes == 4 else "half"


@lru_cache(maxsize=128)
def _select_saved(
    framework: str, variant: str, is_selective: bool, parts: frozenset[str], is_latent: bool
) -> SavedBytes:
    known = load_framework(framework)
    drops_scores_alone = replace(known.selective, scores=known.saved.scores) == known.saved
    if is_selective and not drops_scores_alone:
        return known.selective
    dropped: dict[str, float | bool] = dict(known.variants.get(variant, ()))
    if is_selective or "core-attention" in parts:
        dropped["scores"] = 0.0
    if "norms" in parts:
        dropped["norm_output"] = 0.0
    if "activation" in parts:
        dropped["mlp_second"] = 0.0
    if "mla-up" in parts and is_latent:
        dropped |= {"query": 0.0, "key": 0.0, "value": 0.0}
    return replace(known.saved, **dropped)  # type: ignore[arg-type]


def compute_input_bytes(job: JobConfig) -> int:
    """The input of one layer: 2sbh, or with sequence parallelism 2sbh/t; 4sbh under autocast, which
    sums hidden states in fp32."""
    return count_hidden(job) * (4 if is_autocast(job) else job.training.activation_bytes)


def is_autocast(job: JobConfig) -> bool:
    """Whether torch.autocast casts fp32 weights to 16 bits for each operation."""
    training = job.training
    is_cast = training.dtype != "fp32" and training.master_weights
    return job.profile.model.casts == "autocast" and is_cast


def compute_final_norm_bytes(job: JobConfig) -> int:
    """Input and output of the norm before the head, as the head reads it."""
    bytes_per_element = select_saved_bytes(job).norm_input + HALF_BYTES
    return round(count_hidden(job) * bytes_per_element * _compute_scale(job))


def count_hidden(job: JobConfig) -> int:
    """Count the elements of a layer's output: T h / s."""
    return job.tokens * job.model.hidden // job.parallel.sequence_split


def _compute_scale(job: JobConfig) -> float:
    return job.training.activation_bytes / 2


def _compute_input_ratio(job: JobConfig, saved: SavedBytes) -> float:
    """Size of a GEMM's saved input relative to 16 bits: less if it is saved as it is cast, which
    adapters do not."""
    if job.training.lora_rank:
        return 1.0
    return SAVED_INPUT_RATIOS.get(job.training.dtype, 1.0) if saved.fp8_inputs else 1.0


SAVED_INPUT_RATIOS: Mapping[GemmDtype, float] = {"fp8": 1 / 2, "nvfp4": (0.5 + 1 / 16) / 2}
"""Bytes of an input of a GEMM that is kept in 8 or 4 bits, with its scales, over those in 16."""


def _compute_norms(job: JobConfig, saved: SavedBytes, gathers: int, expert: bool) -> int:
    """Inputs and outputs of both norms, and other tensors of the hidden size; in a parallel block
    both norms have the same input.

    The outputs are inputs of GEMMs, and kept as these get them: with sequence parallelism those of
    gathers of both are whole unless the backward gathers them again.
    """
    outputs = 2.0 * _compute_input_ratio(job, saved)
    if job.training.lora_rank:
        adapted = ("qkv" in job.training.lora_targets) + bool(list_mlp_adapters(job, expert))
        outputs, gathers = 1.0 * adapted, min(gathers, adapted)
    if job.parallel.sequence_split > 1 and not is_gathered_again(job):
        width = 0.5 if is_gathered_in_fp8(job) else 1.0
        outputs += gathers * (width * job.parallel.sequence_split - 1)
    inputs = 1 if job.model.parallel_block else 2
    bytes_per_element = inputs * saved.norm_input + outputs * saved.norm_output
    bytes_per_element += saved.residual + saved.projection + saved.mlp_output
    return round(count_hidden(job) * bytes_per_element * _compute_scale(job))


def _compute_heads(job: JobConfig, saved: SavedBytes) -> int:
    model = job.model
    if model.latent is not None:
        # MLA: the compressed forms before and after their norms, then the heads. DeepSeek-V2,
        # arXiv:2405.04434, section 2.1: keys are as wide as queries for every head.
        latent = model.latent
        width = (latent.nope + latent.rope) * (saved.query + saved.key) + latent.value * saved.value
        compressed = latent.query_rank + latent.kv_rank
        kept = 1 if "norms" in job.training.recompute_parts else 2
        narrow = 2.0 * (kept * compressed + latent.rope)
        shared = narrow / job.parallel.sequence_split
        return round(
            job.tokens * (job.model.heads * width / job.parallel.tp + shared) * _compute_scale(job)
        )
    queries = model.heads * model.head_size
    keys_values = (saved.key + saved.value) * (queries if saved.expand_kv else model.kv_size)
    numbers = saved.query * queries + keys_values
    if model.qk_norm:
        numbers += saved.head_norm * (queries + model.kv_size)
    return round(job.tokens * numbers / job.parallel.tp * _compute_scale(job))


def _compute_attention(job: JobConfig, saved: SavedBytes) -> int:
    """Output, and the fp32 log-sum-exp of flash attention (4a) or the scores: softmax, and with
    dropout its mask and output (2as + as + 2as). Ulysses saves the output before and after its
    all-to-all, fp8 GEMMs a further copy."""
    model, training, layout = job.model, job.training, job.parallel
    size = model.latent.value if model.latent is not None else model.head_size
    exchanged = layout.cp if layout.context_kind == "ulysses" else layout.ulysses
    copies = 2.0 if exchanged > 1 else 1.0
    if training.is_quantized and saved.fp8_inputs and not training.lora_rank:
        copies += _compute_input_ratio(job, saved)
    output = copies * saved.attention_output * size * _compute_scale(job)
    extra = 4.0
    if not training.flash_attention:
        dropped = HALF_BYTES + MASK_BYTES if training.dropout and saved.scores else 0
        extra = (saved.scores + dropped) * training.seq_len * _compute_scale(job)
    return round(job.tokens * model.heads * (output + extra) / layout.tp)


def _compute_mlp(job: JobConfig, saved: SavedBytes, ffn: int) -> int:
    """Outputs of the first GEMMs and the input of the last."""
    return round(job.tokens * ffn / job.parallel.tp * _compute_mlp_unit_bytes(job, saved))


def _compute_mlp_unit_bytes(job: JobConfig, saved: SavedBytes) -> float:
    """Bytes saved per token and unit of width."""
    first = _compute_first_bytes(job, saved)
    if job.training.lora_rank and "mlp" not in job.training.lora_targets:
        return first
    return first + saved.mlp_second * _compute_input_ratio(job, saved) * _compute_scale(job)


def _compute_first_bytes(job: JobConfig, saved: SavedBytes) -> float:
    """Those of the outputs of the first GEMMs."""
    first = 2 * saved.mlp_first + saved.mlp_gate if job.model.gated else saved.mlp_first
    if job.training.fp8_activations and job.training.dtype == "fp8":
        first /= 2
    return first * _compute_scale(job)


FP32_EXPERTS = 2
"""Size of what experts in fp32 save, over that in 16 bits."""


def has_fp32_experts(job: JobConfig) -> bool:
    """Whether experts run in fp32: autocast does not cast the operands of torch's grouped_mm, which
    transformers calls for them."""
    is_routed = job.model.experts is not None
    return is_routed and job.runs_transformers and is_autocast(job)


# Activations in flight on a job's pipeline ranks.


def count_chunks_in_flight(job: JobConfig, rank: int) -> int:
    """Number of (microbatch, chunk) pairs whose activations are in flight at the rank's peak."""
    layout = job.parallel
    return count_in_flight(layout.schedule, layout.pp, job.microbatches, layout.chunks, rank)
