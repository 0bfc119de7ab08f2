"""Data parallel strategies: ddp, zero-1, zero-2, fsdp, hsdp."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from msgspec import Struct

from stepsplit.analyzer.split.call_purposes import DDP_FORWARD
from stepsplit.analyzer.split.mesh import DATA_AXES
from stepsplit.analyzer.split.strategy import Strategy, format_axes
from stepsplit.analyzer.split.strategy_evidence import (
    AFTER,
    BACKWARD,
    FORWARD,
    Counts,
    RankEvidence,
)
from stepsplit.analyzer.trace import OP_CODE, Bool, Group

_SUMS = ("all_reduce", "reduce_scatter", "reduce")

_LATE = (BACKWARD, AFTER)

_RETURNS = ("all_gather", "broadcast")

_LEAST_WEIGHTS = 0.2
"""Minimum bytes of updated weights per byte of gradients: fp8 weights of fp32 gradients give 0.25,
evaluations and checkpoints gather less."""

_ZERO = "Optimizer.step#ZeroRedundancyOptimizer"

_DEEPSPEED_ZERO_3 = "PreBackwardFunctionForModule"
"""The autograd function around each module in deepspeedai/DeepSpeed, runtime/zero,
parameter_offload.py."""

_MEGATRON = "MODEL_PARALLEL_GROUP"


class _Use(Struct, frozen=True):
    """Tensor traffic on a group: counts and bytes per step, shape (parts, ops).

    marked: FSDP annotations mark these calls.
    """

    group: Group
    axes: frozenset[str]
    counts: Counts
    bytes: Counts
    marked: bool

    def is_called(self, part: int, *ops: str) -> bool:
        return bool(self.counts[part, _list_codes(*ops)].any())

    @property
    def sums_gradients(self) -> bool:
        """Whether gradients are reduced, on all ranks or on their owners."""
        return any(self.is_called(part, *_SUMS) for part in _LATE)

    @property
    def scatters(self) -> bool:
        """Whether each rank gets only its own part of the reduced gradients."""
        return any(self.is_called(part, "reduce_scatter", "reduce") for part in _LATE)

    @property
    def shards(self) -> bool:
        """Whether weights are gathered before use."""
        return self.is_called(FORWARD, "all_gather") and self.scatters

    @property
    def may_return_weights(self) -> bool:
        """Whether weights may be gathered or broadcast at all."""
        return any(self.is_called(p, *_RETURNS) for p in (FORWARD, AFTER))

    @property
    def returns_weights(self) -> bool:
        """Whether weights of about the size of the gradients are gathered after the backward."""
        back = self.bytes[AFTER, _list_codes(*_RETURNS)].sum()
        summed = self.bytes[BACKWARD:, _list_codes(*_SUMS)].sum()
        return self.is_called(AFTER, *_RETURNS) and bool(back >= _LEAST_WEIGHTS * summed)


class DataParallel(Struct, frozen=True):
    """The strategies of a rank's data parallel groups."""

    strategies: tuple[Strategy, ...]
    groups: tuple[Group, ...]


def detect_data_strategies(evidence: RankEvidence, taken: Collection[Group]) -> DataParallel:
    """Strategies of the rank's data parallel groups; taken are groups used for something else."""
    uses = [
        use for use in _list_uses(evidence) if use.group not in taken and _is_data(evidence, use)
    ]
    groups, sharded = tuple(use.group for use in uses), [use for use in uses if use.shards]
    if not sharded:
        return DataParallel(
            tuple(s for use in uses for s in _classify_replicated(evidence, use)), groups
        )
    replica_uses = [
        use for use in uses if not use.shards and (use.marked or "dp_replicate" in use.axes)
    ]
    replicas = max((len(use.group.ranks) for use in replica_uses), default=1)
    return DataParallel(
        tuple(_classify_sharded(evidence, use, replicas) for use in sharded), groups
    )


def detect_wrapped_ddp(evidence: RankEvidence, groups: Collection[Group]) -> list[Strategy]:
    """DistributedDataParallel around the cp groups, whose ranks have the same weights."""
    uses = [
        use
        for use in _list_uses(evidence)
        if use.group in groups and use.is_called(BACKWARD, *_SUMS)
    ]
    sizes = [len(use.group.ranks) for use in uses] if _has_event(evidence, DDP_FORWARD) else []
    return [Strategy("ddp", "cp", size) for size in sizes]


def count_gradient_sums(evidence: RankEvidence, groups: Collection[Group]) -> int:
    """After how many backward passes, over all steps, the rank reduces gradients on the groups."""
    summing = np.zeros(len(evidence.row), dtype=np.bool_)
    for group in groups:
        summing |= evidence.is_on(group)
    summing &= evidence.is_op(*_SUMS) & evidence.is_tensor & np.isin(evidence.part, _LATE)
    return len(np.unique(evidence.passes.find_latest(evidence.when[summing])))


def _list_uses(evidence: RankEvidence) -> list[_Use]:
    return [
        _build_use(evidence, group, evidence.is_on(group) & evidence.is_tensor)
        for group in evidence.list_groups()
    ]


def _build_use(evidence: RankEvidence, group: Group, mask: Bool) -> _Use:
    marked = bool((mask & evidence.shards & evidence.is_op("all_gather", *_SUMS)).any())
    axes = evidence.layout.find_axes(group)
    return _Use(group, axes, evidence.count_per_step(mask), evidence.sum_bytes(mask), marked)


def _is_data(evidence: RankEvidence, use: _Use) -> bool:
    """Whether the group reduces gradients of data parallel ranks.

    A group of unknown axis does if it reduces in no forward. Groups across stages do not:
    embeddings of the first and last stage are reduced like gradients. Without ProfilerStep marks it
    is unknown whether weights are gathered after one step or before the next.
    """
    if (
        not use.sums_gradients
        or len({evidence.layout.find_stage(rank) for rank in use.group.ranks}) > 1
    ):
        return False
    if use.marked:
        return True
    if use.may_return_weights and not (evidence.steps.marked or _has_event(evidence, _ZERO)):
        return False
    if use.axes:
        return use.axes == {"ep"} or (use.axes <= DATA_AXES and use.axes != {"cp"})
    return not use.is_called(FORWARD, "all_reduce", "reduce_scatter")


def _classify_sharded(evidence: RankEvidence, use: _Use, replicas: int) -> Strategy:
    """Sharded weights: gathered for each use (fsdp), or kept from forward to backward (zero-2).

    Megatron-LM's distributed optimizer (ZeRO-1) may gather them in the next forward. DeepSpeed's
    ZeRO-3 keeps weights that are needed again soon.
    """
    axis, size = format_axes(use.axes - {"ep"}, "dp_shard"), len(use.group.ranks)
    again = use.is_called(BACKWARD, "all_gather")
    if replicas > 1:
        detail = "" if again else ", weights kept until the backward"
        return Strategy("hsdp", axis, size, f"{replicas} replicas{detail}")
    if again:
        return Strategy("fsdp", axis, size)
    if _has_event(evidence, _DEEPSPEED_ZERO_3):
        return Strategy("fsdp", axis, size, "weights kept until the backward")
    if not use.marked and _is_megatron(evidence):
        return Strategy("zero-1", axis, size)
    return Strategy("zero-2", axis, size, "weights kept until the backward")


def _classify_replicated(evidence: RankEvidence, use: _Use) -> list[Strategy]:
    """Replicated weights: ddp, or zero-1 / zero-2 if updated weights are gathered after the
    optimizer."""
    axis, size = format_axes(use.axes - {"ep"}, "dp_replicate"), len(use.group.ranks)
    if not use.returns_weights and not _has_event(evidence, _ZERO):
        return [] if use.scatters else [Strategy("ddp", axis, size)]
    return [Strategy(*_classify_zero_stage(evidence, use, axis, size))]


def _classify_zero_stage(
    evidence: RankEvidence, use: _Use, axis: str, size: int
) -> tuple[str, str, int, str]:
    """Distinguishes ZeRO-1 from ZeRO-2, and from ZeRO-3 of a small model.

    ZeRO-2 reduce-scatters gradients during the backward or after each microbatch; ZeRO-1 reduces
    them once. With one microbatch, reduced after the backward, both have the same traffic.
    DeepSpeed's ZeRO-3 keeps small weights on all ranks.
    """
    if _has_event(evidence, _DEEPSPEED_ZERO_3):
        return "fsdp", axis, size, "weights too small to shard"
    if _is_megatron(evidence) or _has_event(evidence, _ZERO):
        return "zero-1", axis, size, ""
    if use.is_called(BACKWARD, "reduce_scatter", "reduce"):
        return "zero-2", axis, size, "gradients scattered during the backward"
    if len(evidence.passes) <= len(evidence.steps):
        return "zero-1", axis, size, "or zero-2: with one microbatch they send the same"
    sums_each_pass = count_gradient_sums(evidence, [use.group]) == len(evidence.passes)
    return ("zero-2" if sums_each_pass else "zero-1"), axis, size, ""


def _is_megatron(evidence: RankEvidence) -> bool:
    return any(_MEGATRON in group.description.upper() for group in evidence.trace.groups)


def _has_event(evidence: RankEvidence, prefix: str) -> bool:
    return any(name.startswith(prefix) for name in evidence.trace.events.names)


def _list_codes(*ops: str) -> list[int]:
    return [OP_CODE[op] for op in ops]
