"""Explanations of a prediction: each formula with the job's numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.bound import BOUND
from stepsplit.analyzer.model.comm_ops import FULL_RECOMPUTE
from stepsplit.analyzer.model.config import JobConfig, ModelConfig
from stepsplit.analyzer.model.device_speed import (
    ATTENTION,
    GEMM_TABLE,
    choose_attention_kernel,
    compute_device_speed,
    count_attended_tokens,
    is_attention_stated,
)
from stepsplit.analyzer.model.explain_comm import explain_calls, explain_messages, explain_routes
from stepsplit.analyzer.model.formulas import (
    Explanation,
    Formula,
    RuleOfThumb,
    Symbol,
    select_differing,
)
from stepsplit.analyzer.model.hardware_config import load_attention_rate
from stepsplit.analyzer.model.layer_time import list_mlp_gemms
from stepsplit.analyzer.model.memory_states import (
    ADAPTED,
    compute_layers_by_kind,
    compute_parameter_bytes,
    compute_stage_activations,
    count_chunks_in_flight,
    find_sharding_stage,
    shard_states,
)
from stepsplit.analyzer.model.parameters import (
    CONVENTIONS,
    MFU,
    RECOMPUTE,
    TOTAL,
    Convention,
    StageParameters,
    count_dense_layer,
    count_expert_layer,
    count_layer_weights,
    count_stage_parameters,
    select_trained,
)
from stepsplit.analyzer.model.prediction import Prediction, StageMemory
from stepsplit.analyzer.model.rank_layout import StageConfig, list_stages
from stepsplit.analyzer.model.schedule import IN_FLIGHT
from stepsplit.analyzer.model.schedule_time import FRACTION, OVERHEAD

# explain: from a prediction to its formulas, each with the job's numbers.


def explain(job: JobConfig, prediction: Prediction) -> tuple[Explanation, ...]:
    """Explains the formulas of a prediction, with the rules of thumb that differ from them.

    Raises UsageError for a prediction that was read from a file: its messages have no formulas.
    """
    if not all(row.message.formulas for row in prediction.communication):
        raise UsageError(
            "a prediction that was read from a file has no formulas; predict the job again"
        )
    return (
        *explain_work(job, prediction),
        *explain_memory(job, prediction),
        *explain_pipeline(job, prediction),
        *explain_messages(job, prediction),
        *explain_routes(job, prediction),
        *explain_calls(job, prediction),
        *explain_links(job),
        *_explain_bound(prediction),
    )


def _explain_bound(prediction: Prediction) -> Iterator[Explanation]:
    """The least time of the step, with that of each resource."""
    if (bound := prediction.bound) is not None:
        symbols = [Symbol(name, f"least time by {name}", ns, "ns") for name, ns in bound.resources]
        what = f"least time of the step by physics alone ({bound.resource})"
        yield Explanation(BOUND, what, tuple(symbols), bound.ns, "ns")


# Memory of weights, gradients and optimizer states.

_PROBE_PARAMETERS = 1000
"""Parameters of a probe on 2 ranks that shows which bytes are sharded."""


def explain_memory(job: JobConfig, prediction: Prediction) -> Iterator[Explanation]:
    """Explains the states of the fullest stage, and a layer's saved activations per microbatch."""
    fullest = max(prediction.memory, key=lambda stage: stage.total_bytes)
    if not job.training.offload:
        yield _explain_states(job, fullest)
    yield explain_layer_activations(job, list_stages(job)[fullest.stage])


def _explain_states(job: JobConfig, memory: StageMemory) -> Explanation:
    value = memory.weights_bytes + memory.gradients_bytes + memory.optimizer_bytes
    params = count_stage_parameters(job)[memory.stage]
    bytes_per_parameter = compute_parameter_bytes(job.training)
    experts: tuple[Symbol, ...] = ()
    if params.experts:
        shards = job.parallel.expert_shards
        experts = (
            Symbol("P_e", "parameters of its experts", params.experts, "parameters"),
            Symbol("N_e", "ranks over which their states are sharded", shards),
        )
    symbols = (
        Symbol("P", f"parameters of a rank of stage {memory.stage}", params.dense, "parameters"),
        Symbol("N", "ranks over which their states are sharded", job.parallel.shard_size),
        *experts,
        Symbol("w", "bytes of a weight", bytes_per_parameter.weights, "bytes"),
        Symbol("g", "bytes of a gradient", bytes_per_parameter.gradients, "bytes"),
        Symbol(
            "o", "bytes of optimizer states per parameter", bytes_per_parameter.optimizer, "bytes"
        ),
    )
    formula, rules = bytes_per_parameter.formula, [_build_sixteen_byte_rule(job, params)]
    if job.training.optimizer == "adam":
        mixed = bytes_per_parameter.weights < 4
        rules.append(
            RuleOfThumb(
                "the optimizer doubles the memory of the weights",
                2 * memory.weights_bytes,
                "Adam has two fp32 moments, 8 bytes per parameter"
                + ", and an fp32 copy of the 16-bit weights" * mixed
                + "; gradients are additional",
                ("adam-doubles",),
            )
        )
    note = _describe_sharding(job, params)
    if job.training.lora_rank:
        formula, rules, note = ADAPTED, rules[:1], ""
        adapters = select_trained(job, params).total
        symbols += (Symbol("A", "parameters of the rank's adapters", adapters, "parameters"),)
    what = f"weights, gradients and optimizer of a rank of stage {memory.stage}"
    differing_rules = select_differing(value, rules)
    return Explanation(
        formula, what, symbols, value, "memory_bytes", differing_rules, note,
    )  # fmt: skip


def _describe_sharding(job: JobConfig, params: StageParameters) -> str:
    """The bytes per parameter as sharded by the ZeRO stage: "here 6 P + 12 P/N"."""
    parts = shard_states(
        _PROBE_PARAMETERS,
        2,
        compute_parameter_bytes(job.training),
        job.training,
        find_sharding_stage(job),
    )
    sharded = parts.weights_bytes, parts.gradients_bytes, parts.optimizer_bytes
    bytes_per_parameter = compute_parameter_bytes(job.training)
    unsharded = (
        bytes_per_parameter.weights,
        bytes_per_parameter.gradients,
        bytes_per_parameter.optimizer,
    )
    pairs = list(zip(sharded, unsharded, strict=True))
    whole = sum(n for found, n in pairs if found == n * _PROBE_PARAMETERS)
    spread = sum(n for found, n in pairs if 0 < found < n * _PROBE_PARAMETERS)
    terms = [f"{whole} P" * (whole > 0), f"{spread} P/N" * (spread > 0)]
    experts = ", for experts with P_e and N_e" if params.experts else ""
    return f"here {' + '.join(filter(None, terms))}{experts}"


def _build_sixteen_byte_rule(job: JobConfig, params: StageParameters) -> RuleOfThumb:
    zero, recipe = job.parallel.zero, job.training
    bytes_per_parameter = compute_parameter_bytes(recipe)
    spread = f", sharded by ZeRO-{zero} over N" if zero else ""
    value = params.dense * _compute_paper_bytes(zero, job.parallel.shard_size)
    value += params.experts * _compute_paper_bytes(zero, job.parallel.expert_shards)
    why = (
        f"{recipe.framework} with {recipe.dtype} and {recipe.optimizer} needs"
        f" {bytes_per_parameter.weights} + {bytes_per_parameter.gradients} + "
        f"{bytes_per_parameter.optimizer} bytes"
    )
    if recipe.lora_rank:
        why = "frozen weights have neither gradients nor optimizer states"
    rule = f"16 bytes per parameter (2 + 2 + 12){spread}"
    return RuleOfThumb(rule, value, why, ("sixteen-bytes",))


def _compute_paper_bytes(zero: int, n: int) -> float:
    """Bytes of one parameter on a rank (Rajbhandari et al., arXiv:1910.02054, figure 1)."""
    return (16, 4 + 12 / n, 2 + 14 / n, 16 / n)[zero]


# Saved activations of a layer.

_GPT_WHOLE, _GPT_SPLIT, _GPT_SCORES = 10, 24, 5
"""Bytes of Korthikanti et al., table 2: replicated over tp, sharded by tp, attention scores."""

_ACTIVATION_MEANINGS = {
    "norms": "inputs and outputs of both norms, residuals",
    "heads": "queries, keys and values",
    "attention": "other saved tensors of attention, and its output",
    "masks": "dropout masks",
    "mlp": "the MLP",
    "routed": "experts and router",
    "adapters": "inputs of the adapters' second matrices",
}
"""Fields of LayerActivations."""


def explain_layer_activations(job: JobConfig, stage: StageConfig) -> Explanation:
    """Explains the saved activations of a layer of the stage for one microbatch, in bytes."""
    layers = compute_layers_by_kind(job)
    activations = compute_stage_activations(job, stage, layers)
    value = activations.saved_bytes * len(stage.chunks) / stage.layers
    what = f"saved activations of a layer of stage {stage.index} per microbatch and rank"
    symbols = [
        Symbol("s", "tokens per sequence", job.training.seq_len),
        Symbol("b", "sequences per microbatch", job.training.micro_batch),
        Symbol("c", "context-parallel ranks", job.parallel.cp),
        Symbol("h", "hidden size", job.model.hidden),
        Symbol("t", "tensor-parallel ranks", job.parallel.tp),
    ]
    why = "the input of each recomputed segment is saved, and one segment at a time is complete"
    rule, note = RuleOfThumb("full recomputation saves O(1)", 0.0, why, ("recompute-all",)), ""
    if activations.formula is layers.dense.formula:
        symbols += _list_layer_symbols(job.model)
        # The bytes by purpose, averaged over the stage's layers; they sum to the value.
        for name, meaning in _ACTIVATION_MEANINGS.items():
            total = stage.dense_layers * getattr(layers.dense, name)
            total += stage.expert_layers * getattr(layers.expert, name, 0)
            if total:
                symbols.append(Symbol(name, meaning, total / stage.layers, "bytes"))
        rule = _build_gpt_rule(job)
        note = f"counted tensor by tensor for {job.training.framework} (presets/frameworks.toml)"
    rules = select_differing(value, [rule])
    return Explanation(activations.formula, what, tuple(symbols), value, "bytes", rules, note)


def _build_gpt_rule(job: JobConfig) -> RuleOfThumb:
    model, layout = job.model, job.parallel
    scores = _GPT_SCORES * model.heads * job.training.seq_len / model.hidden
    bytes_per_element = _GPT_WHOLE / layout.sequence_split + (_GPT_SPLIT + scores) / layout.tp
    why = "it holds for 16-bit GPT with dropout, an MLP of 4h and attention that stores its scores"
    rule = "s b h (34 + 5 a s / h), sharded by tp"
    return RuleOfThumb(
        rule, job.tokens * model.hidden * bytes_per_element, why, ("activations-100b",)
    )


# Parameters, FLOPs and MFU.


def explain_work(job: JobConfig, prediction: Prediction) -> Iterator[Explanation]:
    """Explains parameters, FLOPs of a step, MFU and, if any, the FLOPs of recomputation."""
    yield _explain_parameters(job, prediction)
    yield _explain_flops(job, prediction)
    if prediction.mfu is not None:
        yield _explain_mfu(job, prediction, prediction.mfu)
    if prediction.hardware_flops != prediction.model_flops:
        yield _explain_recompute(job, prediction)
    if job.hardware.gemms:
        # The time of one GEMM without and with the measured rates near its shape.
        speed = compute_device_speed(job)
        gemm = list_mlp_gemms(job, job.model.ffn)[0]
        plain_ns = gemm.compute_forward_ns(replace(speed, gemm_ratios=()))
        value_ns = gemm.compute_forward_ns(speed)
        symbols = (
            Symbol("M", "rows", gemm.rows),
            Symbol("N", "columns", gemm.columns),
            Symbol("K", "inner size", gemm.inner),
            Symbol("t", "its time by the constants of the family", plain_ns, "ns"),
            Symbol("r", "measured / modelled time near this shape", value_ns / plain_ns, "ratio"),
        )
        yield Explanation(GEMM_TABLE, "first GEMM of a dense MLP, forward", symbols, value_ns, "ns")
    if job.training.flash_attention and not is_attention_stated(job):
        yield _explain_attention(job)


def _explain_attention(job: JobConfig) -> Explanation:
    """The kernel of attention, its published rate, and the rate in this job's forward."""
    name = choose_attention_kernel(job)
    kernel = load_attention_rate(name, job.hardware.family)
    assert kernel is not None, "a predicted job has a rate"
    symbols = (
        Symbol("s", "tokens that a call sees", count_attended_tokens(job)),
        Symbol("R", "published rate", kernel.rate.forward_flops_per_s, "flops_per_s"),
        Symbol("s0", "tokens at which it reaches half", kernel.rate.start_tokens),
        Symbol("P", "peak of the GPU that was measured", kernel.peak_flops_per_s, "flops_per_s"),
    )
    value = compute_device_speed(job).attention_flops_per_ns * 1e9
    return Explanation(
        ATTENTION, f"rate of attention's forward ({name})", symbols, value, "flops_per_s"
    )


def _explain_parameters(job: JobConfig, prediction: Prediction) -> Explanation:
    model, value = job.model, prediction.parameters
    rule = RuleOfThumb(
        "12 L h^2",
        12 * model.layers * model.hidden**2,
        "it omits embedding and head, and assumes an MLP of 4h without a gate and as many"
        " key-value heads as heads",
    )
    symbols = (
        Symbol("L", "layers", model.layers),
        Symbol("h", "hidden size", model.hidden),
        *_list_layer_symbols(model),
        Symbol("V", "vocabulary", model.vocab),
    )
    if model.experts is None:
        count = count_dense_layer(model).total
        symbols += (Symbol("layer", "parameters of one layer", count, "parameters"),)
    else:
        count = count_expert_layer(model).total
        symbols += (
            Symbol("layer", "parameters of one layer with experts", count, "parameters"),
            Symbol("E", "experts per layer", model.experts.count),
            Symbol("k_top", "experts per token", model.experts.top_k),
            Symbol("f_e", "width of an expert", model.experts.ffn),
        )
    return Explanation(
        TOTAL, "parameters of the whole model", symbols, value, "parameters",
        select_differing(value, [rule]),
    )  # fmt: skip


def _list_layer_symbols(model: ModelConfig) -> tuple[Symbol, ...]:
    """Lists the numbers and sizes of the attention heads, and the sizes of the MLP."""
    latent = model.latent
    heads: tuple[Symbol, ...] = (Symbol("a", "heads", model.heads),)
    if latent is None:
        heads += (
            Symbol("k", "key-value heads", model.kv_heads),
            Symbol("d", "head size", model.head_size),
        )
    else:
        heads += (
            Symbol("r_q", "compressed query size", latent.query_rank),
            Symbol("r_kv", "compressed key-value size", latent.kv_rank),
            Symbol("d_k", "key size of a head", latent.nope + latent.rope),
            Symbol("d_v", "value size of a head", latent.value),
        )
    return (
        *heads,
        Symbol("f", "width of the MLP", model.ffn),
        Symbol("G", "linear layers of the MLP (3 if gated)", 3 if model.gated else 2),
    )


def _explain_flops(job: JobConfig, prediction: Prediction) -> Explanation:
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
    note = _describe_products(job)
    if note:
        meaning = "weights of all layers that one token is multiplied with"
        symbols.append(Symbol("W", meaning, count_layer_weights(model), "parameters"))
    if 0 < model.window < recipe.seq_len:
        keys = model.count_attended_keys(recipe.seq_len) / 2
        symbols.append(Symbol("k", "mean number of keys of a query, over windows", keys))
    return Explanation(
        CONVENTIONS[cast(Convention, prediction.convention)], "model FLOPs of a step, all ranks",
        tuple(symbols), value, "flops", select_differing(value, [rule]), note,
    )  # fmt: skip


def _describe_products(job: JobConfig) -> str:
    """The form of C1 for layers that are not GPT's or have adapters; empty for GPT."""
    model, passes = job.model, 4 if job.training.lora_rank else 6
    gpt = replace(
        model, gated=False, experts=None, latent=None, ffn=4 * model.hidden,
        kv_heads=model.heads, head_size=model.hidden // model.heads,
    )  # fmt: skip
    is_windowed = 0 < model.window < job.training.seq_len
    if model == gpt and not job.training.lora_rank and not is_windowed:
        return ""
    keys = "24 L k" if is_windowed else "12 L s"
    core, widths = f"{keys} a d), a d", model.heads * model.head_size
    if model.latent is not None:
        keys = "12 L k" if is_windowed else "6 L s"
        widths = model.heads * (model.latent.nope + model.latent.rope + model.latent.value)
        core = f"{keys} a (d_k + d_v)), a (d_k + d_v)"
    products = f"B s ({passes} W + {passes} h V + {core} = {widths:,}"
    if job.training.lora_rank:
        products += "; frozen weights have no gradient, and adapters are not counted"
    return f"that is for GPT layers; here {products}"


def _explain_mfu(job: JobConfig, prediction: Prediction, value: float) -> Explanation:
    symbols = (
        Symbol("F", "model FLOPs of a step", prediction.model_flops, "flops"),
        Symbol("T", "step time", prediction.split.step_ns, "ns"),
        Symbol("n", "ranks", job.parallel.world_size),
        Symbol(
            "P",
            f"dense peak, {job.training.dtype}",
            job.hardware.peak_flops_per_s(job.training.dtype) or 0.0,
            "flops_per_s",
        ),
    )
    rules = []
    if prediction.hfu is not None:
        why = "it includes recomputation: that is the HFU"
        rules.append(RuleOfThumb("all FLOPs that the GPUs execute", prediction.hfu, why))
    what = f"MFU by {prediction.convention}"
    return Explanation(MFU, what, symbols, value, "ratio", select_differing(value, rules))


def _explain_recompute(job: JobConfig, prediction: Prediction) -> Explanation:
    value = prediction.hardware_flops / prediction.model_flops
    symbols = (
        Symbol("F", "model FLOPs of a step", prediction.model_flops, "flops"),
        Symbol("F_h", "FLOPs with recomputation", prediction.hardware_flops, "flops"),
    )
    is_full = job.training.recompute in FULL_RECOMPUTE
    backward = "two forwards: 4 instead of 3"
    if job.training.lora_rank:
        backward = "about one, as frozen weights have no gradients: 3 instead of 2"
    rule = RuleOfThumb(
        "recomputing doubles the compute",
        2.0,
        f"only the forward pass is repeated, and a backward pass costs {backward}"
        if is_full
        else "only the attention core is recomputed",
        ("recompute-all",),
    )
    what = f"hardware FLOPs over model FLOPs (recompute {job.training.recompute})"
    return Explanation(RECOMPUTE, what, symbols, value, "", select_differing(value, [rule]))


# Pipeline bubble and microbatches in flight.

_OVERHEAD_REASON = "that is the overhead: relative to the useful time, not to the total time"


def explain_pipeline(job: JobConfig, prediction: Prediction) -> Iterator[Explanation]:
    """Explains bubble fraction, bubble overhead and microbatches in flight, if pp > 1."""
    if job.parallel.pp == 1:
        return
    p, m, schedule = job.parallel.pp, job.microbatches, job.parallel.schedule
    symbols = (
        Symbol("p", "pipeline ranks", p),
        Symbol("m", "microbatches per step", m),
        Symbol("v", "stages per rank", job.parallel.stages_per_rank),
    )
    simulated = f"from a simulation of the schedule ({schedule}) with this job's times"
    why = "it assumes equal stages and free messages"
    if schedule not in ("1f1b", "gpipe"):
        why = f"it is for GPipe and 1F1B, not {schedule}, and assumes equal stages"
    rules = [
        RuleOfThumb("(p-1)/(m+p-1)", (p - 1) / (m + p - 1), why),
        RuleOfThumb("(p-1)/m of the step", (p - 1) / m, _OVERHEAD_REASON),
        RuleOfThumb(
            "a pipeline of p stages is idle (p-1)/p of the time", (p - 1) / p,
            f"it holds for 1 microbatch; this step has {m}", ("naive-bubble", "pp-quarter"),
        ),
    ]  # fmt: skip
    value = prediction.bubble_fraction
    yield Explanation(
        FRACTION, "bubble fraction (of the total time)", symbols, value, "ratio",
        select_differing(value, rules), simulated,
    )  # fmt: skip
    why = "that is the fraction: relative to the total time, not to the useful time"
    rules = [RuleOfThumb("(p-1)/(m+p-1)", (p - 1) / (m + p - 1), why)]
    value = prediction.bubble_overhead
    yield Explanation(
        OVERHEAD, "bubble overhead (of the useful time)", symbols, value, "ratio",
        select_differing(value, rules), simulated,
    )  # fmt: skip
    rank = max(prediction.memory, key=lambda stage: stage.total_bytes).stage
    value = count_chunks_in_flight(job, rank)
    why = f"a rank has 1/{p} of the layers, but several microbatches in flight"
    divided, stages = "p stages divide the activations by p", job.parallel.stages_per_rank
    rules = [RuleOfThumb(divided, stages, why, ("pp-memory",))]
    yield Explanation(
        IN_FLIGHT, f"activations in flight at the peak of pipeline rank {rank} (microbatches x"
        " stages)", (*symbols, Symbol("r", "pipeline rank", rank)), value, "",
        select_differing(value, rules), f"the schedule is {schedule}",
    )  # fmt: skip


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


def explain_links(job: JobConfig) -> Iterator[Explanation]:
    """Explains the rate of NVLink, and that of the network if the job has several nodes."""
    links = []
    if job.hardware.intra.name.startswith("nvlink"):
        link = job.hardware.intra
        rule = RuleOfThumb(
            "the rate on the data sheet", 2 * link.bytes_per_s,
            "it is the sum of both directions; a collective sends at half of it",
            ("nvlink-900", "nvlink-a100", "a100-links"),
        )  # fmt: skip
        links.append((NVLINK, link, rule))
    if job.parallel.world_size > job.hardware.gpus_per_node:
        link = job.hardware.inter
        rule = RuleOfThumb(
            f"{8 * link.bytes_per_s / 1e9:,.0f}, read as GB/s", 8 * link.bytes_per_s,
            "network rates are in bits per second, 8 per byte", ("nic-rates",),
        )  # fmt: skip
        links.append((NIC, link, rule))
    for formula, link, rule in links:
        symbols = (Symbol("e", "fraction of it that large rings reach", link.ring, "ratio"),)
        value, what = link.bytes_per_s, f"rate of {link.name}"
        rules = select_differing(value, [rule])
        yield Explanation(formula, what, symbols, value, "bytes_per_s", rules)
