"""Why the ranks send so many messages and bytes, with the job's numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from stepsplit.analyzer.model.comm.calls import FULL_RECOMPUTE
from stepsplit.analyzer.model.comm.data import (
    ALL_REDUCED,
    DDP,
    REDUNDANCY,
    ZERO,
    hands_out,
    sums_whole,
)
from stepsplit.analyzer.model.comm.sharded import FSDP
from stepsplit.analyzer.model.comm.tensor import SEQUENCE, TENSOR
from stepsplit.analyzer.model.explain.explained import Explained, RuleOfThumb, Symbol, differing
from stepsplit.analyzer.model.prediction import Message, Prediction
from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.spec.stages import stages_of
from stepsplit.analyzer.model.work.parameters import StageParameters, stage_parameters

TENSOR_STRATEGIES = ("tp", "sp")
DATA_STRATEGIES = ("ddp", "zero-1", "zero-2", "fsdp", "hsdp")
_PASSES = ("forward", "backward", "recompute")


def of_messages(job: Job, prediction: Prediction) -> Iterator[Explained]:
    """What the slowest stage's rank sends for tensor and data parallelism, where it has them."""
    stage = prediction.splits.index(prediction.split)
    messages = messages_of_slowest(prediction)
    tensor = [one for one in messages if one.strategy in TENSOR_STRATEGIES and one.phase in _PASSES]
    if tensor:
        yield _tensor(job, stage, tensor)
    data = [one for one in messages if one.strategy in DATA_STRATEGIES]
    if data:
        yield (_sharded if job.layout.zero == 3 else _data)(job, stage, data)


def messages_of_slowest(prediction: Prediction) -> list[Message]:
    """All messages of a rank of the slowest stage."""
    stage = prediction.splits.index(prediction.split)
    return [row.message for row in prediction.communication if row.message.stage == stage]


def _tensor(job: Job, stage: int, messages: list[Message]) -> Explained:
    value, layers = sum(one.count for one in messages), stages_of(job)[stage].layers
    symbols = (
        Symbol("t", "ranks of tensor parallelism", job.layout.tp),
        Symbol("L", f"layers of stage {stage}", layers),
        Symbol("m", "microbatches of a step", job.microbatches),
    )
    rule = RuleOfThumb(
        "two all_reduces a layer", 2 * layers * job.microbatches, _more_calls(job),
        ("two-collectives", "two-all-reduces", "attention-reduces", "tp-every-layer", "tp-gathers"),
    )  # fmt: skip
    what = f"calls on tp of a rank of stage {stage} in a step"
    formula = SEQUENCE if job.layout.sequence_parallel else TENSOR
    found = differing(value, [rule])
    return Explained(formula, what, symbols, value, "", found, calls_of(messages))


def _more_calls(job: Job) -> str:
    repeats = job.recipe.recompute in FULL_RECOMPUTE
    return (
        "that is the forward pass alone; the backward has two more"
        + (", recomputation repeats the forward's" if repeats else "")
        + (", and sequence parallelism makes two calls of each" * job.layout.sequence_parallel)
    )


def _data(job: Job, stage: int, messages: list[Message]) -> Explained:
    value, recipe = sent_bytes(messages), job.recipe
    held = stage_parameters(job)[stage]
    two = RuleOfThumb(
        "2 P, read as bytes", 2 * held.total,
        f"2 P counts elements: a ring sends 2 (N-1)/N times the gradients, each of"
        f" {recipe.gradient_bytes} bytes",
    )  # fmt: skip
    rules = [two, *_three(job, held)]
    what = f"bytes that a rank of stage {stage} sends for gradients and weights in a step"
    formula, symbols = DDP, _sums(job, held)
    if hands_out(job):
        formula, symbols = REDUNDANCY, (*symbols, _gathered(job))
    elif job.layout.zero:
        formula = ALL_REDUCED if sums_whole(job) else ZERO
        symbols = (*symbols, _gathered(job))
    return Explained(
        formula, what, symbols, value, "bytes", differing(value, rules), calls_of(messages)
    )


def _three(job: Job, held: StageParameters) -> tuple[RuleOfThumb, ...]:
    """What an all_reduce and an all_gather would send, where ZeRO needs half of the first."""
    layout, recipe = job.layout, job.recipe
    if not layout.zero or hands_out(job) or sums_whole(job):
        return ()
    groups = (held.dense, layout.gradient_ranks), (held.experts, layout.expert_dp)
    elements = sum(parameters * (n - 1) / n for parameters, n in groups)
    return (
        RuleOfThumb(
            "ZeRO-1 is an all_reduce and an all_gather: 3 P",
            elements * (2 * recipe.gradient_bytes + recipe.weight_bytes),
            "a reduce_scatter is half of an all_reduce, and all that ZeRO-1 and 2 need",
            ("zero1-volume",),
        ),
    )


def _sharded(job: Job, stage: int, messages: list[Message]) -> Explained:
    value, held = sent_bytes(messages), stage_parameters(job)[stage]
    rule = RuleOfThumb(
        "3 P a step, half more than without sharding (16-bit elements)", 3 * 2 * held.total,
        f"gradients take {job.recipe.gradient_bytes} bytes each"
        + f", and each of {job.microbatches} microbatches gathers" * (job.microbatches > 1),
        ("zero3", "zero3-half-more"),
    )  # fmt: skip
    what = f"bytes that a rank of stage {stage} sends for weights and gradients in a step"
    symbols = (
        *_sums(job, held),
        _gathered(job),
        Symbol("m", "microbatches of a step", job.microbatches),
    )
    found = differing(value, [rule])
    return Explained(FSDP, what, symbols, value, "bytes", found, calls_of(messages))


def _sums(job: Job, held: StageParameters) -> tuple[Symbol, ...]:
    layout = job.layout
    experts: tuple[Symbol, ...] = ()
    ranks = layout.shard_size if layout.zero == 3 else layout.gradient_ranks
    if held.experts:
        experts = (
            Symbol("P_e", "parameters of its experts, likewise", held.experts, "parameters"),
            Symbol("N_e", "ranks that hold the same experts", layout.expert_dp),
        )
    return (
        Symbol("N", "ranks that share or sum", ranks),
        Symbol("P", "parameters of the rank, before sharding", held.dense, "parameters"),
        *experts,
        Symbol("g", "bytes of a gradient where it is summed", job.recipe.gradient_bytes, "bytes"),
    )


def _gathered(job: Job) -> Symbol:
    return Symbol("w", "bytes of a weight that is gathered", job.recipe.weight_bytes, "bytes")


def calls_of(messages: list[Message]) -> str:
    """How many of each op in each phase: "calls: 8 all_reduce forward, 8 all_reduce backward"."""
    counts: Counter[str] = Counter()
    for one in messages:
        counts[f"{one.op} {one.phase}"] += one.count
    return "calls: " + ", ".join(f"{count:,} {name}" for name, count in counts.items())


def sent_bytes(messages: list[Message]) -> int:
    """What the rank sends with all of them."""
    return sum(one.count * one.wire_bytes for one in messages)
