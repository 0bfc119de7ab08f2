"""Explanations of predicted communication: volumes and the most expensive calls."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from stepsplit.analyzer import units
from stepsplit.analyzer.model.comm_ops import SEQUENCE, CommOp
from stepsplit.analyzer.model.comm_time import TREE, intra_bytes_per_s, ring_bytes_per_s
from stepsplit.analyzer.model.comm_volume import DDP, FSDP_MESSAGES, HSDP, ZERO
from stepsplit.analyzer.model.config import JobConfig, Link, Span, StageConfig, span_of, stages_of
from stepsplit.analyzer.model.formulas import (
    Explained,
    Formula,
    RuleOfThumb,
    Symbol,
    Unit,
    differing,
)
from stepsplit.analyzer.model.parameters import StageParameters, stage_parameters
from stepsplit.analyzer.model.prediction import Communication, Prediction
from stepsplit.analyzer.ops import busbw_factor

# Times of the most expensive calls.

_RINGS = ("all_reduce", "all_gather", "reduce_scatter")

_LARGE_BYTES = 2**20
"""Below this size latency decides between ring and tree."""

_AXES = ("tp", "cp", "dp", "dp_cp", "dp_shard", "dp_replicate", "expert_dp")


def of_calls(job: JobConfig, prediction: Prediction) -> Iterator[Explained]:
    """Explains the most expensive ring collective and all_to_all, and the volume of a tree."""
    rows = [
        row
        for row in prediction.communication
        if row.message.op in _RINGS and row.message.axis in _AXES and row.message.count
    ]
    if rows:
        yield _costliest(job, max(rows, key=lambda row: row.time.ns))
    exchanged = [row for row in prediction.communication if row.message.op == "all_to_all"]
    if exchanged:
        yield _all_to_all(job, max(exchanged, key=lambda row: row.time.ns))
    reduced = [row for row in rows if _large_sum(job, row)]
    if reduced:
        yield _tree(job, max(reduced, key=lambda row: row.message.message_bytes))


def _large_sum(job: JobConfig, row: Communication) -> bool:
    message = row.message
    large = message.op == "all_reduce" and message.message_bytes >= _LARGE_BYTES
    return large and _span(job, message).ranks > 2


def _span(job: JobConfig, message: CommOp) -> Span:
    """The placement of a call's group; gradient reduction over dp and cp is span_of's dp."""
    return span_of(job, "dp" if message.axis == "dp_cp" else message.axis)


def _costliest(job: JobConfig, row: Communication) -> Explained:
    message, span = row.message, _span(job, row.message)
    value, both = row.time.ns / message.count, 2 * job.hardware.intra.bytes_per_s
    rule = RuleOfThumb(
        f"size / {units.gigabytes_per_second(both)}, the link's data-sheet rate",
        message.message_bytes / both * 1e9,
        "that rate is the sum of both directions, no ring reaches all of it"
        + (f", all_reduce sends {message.wire_bytes / message.message_bytes:.2f} times its buffer")
        * (message.wire_bytes > message.message_bytes)
        + ", and between nodes the network is the bottleneck" * _by_network(job, span),
    )
    what = f"time of one {message.op} on {message.axis} ({message.phase})"
    symbols = (
        Symbol("S", "message", message.message_bytes, "bytes"),
        Symbol("f", "fraction that each rank sends", busbw_factor(message.op, span.ranks)),
        *_links(job, span),
    )
    found = differing(value, [rule])
    return Explained(row.time.formulas[0], what, symbols, value, "ns", found)


def _links(job: JobConfig, span: Span) -> tuple[Symbol, ...]:
    hardware, rate = job.hardware, ring_bytes_per_s(span, job.hardware)
    link = hardware.inter if _by_network(job, span) else hardware.intra
    latency = (hardware.intra if span.nodes == 1 else hardware.inter).latency_ns
    adapters = span.ranks_per_node if link is hardware.inter else 1
    of = f"{adapters} GPUs of a node" if adapters > 1 else "one GPU"
    return (
        Symbol("n", "ranks", span.ranks),
        Symbol("k", "nodes of these ranks", span.nodes),
        Symbol("B", f"{link.name}, one direction of {of}", rate / link.ring, "bytes_per_s"),
        Symbol("e", "fraction of it that large rings reach", link.ring, "ratio"),
        Symbol("a", f"latency of a step {_where(span)}", latency, "ns"),
    )


def _by_network(job: JobConfig, span: Span) -> bool:
    """Whether all adapters of a node together are slower than the links inside it."""
    rate = ring_bytes_per_s(span, job.hardware)
    return span.nodes > 1 and (
        span.ranks_per_node == 1 or rate < intra_bytes_per_s(span, job.hardware)
    )


def _where(span: Span) -> str:
    return "inside the node" if span.nodes == 1 else "between nodes"


def _all_to_all(job: JobConfig, row: Communication) -> Explained:
    message, span, hardware = row.message, _span(job, row.message), job.hardware
    links = [hardware.intra] * (span.ranks_per_node > 1) + [hardware.inter] * (span.nodes > 1)
    symbols = (
        Symbol("S", "message", message.message_bytes, "bytes"),
        Symbol("n", "ranks", span.ranks),
        Symbol("g", "ranks per node", span.ranks_per_node),
        *(Symbol(*_reached(link, link is hardware.intra)) for link in links),
    )
    what = f"time of one all_to_all on {message.axis} ({message.phase})"
    return Explained(row.time.formulas[0], what, symbols, row.time.ns / message.count, "ns")


def _reached(link: Link, inside: bool) -> tuple[str, str, float, Unit]:
    rate = link.bytes_per_s * link.ring
    return (
        "NVLink" if inside else "NIC",
        f"rate that one GPU reaches over {link.name}",
        rate,
        "bytes_per_s",
    )


def _tree(job: JobConfig, row: Communication) -> Explained:
    size, ranks = row.message.message_bytes, _span(job, row.message).ranks
    value = 2 * size
    rule = RuleOfThumb(
        "a tree moves 2 log2(n) times the buffer",
        2 * math.log2(ranks) * size,
        "log2(n) is the depth, for latency only; each rank sends its buffer up once and down once",
        ("tree-volume",),
    )
    symbols = (Symbol("S", "message", size, "bytes"), Symbol("n", "ranks", ranks))
    what = f"bytes that a rank sends for one all_reduce on {row.message.axis} with a tree"
    return Explained(TREE, what, symbols, value, "bytes", differing(value, [rule]))


# Volumes of expert, context and pipeline parallelism.

_EXPERTS = ("ep", "expert-tp")


def of_routes(job: JobConfig, prediction: Prediction) -> Iterator[Explained]:
    """Explains the bytes that a rank of the slowest stage sends on ep, cp and pp, if any."""
    messages = messages_of_slowest(prediction)
    stage = stages_of(job)[prediction.splits.index(prediction.split)]
    experts = [one for one in messages if one.strategy in _EXPERTS]
    if experts:
        yield _sent("for expert parallelism", experts, _of_experts(job, stage))
    around = [one for one in messages if one.strategy == "cp"]
    if around:
        yield _sent("for context parallelism", around, _of_context(job, stage))
    between = [one for one in messages if one.strategy == "pp"]
    if between:
        yield _sent("to neighboring stages", between, _of_pipeline(job))


def _sent(where: str, messages: list[CommOp], symbols: tuple[Symbol, ...]) -> Explained:
    what = f"bytes per step that a rank of stage {messages[0].stage} sends {where}"
    value, note = sent_bytes(messages), calls_of(messages)
    return Explained(_find_formula(messages), what, symbols, value, "bytes", note=note)


def _tokens(job: JobConfig) -> tuple[Symbol, ...]:
    each = job.training.activation_bytes
    return (
        Symbol("m", "microbatches per step", job.microbatches),
        Symbol("T", "tokens per microbatch and rank", job.tokens),
        Symbol("t", "tensor-parallel ranks", job.parallel.tp),
        Symbol("element", "bytes of an element", each, "bytes"),
    )


def _of_experts(job: JobConfig, stage: StageConfig) -> tuple[Symbol, ...]:
    top_k = job.model.experts.top_k if job.model.experts else 0
    return (
        *_tokens(job),
        Symbol("L", "layers with experts", stage.expert_layers),
        Symbol("top_k", "experts per token", top_k),
        Symbol("h", "hidden size", job.model.hidden),
        Symbol("e", "expert-parallel ranks", job.parallel.ep),
    )


def _of_context(job: JobConfig, stage: StageConfig) -> tuple[Symbol, ...]:
    return (
        *_tokens(job),
        Symbol("L", "layers", stage.layers),
        Symbol("c", "context-parallel ranks", job.parallel.cp),
        Symbol("a", "heads", job.model.heads),
        Symbol("k", "key-value heads", job.model.kv_heads),
        Symbol("d", "head size", job.model.head_size),
    )


def _of_pipeline(job: JobConfig) -> tuple[Symbol, ...]:
    return (
        *_tokens(job),
        Symbol("h", "hidden size", job.model.hidden),
        Symbol("v", "stages per rank", job.parallel.stages_per_rank),
    )


# Volumes of tensor and data parallelism.

TENSOR_STRATEGIES = ("tp", "sp")

DATA_STRATEGIES = ("ddp", "zero-1", "zero-2", "fsdp", "hsdp")

_PASSES = ("forward", "backward", "recompute")


def of_messages(job: JobConfig, prediction: Prediction) -> Iterator[Explained]:
    """Explains the tp calls and dp bytes of a rank of the slowest stage, if any."""
    stage = prediction.splits.index(prediction.split)
    messages = messages_of_slowest(prediction)
    tensor = [one for one in messages if one.strategy in TENSOR_STRATEGIES and one.phase in _PASSES]
    if tensor:
        yield _tensor(job, stage, tensor)
    data = [one for one in messages if one.strategy in DATA_STRATEGIES]
    if data:
        sharded = _find_formula(data) in (FSDP_MESSAGES, HSDP)
        yield (_sharded if sharded else _data)(job, stage, data)


def messages_of_slowest(prediction: Prediction) -> list[CommOp]:
    """Lists the communication ops of a rank of the slowest stage."""
    stage = prediction.splits.index(prediction.split)
    return [row.message for row in prediction.communication if row.message.stage == stage]


def _tensor(job: JobConfig, stage: int, messages: list[CommOp]) -> Explained:
    value, layers = sum(one.count for one in messages), stages_of(job)[stage].layers
    formula = _find_formula(messages)
    symbols = (
        Symbol("t", "tensor-parallel ranks", job.parallel.tp),
        Symbol("L", f"layers of stage {stage}", layers),
        Symbol("m", "microbatches per step", job.microbatches),
    )
    rule = RuleOfThumb(
        "two all_reduces per layer", 2 * layers * job.microbatches, _more_calls(messages),
        ("two-collectives", "two-all-reduces", "attention-reduces", "tp-every-layer", "tp-gathers"),
    )  # fmt: skip
    what = f"tp calls per step of a rank of stage {stage}"
    found = differing(value, [rule])
    return Explained(formula, what, symbols, value, "", found, calls_of(messages))


def _more_calls(messages: list[CommOp]) -> str:
    repeats = any(one.phase == "recompute" for one in messages)
    halves = _find_formula(messages) is SEQUENCE
    return (
        "that is only the forward pass; the backward pass has two more"
        + (", recomputation repeats those of the forward pass" if repeats else "")
        + (", and sequence parallelism replaces each with two calls" * halves)
    )


def _data(job: JobConfig, stage: int, messages: list[CommOp]) -> Explained:
    value, recipe = sent_bytes(messages), job.training
    held = stage_parameters(job)[stage]
    two = RuleOfThumb(
        "2 P, read as bytes", 2 * held.total,
        f"2 P counts elements: a ring sends 2 (N-1)/N times the gradients of"
        f" {recipe.gradient_bytes} bytes each",
    )  # fmt: skip
    formula, symbols = _find_formula(messages), _sums(job, held)
    rules = [two, _three(job, held)] if formula is ZERO else [two]
    if formula is not DDP:
        symbols = (*symbols, _gathered(job))
    what = f"bytes per step that a rank of stage {stage} sends for gradients and weights"
    return Explained(
        formula, what, symbols, value, "bytes", differing(value, rules), calls_of(messages)
    )


def _three(job: JobConfig, held: StageParameters) -> RuleOfThumb:
    """The rule that ZeRO needs an all_reduce and an all_gather; a reduce_scatter is half."""
    layout, recipe = job.parallel, job.training
    groups = (held.dense, layout.gradient_ranks), (held.experts, layout.expert_dp)
    elements = sum(parameters * (n - 1) / n for parameters, n in groups)
    return RuleOfThumb(
        "ZeRO-1 is an all_reduce and an all_gather: 3 P",
        elements * (2 * recipe.gradient_bytes + recipe.weight_bytes),
        "ZeRO-1 and 2 need only a reduce_scatter, which is half of an all_reduce",
        ("zero1-volume",),
    )


def _sharded(job: JobConfig, stage: int, messages: list[CommOp]) -> Explained:
    value, held = sent_bytes(messages), stage_parameters(job)[stage]
    rule = RuleOfThumb(
        "3 P per step, 1.5 times the volume without sharding (16-bit elements)", 3 * 2 * held.total,
        f"gradients have {job.training.gradient_bytes} bytes each"
        + f", and each of {job.microbatches} microbatches gathers" * (job.microbatches > 1),
        ("zero3", "zero3-half-more"),
    )  # fmt: skip
    what = f"bytes per step that a rank of stage {stage} sends for weights and gradients"
    symbols = (
        *_sums(job, held),
        _gathered(job),
        Symbol("m", "microbatches per step", job.microbatches),
    )
    found = differing(value, [rule])
    formula, note = _find_formula(messages[:1]), calls_of(messages)
    return Explained(formula, what, symbols, value, "bytes", found, note)


def _sums(job: JobConfig, held: StageParameters) -> tuple[Symbol, ...]:
    layout = job.parallel
    experts: tuple[Symbol, ...] = ()
    ranks = layout.shard_size if layout.zero == 3 else layout.gradient_ranks
    if held.experts:
        experts = (
            Symbol(
                "P_e", "expert parameters of the rank, before sharding", held.experts, "parameters"
            ),
            Symbol("N_e", "ranks with the same experts", layout.expert_dp),
        )
    return (
        Symbol("N", "ranks of the sharding or gradient reduction", ranks),
        Symbol("P", "parameters of the rank, before sharding", held.dense, "parameters"),
        *experts,
        Symbol("g", "bytes of a gradient in the reduction", job.training.gradient_bytes, "bytes"),
    )


def _gathered(job: JobConfig) -> Symbol:
    return Symbol("w", "bytes of a gathered weight", job.training.weight_bytes, "bytes")


def _find_formula(messages: list[CommOp]) -> Formula:
    """The formula of the ops: that of the last, which builds on the previous ones."""
    return messages[-1].formulas[-1]


def calls_of(messages: list[CommOp]) -> str:
    """Formats the calls by op and phase: "calls: 8 all_reduce forward, 8 all_reduce backward"."""
    counts: Counter[str] = Counter()
    for one in messages:
        counts[f"{one.op} {one.phase}"] += one.count
    return "calls: " + ", ".join(f"{count:,} {name}" for name, count in counts.items())


def sent_bytes(messages: list[CommOp]) -> int:
    """Sums the bytes that the rank sends."""
    return sum(one.count * one.wire_bytes for one in messages)
