"""What ZeRO-3 and FSDP send: weights before each use, gradients after."""

from __future__ import annotations

from dataclasses import dataclass, replace

from stepsplit.analyzer.model.comm.calls import Place, all_gather, all_reduce, reduce_scatter
from stepsplit.analyzer.model.comm.data import buckets
from stepsplit.analyzer.model.formula import Formula
from stepsplit.analyzer.model.prediction import Message
from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.work.layers import LayerParameters, norm_parameters
from stepsplit.analyzer.model.work.parameters import StageParameters

FSDP = Formula(
    "comm.fsdp",
    "a unit and microbatch: all_gather of w P_u/N forward and again backward, reduce_scatter of"
    " g P_u; what stays gathered after its forward is not gathered again",
    "Rajbhandari et al., ZeRO, arXiv:1910.02054, section 7.2.2; Zhao et al., PyTorch FSDP,"
    " arXiv:2304.11277; pytorch/torchtitan, fsdp_reshard_after_forward",
)
HSDP = Formula(
    "comm.hsdp",
    "beside FSDP's, an all_reduce of g P_u/N over the replicas after each reduce_scatter",
    "Zhao et al., PyTorch FSDP, arXiv:2304.11277, section 3.2.2",
)


@dataclass(frozen=True, slots=True)
class Unit:
    """count modules that are gathered as one, each of so many parameters on this rank.

    last: it is used last in the forward pass and first in the backward pass.
    """

    count: int
    parameters: int
    last: bool = False


@dataclass(frozen=True, slots=True)
class Times:
    """How often in a step a unit is gathered forward and backward, and its gradients summed."""

    forward: int
    backward: int
    gradients: int


def sharded_messages(job: Job, held: StageParameters) -> tuple[Message, ...]:
    """The calls of one rank of a stage under zero = 3; experts have groups of their own."""
    layout = job.layout
    if layout.zero != 3:
        return ()
    together = layout.ep == 1 and layout.expert_tp == layout.tp
    dense, experts = units(held, together, layout.root_unit)
    if job.recipe.framework == "deepspeed":
        dense = _ends_apart(job, dense)
    return (
        *_group(job, held.stage, dense, "dp_shard", layout.shard_size),
        *_group(job, held.stage, experts, "expert_dp", layout.expert_shards),
    )


def units(
    held: StageParameters, together: bool, root: bool = False
) -> tuple[tuple[Unit, ...], tuple[Unit, ...]]:
    """The units of dense parameters and those of experts; together: a layer holds its experts,
    root: all that is in no layer is one unit.

    A tied embedding is the head as well, and so the last unit.
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


def _ends_apart(job: Job, found: tuple[Unit, ...]) -> tuple[Unit, ...]:
    """DeepSpeed gathers positions and the final norm by themselves, as modules of their own.

    A layer is one unit where it was made a leaf (deepspeed.utils.set_z3_leaf_modules).
    """
    positions, norm = job.model.positions * job.model.hidden, norm_parameters(job.model)
    apart: list[Unit] = []
    for unit in found:
        own = (norm if unit.last else positions) if unit.count == 1 else 0
        apart += [replace(unit, parameters=unit.parameters - own), Unit(1, own)]
    return tuple(_present(apart))


def _present(found: list[Unit]) -> list[Unit]:
    return [unit for unit in found if unit.count and unit.parameters]


def _group(
    job: Job, stage: int, found: tuple[Unit, ...], axis: str, ranks: int
) -> tuple[Message, ...]:
    if job.recipe.framework != "deepspeed":
        return tuple(m for unit in found for m in _of_unit(job, stage, unit, axis, ranks))
    gathered = [
        m
        for unit in found
        for m in _of_unit(job, stage, unit, axis, ranks)
        if m.op != "reduce_scatter"
    ]
    return (*gathered, *_in_buckets(job, stage, found, axis, ranks))


def _in_buckets(
    job: Job, stage: int, found: tuple[Unit, ...], axis: str, ranks: int
) -> list[Message]:
    """DeepSpeed sums the gradients of all units in buckets, each unit in equal shares."""
    if ranks == 1:
        return []
    place, size = Place("fsdp", axis, stage, "grad_sync"), job.recipe.gradient_bytes
    padded = sum(unit.count * -(-unit.parameters // ranks) * ranks for unit in found)
    return [
        reduce_scatter(place, each.count * job.microbatches, each.parameters * size, ranks)
        for each in buckets(job, padded, ranks)
    ]


def _of_unit(job: Job, stage: int, unit: Unit, axis: str, ranks: int) -> tuple[Message, ...]:
    name = "hsdp" if job.layout.dp_replicate > 1 else "fsdp"
    times, own, found = times_of(job, unit), -(-unit.parameters // ranks), []
    if ranks > 1:
        size = own * job.recipe.weight_bytes
        for phase, each in (("forward", times.forward), ("backward", times.backward)):
            found.append(
                all_gather(Place(name, axis, stage, phase), unit.count * each, size, ranks)
            )
    count, size = unit.count * times.gradients, own * job.recipe.gradient_bytes
    if ranks > 1:
        place = Place(name, axis, stage, "grad_sync")
        found.append(reduce_scatter(place, count, size * ranks, ranks))
    if job.layout.dp_replicate > 1:
        place = Place(name, "dp_replicate", stage, "grad_sync")
        found.append(all_reduce(place, count, size, job.layout.dp_replicate))
    return tuple(found)


def times_of(job: Job, unit: Unit) -> Times:
    """In a pipeline gradients are summed once, and weights stay between two backward passes.

    A microbatch's backward then finds what the one before gathered, unless a forward pass freed
    it; that one was spared its own gather. So m + 1 gathers remain, whatever the schedule.
    """
    m, policy = job.microbatches, _reshards(job)
    if job.layout.pp > 1:
        return Times(1, 0, 1) if stays_gathered(job) else Times(m, 1, 1)
    freed = policy == "always" or (policy == "default" and not unit.last)
    return Times(m, m if freed else 0, 1 if job.layout.sum_once else m)


def stays_gathered(job: Job) -> bool:
    """Whether a pipeline gathers its sharded weights once a step, and keeps them through it."""
    return job.layout.zero == 3 and job.layout.pp > 1 and _reshards(job) != "always"


def _reshards(job: Job) -> str:
    """ZeRO-3 as published and DeepSpeed's free every unit after its forward."""
    if job.recipe.framework in ("zero-paper", "deepspeed"):
        return "always"
    return job.layout.reshard_after_forward
