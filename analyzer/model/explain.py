"""Explanations of a prediction: each formula with the job's numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.comm_ops import FULL_RECOMPUTE
from stepsplit.analyzer.model.config import JobConfig, Link, ModelConfig, StageConfig, stages_of
from stepsplit.analyzer.model.explain_comm import of_calls, of_messages, of_routes
from stepsplit.analyzer.model.flops import CONVENTIONS, MFU, RECOMPUTE, Convention, layer_weights
from stepsplit.analyzer.model.formulas import Explained, Formula, RuleOfThumb, Symbol, differing
from stepsplit.analyzer.model.memory_states import (
    LayersByKind,
    chunks_in_flight,
    layers_of,
    parameter_bytes,
    sharding_stage,
    share,
    stage_activations,
)
from stepsplit.analyzer.model.parameters import (
    TOTAL,
    StageParameters,
    dense_layer,
    expert_layer,
    stage_parameters,
)
from stepsplit.analyzer.model.prediction import Prediction, StageMemory
from stepsplit.analyzer.model.schedule import IN_FLIGHT
from stepsplit.analyzer.model.schedule_time import FRACTION, OVERHEAD

# explain: from a prediction to its formulas, each with the job's numbers.


def explain(job: JobConfig, prediction: Prediction) -> tuple[Explained, ...]:
    """Explains the formulas of a prediction, with the rules of thumb that differ from them.

    Raises UsageError for a prediction that was read from a file: its messages have no formulas.
    """
    if not all(row.message.formulas for row in prediction.communication):
        raise UsageError(
            "a prediction that was read from a file has no formulas; predict the job again"
        )
    return (
        *of_work(job, prediction),
        *of_memory(job, prediction),
        *of_pipeline(job, prediction),
        *of_messages(job, prediction),
        *of_routes(job, prediction),
        *of_calls(job, prediction),
        *of_links(job),
    )


# Memory of weights, gradients and optimizer states.

_MANY = 1000
"""Parameters of a probe on 2 ranks that shows which bytes are sharded."""


def of_memory(job: JobConfig, prediction: Prediction) -> Iterator[Explained]:
    """Explains the states of the fullest stage, and a layer's saved activations per microbatch."""
    fullest = max(prediction.memory, key=lambda stage: stage.total_bytes)
    if not job.training.offload:
        yield _states(job, fullest)
    yield kept_of_layer(job, stages_of(job)[fullest.stage])


def _states(job: JobConfig, memory: StageMemory) -> Explained:
    value = memory.weights_bytes + memory.gradients_bytes + memory.optimizer_bytes
    held = stage_parameters(job)[memory.stage]
    each = parameter_bytes(job.training)
    symbols = (
        Symbol("P", f"parameters of a rank of stage {memory.stage}", held.dense, "parameters"),
        Symbol("N", "ranks over which their states are sharded", job.parallel.shard_size),
        *_experts(job, held),
        Symbol("w", "bytes of a weight", each.weights, "bytes"),
        Symbol("g", "bytes of a gradient", each.gradients, "bytes"),
        Symbol("o", "bytes of optimizer states per parameter", each.optimizer, "bytes"),
    )
    rules = [_sixteen(job, held)]
    if job.training.optimizer == "adam":
        rules.append(_doubling(job, memory))
    what = f"weights, gradients and optimizer of a rank of stage {memory.stage}"
    folk = differing(value, rules)
    return Explained(each.formula, what, symbols, value, "memory_bytes", folk, _applied(job, held))


def _applied(job: JobConfig, held: StageParameters) -> str:
    """The bytes per parameter as sharded by the ZeRO stage: "here 6 P + 12 P/N"."""
    parts = share(_MANY, 2, parameter_bytes(job.training), job.training, sharding_stage(job))
    each = parts.weights_bytes, parts.gradients_bytes, parts.optimizer_bytes
    own = parameter_bytes(job.training)
    unsharded = own.weights, own.gradients, own.optimizer
    both = list(zip(each, unsharded, strict=True))
    whole = sum(n for found, n in both if found == n * _MANY)
    spread = sum(n for found, n in both if 0 < found < n * _MANY)
    terms = [f"{whole} P" * (whole > 0), f"{spread} P/N" * (spread > 0)]
    experts = ", for experts with P_e and N_e" if held.experts else ""
    return f"here {' + '.join(filter(None, terms))}{experts}"


def _sixteen(job: JobConfig, held: StageParameters) -> RuleOfThumb:
    zero, recipe = job.parallel.zero, job.training
    own = parameter_bytes(recipe)
    spread = f", sharded by ZeRO-{zero} over N" if zero else ""
    value = held.dense * _paper_bytes(zero, job.parallel.shard_size)
    value += held.experts * _paper_bytes(zero, job.parallel.expert_shards)
    why = (
        f"{recipe.framework} with {recipe.dtype} and {recipe.optimizer} needs"
        f" {own.weights} + {own.gradients} + {own.optimizer} bytes"
    )
    rule = f"16 bytes per parameter (2 + 2 + 12){spread}"
    return RuleOfThumb(rule, value, why, ("sixteen-bytes",))


def _paper_bytes(zero: int, n: int) -> float:
    """Bytes of one parameter on a rank (Rajbhandari et al., arXiv:1910.02054, figure 1)."""
    return (16, 4 + 12 / n, 2 + 14 / n, 16 / n)[zero]


def _experts(job: JobConfig, held: StageParameters) -> tuple[Symbol, ...]:
    if not held.experts:
        return ()
    shards = job.parallel.expert_shards
    return (
        Symbol("P_e", "parameters of its experts", held.experts, "parameters"),
        Symbol("N_e", "ranks over which their states are sharded", shards),
    )


def _doubling(job: JobConfig, memory: StageMemory) -> RuleOfThumb:
    mixed = parameter_bytes(job.training).weights < 4
    return RuleOfThumb(
        "the optimizer doubles the memory of the weights",
        2 * memory.weights_bytes,
        "Adam has two fp32 moments, 8 bytes per parameter"
        + ", and an fp32 copy of the 16-bit weights" * mixed
        + "; gradients are additional",
        ("adam-doubles",),
    )


# Saved activations of a layer.

_GPT_WHOLE, _GPT_SPLIT, _GPT_SCORES = 10, 24, 5
"""Bytes of Korthikanti et al., table 2: replicated over tp, sharded by tp, attention scores."""

_PARTS = {
    "norms": "inputs and outputs of both norms, residuals",
    "heads": "queries, keys and values",
    "attention": "other saved tensors of attention, and its output",
    "masks": "dropout masks",
    "mlp": "the MLP",
    "routed": "experts and router",
}
"""Fields of LayerActivations."""


def kept_of_layer(job: JobConfig, stage: StageConfig) -> Explained:
    """Explains the saved activations of a layer of the stage for one microbatch, in bytes."""
    layers = layers_of(job)
    kept = stage_activations(job, stage, layers)
    value = kept.held_bytes * len(stage.chunks) / stage.layers
    what = f"saved activations of a layer of stage {stage.index} per microbatch and rank"
    symbols, rule, note = _tokens(job), _constant_rule(), ""
    if kept.formula is layers.dense.formula:
        symbols, rule = (*symbols, *_widths(job), *_parts(stage, layers)), _gpt_rule(job)
        note = f"counted tensor by tensor for {job.training.framework} (presets/frameworks.toml)"
    found = differing(value, [rule])
    return Explained(kept.formula, what, symbols, value, "bytes", found, note)


def _tokens(job: JobConfig) -> tuple[Symbol, ...]:
    return (
        Symbol("s", "tokens per sequence", job.training.seq_len),
        Symbol("b", "sequences per microbatch", job.training.micro_batch),
        Symbol("c", "context-parallel ranks", job.parallel.cp),
        Symbol("h", "hidden size", job.model.hidden),
        Symbol("t", "tensor-parallel ranks", job.parallel.tp),
    )


def _widths(job: JobConfig) -> tuple[Symbol, ...]:
    model = job.model
    return (
        *head_symbols(model),
        Symbol("f", "width of the MLP", model.ffn),
        Symbol("G", "linear layers of the MLP (3 if gated)", 3 if model.gated else 2),
    )


def _parts(stage: StageConfig, layers: LayersByKind) -> Iterator[Symbol]:
    """Lists the bytes by purpose, averaged over the stage's layers; they sum to the value."""
    for name, meaning in _PARTS.items():
        total = stage.dense_layers * getattr(layers.dense, name)
        total += stage.expert_layers * getattr(layers.expert, name, 0)
        if total:
            yield Symbol(name, meaning, total / stage.layers, "bytes")


def _constant_rule() -> RuleOfThumb:
    why = "the input of each recomputed segment is saved, and one segment at a time is complete"
    return RuleOfThumb("full recomputation saves O(1)", 0.0, why, ("recompute-all",))


def _gpt_rule(job: JobConfig) -> RuleOfThumb:
    model, layout = job.model, job.parallel
    scores = _GPT_SCORES * model.heads * job.training.seq_len / model.hidden
    each = _GPT_WHOLE / layout.sequence_split + (_GPT_SPLIT + scores) / layout.tp
    why = "it holds for 16-bit GPT with dropout, an MLP of 4h and attention that stores its scores"
    rule = "s b h (34 + 5 a s / h), sharded by tp"
    return RuleOfThumb(rule, job.tokens * model.hidden * each, why, ("activations-100b",))


# Parameters, FLOPs and MFU.


def of_work(job: JobConfig, prediction: Prediction) -> Iterator[Explained]:
    """Explains parameters, FLOPs of a step, MFU and, if any, the FLOPs of recomputation."""
    yield _parameters(job, prediction)
    yield _flops(job, prediction)
    if prediction.mfu is not None:
        yield _mfu(job, prediction, prediction.mfu)
    if prediction.hardware_flops != prediction.model_flops:
        yield _recompute(job, prediction)


def _parameters(job: JobConfig, prediction: Prediction) -> Explained:
    model, value = job.model, prediction.parameters
    rule = RuleOfThumb(
        "12 L h^2",
        12 * model.layers * model.hidden**2,
        "it omits embedding and head, and assumes an MLP of 4h without a gate and as many"
        " key-value heads as heads",
    )
    return Explained(
        TOTAL, "parameters of the whole model", _shape(job), value, "parameters",
        differing(value, [rule]),
    )  # fmt: skip


def _shape(job: JobConfig) -> tuple[Symbol, ...]:
    model = job.model
    symbols = (
        Symbol("L", "layers", model.layers),
        Symbol("h", "hidden size", model.hidden),
        *head_symbols(model),
        Symbol("f", "width of the MLP", model.ffn),
        Symbol("G", "linear layers of the MLP (3 if gated)", 3 if model.gated else 2),
        Symbol("V", "vocabulary", model.vocab),
    )
    if model.experts is None:
        return (
            *symbols,
            Symbol("layer", "parameters of one layer", dense_layer(model).total, "parameters"),
        )
    experts = (
        Symbol(
            "layer", "parameters of one layer with experts", expert_layer(model).total, "parameters"
        ),
        Symbol("E", "experts per layer", model.experts.count),
        Symbol("k_top", "experts per token", model.experts.top_k),
        Symbol("f_e", "width of an expert", model.experts.ffn),
    )
    return symbols + experts


def head_symbols(model: ModelConfig) -> tuple[Symbol, ...]:
    """Lists the numbers and sizes of the attention heads."""
    heads, latent = Symbol("a", "heads", model.heads), model.latent
    if latent is None:
        keys = Symbol("k", "key-value heads", model.kv_heads)
        return heads, keys, Symbol("d", "head size", model.head_size)
    return (
        heads,
        Symbol("r_q", "compressed query size", latent.query_rank),
        Symbol("r_kv", "compressed key-value size", latent.kv_rank),
        Symbol("d_k", "key size of a head", latent.nope + latent.rope),
        Symbol("d_v", "value size of a head", latent.value),
    )


def _flops(job: JobConfig, prediction: Prediction) -> Explained:
    model, recipe, value = job.model, job.training, prediction.model_flops
    tokens = recipe.global_batch * recipe.seq_len
    rule = RuleOfThumb(
        "6 FLOPs per parameter and token",
        6 * prediction.parameters * tokens,
        "it omits the attention core, and counts the embedding, which is a lookup"
        + (", and inactive experts" if model.experts else ""),
    )
    symbols = [
        Symbol("B", "sequences per step", recipe.global_batch),
        Symbol("s", "tokens per sequence", recipe.seq_len),
        Symbol("L", "layers", model.layers),
        Symbol("h", "hidden size", model.hidden),
        Symbol("V", "vocabulary, padded", job.padded_vocab),
    ]
    note = _of_products(model)
    if note:
        met = "weights of all layers that one token is multiplied with"
        symbols.append(Symbol("W", met, layer_weights(model), "parameters"))
    return Explained(
        CONVENTIONS[cast(Convention, prediction.convention)], "model FLOPs of a step, all ranks",
        tuple(symbols), value, "flops", differing(value, [rule]), note,
    )  # fmt: skip


def _of_products(model: ModelConfig) -> str:
    """The form of C1 for layers that are not GPT's; empty for GPT."""
    gpt = replace(
        model, gated=False, experts=None, latent=None, ffn=4 * model.hidden,
        kv_heads=model.heads, head_size=model.hidden // model.heads,
    )  # fmt: skip
    if model == gpt:
        return ""
    core, widths = "12 L s a d), a d", model.heads * model.head_size
    if model.latent is not None:
        widths = model.heads * (model.latent.nope + model.latent.rope + model.latent.value)
        core = "6 L s a (d_k + d_v)), a (d_k + d_v)"
    return f"that is for GPT layers; here B s (6 W + 6 h V + {core} = {widths:,}"


def _mfu(job: JobConfig, prediction: Prediction, value: float) -> Explained:
    symbols = (
        Symbol("F", "model FLOPs of a step", prediction.model_flops, "flops"),
        Symbol("T", "step time", prediction.split.step_ns, "ns"),
        Symbol("n", "ranks", job.parallel.world_size),
        Symbol("P", f"dense peak, {job.training.dtype}", _peak(job), "flops_per_s"),
    )
    rules = []
    if prediction.hfu is not None:
        why = "it includes recomputation: that is the HFU"
        rules.append(RuleOfThumb("all FLOPs that the GPUs execute", prediction.hfu, why))
    what = f"MFU by {prediction.convention}"
    return Explained(MFU, what, symbols, value, "ratio", differing(value, rules))


def _peak(job: JobConfig) -> float:
    return job.hardware.peak_flops_per_s(job.training.dtype) or 0.0


def _recompute(job: JobConfig, prediction: Prediction) -> Explained:
    value = prediction.hardware_flops / prediction.model_flops
    symbols = (
        Symbol("F", "model FLOPs of a step", prediction.model_flops, "flops"),
        Symbol("F_h", "FLOPs with recomputation", prediction.hardware_flops, "flops"),
    )
    whole = job.training.recompute in FULL_RECOMPUTE
    rule = RuleOfThumb(
        "recomputing doubles the compute",
        2.0,
        "only the forward pass is repeated, and a backward pass costs two forwards: 4 instead of 3"
        if whole
        else "only the attention core is recomputed",
        ("recompute-all",),
    )
    what = f"hardware FLOPs over model FLOPs (recompute {job.training.recompute})"
    return Explained(RECOMPUTE, what, symbols, value, "", differing(value, [rule]))


# Pipeline bubble and microbatches in flight.

_OTHER_WHOLE = "that is the overhead: relative to the useful time, not to the total time"


def of_pipeline(job: JobConfig, prediction: Prediction) -> Iterator[Explained]:
    """Explains bubble fraction, bubble overhead and microbatches in flight, if pp > 1."""
    if job.parallel.pp > 1:
        yield _fraction(job, prediction.bubble_fraction)
        yield _overhead(job, prediction.bubble_overhead)
        yield _in_flight(job, max(prediction.memory, key=lambda stage: stage.total_bytes).stage)


def _fraction(job: JobConfig, value: float) -> Explained:
    p, m = job.parallel.pp, job.microbatches
    rules = (
        _simple_fraction(job),
        RuleOfThumb("(p-1)/m of the step", (p - 1) / m, _OTHER_WHOLE),
        RuleOfThumb(
            "a pipeline of p stages is idle (p-1)/p of the time", (p - 1) / p,
            f"it holds for 1 microbatch; this step has {m}", ("naive-bubble", "pp-quarter"),
        ),
    )  # fmt: skip
    return Explained(
        FRACTION, "bubble fraction (of the total time)", _symbols(job), value, "ratio",
        differing(value, rules),
        _simulated(job),
    )  # fmt: skip


def _overhead(job: JobConfig, value: float) -> Explained:
    p, m = job.parallel.pp, job.microbatches
    why = "that is the fraction: relative to the total time, not to the useful time"
    rules = (RuleOfThumb("(p-1)/(m+p-1)", (p - 1) / (m + p - 1), why),)
    return Explained(
        OVERHEAD, "bubble overhead (of the useful time)", _symbols(job), value, "ratio",
        differing(value, rules),
        _simulated(job),
    )  # fmt: skip


def _simulated(job: JobConfig) -> str:
    return f"from a simulation of the schedule ({job.parallel.schedule}) with this job's times"


def _in_flight(job: JobConfig, rank: int) -> Explained:
    p, schedule, one = job.parallel.pp, job.parallel.schedule, job.parallel.stages_per_rank
    value = chunks_in_flight(job, rank)
    why = f"a rank has 1/{p} of the layers, but several microbatches in flight"
    rule = RuleOfThumb("p stages divide the activations by p", one, why, ("pp-memory",))
    symbols = (*_symbols(job), Symbol("r", "pipeline rank", rank))
    what = f"activations in flight at the peak of pipeline rank {rank} (microbatches x stages)"
    note = f"the schedule is {schedule}"
    return Explained(IN_FLIGHT, what, symbols, value, "", differing(value, [rule]), note)


def _simple_fraction(job: JobConfig) -> RuleOfThumb:
    p, m, schedule = job.parallel.pp, job.microbatches, job.parallel.schedule
    why = "it assumes equal stages and free messages"
    if schedule not in ("1f1b", "gpipe"):
        why = f"it is for GPipe and 1F1B, not {schedule}, and assumes equal stages"
    return RuleOfThumb("(p-1)/(m+p-1)", (p - 1) / (m + p - 1), why)


def _symbols(job: JobConfig) -> tuple[Symbol, ...]:
    return (
        Symbol("p", "pipeline ranks", job.parallel.pp),
        Symbol("m", "microbatches per step", job.microbatches),
        Symbol("v", "stages per rank", job.parallel.stages_per_rank),
    )


# Link rates, by data sheet and per direction.

NVLINK = Formula(
    "link.nvlink",
    "bytes per second of one GPU in one direction: the reference for a collective's busbw",
    "NVIDIA data sheets, which give the sum of both directions",
)

NIC = Formula(
    "link.nic",
    "bytes per second of one GPU's adapter in one direction: bits per second of the data sheet / 8",
    "data sheets of the networks; stas00/ml-engineering, network/README.md",
)


def of_links(job: JobConfig) -> Iterator[Explained]:
    """Explains the rate of NVLink, and that of the network if the job has several nodes."""
    if job.hardware.intra.name.startswith("nvlink"):
        yield _nvlink(job.hardware.intra)
    if job.parallel.world_size > job.hardware.gpus_per_node:
        yield _nic(job.hardware.inter)


def _nvlink(link: Link) -> Explained:
    rule = RuleOfThumb(
        "the rate on the data sheet", 2 * link.bytes_per_s,
        "it is the sum of both directions; a collective sends at half of it",
        ("nvlink-900", "nvlink-a100", "a100-links"),
    )  # fmt: skip
    symbols = (Symbol("e", "fraction of it that large rings reach", link.ring, "ratio"),)
    value = link.bytes_per_s
    what = f"rate of {link.name}"
    return Explained(NVLINK, what, symbols, value, "bytes_per_s", differing(value, [rule]))


def _nic(link: Link) -> Explained:
    rule = RuleOfThumb(
        f"{8 * link.bytes_per_s / 1e9:,.0f}, read as GB/s", 8 * link.bytes_per_s,
        "network rates are in bits per second, 8 per byte", ("nic-rates",),
    )  # fmt: skip
    symbols = (Symbol("e", "fraction of it that large rings reach", link.ring, "ratio"),)
    value, what = link.bytes_per_s, f"rate of {link.name}"
    return Explained(NIC, what, symbols, value, "bytes_per_s", differing(value, [rule]))
