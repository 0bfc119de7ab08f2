"""What tensor parallelism sends, with and without sequence parallelism."""

from __future__ import annotations

from stepsplit.analyzer.model.comm.calls import (
    FULL_RECOMPUTE,
    Place,
    all_gather,
    all_reduce,
    hidden_bytes,
    reduce_scatter,
    rounds,
)
from stepsplit.analyzer.model.formula import Formula
from stepsplit.analyzer.model.prediction import Message
from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.spec.stages import Stage
from stepsplit.analyzer.model.work.parameters import StageParameters

TENSOR = Formula(
    "comm.tensor",
    "m (4 L + 2) all_reduces of T h bytes, m (6 L + 2) with full recomputation;"
    " a layer's share of a microbatch: 8 b s h (t-1)/t elements sent",
    "Shoeybi et al., arXiv:1909.08053, section 3; Narayanan et al., SC'21, section 3.2",
)
SEQUENCE = Formula(
    "comm.sequence",
    "each all_reduce becomes a reduce_scatter of T h and an all_gather of T h/t; Megatron-LM"
    " gathers the input of column-parallel products again in the backward pass",
    "Korthikanti et al., arXiv:2205.05198, section 4.2.2",
)
LOSS = Formula(
    "comm.loss",
    "3 all_reduces of 4 T bytes a microbatch: maximum, target's logit and sum over the vocabulary",
    "NVIDIA/Megatron-LM, tensor_parallel/cross_entropy.py; Shoeybi et al., arXiv:1909.08053",
)
LOSS_BYTES = 4
"""The loss sums in fp32."""


def tensor_messages(job: Job, stage: Stage, held: StageParameters) -> tuple[Message, ...]:
    """The calls over tp of one rank of a stage in a step; none where tp is 1."""
    if job.layout.tp == 1:
        return ()
    if not job.layout.sequence_parallel:
        return (*_whole(job, stage), *_loss(job, stage))
    return (*_split(job, stage), *_loss(job, stage), _replicated(job, stage, held))


def _whole(job: Job, stage: Stage) -> tuple[Message, ...]:
    """Every pair of products sums its result forward and the gradient of its input backward."""
    pairs, size, tp = _pairs(job, stage), hidden_bytes(job), job.layout.tp
    counts = {
        "forward": pairs + (stage.embedding and job.layout.split_vocab),
        "backward": pairs + (stage.head and job.layout.split_vocab),
        "recompute": _again(job, pairs),
    }
    return tuple(
        all_reduce(Place("tp", "tp", stage.index, phase), rounds(job) * count, size, tp)
        for phase, count in counts.items()
    )


def _split(job: Job, stage: Stage) -> tuple[Message, ...]:
    """Every pair gathers its input and scatters the sum of its result, backward the reverse."""
    pairs, again = _pairs(job, stage), _again(job, _pairs(job, stage))
    first, last = int(stage.embedding), int(stage.head)
    regathered = pairs + last if job.recipe.framework == "megatron" else 0
    counts = {
        "forward": (pairs + last, pairs + first),
        "backward": (pairs + first + regathered, pairs + last),
        "recompute": (again, again),
    }
    return tuple(
        message
        for phase, (gathers, scatters) in counts.items()
        for message in _gathers_and_scatters(job, stage, phase, gathers, scatters)
    )


def _gathers_and_scatters(
    job: Job, stage: Stage, phase: str, gathers: int, scatters: int
) -> tuple[Message, ...]:
    place, tp, size = Place("sp", "tp", stage.index, phase), job.layout.tp, hidden_bytes(job)
    return (
        all_gather(place, rounds(job) * gathers, size // tp, tp),
        reduce_scatter(place, rounds(job) * scatters, size, tp),
    )


def _pairs(job: Job, stage: Stage) -> int:
    """Pairs of a column- and a row-parallel product: attention and MLP of each layer.

    Under sequence parallelism routed tokens go to their experts directly (expert messages), so
    that of a mixture only a shared expert is such a pair.
    """
    experts = job.model.experts
    whole = experts is not None and (experts.shared_ffn > 0 or not job.layout.sequence_parallel)
    return 2 * stage.dense_layers + (2 if whole else 1) * stage.expert_layers


def _again(job: Job, pairs: int) -> int:
    return pairs if job.recipe.recompute in FULL_RECOMPUTE else 0


def _loss(job: Job, stage: Stage) -> tuple[Message, ...]:
    if not (stage.head and job.layout.split_vocab):
        return ()
    place = Place("loss", "tp", stage.index, "forward")
    return (all_reduce(place, 3 * rounds(job), LOSS_BYTES * job.tokens, job.layout.tp),)


def _replicated(job: Job, stage: Stage, held: StageParameters) -> Message:
    """Each rank saw its part of the sequence only: gradients of what tp leaves whole are summed."""
    size = (held.replicated + _positions_in_parts(job, stage)) * job.recipe.gradient_bytes
    if job.layout.zero == 3:
        size //= job.layout.shard_size
    return all_reduce(Place("sp", "tp", stage.index, "grad_sync"), 1, size, job.layout.tp)


def _positions_in_parts(job: Job, stage: Stage) -> int:
    """Learned positions, where each rank adds those of its part of the sequence only.

    Megatron-LM adds them all before it splits the sequence, so that no gradient is a part.
    """
    whole = not stage.embedding or job.recipe.framework == "megatron"
    return 0 if whole else job.model.positions * job.model.hidden
