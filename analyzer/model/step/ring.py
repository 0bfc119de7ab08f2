"""What a ring of context parallelism computes beside attention: its result comes in pieces."""

from __future__ import annotations

from stepsplit.analyzer.model.formula import Formula
from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.step.speed import Speed
from stepsplit.analyzer.model.work.weights import share

PIECES = Formula(
    "step.ring_pieces",
    "each of the c-1 further pieces is added to an fp32 sum: 10 bytes a number of the output"
    " forward, of the gradients of queries, keys and values backward, and 2 or 3 more launches",
    "Liu et al., Ring Attention, arXiv:2310.01889, section 3; PyTorch 2.13,"
    " _context_parallel/_attention.py, _SDPAMerger and _templated_ring_attention_backward",
)
MERGED_BYTES = 10
"""A piece is read in 16 bits, the fp32 sum read and written."""
FORWARD_KERNELS = 2
BACKWARD_KERNELS = 3
"""Attention itself, and what adds its results up: one sum forward, backward that of queries and
that of keys and values."""


def comes_in_pieces(job: Job) -> bool:
    """Whether fused attention goes round a ring."""
    layout = job.layout
    return layout.cp > 1 and layout.context_kind == "ring" and job.recipe.flash_attention


def pieces_ns(job: Job, speed: Speed) -> tuple[float, float]:
    """What the further pieces of one layer's attention take, forward and backward.

    Nothing but in a ring. The last rank, for which the others wait, attends to all earlier tokens
    and so adds whole pieces.
    """
    if not comes_in_pieces(job):
        return 0.0, 0.0
    layout, model = job.layout, job.model
    latent, heads = model.latent, share(model.heads, layout.tp)
    query = model.head_size if latent is None else latent.nope + latent.rope
    value = model.head_size if latent is None else latent.value
    pairs = heads if latent is not None else share(model.kv_heads, layout.tp)
    each = MERGED_BYTES * job.tokens
    forward = speed.moved_ns(each * heads * value, FORWARD_KERNELS)
    backward = speed.moved_ns(each * (heads * query + pairs * (query + value)), BACKWARD_KERNELS)
    return (layout.cp - 1) * forward, (layout.cp - 1) * backward
