"""How many bytes a layer saves for its backward pass, item by item."""

from __future__ import annotations

from dataclasses import dataclass

from stepsplit.analyzer.model.formula import Formula
from stepsplit.analyzer.model.memory.frameworks import Saved, coefficients
from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.spec.transformer import Experts, LatentAttention

LAYER = Formula(
    "memory.activations",
    "8h (norms; /t with sequence parallelism) + 2d(2a + 2k)/t + 4a/t + 2f(G-1)/t + 2f/t bytes a"
    " token, times T = sb/c",
    "Korthikanti et al., arXiv:2205.05198, section 4, with flash attention, gated MLP and GQA",
)
KORTHIKANTI = Formula(
    "memory.activations_gpt",
    "sbh(10 + 24/t + 5as/(ht)); with sequence parallelism sbh/t (34 + 5as/h); selective 34sbh/t",
    "Korthikanti et al., arXiv:2205.05198, table 2",
)
MASK_BYTES = 1
"""A dropout mask holds one byte an element."""


@dataclass(frozen=True, slots=True)
class LayerActivations:
    """Bytes of one layer, microbatch and rank.

    heads: queries, keys, values (with MLA, their compressed forms too); attention: what attention
    itself keeps beside them (the log-sum-exp, or the scores) and its output; routed: what tokens
    cost in the experts that they are sent to, and the router.
    """

    norms: int
    heads: int
    attention: int
    masks: int
    mlp: int
    routed: int

    @property
    def total_bytes(self) -> int:
        return self.norms + self.heads + self.attention + self.masks + self.mlp + self.routed


@dataclass(frozen=True, slots=True)
class Layers:
    """One layer of each kind: with an MLP, and with experts where the model has them."""

    dense: LayerActivations
    expert: LayerActivations | None


def layers_of(job: Job) -> Layers:
    """What one layer of each kind saves."""
    expert = layer_activations(job, expert=True) if job.model.experts is not None else None
    return Layers(layer_activations(job), expert)


def layer_activations(job: Job, expert: bool = False) -> LayerActivations:
    """What one layer saves of one microbatch, in bytes on one rank, unless all is recomputed.

    Without flash attention, with dropout and G = 2 these are the formulas of Korthikanti et al.,
    table 2; selective recomputation drops what the framework's coefficients say.
    """
    saved, routed, mlp = saved_of(job), 0, 0
    if expert and job.model.experts is not None:
        routed = _routed(job, saved, job.model.experts)
        mlp = _mlp(job, saved, job.model.experts.shared_ffn)
    else:
        mlp = _mlp(job, saved, job.model.ffn)
    return LayerActivations(
        norms=_norms(job, saved),
        heads=_heads(job, saved),
        attention=_attention(job, saved),
        masks=2 * MASK_BYTES * _hidden(job) if job.recipe.dropout else 0,
        mlp=mlp,
        routed=routed,
    )


def saved_of(job: Job) -> Saved:
    """What the job's framework saves of a layer, by the job's recomputation."""
    found = coefficients(job.recipe.framework)
    return found.selective if job.recipe.recompute == "selective" else found.saved


def input_bytes(job: Job) -> int:
    """The input of one layer: 2sbh, or with sequence parallelism 2sbh/t."""
    return _hidden(job) * job.recipe.activation_bytes


def _hidden(job: Job) -> int:
    """Elements that a layer hands on: T h / s."""
    return job.tokens * job.model.hidden // job.layout.sequence_split


def _scale(job: Job) -> float:
    return job.recipe.activation_bytes / 2


def _input_share(job: Job, saved: Saved) -> float:
    """What is left of the input of a matrix product that keeps it in fp8."""
    return 0.5 if job.recipe.dtype == "fp8" and saved.fp8_inputs else 1.0


def _norms(job: Job, saved: Saved) -> int:
    """The inputs and outputs of both norms, and what else keeps the hidden size."""
    whole = 2 * (saved.norm_input + saved.norm_output * _input_share(job, saved))
    whole += saved.residual + saved.projection + saved.mlp_output
    return round(_hidden(job) * whole * _scale(job))


def _heads(job: Job, saved: Saved) -> int:
    model = job.model
    if model.latent is not None:
        return _latent(job, saved, model.latent)
    queries = model.heads * model.head_size
    pairs = (saved.key + saved.value) * (queries if saved.expand_kv else model.kv_size)
    each = saved.query * queries + pairs
    return round(job.tokens * each / job.layout.tp * _scale(job))


def _latent(job: Job, saved: Saved, latent: LatentAttention) -> int:
    """MLA: the compressed forms before and after their norms, then whole heads.

    DeepSeek-V2, arXiv:2405.04434, section 2.1: keys are as wide as queries for every head.
    """
    wide = (latent.nope + latent.rope) * (saved.query + saved.key) + latent.value * saved.value
    narrow = 2.0 * (2 * latent.query_rank + 2 * latent.kv_rank + latent.rope)
    shared = narrow / job.layout.sequence_split
    return round(job.tokens * (job.model.heads * wide / job.layout.tp + shared) * _scale(job))


def _attention(job: Job, saved: Saved) -> int:
    """Output, and fp32 log-sum-exp of flash attention (4a), or the scores: softmax, and with
    dropout its mask and output (2as + as + 2as). Ulysses keeps the output on both sides of its
    all-to-all, fp8 products a copy of their own."""
    model, recipe, layout = job.model, job.recipe, job.layout
    size = model.latent.value if model.latent is not None else model.head_size
    copies = 2.0 if layout.context_kind == "ulysses" and layout.cp > 1 else 1.0
    copies += 1.0 - _input_share(job, saved)
    output = copies * saved.attention_output * size * _scale(job)
    beside = 4.0
    if not recipe.flash_attention:
        each = (2 * 2 + MASK_BYTES) if recipe.dropout else 2
        beside = each * recipe.seq_len * _scale(job) if saved.scores else 0.0
    return round(job.tokens * model.heads * (output + beside) / layout.tp)


def _mlp(job: Job, saved: Saved, ffn: int) -> int:
    """Outputs of the first products and the input of the last."""
    return round(job.tokens * ffn / job.layout.tp * _mlp_each(job, saved))


def _mlp_each(job: Job, saved: Saved) -> float:
    """Bytes saved for each unit of width."""
    first = 2 * saved.mlp_first + saved.mlp_gate if job.model.gated else saved.mlp_first
    return (first + saved.mlp_second * _input_share(job, saved)) * _scale(job)


def _routed(job: Job, saved: Saved, experts: Experts) -> int:
    """top_k copies of every token through an expert, and fp32 logits of the router (4E).

    Balanced routing: each rank works on as many copies as it sends.
    """
    copies = job.tokens * experts.top_k / job.layout.sequence_split
    hidden = saved.norm_output * job.model.hidden * (2 if saved.routed_output else 1)
    inside = experts.ffn / job.layout.expert_tp * _mlp_each(job, saved)
    router = 4.0 * experts.count * job.tokens / job.layout.sequence_split
    return round(copies * (hidden * _scale(job) + inside) + router)
