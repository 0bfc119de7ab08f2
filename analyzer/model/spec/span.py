"""Where the ranks of a group sit: how many of them share a node."""

from __future__ import annotations

import math
from dataclasses import dataclass

from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.spec.layout import Layout


@dataclass(frozen=True, slots=True)
class Span:
    """A group of ranks spread evenly over nodes."""

    ranks: int
    ranks_per_node: int

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.ranks_per_node)


def span_of(job: Job, axis: str) -> Span:
    """The group of an axis: tp, cp, ep, dp (all that sum dense gradients, cp included), dp_shard,
    dp_replicate, expert_tp, expert_dp, or pp (the two neighbors that are farthest apart)."""
    ranks, stride = _ranks_and_stride(job.layout, axis)
    if axis == "pp" and stride * job.layout.pp > job.hardware.gpus_per_node:
        return Span(ranks, 1)
    on_node = max(1, min(ranks, job.hardware.gpus_per_node // stride))
    return Span(ranks, math.gcd(ranks, on_node))


def _ranks_and_stride(layout: Layout, axis: str) -> tuple[int, int]:
    if axis == "pp":
        return min(2, layout.pp), _stride(layout, "pp")
    if axis == "expert_tp":
        return layout.expert_tp, 1
    if axis == "ep":
        return layout.ep, layout.expert_tp
    if axis == "expert_dp":
        return layout.expert_dp, layout.ep * layout.expert_tp
    if axis == "dp":
        return layout.gradient_ranks, min(_stride(layout, "cp"), _stride(layout, "dp"))
    if axis == "dp_shard":
        return layout.shard_size, min(_stride(layout, "cp"), _stride(layout, "dp"))
    if axis == "dp_replicate":
        return layout.dp_replicate, _stride(layout, "dp") * layout.dp_shard
    return getattr(layout, axis), _stride(layout, axis)


def _stride(layout: Layout, axis: str) -> int:
    """Ranks between neighbors along the axis: the product of the faster axes."""
    sizes = {"tp": layout.tp, "cp": layout.cp, "dp": layout.dp, "pp": layout.pp}
    faster = layout.order[: layout.order.index(axis)]
    return math.prod(sizes.get(each, 1) for each in faster)
