"""Which layers each rank of the pipeline holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.spec.layout import Schedule

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Chunk:
    """One model stage: consecutive layers, with the embedding before or the head behind them."""

    dense_layers: int
    expert_layers: int
    embedding: bool
    head: bool

    @property
    def layers(self) -> int:
        return self.dense_layers + self.expert_layers


@dataclass(frozen=True, slots=True)
class Stage:
    """What one pp coordinate holds: its chunks, in the model's order."""

    index: int
    chunks: tuple[Chunk, ...]

    @property
    def dense_layers(self) -> int:
        return sum(chunk.dense_layers for chunk in self.chunks)

    @property
    def expert_layers(self) -> int:
        return sum(chunk.expert_layers for chunk in self.chunks)

    @property
    def layers(self) -> int:
        return self.dense_layers + self.expert_layers

    @property
    def embedding(self) -> bool:
        return any(chunk.embedding for chunk in self.chunks)

    @property
    def head(self) -> bool:
        return any(chunk.head for chunk in self.chunks)


def stages_of(job: Job) -> tuple[Stage, ...]:
    """The pipeline's ranks, first to last, each with its chunks."""
    return _stages(*_shape(job))


def each_once(job: Job, make: Callable[[Stage], _T]) -> tuple[_T, ...]:
    """What make says of each stage, asked once of all that hold the same; it may not look at the
    index."""
    found: list[_T] = []
    for stage, first in zip(stages_of(job), first_alike(job), strict=True):
        found.append(make(stage) if first == stage.index else found[first])
    return tuple(found)


def first_alike(job: Job) -> tuple[int, ...]:
    """For each stage the first that holds the same."""
    return _first_alike(*_shape(job))


def _shape(job: Job) -> tuple[tuple[int, ...], int, Schedule, int, int]:
    layout, dense = job.layout, job.model.layers - job.model.expert_layers
    return layers_per_chunk(job), dense, layout.schedule, layout.pp, layout.chunks


@lru_cache(maxsize=1024)
def _stages(
    sizes: tuple[int, ...], dense: int, schedule: Schedule, pp: int, chunks: int
) -> tuple[Stage, ...]:
    model = _chunks(sizes, dense)
    return tuple(
        Stage(rank, tuple(model[i] for i in _of_rank(schedule, pp, chunks, rank)))
        for rank in range(pp)
    )


@lru_cache(maxsize=1024)
def _first_alike(
    sizes: tuple[int, ...], dense: int, schedule: Schedule, pp: int, chunks: int
) -> tuple[int, ...]:
    held = [stage.chunks for stage in _stages(sizes, dense, schedule, pp, chunks)]
    return tuple(held.index(each) for each in held)


def chunks_of_rank(job: Job, rank: int) -> tuple[int, ...]:
    """Positions in the model of the chunks that a pipeline rank holds."""
    return _of_rank(job.layout.schedule, job.layout.pp, job.layout.chunks, rank)


def _of_rank(schedule: Schedule, p: int, chunks: int, rank: int) -> tuple[int, ...]:
    """Interleaved ranks hold every pp-th chunk; zb-v and dualpipe-v fold the model into a V;
    dualpipe runs a second copy of the model from the other end."""
    if p > 1 and schedule in ("zb-v", "dualpipe-v"):
        return rank, 2 * p - 1 - rank
    if p > 1 and schedule == "dualpipe":
        return tuple(sorted((rank, p - 1 - rank)))
    return tuple(rank + p * chunk for chunk in range(chunks))


def chunk_count(job: Job) -> int:
    """Model stages that the layers are cut into (p v; p for dualpipe's two copies)."""
    p, layout = job.layout.pp, job.layout
    return p if layout.schedule == "dualpipe" else p * layout.stages_per_rank


def layers_per_chunk(job: Job) -> tuple[int, ...]:
    """Layers of each model stage; the first take the rest where they do not divide."""
    if job.layout.layers_per_stage is not None:
        return job.layout.layers_per_stage
    count = chunk_count(job)
    each, rest = divmod(job.model.layers, count)
    return tuple(each + (i < rest) for i in range(count))


def _chunks(sizes: tuple[int, ...], dense: int) -> tuple[Chunk, ...]:
    before, found = 0, []
    for i, layers in enumerate(sizes):
        here = max(0, min(before + layers, dense) - before)
        found.append(Chunk(here, layers - here, i == 0, i == len(sizes) - 1))
        before += layers
    return tuple(found)
