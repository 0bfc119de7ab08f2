"""Patterns that several signatures share, and rules that are algorithms rather than patterns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from stepsplit.analyzer.arrays import is_inside
from stepsplit.analyzer.split.call_purposes import find_spans
from stepsplit.analyzer.split.mesh import DATA_AXES, format_axes
from stepsplit.analyzer.split.protocols import name_expert_library
from stepsplit.analyzer.split.signature import (
    UNKNOWN_AXIS,
    AnyOf,
    CallSet,
    Fits,
    HasByteRatio,
    HasCallRatio,
    HasCalls,
    HasEvent,
    IsAlong,
    OnAnyGroup,
    Pattern,
)
from stepsplit.analyzer.split.strategy import Accumulation, GradientSums
from stepsplit.analyzer.split.strategy_evidence import AFTER, BACKWARD, FORWARD
from stepsplit.analyzer.trace import Bool, Category, Events, Int64

# Ops and parts of a step.

LATE = (BACKWARD, AFTER)

SUM, GATHER, SCATTER = ("all_reduce",), ("all_gather",), ("reduce_scatter",)

EXCHANGE, MESSAGES = ("all_to_all",), ("send", "recv", "send_recv")

ACTIVATION_SUMS = (*SUM, *SCATTER)
"""Ops that reduce activations."""

GRADIENT_SCATTERS = (*SCATTER, "reduce")
"""Ops by which each rank gets only its own part of the reduced gradients."""

GRADIENT_SUMS = (*SUM, *GRADIENT_SCATTERS)

_WEIGHT_RETURNS = (*GATHER, "broadcast")
"""Ops that distribute what the owner of a weight updated."""

# Frameworks and their wrappers.

ZERO_OPTIMIZER = HasEvent("Optimizer.step#ZeroRedundancyOptimizer*")

DEEPSPEED_ZERO_3 = HasEvent("PreBackwardFunctionForModule*")
"""The autograd function around each module in deepspeedai/DeepSpeed, runtime/zero,
parameter_offload.py."""


def is_megatron(calls: CallSet) -> bool:
    """Whether Megatron-LM, by the names of its groups, trains."""
    groups = calls.rank.evidence.trace.groups
    return any("MODEL_PARALLEL_GROUP" in group.description.upper() for group in groups)


# Data parallelism: which groups reduce gradients, and whether each rank has all weights.

BY_FSDP = HasCalls((*GATHER, *GRADIENT_SUMS), by_fsdp=True)


def _is_within_stage(calls: CallSet) -> bool:
    layout = calls.rank.evidence.layout
    return len({layout.find_stage(rank) for rank in calls.ranks}) == 1


def _has_step_marks(calls: CallSet) -> bool:
    return calls.rank.evidence.steps.marked


_BY_AXIS_OR_USE = AnyOf((
    IsAlong(("ep",)),
    Pattern(needs=(IsAlong(tuple(sorted(DATA_AXES))),), absent=(IsAlong(("cp",)),)),
    # A group of unknown axis reduces gradients if it reduces in no forward.
    Pattern(
        needs=(IsAlong((UNKNOWN_AXIS,)),), absent=(HasCalls(ACTIVATION_SUMS, (FORWARD,)),)
    ),
))  # fmt: skip

_WEIGHT_RETURNS_DATED = AnyOf((
    # Without ProfilerStep marks it is unknown whether weights are gathered after one step or
    # before the next.
    _has_step_marks,
    ZERO_OPTIMIZER,
    Pattern(absent=(HasCalls(_WEIGHT_RETURNS, (FORWARD, AFTER)),)),
))  # fmt: skip

DATA_PARALLEL = Pattern(
    needs=(
        HasCalls(GRADIENT_SUMS, LATE),
        # Embeddings of the first and the last stage are reduced like gradients.
        _is_within_stage,
        AnyOf((BY_FSDP, Pattern(needs=(_WEIGHT_RETURNS_DATED, _BY_AXIS_OR_USE)))),
    ),
    absent=(Fits(("tp", "cp")),),
)
"""The group reduces gradients of data parallel ranks, whatever the strategy."""

SHARDED = Pattern(
    needs=(DATA_PARALLEL, HasCalls(GATHER, (FORWARD,)), HasCalls(GRADIENT_SCATTERS, LATE))
)
"""Weights are gathered before use."""

GATHERED_AGAIN = HasCalls(GATHER, (BACKWARD,))

_MIN_WEIGHT_BYTES = 0.2
"""Minimum bytes of updated weights per byte of gradients: fp8 weights of fp32 gradients give 0.25,
evaluations and checkpoints gather less. test_strategies.py passes at 0.1 and at 0.4 too."""

UPDATED_BY_OWNERS = AnyOf((
    Pattern(
        needs=(
            HasCalls(_WEIGHT_RETURNS, (AFTER,)),
            HasByteRatio(_WEIGHT_RETURNS, (AFTER,), _MIN_WEIGHT_BYTES, GRADIENT_SUMS, LATE),
        )
    ),
    ZERO_OPTIMIZER,
))  # fmt: skip
"""Each rank updates a part of the weights, and they return to all ranks after the backward."""

REPLICATED = Pattern(needs=(DATA_PARALLEL,), absent=(OnAnyGroup(SHARDED),))
"""All ranks keep all weights; next to a group of shards such a group is one of replicas."""

OWNED = Pattern(needs=(REPLICATED, UPDATED_BY_OWNERS))
"""ZeRO-1 or ZeRO-2."""


def name_data_axis(calls: CallSet) -> str:
    """The axes of a data parallel group, such as "dp_shard x cp"."""
    unknown = "dp_shard" if calls.satisfies(SHARDED) else "dp_replicate"
    return format_axes(calls.axes - {"ep"}) or unknown


def describe_replicas(calls: CallSet) -> str | None:
    """The number of replicas of shards; None if there is one."""
    replicas = [
        group
        for group in _list_data_parallel(calls)
        if not group.satisfies(SHARDED)
        and (group.satisfies(BY_FSDP) or "dp_replicate" in group.axes)
    ]
    count = max((len(group.ranks) for group in replicas), default=1)
    if count == 1:
        return None
    kept = "" if calls.satisfies(GATHERED_AGAIN) else ", weights kept until the backward"
    return f"{count} replicas{kept}"


def _list_data_parallel(calls: CallSet) -> list[CallSet]:
    return [group for group in calls.rank.groups if group.satisfies(DATA_PARALLEL)]


def has_several_backwards(calls: CallSet) -> bool:
    """Whether there are more backward passes than steps."""
    return len(calls.rank.evidence.passes) > len(calls.rank.evidence.steps)


def sums_after_each_backward(calls: CallSet) -> bool:
    """Whether gradients are reduced in or after each backward pass."""
    return _count_summing_passes([calls]) == len(calls.rank.evidence.passes)


def _count_summing_passes(groups: Sequence[CallSet]) -> int:
    """After how many backward passes, over all steps, the rank reduces gradients on the groups."""
    latest = [
        one.rank.evidence.passes.find_latest(
            one.rank.evidence.when[one.rows[one.select(GRADIENT_SUMS, LATE)]]
        )
        for one in groups
    ]
    return len(np.unique(np.concatenate(latest))) if latest else 0


# Data parallelism without host ops: by the axis of the group and the numbers of its calls.

_MIN_GATHER_RATIO = 1.5
"""Weights gathered in both passes are gathered about twice as often as gradients are scattered;
less than twice if the weights of the last layer stay gathered. At 0.75 a
group that gathers once has shards, at 3 one that gathers twice has none (test_strategies.py)."""

GATHERED_TWICE = Pattern(
    needs=(
        IsAlong(("dp_shard", "cp")),
        HasCalls(SCATTER),
        HasCallRatio(GATHER, _MIN_GATHER_RATIO, SCATTER),
    ),
    absent=(IsAlong(("cp",)),),
)

ONLY_SUMMED = Pattern(
    needs=(IsAlong(("dp_replicate", "cp")), HasCalls(SUM)),
    # Other collectives may be the weight updates of zero-1.
    absent=(IsAlong(("cp",)), HasCalls((*_WEIGHT_RETURNS, *GRADIENT_SCATTERS))),
)


def describe_summing_replicas(calls: CallSet) -> str | None:
    """The number of replicas by the first group on which replicas only reduce; None without one."""
    sizes = [len(one.ranks) for one in calls.rank.groups if one.satisfies(ONLY_SUMMED)]
    return f"{sizes[0]} replicas" if sizes else None


# Expert parallelism by kernels of its own.


EXCHANGED_TOKENS = Pattern(needs=(IsAlong(("ep",)), HasCalls(EXCHANGE)))


def name_group_library(calls: CallSet) -> str:
    """The library whose kernels move the tokens of experts on a group, "" for collectives."""
    library = name_expert_library(calls.rank.evidence.trace)
    return library[0] if library else ""


def name_expert_protocol(calls: CallSet) -> str | None:
    """The library whose kernels dispatch tokens to experts and combine their results, with the
    number of ranks that they state; None if their group is known."""
    library = name_expert_library(calls.rank.evidence.trace)
    if library is None or any(one.satisfies(EXCHANGED_TOKENS) for one in calls.rank.groups):
        return None
    name, ranks = library
    return f"{name}, {ranks} ranks" if ranks else name


# Memory saving: gradient accumulation, recomputation, and optimizers on the host.

_ONLY_FORWARD = (
    "aten::linear",
    "aten::layer_norm",
    "aten::rms_norm",
    "aten::batch_norm",
    "aten::group_norm",
    "aten::conv2d",
    "aten::scaled_dot_product_attention",
    "aten::gelu",
    "aten::silu",
    "aten::relu",
    "aten::relu_",
    "aten::softmax",
    "aten::dropout",
)
"""Ops that do not occur in a backward: inside one, they recompute activations."""

_WITHIN = {
    "aten::linear": ("aten::mm", "aten::addmm"),
    "aten::scaled_dot_product_attention": ("aten::_scaled_dot_product",),
}
"""Inner ops that do the work of a composite op."""

_MIN_RECOMPUTED = 0.6
"""Minimum recomputed fraction of each op for full recomputation; ops outside the layers, such as
the head, are not recomputed. The number is not measured: a ResNet with checkpoints (trace of an
MI300 in test_strategies.py) counts as full up to 0.9 and no longer at 0.95."""


def describe_accumulation(calls: CallSet) -> str | None:
    """The microbatches per optimizer step and when their gradients are reduced.

    None with one microbatch, in a pipeline, which splits the batch for another reason, and if
    messages may be of one. None as well if the passes are followed by neither an optimizer nor a
    reduction of gradients: nothing shows then that they add up to one update.
    """
    evidence = calls.rank.evidence
    passes, steps, spans = evidence.passes, evidence.steps, evidence.marks.optimizer
    unknown = [not evidence.layout.find_axes(group) for group in evidence.trace.groups]
    if (evidence.is_op(*MESSAGES) & np.array([*unknown, True])[evidence.group]).any():
        return None
    starts_ns = spans.start_ns[steps.find_step(spans.start_ns) >= 0]
    # ZeRO-3 updates its groups of weights one after the other.
    updates = len(np.unique(passes.find_latest(starts_ns)))
    updates = updates or (len(steps) if steps.marked else len(passes))
    count, rest = divmod(len(passes), updates)
    if count < 2 or rest or any(evidence.trace.rank in line for line in evidence.layout.pipelines):
        return None
    closures = find_spans(evidence.trace.events, "Optimizer.step#")
    begins, ends = np.searchsorted(passes.start_ns, (closures.start_ns, closures.end_ns))
    if (ends - begins).max(initial=0) > 1:
        # LBFGS evaluates the same batch several times.
        return None
    sums = _count_summing_passes(_list_data_parallel(calls))
    if not sums and not len(starts_ns):
        return None
    when = {updates: GradientSums.ONCE, len(passes): GradientSums.AFTER_EACH}
    return Accumulation(count, when.get(sums, GradientSums.UNKNOWN)).detail


def describe_recomputation(calls: CallSet) -> str | None:
    """Forward ops inside backwards: full if most of every op are repeated, else selective.

    Ops whose results a selective checkpoint saves are called again without computing.
    """
    evidence = calls.rank.evidence
    events, engine = evidence.trace.events, evidence.marks.engine
    ids = [i for i, name in enumerate(events.names) if name in _ONLY_FORWARD]
    rows = np.flatnonzero(np.isin(events.name_id, ids) & events.is_category(Category.OP))
    rows = rows[evidence.steps.find_step(events.start_ns[rows]) >= 0]
    again = is_inside(engine, events.start_ns[rows])
    if not again.any():
        return None
    computes = _is_computing(events, rows, again)
    count = np.bincount(events.name_id[rows], again & computes, len(events.names))
    first = np.bincount(events.name_id[rows], ~again, len(events.names))
    layered = first >= 2 * max(1, len(evidence.passes))
    full = layered.any() and (count[layered] >= _MIN_RECOMPUTED * first[layered]).all()
    return "full" if full else "selective"


def _is_computing(events: Events, rows: Int64, again: Bool) -> Bool:
    """Whether each op does its work: it contains as many inner ops as the median first call.

    Under a dispatch mode, as used by selective checkpoints, a GEMM that runs contains another one.
    """
    computing = np.ones(len(rows), dtype=np.bool_)
    for name, prefixes in _WITHIN.items():
        own = events.match_prefix(name)[rows]
        within = np.array([one.startswith(prefixes) for one in events.names], dtype=np.bool_)
        starts = events.start_ns[within[events.name_id] & events.is_category(Category.OP)]
        low, high = np.searchsorted(starts, (events.start_ns[rows], events.ends_of(rows)))
        if (own & ~again).any():
            computing &= ~own | (high - low >= np.median((high - low)[own & ~again]))
    return computing


def updates_on_host(calls: CallSet) -> bool:
    """Whether there is an optimizer, and it launches no kernel."""
    evidence = calls.rank.evidence
    events, spans = evidence.trace.events, evidence.marks.optimizer
    kernels = np.flatnonzero(events.is_category(Category.KERNEL))
    launches = events.find_launches(kernels)
    return len(spans) > 0 and not is_inside(spans, events.start_ns[launches]).any()


# Precisions.

_CASTING = ("aten::linear", "aten::matmul", "aten::conv2d")
"""Ops that autocast runs in a lower precision."""


def casts_inputs(calls: CallSet) -> bool:
    """Whether an op casts its inputs and calls itself, as under autocast: it contains casts, then
    itself."""
    return any(_has_nested_casts(calls.rank.evidence.trace.events, name) for name in _CASTING)


def _has_nested_casts(events: Events, name: str) -> bool:
    rows, casts = _find_rows(events, name), events.start_ns[_find_rows(events, "aten::_to_copy")]
    rows = rows[np.argsort(events.lane[rows], kind="stable")]
    start, end, lane = events.start_ns[rows], events.ends_of(rows), events.lane[rows]
    holds_next = (lane[1:] == lane[:-1]) & (start[1:] < end[:-1])
    between = np.searchsorted(casts, start[1:]) - np.searchsorted(casts, start[:-1])
    return bool((holds_next & (between > 0)).any())


def _find_rows(events: Events, name: str) -> Int64:
    """The ops with this name, in order of time."""
    chosen = events.name_mask(tuple(one == name for one in events.names))
    return np.flatnonzero(chosen & events.is_category(Category.OP))


def describe_precisions(calls: CallSet) -> str | None:
    """The precision in which FSDP gathers weights and the one in which it reduces their gradients;
    None if they do not differ."""
    gathers, sums = (_find_fsdp_dtype(calls, ops) for ops in (GATHER, SCATTER))
    if gathers is None or sums is None or gathers == sums:
        return None
    return f"weights gathered in {gathers}, gradients summed in {sums}"


def _find_fsdp_dtype(calls: CallSet, ops: Sequence[str]) -> str | None:
    """The dtype of most FSDP calls of the op."""
    evidence = calls.rank.evidence
    rows = evidence.row[calls.rows[calls.select(ops, by_fsdp=True)]]
    most = Counter(evidence.trace.calls.dtype[rows].tolist()).most_common(1)
    return evidence.trace.calls.dtypes[most[0][0]] if most and most[0][0] >= 0 else None
