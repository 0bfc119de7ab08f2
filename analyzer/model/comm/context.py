"""What context parallelism sends around each layer's attention."""

from __future__ import annotations

from stepsplit.analyzer.model.comm.calls import (
    FULL_RECOMPUTE,
    Place,
    all_gather,
    all_to_all,
    receive,
    reduce_scatter,
    rounds,
    send,
)
from stepsplit.analyzer.model.formula import Formula
from stepsplit.analyzer.model.prediction import Message
from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.spec.stages import Stage
from stepsplit.analyzer.model.work.weights import share

RING = Formula(
    "comm.context_ring",
    "(c-1) sends of keys and values forward, 2 (c-1) backward (them and their gradients):"
    " 2 T k d/t numbers each",
    "Liu et al., Ring Attention, arXiv:2310.01889; NVIDIA/TransformerEngine, context_parallel.py",
)
GATHER = Formula(
    "comm.context_all_gather",
    "all_gather of keys and values forward and again backward, for only the own are kept, and"
    " reduce_scatter of their gradients",
    "Grattafiori et al., Llama 3, arXiv:2407.21783, section 3.3.2; NVIDIA/TransformerEngine,"
    " context_parallel.py; PyTorch 2.13, _context_parallel/_attention.py, _AllGatherRotater",
)
ULYSSES = Formula(
    "comm.context_ulysses",
    "4 all_to_alls forward and 4 backward: queries and output T a d/t, keys and values T k d/t",
    "Jacobs et al., DeepSpeed-Ulysses, arXiv:2309.14509",
)


def context_messages(job: Job, stage: Stage) -> tuple[Message, ...]:
    """The calls over cp of one rank of a stage in a step; none where cp is 1.

    What recomputes attention repeats its forward communication.
    """
    if job.layout.cp == 1:
        return ()
    phases = ["forward", "backward"]
    stored = job.recipe.recompute == "selective" and not job.recipe.flash_attention
    if stored or job.recipe.recompute in FULL_RECOMPUTE:
        phases.append("recompute")
    calls = {"ring": _ring, "all-gather": _gather, "ulysses": _ulysses}[job.layout.context_kind]
    return tuple(
        message
        for phase in phases
        for message in calls(job, Place("cp", "cp", stage.index, phase), rounds(job) * stage.layers)
    )


def _ring(job: Job, place: Place, count: int) -> tuple[Message, ...]:
    hops = (job.layout.cp - 1) * (2 if place.phase == "backward" else 1)
    size = _pair_bytes(job)
    return send(place, count * hops, size), receive(place, count * hops, size)


def _gather(job: Job, place: Place, count: int) -> tuple[Message, ...]:
    size, cp = _pair_bytes(job), job.layout.cp
    gathered = all_gather(place, count, size, cp)
    if place.phase != "backward":
        return (gathered,)
    return gathered, reduce_scatter(place, count, size * cp, cp)


def _ulysses(job: Job, place: Place, count: int) -> tuple[Message, ...]:
    """Each rank gets whole sequences of some heads: at least one key-value head, copied if need."""
    model, cp, tp = job.model, job.layout.cp, job.layout.tp
    token = job.tokens * job.recipe.activation_bytes * model.head_size
    wide = token * share(model.heads, tp)
    narrow = token * max(share(model.kv_heads, tp), cp)
    return (
        all_to_all(place, 2 * count, wide, cp),
        all_to_all(place, 2 * count, narrow, cp),
    )


def _pair_bytes(job: Job) -> int:
    """Keys and values of a rank's tokens in one layer; latent attention hands them on widened."""
    latent, tp = job.model.latent, job.layout.tp
    if latent is None:
        width = 2 * share(job.model.kv_heads, tp) * job.model.head_size
    else:
        width = share(job.model.heads, tp) * (latent.nope + latent.rope + latent.value)
    return job.tokens * width * job.recipe.activation_bytes
