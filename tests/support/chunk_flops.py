"""The FLOPs of a chunk's forward pass on one rank by its weights, with which GEMMs are compared."""

from __future__ import annotations

from dataclasses import dataclass

from stepsplit.analyzer.model.config import JobConfig
from stepsplit.analyzer.model.parameters import (
    Weights,
    count_attention_weights,
    count_core_flops,
    count_mlp_weights,
    count_routed_weights,
    divide_ceil,
)
from stepsplit.analyzer.model.rank_layout import Chunk


@dataclass(frozen=True, slots=True)
class ChunkFlops:
    """FLOPs of one forward pass: linear layers, attention core (not causal) and head."""

    linear: int
    attention: int
    head: int


def count_chunk_flops(job: JobConfig, chunk: Chunk) -> ChunkFlops:
    """Counts the FLOPs of one microbatch's forward pass through a chunk on one rank.

    Context parallelism splits the tokens, tensor parallelism the GEMMs. With sequence parallelism,
    replicated weights (router, compressed projections) are applied to the rank's tokens only.
    Expert work assumes balanced routing.
    """
    model, tp, tokens = job.model, job.parallel.tp, job.tokens
    dense = count_attention_weights(model, tp) + count_mlp_weights(model, model.ffn, tp)
    linear = chunk.dense_layers * _count_product_flops(job, dense)
    if chunk.expert_layers:
        routed = count_attention_weights(model, tp) + count_routed_weights(model, tp)
        linear += chunk.expert_layers * _count_product_flops(job, routed)
    attention = tokens * chunk.layers * count_core_flops(model, job.training.seq_len, tp)
    vocab = divide_ceil(job.padded_vocab, job.parallel.vocab_split) if chunk.head else 0
    head = 2 * tokens * model.hidden * vocab
    return ChunkFlops(linear, attention, head)


def _count_product_flops(job: JobConfig, weights: Weights) -> int:
    whole = divide_ceil(job.tokens, job.parallel.sequence_split) * weights.whole
    return 2 * (job.tokens * weights.divided + whole)
