"""Explanations of predicted communication: volumes and the most expensive calls."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from stepsplit.analyzer import units
from stepsplit.analyzer.model.comm_ops import SEQUENCE, CommOp
from stepsplit.analyzer.model.comm_time import (
    TREE,
    compute_intra_bytes_per_s,
    compute_ring_bytes_per_s,
)
from stepsplit.analyzer.model.comm_volume import DDP, FSDP_MESSAGES, HSDP, ZERO
from stepsplit.analyzer.model.config import JobConfig
from stepsplit.analyzer.model.formulas import (
    Explanation,
    Formula,
    RuleOfThumb,
    Symbol,
    select_differing,
)
from stepsplit.analyzer.model.parameters import (
    StageParameters,
    count_stage_parameters,
    select_trained,
)
from stepsplit.analyzer.model.prediction import Communication, Prediction
from stepsplit.analyzer.model.rank_layout import GroupPlacement, list_stages, place_group
from stepsplit.analyzer.ops import compute_busbw_factor

# Times of the most expensive calls.

_RINGS = ("all_reduce", "all_gather", "reduce_scatter")

_LARGE_BYTES = 2**20
"""Below this size latency decides between ring and tree."""

_AXES = ("tp", "cp", "dp", "dp_cp", "dp_shard", "dp_replicate", "expert_dp")


def explain_calls(job: JobConfig, prediction: Prediction) -> Iterator[Explanation]:
    """Explains the most expensive ring collective and all_to_all, and the volume of a tree."""
    rows = [
        row
        for row in prediction.communication
        if row.message.op in _RINGS and row.message.axis in _AXES and row.message.count
    ]
    if rows:
        yield _explain_ring_call(job, max(rows, key=lambda row: row.time.ns))
    all_to_alls = [row for row in prediction.communication if row.message.op == "all_to_all"]
    if all_to_alls:
        yield _explain_all_to_all(job, max(all_to_alls, key=lambda row: row.time.ns))
    all_reduces = [
        row
        for row in rows
        if row.message.op == "all_reduce"
        and row.message.message_bytes >= _LARGE_BYTES
        and _place_call(job, row.message).ranks > 2
    ]
    if all_reduces:
        yield _explain_tree(job, max(all_reduces, key=lambda row: row.message.message_bytes))


def _place_call(job: JobConfig, message: CommOp) -> GroupPlacement:
    """The placement of a call's group; gradient reduction over dp and cp is placed as dp."""
    return place_group(job, "dp" if message.axis == "dp_cp" else message.axis)


def _explain_ring_call(job: JobConfig, row: Communication) -> Explanation:
    message, group, hardware = row.message, _place_call(job, row.message), job.hardware
    rate = compute_ring_bytes_per_s(group, hardware)
    # Whether all adapters of a node together are slower than the links inside it.
    is_network_bound = group.nodes > 1 and (
        group.ranks_per_node == 1 or rate < compute_intra_bytes_per_s(group, hardware)
    )
    value, bidirectional_rate = row.time.ns / message.count, 2 * hardware.intra.bytes_per_s
    rule = RuleOfThumb(
        f"size / {units.format_gigabytes_per_second(bidirectional_rate)}, the link's "
        "data-sheet rate",
        message.message_bytes / bidirectional_rate * 1e9,
        "that rate is the sum of both directions, no ring reaches all of it"
        + (f", all_reduce sends {message.wire_bytes / message.message_bytes:.2f} times its buffer")
        * (message.wire_bytes > message.message_bytes)
        + ", and between nodes the network is the bottleneck" * is_network_bound,
    )
    what = f"time of one {message.op} on {message.axis} ({message.phase})"
    link = hardware.inter if is_network_bound else hardware.intra
    adapters = group.ranks_per_node if link is hardware.inter else 1
    gpus = f"{adapters} GPUs of a node" if adapters > 1 else "one GPU"
    where = "inside the node" if group.nodes == 1 else "between nodes"
    latency_ns = (hardware.intra if group.nodes == 1 else hardware.inter).latency_ns
    symbols = (
        Symbol("S", "message", message.message_bytes, "bytes"),
        Symbol("f", "fraction that each rank sends", compute_busbw_factor(message.op, group.ranks)),
        Symbol("n", "ranks", group.ranks),
        Symbol("k", "nodes of these ranks", group.nodes),
        Symbol("B", f"{link.name}, one direction of {gpus}", rate / link.ring, "bytes_per_s"),
        Symbol("e", "fraction of it that large rings reach", link.ring, "ratio"),
        Symbol("a", f"latency of a step {where}", latency_ns, "ns"),
    )
    rules = select_differing(value, [rule])
    return Explanation(row.time.formulas[0], what, symbols, value, "ns", rules)


def _explain_all_to_all(job: JobConfig, row: Communication) -> Explanation:
    message, group, hardware = row.message, _place_call(job, row.message), job.hardware
    links = [("NVLink", hardware.intra)] * (group.ranks_per_node > 1)
    links += [("NIC", hardware.inter)] * (group.nodes > 1)
    reached = "rate that one GPU reaches over"
    symbols = (
        Symbol("S", "message", message.message_bytes, "bytes"),
        Symbol("n", "ranks", group.ranks),
        Symbol("g", "ranks per node", group.ranks_per_node),
        *(
            Symbol(name, f"{reached} {link.name}", link.bytes_per_s * link.ring, "bytes_per_s")
            for name, link in links
        ),
    )
    what = f"time of one all_to_all on {message.axis} ({message.phase})"
    return Explanation(row.time.formulas[0], what, symbols, row.time.ns / message.count, "ns")


def _explain_tree(job: JobConfig, row: Communication) -> Explanation:
    size, ranks = row.message.message_bytes, _place_call(job, row.message).ranks
    value = 2 * size
    rule = RuleOfThumb(
        "a tree moves 2 log2(n) times the buffer",
        2 * math.log2(ranks) * size,
        "log2(n) is the depth, for latency only; each rank sends its buffer up once and down once",
        ("tree-volume",),
    )
    symbols = (Symbol("S", "message", size, "bytes"), Symbol("n", "ranks", ranks))
    what = f"bytes that a rank sends for one all_reduce on {row.message.axis} with a tree"
    return Explanation(TREE, what, symbols, value, "bytes", select_differing(value, [rule]))


# Volumes of expert, context and pipeline parallelism.

_EXPERT_STRATEGIES = ("ep", "expert-tp")


def explain_routes(job: JobConfig, prediction: Prediction) -> Iterator[Explanation]:
    """Explains the bytes that a rank of the slowest stage sends on ep, cp and pp, if any."""
    messages = list_slowest_stage_ops(prediction)
    stage = list_stages(job)[prediction.splits.index(prediction.split)]
    tokens = (
        Symbol("m", "microbatches per step", job.microbatches),
        Symbol("T", "tokens per microbatch and rank", job.tokens),
        Symbol("t", "tensor-parallel ranks", job.parallel.tp),
        Symbol("element", "bytes of an element", job.training.activation_bytes, "bytes"),
    )
    hidden = Symbol("h", "hidden size", job.model.hidden)
    experts = [one for one in messages if one.strategy in _EXPERT_STRATEGIES]
    if experts:
        top_k = job.model.experts.top_k if job.model.experts else 0
        symbols = (
            Symbol("L", "layers with experts", stage.expert_layers),
            Symbol("top_k", "experts per token", top_k),
            hidden,
            Symbol("e", "expert-parallel ranks", job.parallel.ep),
        )
        yield _explain_sent_bytes("for expert parallelism", experts, tokens + symbols)
    context = [one for one in messages if one.strategy == "cp"]
    if context:
        heads = (
            Symbol("L", "layers", stage.layers),
            Symbol("c", "context-parallel ranks", job.parallel.cp),
            Symbol("a", "heads", job.model.heads),
            Symbol("k", "key-value heads", job.model.kv_heads),
            Symbol("d", "head size", job.model.head_size),
        )
        yield _explain_sent_bytes("for context parallelism", context, tokens + heads)
    pipeline = [one for one in messages if one.strategy == "pp"]
    if pipeline:
        stages = Symbol("v", "stages per rank", job.parallel.stages_per_rank)
        yield _explain_sent_bytes("to neighboring stages", pipeline, (*tokens, hidden, stages))


def _explain_sent_bytes(
    where: str, messages: list[CommOp], symbols: tuple[Symbol, ...]
) -> Explanation:
    what = f"bytes per step that a rank of stage {messages[0].stage} sends {where}"
    value, note = sum_sent_bytes(messages), format_calls(messages)
    return Explanation(_find_formula(messages), what, symbols, value, "bytes", note=note)


# Volumes of tensor and data parallelism.

TENSOR_STRATEGIES = ("tp", "sp")

DATA_STRATEGIES = ("ddp", "zero-1", "zero-2", "fsdp", "hsdp")

_PASSES = ("forward", "backward", "recompute")


def explain_messages(job: JobConfig, prediction: Prediction) -> Iterator[Explanation]:
    """Explains the tp calls and dp bytes of a rank of the slowest stage, if any."""
    stage = prediction.splits.index(prediction.split)
    messages = list_slowest_stage_ops(prediction)
    tensor = [one for one in messages if one.strategy in TENSOR_STRATEGIES and one.phase in _PASSES]
    if tensor:
        yield _explain_tensor(job, stage, tensor)
    data = [one for one in messages if one.strategy in DATA_STRATEGIES]
    if data:
        sharded = _find_formula(data) in (FSDP_MESSAGES, HSDP)
        yield (_explain_sharded if sharded else _explain_data)(job, stage, data)


def list_slowest_stage_ops(prediction: Prediction) -> list[CommOp]:
    """Lists the communication ops of a rank of the slowest stage."""
    stage = prediction.splits.index(prediction.split)
    return [row.message for row in prediction.communication if row.message.stage == stage]


def _explain_tensor(job: JobConfig, stage: int, messages: list[CommOp]) -> Explanation:
    value, layers = sum(one.count for one in messages), list_stages(job)[stage].layers
    formula = _find_formula(messages)
    why = "that is only the forward pass; the backward pass has two more"
    if any(one.phase == "recompute" for one in messages):
        why += ", recomputation repeats those of the forward pass"
    if formula is SEQUENCE:
        why += ", and sequence parallelism replaces each with two calls"
    symbols = (
        Symbol("t", "tensor-parallel ranks", job.parallel.tp),
        Symbol("L", f"layers of stage {stage}", layers),
        Symbol("m", "microbatches per step", job.microbatches),
    )
    rule = RuleOfThumb(
        "two all_reduces per layer", 2 * layers * job.microbatches, why,
        ("two-collectives", "two-all-reduces", "attention-reduces", "tp-every-layer", "tp-gathers"),
    )  # fmt: skip
    what = f"tp calls per step of a rank of stage {stage}"
    rules = select_differing(value, [rule])
    return Explanation(formula, what, symbols, value, "", rules, format_calls(messages))


def _explain_data(job: JobConfig, stage: int, messages: list[CommOp]) -> Explanation:
    value, recipe = sum_sent_bytes(messages), job.training
    params = count_stage_parameters(job)[stage]
    two_rule = RuleOfThumb(
        "2 P, read as bytes", 2 * params.total,
        f"2 P counts elements: a ring sends 2 (N-1)/N times the gradients of"
        f" {recipe.gradient_bytes} bytes each",
    )  # fmt: skip
    formula, symbols = _find_formula(messages), _list_gradient_symbols(job, params)
    rules = [two_rule]
    if formula is ZERO:
        # An all_reduce and an all_gather; a reduce_scatter is half of the former.
        layout = job.parallel
        groups = (params.dense, layout.gradient_ranks), (params.experts, layout.expert_dp)
        elements = sum(parameters * (n - 1) / n for parameters, n in groups)
        rules.append(
            RuleOfThumb(
                "ZeRO-1 is an all_reduce and an all_gather: 3 P",
                elements * (2 * recipe.gradient_bytes + recipe.weight_bytes),
                "ZeRO-1 and 2 need only a reduce_scatter, which is half of an all_reduce",
                ("zero1-volume",),
            )
        )
    if formula is not DDP:
        symbols = (*symbols, _make_weight_symbol(job))
    what = f"bytes per step that a rank of stage {stage} sends for gradients and weights"
    return Explanation(
        formula,
        what,
        symbols,
        value,
        "bytes",
        select_differing(value, rules),
        format_calls(messages),
    )


def _explain_sharded(job: JobConfig, stage: int, messages: list[CommOp]) -> Explanation:
    value, params = sum_sent_bytes(messages), count_stage_parameters(job)[stage]
    rule = RuleOfThumb(
        "3 P per step, 1.5 times the volume without sharding (16-bit elements)",
        3 * 2 * params.total,
        f"gradients have {job.training.gradient_bytes} bytes each"
        + f", and each of {job.microbatches} microbatches gathers" * (job.microbatches > 1),
        ("zero3", "zero3-half-more"),
    )
    what = f"bytes per step that a rank of stage {stage} sends for weights and gradients"
    symbols = (
        *_list_gradient_symbols(job, params),
        _make_weight_symbol(job),
        Symbol("m", "microbatches per step", job.microbatches),
    )
    rules = select_differing(value, [rule])
    formula, note = _find_formula(messages[:1]), format_calls(messages)
    return Explanation(formula, what, symbols, value, "bytes", rules, note)


def _list_gradient_symbols(job: JobConfig, params: StageParameters) -> tuple[Symbol, ...]:
    layout = job.parallel
    experts: tuple[Symbol, ...] = ()
    ranks = layout.shard_size if layout.shard_replicas > 1 else layout.gradient_ranks
    if params.experts:
        experts = (
            Symbol(
                "P_e",
                "expert parameters of the rank, before sharding",
                params.experts,
                "parameters",
            ),
            Symbol("N_e", "ranks with the same experts", layout.expert_dp),
        )
    trained, meaning = select_trained(job, params).dense, "parameters of the rank, before sharding"
    whole = Symbol("P", meaning, params.dense, "parameters")
    if job.training.lora_rank and not job.is_fsdp:
        whole = Symbol("P", f"trained {meaning}", trained, "parameters")
    elif job.training.lora_rank:
        experts += (Symbol("A", "those of adapters, with gradients: g A", trained, "parameters"),)
    return (
        Symbol("N", "ranks of the sharding or gradient reduction", ranks),
        whole,
        *experts,
        Symbol("g", "bytes of a gradient in the reduction", job.training.gradient_bytes, "bytes"),
    )


def _make_weight_symbol(job: JobConfig) -> Symbol:
    return Symbol("w", "bytes of a gathered weight", job.training.weight_bytes, "bytes")


def _find_formula(messages: list[CommOp]) -> Formula:
    """The formula of the ops: that of the last, which builds on the previous ones."""
    return messages[-1].formulas[-1]


def format_calls(messages: list[CommOp]) -> str:
    """Formats the calls by op and phase: "calls: 8 all_reduce forward, 8 all_reduce backward"."""
    counts: Counter[str] = Counter()
    for one in messages:
        counts[f"{one.op} {one.phase}"] += one.count
    return "calls: " + ", ".join(f"{count:,} {name}" for name, count in counts.items())


def sum_sent_bytes(messages: list[CommOp]) -> int:
    """Sums the bytes that the rank sends."""
    return sum(one.count * one.wire_bytes for one in messages)
