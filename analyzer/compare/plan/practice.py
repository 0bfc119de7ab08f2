"""How people choose a layout by hand, with this job's numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from stepsplit.analyzer.compare.plan.habits import recipe_on, zeros
from stepsplit.analyzer.compare.plan.plan import Place, Trial
from stepsplit.analyzer.compare.plan.space import even_layers
from stepsplit.analyzer.model.memory.memory import fits, memory_of
from stepsplit.analyzer.model.spec.checks import first_fault
from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.spec.span import span_of

AXES = ("tp", "cp", "ep", "pp", "dp")


def tree_of(job: Job, gpus: int) -> tuple[Trial, ...]:
    """The questions in order, up to the first yes: one GPU, its states spread by ZeRO, one node
    by tensor parallelism, then more and more nodes by a pipeline."""
    asked: list[Trial] = []
    for trial in _trials(job, gpus):
        asked.append(trial)
        if trial.fits:
            break
    return tuple(asked)


def places_of(job: Job) -> tuple[Place, ...]:
    """Each axis of more than one rank, the fastest link first."""
    found = []
    for axis in AXES:
        span = span_of(job, axis)
        if span.ranks > 1:
            link = job.hardware.intra if span.nodes == 1 else job.hardware.inter
            ranks = job.layout.pp if axis == "pp" else span.ranks
            nodes = min(span.nodes * ranks // span.ranks, ranks)
            found.append(Place(axis, ranks, nodes if span.nodes > 1 else 1, link.name))
    return tuple(sorted(found, key=lambda place: place.nodes > 1))


def _trials(job: Job, gpus: int) -> Iterator[Trial]:
    yield from _trial(job, "one GPU", 1, 1, 1)
    if gpus > 1:
        yield from _trial(job, "states spread over data parallelism", 1, 1, gpus)
    node = min(job.hardware.gpus_per_node, gpus)
    widths = [tp for tp in range(2, node + 1) if node % tp == 0 and _possible(job, tp, 1)]
    for tp in widths:
        yield from _trial(job, "one node by tensor parallelism", tp, 1, 1)
    widest = max(widths, default=1)
    for pp in range(2, min(gpus // widest, job.model.layers) + 1):
        if gpus % (widest * pp) == 0:
            dp = gpus // (widest * pp)
            yield from _trial(job, "a pipeline over nodes", widest, pp, dp)


def _trial(job: Job, question: str, tp: int, pp: int, dp: int) -> Iterator[Trial]:
    """The leanest job of this kind: all recomputed, one sequence a microbatch, p of them."""
    one = _leanest(job, tp, pp, dp)
    if first_fault(one) is not None:
        return
    memory = memory_of(one)
    most = max(stage.total_bytes for stage in memory)
    zero = one.layout.zero
    yield Trial(question, tp, pp, zero, one.layout.world_size, most, fits(one, memory))


def _leanest(job: Job, tp: int, pp: int, dp: int) -> Job:
    zero = max(zeros(job, dp, pp))
    layout = replace(
        job.layout, tp=tp, pp=pp, cp=1, ep=1, expert_tp=1, zero=zero, schedule="1f1b", chunks=1,
        dp_replicate=1 if zero == 3 else dp, dp_shard=dp if zero == 3 else 1,
        layers_per_stage=even_layers(job.model.layers, pp),
        sequence_parallel=tp > 1 and job.recipe.seq_len % tp == 0,
    )  # fmt: skip
    recipe = replace(recipe_on(job, layout), micro_batch=1, recompute="full")
    return replace(job, layout=layout, recipe=replace(recipe, global_batch=pp * dp))


def _possible(job: Job, tp: int, pp: int) -> bool:
    return first_fault(_leanest(job, tp, pp, 1)) is None
