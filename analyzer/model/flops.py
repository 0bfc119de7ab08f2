"""FLOPs of a step and of one forward pass on one rank, MFU and HFU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stepsplit.analyzer.model.config import (
    Chunk,
    JobConfig,
    ModelConfig,
    count_chunks,
    count_rerun_layers,
)
from stepsplit.analyzer.model.formulas import Formula
from stepsplit.analyzer.model.parameters import (
    Weights,
    count_active_parameters,
    count_attention_weights,
    count_mlp_weights,
    count_parameters,
    count_routed_weights,
    divide_ceil,
)

# FLOPs of a step of the whole job, and of one forward pass on one rank.

RECOMPUTE = Formula(
    "flops.recompute",
    "hardware FLOPs / model FLOPs; every layer recomputed: (3 + 1)/3, and the head once",
    "Narayanan et al., SC'21, arXiv:2104.04473, section 3.5 and eq. 3; Korthikanti et al.,"
    " arXiv:2205.05198, eq. 8",
)

PASSES = 3
"""Forward plus backward, in forward passes: gradients of inputs and of weights cost two."""

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


@dataclass(frozen=True, slots=True)
class ChunkFlops:
    """FLOPs of one forward pass: linear layers, attention core (not causal) and head."""

    linear: int
    attention: int
    head: int


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
    match convention:
        case "C2":
            return _count_job_flops(job, PASSES, PASSES + KORTHIKANTI_CORE)
        case "C3":
            return _count_job_flops(job, PASSES + 1, PASSES + 1)
        case "C4":
            return _count_flops_by_parameters(job, count_parameters(job.model), PASSES, PASSES)
        case "C5":
            return _count_job_flops(job, PASSES, PASSES, causal=True)
        case "C6":
            return _count_flops_by_parameters(
                job, count_active_parameters(job.model), PASSES, PASSES
            )
    return _count_job_flops(job, PASSES, PASSES)


def count_hardware_flops(job: JobConfig, convention: Convention = "C1") -> int:
    """Counts model FLOPs plus the FLOPs of activation recomputation (RECOMPUTE).

    selective: the attention core (C1: as in Korthikanti's eq. 8); full, every and sqrt: the forward
    pass of all layers without the head (C4 and C6, like llm-foundry: with the head).
    """
    layers, core = _count_passes(job, convention)
    if job.training.recompute_parts:
        core += "core-attention" in job.training.recompute_parts
        layers += _count_parts_share(job)
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


def _count_passes(job: JobConfig, convention: Convention) -> tuple[float, float]:
    """Counts forward passes of the layers' GEMMs and of the attention core.

    Selective recomputation repeats an attention core that stores its scores, but not a fused one;
    torchtitan's repeats every second GEMM.
    """
    match job.training.recompute:
        case "none":
            return PASSES, PASSES
        case "selective" if job.training.framework == "fsdp2":
            return PASSES + 0.5, PASSES
        case "selective" if job.training.flash_attention:
            return PASSES, PASSES
        case "selective":
            return PASSES, PASSES + (KORTHIKANTI_CORE if convention == "C1" else 1)
    again = count_rerun_layers(job, job.model.layers / count_chunks(job))
    share = again * count_chunks(job) / job.model.layers
    return PASSES + share, PASSES + share


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
    head = PASSES * 2 * model.hidden * job.padded_vocab
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


def count_core_flops(model: ModelConfig, keys: int, tp: int = 1) -> int:
    """Counts forward FLOPs per token of an attention core: 2 s a (d_qk + d_v), not causal."""
    latent = model.latent
    widths = 2 * model.head_size if latent is None else latent.nope + latent.rope + latent.value
    return 2 * keys * divide_ceil(model.heads, tp) * widths


def count_chunk_flops(job: JobConfig, chunk: Chunk) -> ChunkFlops:
    """Counts the FLOPs of one microbatch's forward pass through a chunk on one rank.

    Context parallelism splits the tokens, tensor parallelism the GEMMs. With sequence parallelism,
    replicated weights (router, compressed projections) are applied to the rank's tokens only.
    Expert work assumes balanced routing.
    """
    model, tp, tokens = job.model, job.parallel.tp, job.tokens
    dense = count_attention_weights(model, tp) + count_mlp_weights(model, model.ffn, tp)
    linear = chunk.dense_layers * _count_product_flops(job, dense)
    if chunk.expert_layers:
        routed = count_attention_weights(model, tp) + count_routed_weights(model, tp)
        linear += chunk.expert_layers * _count_product_flops(job, routed)
    attention = tokens * chunk.layers * count_core_flops(model, job.training.seq_len, tp)
    vocab = divide_ceil(job.padded_vocab, job.parallel.vocab_split) if chunk.head else 0
    head = 2 * tokens * model.hidden * vocab
    return ChunkFlops(linear, attention, head)


def _count_product_flops(job: JobConfig, weights: Weights) -> int:
    whole = divide_ceil(job.tokens, job.parallel.sequence_split) * weights.whole
    return 2 * (job.tokens * weights.divided + whole)


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

DAYS = Formula("flops.days", "T F / (B s n X)", f"{_SC21}, eq. 3 over eq. 4's n X")


def compute_korthikanti_flops(layers: int, hidden: int, seq: int, vocab: int, batch: int) -> int:
    """Computes C1 of a GPT step in closed form (Korthikanti et al., eq. 7): no recomputation."""
    per_token = 72 * layers * hidden**2 + 12 * layers * hidden * seq + 6 * hidden * vocab
    return batch * seq * per_token


def compute_korthikanti_selective_flops(
    layers: int, hidden: int, seq: int, vocab: int, batch: int
) -> int:
    """Computes C2 of a GPT step in closed form (Korthikanti et al., eq. 8)."""
    per_token = 72 * layers * hidden**2 + 24 * layers * hidden * seq + 6 * hidden * vocab
    return batch * seq * per_token


def compute_sc21_flops(layers: int, hidden: int, seq: int, vocab: int, batch: int) -> int:
    """Computes C3 of a GPT step in closed form (Narayanan et al., eq. 3): full recomputation."""
    per_token = 96 * layers * hidden**2 + 16 * layers * hidden * seq + 6 * hidden * vocab
    return batch * seq * per_token


def compute_training_days(
    tokens: float, flops_per_token: float, world_size: int, flops_per_s: float
) -> float:
    """Computes the days to train on tokens with flops_per_s on each of world_size GPUs."""
    return tokens * flops_per_token / (world_size * flops_per_s) / SECONDS_PER_DAY


def compute_sc21_days(
    tokens: float, parameters: float, world_size: int, flops_per_s: float
) -> float:
    """Computes days as 8 T P / (n X) (Narayanan et al., eq. 4): 2 to 3 % low, no attention."""
    return compute_training_days(tokens, 8 * parameters, world_size, flops_per_s)


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
