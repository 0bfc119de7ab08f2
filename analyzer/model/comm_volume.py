"""Communication volume of data parallelism: DDP, ZeRO and FSDP."""

from __future__ import annotations

from dataclasses import dataclass, replace

from stepsplit.analyzer.model.comm_ops import (
    CommOp,
    CommSite,
    Neighbors,
    count_neighbors,
    list_cp_ops,
    list_dualpipe_ops,
    list_ep_ops,
    list_grad_norm_ops,
    list_pp_ops,
    list_tied_embedding_ops,
    list_tp_ops,
    make_all_gather,
    make_all_reduce,
    make_broadcast,
    make_reduce_scatter,
)
from stepsplit.analyzer.model.config import JobConfig
from stepsplit.analyzer.model.formulas import Formula
from stepsplit.analyzer.model.parameters import (
    LayerParameters,
    StageParameters,
    count_norm_parameters,
    count_stage_parameters,
    select_trained,
)
from stepsplit.analyzer.model.rank_layout import Chunk, list_stages

# All communication of one step, for one rank of each pipeline stage.


def list_comm_ops(job: JobConfig) -> tuple[CommOp, ...]:
    """Lists the communication ops of one rank of every stage in a step, stage by stage.

    A recv is the other end of a neighbor's send: its wire_bytes are 0, so that wire_bytes sum to
    the traffic, and only one end of each pair is timed.
    """
    return tuple(
        op.move_to_stage(stage) for stage, ops in enumerate(list_shared_ops(job)) for op in ops
    )


def list_shared_ops(job: JobConfig) -> tuple[tuple[CommOp, ...], ...]:
    """The ops of each stage; equal stages have the same tuple, with the stage of the first."""
    ops_by_shape: dict[tuple[tuple[Chunk, ...], Neighbors], tuple[CommOp, ...]] = {}
    stages: list[tuple[CommOp, ...]] = []
    for stage, params in zip(list_stages(job), count_stage_parameters(job), strict=True):
        shape = (stage.chunks, count_neighbors(job, stage.index))
        if shape not in ops_by_shape:
            ops = (
                *list_tp_ops(job, stage, params),
                *list_cp_ops(job, stage),
                *list_ep_ops(job, stage),
                *list_pp_ops(job, stage),
                *list_fsdp_ops(job, params),
                *list_dp_ops(job, params),
                *list_tied_embedding_ops(job, stage),
                *list_dualpipe_ops(job, stage, params),
                *list_grad_norm_ops(job, stage.index),
            )
            ops_by_shape[shape] = tuple(
                message for message in ops if message.count and message.input_bytes
            )
        stages.append(ops_by_shape[shape])
    return tuple(stages)


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
class FsdpUnit:
    """count FSDP units (modules gathered as one), each with so many parameters on this rank, of
    which trained have gradients.

    first: whether it is the embedding, with the positions. last: whether it is used last in the
    forward pass and first in the backward pass.
    """

    count: int
    parameters: int
    trained: int
    first: bool = False
    last: bool = False


@dataclass(frozen=True, slots=True)
class UnitCounts:
    """Calls per step and unit: all_gathers forward and backward, and gradient reductions."""

    forward: int
    backward: int
    gradients: int


def list_fsdp_ops(job: JobConfig, params: StageParameters) -> tuple[CommOp, ...]:
    """Lists the calls of one rank of a stage with FSDP; experts have their own groups."""
    layout = job.parallel
    if not job.is_fsdp:
        return ()
    experts_in_layer = layout.ep == 1 and layout.expert_tp == layout.tp
    trained = select_trained(job, params)
    dense, experts = list_fsdp_units(params, trained, experts_in_layer, layout.root_unit)
    if job.profile.messages.gathers_modules:
        # Splits off positions and the final norm, which DeepSpeed gathers as separate modules. A
        # layer is one unit if it was made a leaf (deepspeed.utils.set_z3_leaf_modules).
        positions, norm = job.model.positions * job.model.hidden, count_norm_parameters(job.model)
        split_units: list[FsdpUnit] = []
        for unit in dense:
            own = norm if unit.last else positions if unit.first else 0
            own_trained = own if unit.trained else 0
            rest = replace(
                unit, parameters=unit.parameters - own, trained=unit.trained - own_trained
            )
            split_units += [rest, FsdpUnit(1, own, own_trained)]
        dense = tuple(_drop_empty_units(split_units))
    return (
        *_list_shard_ops(job, params.stage, dense, layout.shard_axis, layout.shard_size),
        *_list_shard_ops(job, params.stage, experts, "expert_dp", layout.expert_shards),
    )


def list_fsdp_units(
    params: StageParameters, trained: StageParameters, experts_in_layer: bool, root: bool = False
) -> tuple[tuple[FsdpUnit, ...], tuple[FsdpUnit, ...]]:
    """Lists the FSDP units of dense parameters and those of experts; trained are those of params
    that have gradients, or adapters beside them.

    together: whether a layer's unit includes its experts. root: whether all parameters outside of
    the layers are one unit. A tied embedding is also the head, and so the last unit.
    """
    dense, expert = params.dense_layer, params.expert_layer or NO_LAYER
    own, own_expert = trained.dense_layer, trained.expert_layer or NO_LAYER
    frozen = trained is not params
    mixture, own_mixture = expert.dense, own_expert.dense
    if experts_in_layer:
        mixture, own_mixture = expert.total, own_expert.total
    last, own_last = params.head + params.final_norm, trained.head + trained.final_norm
    ends = [
        FsdpUnit(1, params.embedding, trained.embedding, first=True),
        FsdpUnit(1, last, own_last, last=True),
    ]
    if has_root_unit(params, root):
        last, own_last = last + params.embedding, own_last + trained.embedding
        ends = [FsdpUnit(1, last, own_last, last=True)]
    layers = [
        FsdpUnit(params.dense_layers, dense.dense + frozen * own.dense, own.dense),
        FsdpUnit(params.expert_layers, mixture + frozen * own_mixture, own_mixture),
    ]
    routed = FsdpUnit(params.expert_layers, expert.experts, own_expert.experts)
    experts = () if experts_in_layer else (routed,)
    return tuple(_drop_empty_units([*layers, *ends])), tuple(_drop_empty_units([*experts]))


NO_LAYER = LayerParameters(0, 0, 0, 0, 0, 0)


def has_root_unit(params: StageParameters, root: bool) -> bool:
    """Whether all parameters outside of the layers are one FSDP unit: as the job states by root, or
    because the head is the embedding."""
    return root or bool(params.embedding and params.final_norm and not params.head)


def _drop_empty_units(fsdp_units: list[FsdpUnit]) -> list[FsdpUnit]:
    return [unit for unit in fsdp_units if unit.count and unit.parameters]


def _list_shard_ops(
    job: JobConfig, stage: int, fsdp_units: tuple[FsdpUnit, ...], axis: str, ranks: int
) -> tuple[CommOp, ...]:
    if not job.profile.messages.buckets_shards:
        return tuple(
            m for unit in fsdp_units for m in _list_unit_ops(job, stage, unit, axis, ranks)
        )
    gathered = [
        m
        for unit in fsdp_units
        for m in _list_unit_ops(job, stage, unit, axis, ranks)
        if m.op != "reduce_scatter"
    ]
    return (*gathered, *_list_bucketed_ops(job, stage, fsdp_units, axis, ranks))


def _list_bucketed_ops(
    job: JobConfig, stage: int, fsdp_units: tuple[FsdpUnit, ...], axis: str, ranks: int
) -> list[CommOp]:
    """Lists DeepSpeed's bucketed gradient reductions over all units, each padded to the ranks."""
    if ranks == 1:
        return []
    site = CommSite("fsdp", axis, stage, "grad_sync", (FSDP_MESSAGES,))
    size = job.training.gradient_bytes
    padded = sum(unit.count * -(-unit.trained // ranks) * ranks for unit in fsdp_units)
    return [
        make_reduce_scatter(site, each.count * job.microbatches, each.parameters * size, ranks)
        for each in split_buckets(job, padded, ranks)
    ]


def _list_unit_ops(
    job: JobConfig, stage: int, unit: FsdpUnit, axis: str, ranks: int
) -> tuple[CommOp, ...]:
    replicas = job.parallel.shard_replicas
    name = "hsdp" if replicas > 1 else "fsdp"
    calls, own, ops = count_unit_calls(job, unit), -(-unit.parameters // ranks), []
    if ranks > 1:
        size = own * job.training.weight_bytes
        for phase, each in (("forward", calls.forward), ("backward", calls.backward)):
            site = CommSite(name, axis, stage, phase, (FSDP_MESSAGES,))
            ops.append(make_all_gather(site, unit.count * each, size, ranks))
    count = unit.count * calls.gradients
    size = -(-unit.trained // ranks) * job.training.gradient_bytes
    if ranks > 1:
        site = CommSite(name, axis, stage, "grad_sync", (FSDP_MESSAGES,))
        ops.append(make_reduce_scatter(site, count, size * ranks, ranks))
    if replicas > 1:
        site = CommSite(name, "dp_replicate", stage, "grad_sync", (HSDP,))
        ops.append(make_all_reduce(site, count, size, replicas))
    return tuple(ops)


def count_unit_calls(job: JobConfig, unit: FsdpUnit) -> UnitCounts:
    """Counts a unit's calls per step.

    With a pipeline, gradients are reduced once, and weights stay gathered between two backward
    passes unless a forward pass frees them, which then saves its own gather: m + 1 gathers for any
    schedule.
    """
    m, policy = job.microbatches, find_reshard_policy(job)
    if job.parallel.pp > 1:
        return UnitCounts(1, 0, 1) if is_kept_gathered(job) else UnitCounts(m, 1, 1)
    freed = policy == "always" or (policy == "default" and not unit.last)
    return UnitCounts(m, m if freed else 0, 1 if job.parallel.sum_once else m)


def is_kept_gathered(job: JobConfig) -> bool:
    """Whether a pipeline gathers its sharded weights once per step and keeps them."""
    return job.is_fsdp and job.parallel.pp > 1 and find_reshard_policy(job) != "always"


def find_reshard_policy(job: JobConfig) -> str:
    """The reshard policy; the ZeRO paper and DeepSpeed free each unit after its forward pass,
    FSDP2 with stage 2 none."""
    if job.profile.messages.frees_units:
        return "always"
    if job.parallel.zero == 2:
        return "never"
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

INSTANCES = Formula(
    "comm.zero_instances",
    "in addition to ZeRO's, all_reduces of g P/N bytes over the replicas of the sharded states",
    "NVIDIA/Megatron-LM, core/distributed/param_and_grad_buffer.py;"
    " --num-distributed-optimizer-instances",
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


@dataclass(frozen=True, slots=True)
class GradientBucket:
    """count buckets with so many parameters each."""

    count: int
    parameters: int


def list_dp_ops(job: JobConfig, params: StageParameters) -> tuple[CommOp, ...]:
    """Lists one rank's calls for gradients and weights; empty with FSDP (list_fsdp_ops)."""
    layout, params = job.parallel, select_trained(job, params)
    if job.is_fsdp:
        return ()
    is_broadcast = has_weight_broadcast(job)
    axis = "dp" if is_broadcast else layout.shard_axis
    replicas = 1 if is_broadcast else layout.shard_replicas
    ranks, experts = layout.gradient_ranks // replicas, max(1, layout.expert_dp // replicas)
    reduced = (
        *_list_replica_ops(job, params.stage, params.dense, axis, ranks),
        *_list_replica_ops(job, params.stage, params.experts, "expert_dp", experts),
    )
    if not is_broadcast:
        return reduced
    return (
        *reduced,
        *_list_broadcasts(job, params.stage, params.dense, layout.shard_axis, layout.shard_size),
        *_list_broadcasts(job, params.stage, params.experts, "expert_dp", layout.expert_shards),
    )


def _list_replica_ops(
    job: JobConfig, stage: int, parameters: int, axis: str, ranks: int
) -> tuple[CommOp, ...]:
    if ranks == 1 or parameters == 0:
        return ()
    buckets = split_buckets(job, parameters, ranks)
    return tuple(
        op for bucket in buckets for op in _list_gradient_ops(job, stage, bucket, axis, ranks)
    )


def _list_broadcasts(
    job: JobConfig, stage: int, parameters: int, axis: str, ranks: int
) -> tuple[CommOp, ...]:
    """Each rank's updated share of the weights goes to the others that shard them."""
    if ranks == 1 or parameters == 0:
        return ()
    share = -(-parameters * job.training.weight_bytes // ranks)
    site = CommSite("zero-1", axis, stage, "optimizer", (DDP, REDUNDANCY))
    return (make_broadcast(site, ranks, share),)


def has_weight_broadcast(job: JobConfig) -> bool:
    """Whether DDP all_reduces gradients and each rank then broadcasts its updated weights."""
    return job.parallel.zero == 1 and job.profile.messages.broadcasts


def _list_gradient_ops(
    job: JobConfig, stage: int, bucket: GradientBucket, axis: str, ranks: int
) -> list[CommOp]:
    zero, size = job.parallel.zero, bucket.parameters * job.training.gradient_bytes
    name = f"zero-{zero}" if zero else "ddp"
    if zero == 0 or has_weight_broadcast(job):
        site = CommSite(name, axis, stage, "grad_sync", (DDP,))
        return [make_all_reduce(site, bucket.count, size, ranks)]
    times = bucket.count * (job.microbatches if is_reduced_every_microbatch(job) else 1)
    make_reduction, formula = (
        (make_all_reduce, ALL_REDUCED)
        if job.profile.messages.all_reduces
        else (make_reduce_scatter, ZERO)
    )
    weights = -(-bucket.parameters * job.training.weight_bytes // ranks)
    ops = [
        make_reduction(CommSite(name, axis, stage, "grad_sync", (formula,)), times, size, ranks),
        make_all_gather(
            CommSite(name, axis, stage, "optimizer", (formula,)), bucket.count, weights, ranks
        ),
    ]
    replicas = job.parallel.shard_replicas
    if replicas > 1:
        site = CommSite(name, "dp_replicate", stage, "grad_sync", (formula, INSTANCES))
        ops.append(make_all_reduce(site, times, -(-size // ranks), replicas))
    return ops


def is_reduced_every_microbatch(job: JobConfig) -> bool:
    """Whether ZeRO-2 reduces the gradients of each microbatch separately."""
    return job.parallel.zero == 2 and job.profile.messages.every_microbatch


def split_buckets(job: JobConfig, parameters: int, ranks: int) -> tuple[GradientBucket, ...]:
    """Splits a rank's parameters into the framework's buckets.

    Real buckets end at tensor boundaries, so there are slightly fewer of them.
    """
    buckets, size = job.profile.buckets, job.training.gradient_bytes
    first = each = 0
    if buckets.each_bytes:
        stated = job.parallel.bucket_bytes
        first, each = (
            (stated or buckets.first_bytes) // size,
            (stated or buckets.each_bytes) // size,
        )
    elif not buckets.overlapped or "dp" in job.parallel.overlap:
        each = max(buckets.parameters, buckets.parameters_per_rank * ranks)
    head = min(first, parameters)
    # Without a capacity all parameters are one bucket.
    count, rest = divmod(parameters - head, each) if each else (0, parameters - head)
    found = (GradientBucket(1, head), GradientBucket(count, each), GradientBucket(1, rest))
    return tuple(bucket for bucket in found if bucket.count and bucket.parameters)
