"""Every layout that is considered: all ways to split the GPUs, with all settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import TypeVar

from stepsplit.analyzer.compare.plan.habits import (
    recipe_on,
    recomputes,
    schedules,
    sequence_parallel,
    zeros,
)
from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.spec.layout import TWO_STAGES, Layout, Schedule
from stepsplit.analyzer.model.spec.span import span_of

_T = TypeVar("_T")
SHORT = 2
"""Layers by which an uneven interleaved pipeline may be short: embedding and head take their place
(Llama 3, arXiv:2407.21783, section 3.3.2)."""
KEYS = (
    "tp", "pp", "cp", "ep", "expert_tp", "zero", "sequence_parallel", "schedule", "chunks",
    "micro_batch", "recompute",
)  # fmt: skip
"""What is free, unless it is kept as the job has it."""


def families(job: Job, gpus: int, keep: frozenset[str] = frozenset()) -> Iterator[tuple[Job, ...]]:
    """All jobs of a layout and its settings but for the microbatch, which grows along a family.

    Tensor parallelism stays inside the node's fast link. keep names what stays as the job has it.
    """
    for layout in _layouts(job, gpus, keep):
        recipe = recipe_on(job, layout)
        sizes = _micro_batches(job, layout, keep)
        for recompute in (recipe.recompute,) if "recompute" in keep else recomputes(job):
            each = replace(recipe, recompute=recompute)
            yield tuple(
                replace(job, layout=layout, recipe=replace(each, micro_batch=size))
                for size in sizes
            )


def _layouts(job: Job, gpus: int, keep: frozenset[str]) -> Iterator[Layout]:
    for axes in _axes(job, gpus, keep):
        pipelines = tuple(_pipelines(job, axes.pp, keep))
        for data in _data(job, axes, keep):
            for parallel in _kept(
                job.layout.sequence_parallel, sequence_parallel(job, axes.tp), "sequence_parallel",
                keep,
            ):  # fmt: skip
                for schedule, chunks, layers in pipelines:
                    yield replace(
                        data, sequence_parallel=parallel, schedule=schedule, chunks=chunks,
                        layers_per_stage=layers,
                    )  # fmt: skip


def _axes(job: Job, gpus: int, keep: frozenset[str]) -> Iterator[Layout]:
    """tp, pp, cp and the rest as copies; with experts, how those lie on the same ranks."""
    node = min(job.hardware.gpus_per_node, gpus)
    bare = replace(job.layout, dp_shard=1, zero=0)
    for tp in _kept(job.layout.tp, _divisors(node), "tp", keep):
        for pp in _kept(job.layout.pp, _divisors(gpus), "pp", keep):
            for cp in _kept(job.layout.cp, _divisors(gpus), "cp", keep):
                if gpus % (tp * pp * cp) or pp > job.model.layers or job.recipe.seq_len % cp:
                    continue
                dp = gpus // (tp * pp * cp)
                if dp > job.recipe.global_batch:
                    continue
                axes = replace(bare, tp=tp, pp=pp, cp=cp, dp_replicate=dp)
                if "tp" not in keep and span_of(replace(job, layout=axes), "tp").nodes > 1:
                    continue
                yield from _experts(job, axes, node, keep)


def _experts(job: Job, axes: Layout, node: int, keep: frozenset[str]) -> Iterator[Layout]:
    experts = job.model.experts
    if experts is None:
        yield replace(axes, ep=1, expert_tp=1)
        return
    ranks = axes.tp * axes.cp * axes.dp
    cuts = sorted({1, axes.tp}) if job.recipe.framework == "megatron" else [1]
    for ep in _kept(job.layout.ep, _divisors(experts.count), "ep", keep):
        for expert_tp in _kept(job.layout.expert_tp, tuple(cuts), "expert_tp", keep):
            if ranks % (ep * expert_tp) == 0 and expert_tp <= node:
                yield replace(axes, ep=ep, expert_tp=expert_tp)


def _data(job: Job, axes: Layout, keep: frozenset[str]) -> Iterator[Layout]:
    """What ZeRO spreads, and over how many ranks: all, or those of a node (HSDP)."""
    dp = axes.dp_replicate
    for zero in _kept(job.layout.zero, zeros(job, dp * axes.cp, axes.pp), "zero", keep):
        if zero != 3:
            yield replace(axes, zero=zero)
            continue
        node = job.hardware.gpus_per_node // (axes.tp * axes.cp)
        for shard in {dp, node if node > 1 and dp % node == 0 else dp}:
            if shard * axes.cp > 1:
                yield replace(axes, zero=3, dp_replicate=dp // shard, dp_shard=shard)


def _pipelines(
    job: Job, pp: int, keep: frozenset[str]
) -> Iterator[tuple[Schedule, int, tuple[int, ...] | None]]:
    """Schedules with their chunks and, where layers don't divide, the layers of each stage."""
    if pp == 1:
        yield "1f1b", 1, None
        return
    for schedule in _kept(job.layout.schedule, schedules(job), "schedule", keep):
        for chunks in _kept(job.layout.chunks, _chunks(job, pp, schedule), "chunks", keep):
            count = pp * (2 if schedule in TWO_STAGES else chunks)
            yield schedule, chunks, even_layers(job.model.layers, count)


def _chunks(job: Job, pp: int, schedule: Schedule) -> tuple[int, ...]:
    if schedule != "interleaved":
        return (1,)
    layers = job.model.layers
    most = (layers + SHORT) // pp
    return tuple(v for v in range(2, most + 1) if -layers % (pp * v) <= SHORT)


def even_layers(layers: int, stages: int) -> tuple[int, ...] | None:
    """Layers of each stage where they don't divide: the middle ones take the rest, since embedding
    and head weigh on the ends, which may hold nothing else. None where they divide, or are too few
    for the stages between."""
    each, rest = divmod(layers, stages)
    if rest == 0 or layers < stages - SHORT:
        return None
    inner = sorted(range(stages), key=lambda i: (-min(i, stages - 1 - i), i))
    return tuple(each + (i in inner[:rest]) for i in range(stages))


def _micro_batches(job: Job, layout: Layout, keep: frozenset[str]) -> tuple[int, ...]:
    """Powers of two that divide a rank's sequences, and the job's own; 1 where none does."""
    whole, rest = divmod(job.recipe.global_batch, layout.dp)
    if "micro_batch" in keep or rest:
        return (job.recipe.micro_batch if "micro_batch" in keep else 1,)
    powers = {1 << n for n in range(whole.bit_length()) if whole % (1 << n) == 0}
    own = {job.recipe.micro_batch} if whole % job.recipe.micro_batch == 0 else set()
    return tuple(sorted(powers | own))


def _kept(own: _T, free: tuple[_T, ...], key: str, keep: frozenset[str]) -> tuple[_T, ...]:
    return (own,) if key in keep else free


@lru_cache(maxsize=64)
def _divisors(number: int) -> tuple[int, ...]:
    return tuple(n for n in range(1, number + 1) if number % n == 0)
