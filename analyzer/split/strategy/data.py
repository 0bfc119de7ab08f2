"""How the ranks that see different data keep one model: ddp, zero-1, zero-2, fsdp, hsdp."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from stepsplit.analyzer.split.mesh.layout import DATA_AXES
from stepsplit.analyzer.split.strategy.passes import AFTER, BACKWARD, FORWARD
from stepsplit.analyzer.split.strategy.seen import Counts, Seen
from stepsplit.analyzer.split.strategy.strategy import Strategy, axis_named
from stepsplit.analyzer.trace import OP_CODE, Bool, Group

_SUMS = ("all_reduce", "reduce_scatter", "reduce")
_LATE = (BACKWARD, AFTER)
_RETURNS = ("all_gather", "broadcast")
_LEAST_WEIGHTS = 0.2
"""Weights that come back after the optimizer are at least so many bytes for one of gradients:
fp8 of fp32 is 0.25, evaluations and checkpoints gather less."""
_DDP = "DistributedDataParallel.forward"
_ZERO = "Optimizer.step#ZeroRedundancyOptimizer"
_MEGATRON = "MODEL_PARALLEL_GROUP"


@dataclass(frozen=True, slots=True)
class _Use:
    """How a group is used for tensors; counts and bytes a step, shape (parts, ops).

    marked: FSDP says that these calls are its own.
    """

    group: Group
    axes: frozenset[str]
    counts: Counts
    bytes: Counts
    marked: bool

    def called(self, part: int, *ops: str) -> bool:
        return bool(self.counts[part, _codes(*ops)].any())

    @property
    def sums(self) -> bool:
        """Whether gradients are brought together on all ranks or on their owners."""
        return any(self.called(part, *_SUMS) for part in _LATE)

    @property
    def scatters(self) -> bool:
        """Whether each rank gets its own part of the sums alone."""
        return any(self.called(part, "reduce_scatter", "reduce") for part in _LATE)

    @property
    def shards(self) -> bool:
        """Whether weights are gathered before they are used."""
        return self.called(FORWARD, "all_gather") and self.scatters

    @property
    def hands_on(self) -> bool:
        """Whether weights may be handed on at all."""
        return any(self.called(p, *_RETURNS) for p in (FORWARD, AFTER))

    @property
    def returns_weights(self) -> bool:
        """Whether about as many bytes as of gradients come back after the backward."""
        back = self.bytes[AFTER, _codes(*_RETURNS)].sum()
        summed = self.bytes[BACKWARD:, _codes(*_SUMS)].sum()
        return self.called(AFTER, *_RETURNS) and bool(back >= _LEAST_WEIGHTS * summed)


@dataclass(frozen=True, slots=True)
class DataParallel:
    """The strategies of a rank's data parallel groups."""

    strategies: tuple[Strategy, ...]
    groups: tuple[Group, ...]


def data_strategies(seen: Seen, taken: Collection[Group]) -> DataParallel:
    """What the rank's groups of data parallel ranks do; taken are those that do something else."""
    uses = [use for use in _uses(seen) if use.group not in taken and _is_data(seen, use)]
    groups, sharded = tuple(use.group for use in uses), [use for use in uses if use.shards]
    if not sharded:
        return DataParallel(tuple(s for use in uses for s in _replicated(seen, use)), groups)
    copies = [use for use in uses if not use.shards and _copies_shards(use)]
    replicas = max((len(use.group.ranks) for use in copies), default=1)
    return DataParallel(tuple(_sharded(seen, use, replicas) for use in sharded), groups)


def wrapped(seen: Seen, groups: Collection[Group]) -> list[Strategy]:
    """DistributedDataParallel around the groups of cp, whose ranks hold the same weights."""
    uses = [use for use in _uses(seen) if use.group in groups and use.called(BACKWARD, *_SUMS)]
    sizes = [len(use.group.ranks) for use in uses] if _says(seen, _DDP) else []
    return [Strategy("ddp", "cp", size) for size in sizes]


def sums_of(seen: Seen, groups: Collection[Group]) -> int:
    """After how many of its backward passes, over all steps, the rank sums over the groups."""
    summing = np.zeros(len(seen.row), dtype=np.bool_)
    for group in groups:
        summing |= seen.on(group)
    summing &= seen.of(*_SUMS) & seen.is_tensor & np.isin(seen.part, _LATE)
    return len(np.unique(seen.passes.latest(seen.when[summing])))


def _copies_shards(use: _Use) -> bool:
    """Whether the group adds up the shards of several whole models."""
    return use.marked or "dp_replicate" in use.axes


def _uses(seen: Seen) -> list[_Use]:
    return [_use(seen, group, seen.on(group) & seen.is_tensor) for group in seen.groups()]


def _use(seen: Seen, group: Group, mask: Bool) -> _Use:
    marked = bool((mask & seen.shards & seen.of("all_gather", *_SUMS)).any())
    axes = seen.layout.axes_of(group)
    return _Use(group, axes, seen.counts(mask), seen.bytes_of(mask), marked)


def _is_data(seen: Seen, use: _Use) -> bool:
    """Whether the group brings together gradients of ranks that see different data.

    A group of unknown axis does where nothing is summed in a forward; embeddings of the first and
    the last stage are summed as gradients are, and a group of experts lies within one of data.
    Without marks of steps nobody knows whether weights come after one step or before the next.
    """
    if not use.sums or len({seen.layout.stage(rank) for rank in use.group.ranks}) > 1:
        return False
    if use.marked:
        return True
    if use.hands_on and not (seen.steps.marked or _says(seen, _ZERO)):
        return False
    if use.axes:
        return use.axes == {"ep"} or (use.axes <= DATA_AXES and use.axes != {"cp"})
    return not use.called(FORWARD, "all_reduce", "reduce_scatter")


def _sharded(seen: Seen, use: _Use, copies: int) -> Strategy:
    """Weights in parts: gathered for each use (fsdp), or kept from forward to backward (zero-2).

    Megatron-LM's distributed optimizer, which is ZeRO-1, may gather them in the next forward.
    """
    axis, size = axis_named(use.axes - {"ep"}, "dp_shard"), len(use.group.ranks)
    again = use.called(BACKWARD, "all_gather")
    if copies > 1:
        kept = "" if again else ", weights kept until the backward"
        return Strategy("hsdp", axis, size, f"{copies} replicas{kept}")
    if again:
        return Strategy("fsdp", axis, size)
    if not use.marked and _is_megatron(seen):
        return Strategy("zero-1", axis, size)
    return Strategy("zero-2", axis, size, "weights kept until the backward")


def _replicated(seen: Seen, use: _Use) -> list[Strategy]:
    """Whole weights on each rank; who owns a part of them, or of the gradients, hands it on."""
    axis, size = axis_named(use.axes - {"ep"}, "dp_replicate"), len(use.group.ranks)
    if not use.returns_weights and not _says(seen, _ZERO):
        return [] if use.scatters else [Strategy("ddp", axis, size)]
    return [Strategy(*_stage(seen, use, axis, size))]


def _stage(seen: Seen, use: _Use, axis: str, size: int) -> tuple[str, str, int, str]:
    """ZeRO-2 keeps no whole gradients: it scatters them as they come, or of each microbatch.

    ZeRO-1 sums them once. With one microbatch, summed behind the backward, both look the same.
    """
    if _is_megatron(seen) or _says(seen, _ZERO):
        return "zero-1", axis, size, ""
    if use.called(BACKWARD, "reduce_scatter", "reduce"):
        return "zero-2", axis, size, "gradients scattered during the backward"
    if len(seen.passes) <= len(seen.steps):
        return "zero-1", axis, size, "or zero-2: with one microbatch they send the same"
    each = sums_of(seen, [use.group]) == len(seen.passes)
    return ("zero-2" if each else "zero-1"), axis, size, ""


def _is_megatron(seen: Seen) -> bool:
    return any(_MEGATRON in group.description.upper() for group in seen.trace.groups)


def _says(seen: Seen, prefix: str) -> bool:
    return any(name.startswith(prefix) for name in seen.trace.events.names)


def _codes(*ops: str) -> list[int]:
    return [OP_CODE[op] for op in ops]
