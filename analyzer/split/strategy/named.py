"""What is told where the host's ops are not recorded: by axes of groups and their calls alone."""

from __future__ import annotations

from stepsplit.analyzer.split.strategy.seen import Seen
from stepsplit.analyzer.split.strategy.strategy import Strategy, axis_named
from stepsplit.analyzer.trace import Group

_TWICE = 1.5
"""Weights that are gathered in both passes are gathered more often than gradients are scattered;
not twice as often where the last layer's stay."""


def named_strategies(seen: Seen) -> list[Strategy]:
    """The strategies of groups whose axis is known, where nothing tells forward from backward."""
    found = [one for group in seen.groups() for one in _of_model(seen, group)]
    sharded = [group for group in seen.groups() if _gathers_twice(seen, group)]
    replicas = [group for group in seen.groups() if _only_sums(seen, group)]
    if sharded:
        return [*found, *(_sharded(seen, group, replicas) for group in sharded)]
    return [*found, *(Strategy("ddp", "dp_replicate", len(group.ranks)) for group in replicas)]


def _of_model(seen: Seen, group: Group) -> list[Strategy]:
    axes, size = seen.layout.axes_of(group), len(group.ranks)
    if axes == {"tp"}:
        return _tensor(seen, group)
    if axes == {"ep"} and _count(seen, group, "all_to_all"):
        return [Strategy("ep", "ep", size)]
    if axes == {"cp"} and _count(seen, group, "send", "recv", "send_recv"):
        return [Strategy("cp", "cp", size, "ring")]
    return []


def _tensor(seen: Seen, group: Group) -> list[Strategy]:
    size = len(group.ranks)
    if _count(seen, group, "all_gather") and _count(seen, group, "reduce_scatter"):
        return [Strategy("tp", "tp", size), Strategy("sp", "tp", size)]
    return [Strategy("tp", "tp", size)] if _count(seen, group, "all_reduce") else []


def _sharded(seen: Seen, group: Group, replicas: list[Group]) -> Strategy:
    axis, size = axis_named(seen.layout.axes_of(group), "dp_shard"), len(group.ranks)
    if replicas:
        return Strategy("hsdp", axis, size, f"{len(replicas[0].ranks)} replicas")
    return Strategy("fsdp", axis, size)


def _only_sums(seen: Seen, group: Group) -> bool:
    """Whether replicas exchange nothing but sums: what hands weights on may be zero-1."""
    if seen.layout.axes_of(group) != {"dp_replicate"} or not _count(seen, group, "all_reduce"):
        return False
    return not _count(seen, group, "all_gather", "reduce_scatter", "broadcast", "reduce")


def _gathers_twice(seen: Seen, group: Group) -> bool:
    axes = seen.layout.axes_of(group)
    if "dp_shard" not in axes or not axes <= {"dp_shard", "cp"}:
        return False
    scatters = _count(seen, group, "reduce_scatter")
    return scatters > 0 and _count(seen, group, "all_gather") >= _TWICE * scatters


def _count(seen: Seen, group: Group, *ops: str) -> int:
    """How many calls of tensors the rank makes on the group by these ops, over all steps."""
    return int((seen.on(group) & seen.of(*ops) & seen.is_tensor).sum())
