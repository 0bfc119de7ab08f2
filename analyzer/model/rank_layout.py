"""Where the ranks and layers of a job are: the nodes of each group, the layers of each stage."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeVar

from stepsplit.analyzer.model.config import JobConfig, ParallelConfig
from stepsplit.analyzer.model.schedule_names import Schedule

# Placement of a group on the nodes: how many of its ranks share a node.


@dataclass(frozen=True, slots=True)
class GroupPlacement:
    """A group of ranks, evenly distributed over nodes."""

    ranks: int
    ranks_per_node: int

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.ranks_per_node)


def place_group(job: JobConfig, axis: str) -> GroupPlacement:
    """Returns the placement of an axis's group: tp, cp, ulysses, ep, dp (all ranks of the dense
    gradient reduction, including cp), dp_shard, dp_replicate, expert_tp, expert_dp, or pp (the two
    neighbors that are farthest apart)."""
    layout = job.parallel
    if axis in ("dp", "dp_shard"):
        ranks = layout.gradient_ranks if axis == "dp" else layout.shard_size
        return GroupPlacement(ranks, math.gcd(ranks, min(ranks, _count_replicas_on_node(job))))
    ranks, stride = _compute_ranks_and_stride(layout, axis)
    if axis == "pp" and stride * layout.pp > job.hardware.gpus_per_node:
        return GroupPlacement(ranks, 1)
    on_node = max(1, min(ranks, _count_gpus_per_node(job) // stride))
    return GroupPlacement(ranks, math.gcd(ranks, on_node))


def _count_replicas_on_node(job: JobConfig) -> int:
    """Ranks of cp and dp on a node of consecutive ranks, others of which belong to faster axes."""
    layout, left, count = job.parallel, _count_gpus_per_node(job), 1
    sizes = {"tp": layout.tp, "cp": layout.cp, "dp": layout.dp, "pp": layout.pp}
    for axis in layout.rank_order:
        taken = min(sizes.get(axis, 1), left)
        count *= taken if axis in ("cp", "dp") else 1
        left //= taken
    return count


def _count_gpus_per_node(job: JobConfig) -> int:
    """GPUs that the job uses on each node: all, or as many as divide its ranks (64 of 72)."""
    world, most = job.parallel.world_size, job.hardware.gpus_per_node
    if world <= most:
        return most
    return next(count for count in range(most, 0, -1) if world % count == 0)


def _compute_ranks_and_stride(layout: ParallelConfig, axis: str) -> tuple[int, int]:
    if axis == "pp":
        return min(2, layout.pp), _compute_stride(layout, "pp")
    if axis == "expert_tp":
        return layout.expert_tp, 1
    if axis == "ulysses":
        return layout.ulysses, _compute_stride(layout, "cp")
    if axis == "cp" and layout.ulysses > 1:
        return layout.ring, _compute_stride(layout, "cp") * layout.ulysses
    if axis == "ep":
        return layout.ep, layout.expert_tp
    if axis == "expert_dp":
        return layout.expert_dp, layout.ep * layout.expert_tp
    if axis == "dp_replicate":
        return layout.dp_replicate, _compute_stride(layout, "dp") * layout.dp_shard
    return getattr(layout, axis), _compute_stride(layout, axis)


def _compute_stride(layout: ParallelConfig, axis: str) -> int:
    """Ranks between neighbors along the axis: the product of the faster axes."""
    sizes = {"tp": layout.tp, "cp": layout.cp, "dp": layout.dp, "pp": layout.pp}
    faster = layout.rank_order[: layout.rank_order.index(axis)]
    return math.prod(sizes.get(each, 1) for each in faster)


# The layers of each pipeline rank.

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Chunk:
    """One model stage: consecutive layers, with the embedding or the head at the model's ends."""

    dense_layers: int
    expert_layers: int
    embedding: bool
    head: bool
    mtp_layers: int = 0
    """Those of the layers that belong to multi-token prediction modules."""

    @property
    def layers(self) -> int:
        return self.dense_layers + self.expert_layers


@dataclass(frozen=True, slots=True)
class StageConfig:
    """The chunks of one pp coordinate, in model order, and how many layers they have of each kind.

    The counts follow from the chunks. They are kept, since a search asks for them very often.
    """

    index: int
    chunks: tuple[Chunk, ...]
    dense_layers: int = field(init=False, compare=False)
    expert_layers: int = field(init=False, compare=False)
    mtp_layers: int = field(init=False, compare=False)
    embedding: bool = field(init=False, compare=False)
    head: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("dense_layers", "expert_layers", "mtp_layers"):
            object.__setattr__(self, name, sum(getattr(chunk, name) for chunk in self.chunks))
        for name in ("embedding", "head"):
            object.__setattr__(self, name, any(getattr(chunk, name) for chunk in self.chunks))

    @property
    def layers(self) -> int:
        return self.dense_layers + self.expert_layers


def list_stages(job: JobConfig) -> tuple[StageConfig, ...]:
    """Lists the pipeline stages, first to last, each with its chunks."""
    return _build_stages(*_build_cache_key(job))


def map_unique_stages(job: JobConfig, build: Callable[[StageConfig], _T]) -> tuple[_T, ...]:
    """Calls make once for each distinct stage and returns its result for every stage.

    make must not depend on the stage's index.
    """
    results: list[_T] = []
    for stage, first in zip(list_stages(job), find_equal_stages(job), strict=True):
        results.append(build(stage) if first == stage.index else results[first])
    return tuple(results)


def find_equal_stages(job: JobConfig) -> tuple[int, ...]:
    """Returns for each stage the index of the first stage with equal chunks."""
    return _find_equal_stages(*_build_cache_key(job))


def _build_cache_key(job: JobConfig) -> tuple[tuple[int, ...], int, int, Schedule, int, int]:
    layout, dense = job.parallel, job.model.layers - job.model.expert_layers
    mtp = job.model.mtp_layers
    return split_layers(job), dense, mtp, layout.schedule, layout.pp, layout.chunks


@lru_cache(maxsize=1024)
def _build_stages(
    sizes: tuple[int, ...], dense: int, mtp: int, schedule: Schedule, pp: int, chunks: int
) -> tuple[StageConfig, ...]:
    model = _build_chunks(sizes, dense, mtp)
    return tuple(
        StageConfig(rank, tuple(model[i] for i in _list_rank_chunks(schedule, pp, chunks, rank)))
        for rank in range(pp)
    )


@lru_cache(maxsize=1024)
def _find_equal_stages(
    sizes: tuple[int, ...], dense: int, mtp: int, schedule: Schedule, pp: int, chunks: int
) -> tuple[int, ...]:
    stages = _build_stages(sizes, dense, mtp, schedule, pp, chunks)
    chunk_lists = [stage.chunks for stage in stages]
    return tuple(chunk_lists.index(each) for each in chunk_lists)


def list_rank_chunks(job: JobConfig, rank: int) -> tuple[int, ...]:
    """Lists the positions in the model of a pipeline rank's chunks."""
    return _list_rank_chunks(job.parallel.schedule, job.parallel.pp, job.parallel.chunks, rank)


def _list_rank_chunks(schedule: Schedule, p: int, chunks: int, rank: int) -> tuple[int, ...]:
    """Interleaved ranks have every pp-th chunk; zb-v and dualpipe-v fold the model into a V;
    dualpipe runs a second copy of the model from the other end."""
    if p > 1 and schedule in ("zb-v", "dualpipe-v"):
        return rank, 2 * p - 1 - rank
    if p > 1 and schedule == "dualpipe":
        return tuple(sorted((rank, p - 1 - rank)))
    return tuple(rank + p * chunk for chunk in range(chunks))


def count_rerun_layers(job: JobConfig, layers: float) -> float:
    """Counts how many of a model stage's layers run their forward pass again."""
    most = job.training.recompute_layers
    return min(layers, most) if most and job.training.recompute == "full" else layers


def split_layers(job: JobConfig) -> tuple[int, ...]:
    """Layers of each model stage; the first stages get the remainder."""
    if job.parallel.layers_per_stage is not None:
        return job.parallel.layers_per_stage
    count = job.parallel.model_stages
    base_layers, rest = divmod(job.model.layers, count)
    return tuple(base_layers + (i < rest) for i in range(count))


def _build_chunks(sizes: tuple[int, ...], dense: int, mtp: int) -> tuple[Chunk, ...]:
    """The modules of multi-token prediction follow the last layer, and are of its kind."""
    before, chunks, last = 0, [], len(sizes) - 1
    for i, layers in enumerate(sizes):
        dense_here = max(0, min(before + layers, dense) - before)
        own_mtp = mtp if i == last else 0
        routed = layers - dense_here
        all_dense = dense == sum(sizes)
        chunks.append(
            Chunk(
                dense_here + (own_mtp if all_dense else 0),
                routed + (0 if all_dense else own_mtp),
                i == 0, i == last, own_mtp,
            )
        )  # fmt: skip
        before += layers
    return tuple(chunks)
