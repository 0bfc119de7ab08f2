"""What data parallelism sends where every rank keeps whole weights: DDP, ZeRO-1 and ZeRO-2."""

from __future__ import annotations

from dataclasses import dataclass

from stepsplit.analyzer.model.comm.calls import (
    Place,
    all_gather,
    all_reduce,
    broadcast,
    reduce_scatter,
)
from stepsplit.analyzer.model.formula import Formula
from stepsplit.analyzer.model.prediction import Message
from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.work.parameters import StageParameters

DDP = Formula(
    "comm.ddp",
    "all_reduces of the gradients once a step, g P bytes in ceil(g P/bucket) calls",
    "Li et al., PyTorch Distributed, arXiv:2006.15704, section 3.2",
)
ZERO = Formula(
    "comm.zero",
    "reduce_scatters of g P bytes of gradients, all_gathers of w P/N bytes of weights, once a step"
    " (ZeRO-2 outside Megatron-LM: gradients every microbatch)",
    "Rajbhandari et al., ZeRO, arXiv:1910.02054, section 7.2.1; Megatron-LM, distrib_optimizer.md",
)
REDUNDANCY = Formula(
    "comm.zero_redundancy",
    "DDP's all_reduces, then N broadcasts of w P/N bytes: each rank's updated share",
    "pytorch/pytorch, torch/distributed/optim/zero_redundancy_optimizer.py (_sync_params,"
    " parameters_as_bucket_view)",
)
ALL_REDUCED = Formula(
    "comm.zero_deepspeed",
    "all_reduces of g P bytes of gradients (ZeRO-2: every microbatch), all_gathers of w P/N bytes",
    "deepspeedai/DeepSpeed, runtime/zero/stage_1_and_2.py, use_multi_rank_bucket_allreduce",
)
MIB = 2**20
MEGATRON_BUCKET = 40_000_000
MEGATRON_BUCKET_PER_RANK = 1_000_000
"""Parameters in a bucket where gradients overlap the backward pass; else one bucket holds all.
NVIDIA/Megatron-LM, core/distributed/distributed_data_parallel.py."""
DEEPSPEED_BUCKET = 500_000_000
"""Numbers in a bucket: reduce_bucket_size and allgather_bucket_size, DeepSpeed's config-json."""
DDP_FIRST_BYTES, DDP_BYTES = 1 * MIB, 25 * MIB
"""PyTorch's kDefaultFirstBucketBytes and bucket_cap_mb."""
EVERY_MICROBATCH = ("deepspeed", "zero-paper")
"""Frameworks whose ZeRO-2 cannot keep whole gradients from one microbatch to the next."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """count buckets of so many parameters."""

    count: int
    parameters: int


def data_messages(job: Job, held: StageParameters) -> tuple[Message, ...]:
    """The calls that one rank's gradients and weights need; ZeRO-3 is sharded_messages'."""
    layout = job.layout
    if layout.zero == 3:
        return ()
    return (
        *_group(job, held.stage, held.dense, "dp", layout.gradient_ranks),
        *_group(job, held.stage, held.experts, "expert_dp", layout.expert_dp),
    )


def _group(job: Job, stage: int, parameters: int, axis: str, ranks: int) -> tuple[Message, ...]:
    if ranks == 1 or parameters == 0:
        return ()
    found = []
    for bucket in buckets(job, parameters, ranks):
        found += _summed(job, stage, bucket, axis, ranks)
    if hands_out(job):
        share = -(-parameters * job.recipe.weight_bytes // ranks)
        found.append(broadcast(Place("zero-1", axis, stage, "optimizer"), ranks, share))
    return tuple(found)


def hands_out(job: Job) -> bool:
    """Whether DDP sums whole gradients and each rank then broadcasts the weights of its share."""
    return job.layout.zero == 1 and job.recipe.framework == "ddp"


def _summed(job: Job, stage: int, bucket: Bucket, axis: str, ranks: int) -> list[Message]:
    zero, size = job.layout.zero, bucket.parameters * job.recipe.gradient_bytes
    place = Place(f"zero-{zero}" if zero else "ddp", axis, stage, "grad_sync")
    if zero == 0 or hands_out(job):
        return [all_reduce(place, bucket.count, size, ranks)]
    times = bucket.count * (job.microbatches if sums_every_microbatch(job) else 1)
    summed = all_reduce if sums_whole(job) else reduce_scatter
    after = Place(place.strategy, axis, stage, "optimizer")
    weights = -(-bucket.parameters * job.recipe.weight_bytes // ranks)
    return [
        summed(place, times, size, ranks),
        all_gather(after, bucket.count, weights, ranks),
    ]


def sums_whole(job: Job) -> bool:
    """Whether ZeRO-1 and 2 sum whole buckets on all ranks, each of which keeps its share."""
    return job.recipe.framework == "deepspeed"


def sums_every_microbatch(job: Job) -> bool:
    """Whether ZeRO-2 reduces the gradients of each microbatch by themselves."""
    return job.layout.zero == 2 and job.recipe.framework in EVERY_MICROBATCH


def buckets(job: Job, parameters: int, ranks: int) -> tuple[Bucket, ...]:
    """How the framework cuts a rank's parameters; the parts add up to them.

    Real buckets end where a tensor does, so that their number is a little smaller.
    """
    first, each = _capacity(job, ranks)
    head = min(first, parameters)
    count, rest = divmod(parameters - head, each) if each else (0, parameters - head)
    found = (Bucket(1, head), Bucket(count, each), Bucket(1, rest))
    return tuple(bucket for bucket in found if bucket.count and bucket.parameters)


def _capacity(job: Job, ranks: int) -> tuple[int, int]:
    """Parameters in the first bucket and in each other one; 0: no bound."""
    match job.recipe.framework:
        case "ddp" | "huggingface" | "fsdp2":
            size = job.recipe.gradient_bytes
            stated = job.layout.bucket_bytes
            return (stated or DDP_FIRST_BYTES) // size, (stated or DDP_BYTES) // size
        case "deepspeed":
            return 0, DEEPSPEED_BUCKET
        case "megatron" if "dp" in job.layout.overlap:
            return 0, max(MEGATRON_BUCKET, MEGATRON_BUCKET_PER_RANK * ranks)
    return 0, 0
