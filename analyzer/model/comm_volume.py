"""Communication volume of data parallelism: DDP, ZeRO and FSDP."""

from __future__ import annotations

from dataclasses import dataclass, replace

from stepsplit.analyzer.model.comm_ops import (
    CommOp,
    CommSite,
    Neighbors,
    all_gather,
    all_reduce,
    broadcast,
    context_messages,
    copy_messages,
    embedding_messages,
    expert_messages,
    neighbors,
    norm_messages,
    pipeline_messages,
    reduce_scatter,
    tensor_messages,
)
from stepsplit.analyzer.model.config import Chunk, JobConfig, StageConfig, stages_of
from stepsplit.analyzer.model.formulas import Formula
from stepsplit.analyzer.model.parameters import (
    LayerParameters,
    StageParameters,
    norm_parameters,
    stage_parameters,
)

# All communication of one step, for one rank of each pipeline stage.


def messages_of(job: JobConfig) -> tuple[CommOp, ...]:
    """Lists the communication ops of one rank of every stage in a step, stage by stage.

    A recv is the other end of a neighbor's send: its wire_bytes are 0, so that wire_bytes sum to
    the traffic, and only one end of each pair is timed.
    """
    alike: dict[tuple[tuple[Chunk, ...], Neighbors], tuple[CommOp, ...]] = {}
    found: list[CommOp] = []
    for stage, held in zip(stages_of(job), stage_parameters(job), strict=True):
        shape = (stage.chunks, neighbors(job, stage.index))
        if shape not in alike:
            alike[shape] = _of_stage(job, stage, held)
        found += (message.on(stage.index) for message in alike[shape])
    return tuple(found)


def _of_stage(job: JobConfig, stage: StageConfig, held: StageParameters) -> tuple[CommOp, ...]:
    found = (
        *tensor_messages(job, stage, held),
        *context_messages(job, stage),
        *expert_messages(job, stage),
        *pipeline_messages(job, stage),
        *sharded_messages(job, held),
        *data_messages(job, held),
        *embedding_messages(job, stage),
        *copy_messages(job, stage, held),
        *norm_messages(job, stage.index),
    )
    return tuple(message for message in found if message.count and message.input_bytes)


# ZeRO-3 and FSDP: all_gather of weights before each use, reduce_scatter of gradients after.

FSDP_MESSAGES = Formula(
    "comm.fsdp",
    "per unit and microbatch: all_gather of w P_u/N forward and again backward, reduce_scatter of"
    " g P_u; units kept gathered after their forward pass are not gathered again",
    "Rajbhandari et al., ZeRO, arXiv:1910.02054, section 7.2.2; Zhao et al., PyTorch FSDP,"
    " arXiv:2304.11277; pytorch/torchtitan, fsdp_reshard_after_forward",
)

HSDP = Formula(
    "comm.hsdp",
    "in addition to FSDP's, an all_reduce of g P_u/N over the replicas after each reduce_scatter",
    "Zhao et al., PyTorch FSDP, arXiv:2304.11277, section 3.2.2",
)


@dataclass(frozen=True, slots=True)
class Unit:
    """count FSDP units (modules gathered as one), each with so many parameters on this rank.

    last: whether it is used last in the forward pass and first in the backward pass.
    """

    count: int
    parameters: int
    last: bool = False


@dataclass(frozen=True, slots=True)
class UnitCounts:
    """Calls per step and unit: all_gathers forward and backward, and gradient reductions."""

    forward: int
    backward: int
    gradients: int


def sharded_messages(job: JobConfig, held: StageParameters) -> tuple[CommOp, ...]:
    """Lists the calls of one rank of a stage with zero = 3; experts have their own groups."""
    layout = job.parallel
    if layout.zero != 3:
        return ()
    together = layout.ep == 1 and layout.expert_tp == layout.tp
    dense, experts = units(held, together, layout.root_unit)
    if job.training.framework == "deepspeed":
        dense = _ends_apart(job, dense)
    return (
        *_shard_messages(job, held.stage, dense, "dp_shard", layout.shard_size),
        *_shard_messages(job, held.stage, experts, "expert_dp", layout.expert_shards),
    )


def units(
    held: StageParameters, together: bool, root: bool = False
) -> tuple[tuple[Unit, ...], tuple[Unit, ...]]:
    """Lists the FSDP units of dense parameters and those of experts.

    together: whether a layer's unit includes its experts. root: whether all parameters outside of
    the layers are one unit. A tied embedding is also the head, and so the last unit.
    """
    routed = held.expert_layer or LayerParameters(0, 0, 0, 0, 0, 0)
    mixture = routed.total if together else routed.dense
    ends = [Unit(1, held.embedding), Unit(1, held.head + held.final_norm, last=True)]
    if held.embedding and held.final_norm and not held.head:
        root = True
    if root:
        ends = [Unit(1, held.embedding + held.head + held.final_norm, last=True)]
    layers = [Unit(held.dense_layers, held.dense_layer.dense), Unit(held.expert_layers, mixture)]
    experts = () if together else (Unit(held.expert_layers, routed.experts),)
    return tuple(_present([*layers, *ends])), tuple(_present([*experts]))


def _ends_apart(job: JobConfig, found: tuple[Unit, ...]) -> tuple[Unit, ...]:
    """Splits off positions and the final norm, which DeepSpeed gathers as separate modules.

    A layer is one unit if it was made a leaf (deepspeed.utils.set_z3_leaf_modules).
    """
    positions, norm = job.model.positions * job.model.hidden, norm_parameters(job.model)
    apart: list[Unit] = []
    for unit in found:
        own = (norm if unit.last else positions) if unit.count == 1 else 0
        apart += [replace(unit, parameters=unit.parameters - own), Unit(1, own)]
    return tuple(_present(apart))


def _present(found: list[Unit]) -> list[Unit]:
    return [unit for unit in found if unit.count and unit.parameters]


def _shard_messages(
    job: JobConfig, stage: int, found: tuple[Unit, ...], axis: str, ranks: int
) -> tuple[CommOp, ...]:
    if job.training.framework != "deepspeed":
        return tuple(m for unit in found for m in _of_unit(job, stage, unit, axis, ranks))
    gathered = [
        m
        for unit in found
        for m in _of_unit(job, stage, unit, axis, ranks)
        if m.op != "reduce_scatter"
    ]
    return (*gathered, *_in_buckets(job, stage, found, axis, ranks))


def _in_buckets(
    job: JobConfig, stage: int, found: tuple[Unit, ...], axis: str, ranks: int
) -> list[CommOp]:
    """Lists DeepSpeed's bucketed gradient reductions over all units, each padded to the ranks."""
    if ranks == 1:
        return []
    place = CommSite("fsdp", axis, stage, "grad_sync", (FSDP_MESSAGES,))
    size = job.training.gradient_bytes
    padded = sum(unit.count * -(-unit.parameters // ranks) * ranks for unit in found)
    return [
        reduce_scatter(place, each.count * job.microbatches, each.parameters * size, ranks)
        for each in buckets(job, padded, ranks)
    ]


def _of_unit(job: JobConfig, stage: int, unit: Unit, axis: str, ranks: int) -> tuple[CommOp, ...]:
    name = "hsdp" if job.parallel.dp_replicate > 1 else "fsdp"
    times, own, found = times_of(job, unit), -(-unit.parameters // ranks), []
    if ranks > 1:
        size = own * job.training.weight_bytes
        for phase, each in (("forward", times.forward), ("backward", times.backward)):
            place = CommSite(name, axis, stage, phase, (FSDP_MESSAGES,))
            found.append(all_gather(place, unit.count * each, size, ranks))
    count, size = unit.count * times.gradients, own * job.training.gradient_bytes
    if ranks > 1:
        place = CommSite(name, axis, stage, "grad_sync", (FSDP_MESSAGES,))
        found.append(reduce_scatter(place, count, size * ranks, ranks))
    if job.parallel.dp_replicate > 1:
        place = CommSite(name, "dp_replicate", stage, "grad_sync", (HSDP,))
        found.append(all_reduce(place, count, size, job.parallel.dp_replicate))
    return tuple(found)


def times_of(job: JobConfig, unit: Unit) -> UnitCounts:
    """Counts a unit's calls per step.

    With a pipeline, gradients are reduced once, and weights stay gathered between two backward
    passes unless a forward pass frees them, which then saves its own gather: m + 1 gathers for any
    schedule.
    """
    m, policy = job.microbatches, _reshards(job)
    if job.parallel.pp > 1:
        return UnitCounts(1, 0, 1) if stays_gathered(job) else UnitCounts(m, 1, 1)
    freed = policy == "always" or (policy == "default" and not unit.last)
    return UnitCounts(m, m if freed else 0, 1 if job.parallel.sum_once else m)


def stays_gathered(job: JobConfig) -> bool:
    """Whether a pipeline gathers its sharded weights once per step and keeps them."""
    return job.parallel.zero == 3 and job.parallel.pp > 1 and _reshards(job) != "always"


def _reshards(job: JobConfig) -> str:
    """The reshard policy; the ZeRO paper and DeepSpeed free each unit after its forward pass."""
    if job.training.framework in ("zero-paper", "deepspeed"):
        return "always"
    return job.parallel.reshard_after_forward


# Data parallelism with replicated weights: DDP, ZeRO-1 and ZeRO-2.

DDP = Formula(
    "comm.ddp",
    "all_reduces of the gradients once per step, g P bytes in ceil(g P/bucket) calls",
    "Li et al., PyTorch Distributed, arXiv:2006.15704, section 3.2",
)

ZERO = Formula(
    "comm.zero",
    "reduce_scatters of g P bytes of gradients, all_gathers of w P/N bytes of weights, once"
    " per step (ZeRO-2 except Megatron-LM's: gradients every microbatch)",
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
"""Parameters per bucket if gradient reduction overlaps the backward pass; else one bucket.
NVIDIA/Megatron-LM, core/distributed/distributed_data_parallel.py."""

DEEPSPEED_BUCKET = 500_000_000
"""Elements per bucket: reduce_bucket_size, allgather_bucket_size of DeepSpeed's config-json."""

DDP_FIRST_BYTES, DDP_BYTES = 1 * MIB, 25 * MIB
"""PyTorch's kDefaultFirstBucketBytes and bucket_cap_mb."""

EVERY_MICROBATCH = ("deepspeed", "zero-paper")
"""Frameworks whose ZeRO-2 reduces gradients every microbatch instead of accumulating them."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """count buckets with so many parameters each."""

    count: int
    parameters: int


def data_messages(job: JobConfig, held: StageParameters) -> tuple[CommOp, ...]:
    """Lists one rank's calls for gradients and weights; empty with ZeRO-3 (sharded_messages)."""
    layout = job.parallel
    if layout.zero == 3:
        return ()
    return (
        *_replica_messages(job, held.stage, held.dense, "dp", layout.gradient_ranks),
        *_replica_messages(job, held.stage, held.experts, "expert_dp", layout.expert_dp),
    )


def _replica_messages(
    job: JobConfig, stage: int, parameters: int, axis: str, ranks: int
) -> tuple[CommOp, ...]:
    if ranks == 1 or parameters == 0:
        return ()
    found = []
    for bucket in buckets(job, parameters, ranks):
        found += _summed(job, stage, bucket, axis, ranks)
    if hands_out(job):
        share = -(-parameters * job.training.weight_bytes // ranks)
        place = CommSite("zero-1", axis, stage, "optimizer", (DDP, REDUNDANCY))
        found.append(broadcast(place, ranks, share))
    return tuple(found)


def hands_out(job: JobConfig) -> bool:
    """Whether DDP all_reduces gradients and each rank then broadcasts its updated weights."""
    return job.parallel.zero == 1 and job.training.framework == "ddp"


def _summed(job: JobConfig, stage: int, bucket: Bucket, axis: str, ranks: int) -> list[CommOp]:
    zero, size = job.parallel.zero, bucket.parameters * job.training.gradient_bytes
    name = f"zero-{zero}" if zero else "ddp"
    if zero == 0 or hands_out(job):
        place = CommSite(name, axis, stage, "grad_sync", (DDP,))
        return [all_reduce(place, bucket.count, size, ranks)]
    times = bucket.count * (job.microbatches if sums_every_microbatch(job) else 1)
    summed, formula = (all_reduce, ALL_REDUCED) if sums_whole(job) else (reduce_scatter, ZERO)
    weights = -(-bucket.parameters * job.training.weight_bytes // ranks)
    return [
        summed(CommSite(name, axis, stage, "grad_sync", (formula,)), times, size, ranks),
        all_gather(
            CommSite(name, axis, stage, "optimizer", (formula,)), bucket.count, weights, ranks
        ),
    ]


def sums_whole(job: JobConfig) -> bool:
    """Whether ZeRO-1 and 2 all_reduce whole buckets, of which each rank keeps its share."""
    return job.training.framework == "deepspeed"


def sums_every_microbatch(job: JobConfig) -> bool:
    """Whether ZeRO-2 reduces the gradients of each microbatch separately."""
    return job.parallel.zero == 2 and job.training.framework in EVERY_MICROBATCH


def buckets(job: JobConfig, parameters: int, ranks: int) -> tuple[Bucket, ...]:
    """Splits a rank's parameters into the framework's buckets.

    Real buckets end at tensor boundaries, so there are slightly fewer of them.
    """
    first, each = _capacity(job, ranks)
    head = min(first, parameters)
    count, rest = divmod(parameters - head, each) if each else (0, parameters - head)
    found = (Bucket(1, head), Bucket(count, each), Bucket(1, rest))
    return tuple(bucket for bucket in found if bucket.count and bucket.parameters)


def _capacity(job: JobConfig, ranks: int) -> tuple[int, int]:
    """Parameters of the first bucket and of each other one; 0 for no limit."""
    match job.training.framework:
        case "ddp" | "huggingface" | "fsdp2":
            size = job.training.gradient_bytes
            stated = job.parallel.bucket_bytes
            return (stated or DDP_FIRST_BYTES) // size, (stated or DDP_BYTES) // size
        case "deepspeed":
            return 0, DEEPSPEED_BUCKET
        case "megatron" if "dp" in job.parallel.overlap:
            return 0, max(MEGATRON_BUCKET, MEGATRON_BUCKET_PER_RANK * ranks)
    return 0, 0
