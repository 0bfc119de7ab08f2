"""Which layers each rank of the pipeline holds."""

from __future__ import annotations

from dataclasses import dataclass

from stepsplit.analyzer.model.spec.job import Job


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
    chunks = _chunks(job)
    return tuple(
        Stage(rank, tuple(chunks[i] for i in chunks_of_rank(job, rank)))
        for rank in range(job.layout.pp)
    )


def chunks_of_rank(job: Job, rank: int) -> tuple[int, ...]:
    """Positions in the model of the chunks that a pipeline rank holds.

    Interleaved ranks hold every pp-th chunk; zb-v and dualpipe-v fold the model into a V;
    dualpipe runs a second copy of the model from the other end.
    """
    p = job.layout.pp
    if p > 1 and job.layout.schedule in ("zb-v", "dualpipe-v"):
        return rank, 2 * p - 1 - rank
    if p > 1 and job.layout.schedule == "dualpipe":
        return tuple(sorted((rank, p - 1 - rank)))
    return tuple(rank + p * chunk for chunk in range(job.layout.chunks))


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


def _chunks(job: Job) -> tuple[Chunk, ...]:
    dense = job.model.layers - job.model.expert_layers
    sizes, before, found = layers_per_chunk(job), 0, []
    for i, layers in enumerate(sizes):
        here = max(0, min(before + layers, dense) - before)
        found.append(Chunk(here, layers - here, i == 0, i == len(sizes) - 1))
        before += layers
    return tuple(found)
