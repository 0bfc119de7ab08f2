"""Offloading to host memory: what leaves the GPU, copies over the link, the update on the host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from stepsplit.analyzer.model.comm_ops import count_rank_microbatches
from stepsplit.analyzer.model.comm_volume import find_reshard_policy, is_kept_gathered
from stepsplit.analyzer.model.config import HardwareConfig, JobConfig, TrainingConfig
from stepsplit.analyzer.model.formulas import Formula
from stepsplit.analyzer.model.memory_states import (
    MASTER_BYTES,
    States,
    compute_parameter_bytes,
    count_update_traffic_bytes,
    count_updated_bytes,
    uses_foreach,
)
from stepsplit.analyzer.model.parameters import (
    StageParameters,
    count_shards,
    count_updated_parameters,
)
from stepsplit.analyzer.model.profile import load_framework

# Memory that offloading moves from the GPU to the host.

OFFLOAD = Formula(
    "memory.offload",
    "optimizer leaves the GPU (DeepSpeed: its gradients too; Megatron-LM: without the fp32"
    " weights), parameters (FSDP2: and gradients) and activations likewise; host of one node"
    " P max(4g, 16) 1.5 (ZeRO-2), P 18 (g/N) 1.5 (ZeRO-3)",
    "DeepSpeed docs, memory.rst; Ren et al., ZeRO-Offload, arXiv:2101.06840; Megatron-Bridge,"
    " guide to CPU offloading",
)

SLACK = 1.5
"""DeepSpeed's own factor for additional host memory."""


@dataclass(frozen=True, slots=True)
class Offloaded:
    """States that stay on the GPU, and the bytes that one rank moves to the host (or its NVMe)."""

    states: States
    offloaded_bytes: int


def apply_offload(states: States, training: TrainingConfig) -> Offloaded:
    """Remove the offloaded states ("optimizer", "parameters") of one rank from the GPU."""
    remaining, behavior = states, load_framework(training.framework).offload
    if "optimizer" in training.offload:
        states_bytes, share = compute_parameter_bytes(training).optimizer, 0.0
        if behavior.keeps_master and training.master_weights and states_bytes > MASTER_BYTES:
            share = MASTER_BYTES / states_bytes
        kept_bytes = round(states.optimizer_bytes * share)
        remaining = replace(remaining, optimizer_bytes=kept_bytes)
    if "parameters" in training.offload:
        remaining = replace(remaining, weights_bytes=0, frozen_bytes=0)
    if behavior.gradients in training.offload:
        remaining = replace(remaining, gradients_bytes=0)
    if remaining != states:
        remaining = replace(remaining, formulas=(*states.formulas, OFFLOAD))
    return Offloaded(remaining, states.total_bytes - remaining.total_bytes)


def estimate_deepspeed_host_bytes(
    parameters: int,
    gpus_per_node: int,
    nodes: int,
    zero: int,
    offloaded: frozenset[str],
    largest_layer: int | None = None,
) -> int:
    """Host memory of one node in bytes, as DeepSpeed's estimator computes it.

    largest_layer is given if zero.Init builds the model in shards (ZeRO-3); otherwise every process
    starts with an fp32 copy of the whole model.
    """
    fp32_bytes = 4 * gpus_per_node
    if zero < 3:
        host_bytes = max(fp32_bytes, 16) if "optimizer" in offloaded else fp32_bytes
        return round(parameters * host_bytes * SLACK)
    sharded_bytes = (
        (18 if "parameters" in offloaded else 16) / nodes if "optimizer" in offloaded else 0.0
    )
    if largest_layer is None:
        return round(parameters * max(fp32_bytes, sharded_bytes) * SLACK)
    if "optimizer" not in offloaded:
        return round(largest_layer * fp32_bytes * SLACK)
    return round(parameters * sharded_bytes * SLACK)


# The update of offloaded states by the processors of a host, while its devices are idle.

HOST_UPDATE = Formula(
    "step.host_update",
    "idle: bytes that the update moves (30 per parameter for Adam) for all ranks of a host, over"
    " the rate of its processors; 6 times as long operation by operation",
    "Ren et al., ZeRO-Offload, arXiv:2101.06840, table 4 (CPU-Adam and PyTorch's); 9 times with"
    " torch 2.13 on two processors",
)

HOST_BYTES_PER_S = 1.17e11
"""30 bytes of each of 2 to 10 billion parameters in 0.51 to 2.57 s: DeepSpeed's CPU-Adam on two
processors of 2017 (ZeRO-Offload, table 4)."""

FOREACH_ON_HOST = 6.0
"""See HOST_UPDATE: 6 times as long in the published table."""

MOST_GPUS_PER_HOST = 8
"""A node of more is a rack: its GPUs share links, not processors."""


def compute_host_updates_ns(
    job: JobConfig, stage_params: tuple[StageParameters, ...]
) -> tuple[float, ...]:
    """Time of the update on the host of each stage, 0 on the device. Stages that share a host, as
    those of consecutive ranks do, wait for the states of all of them."""
    if "optimizer" not in job.offloaded:
        return (0.0,) * len(stage_params)
    each_bytes = float(count_update_traffic_bytes(job.training))
    if uses_foreach(job.training):
        each_bytes *= FOREACH_ON_HOST
    rate = job.hardware.host_update_bytes_per_s or HOST_BYTES_PER_S
    held = [count_updated_parameters(job, params) for params in stage_params]
    ranks, of_stage = (
        min(job.parallel.world_size, find_gpus_per_host(job.hardware)),
        job.parallel.world_size // len(held),
    )
    alike = max(1, ranks // of_stage)
    firsts = [stage - stage % alike for stage in range(len(held))]
    counts = [sum(held[first : first + alike]) * min(ranks, of_stage) for first in firsts]
    return tuple(count * each_bytes / rate * 1e9 for count in counts)


def find_gpus_per_host(hardware: HardwareConfig) -> int:
    """The GPUs that share the processors of a host."""
    return hardware.gpus_per_host or min(hardware.gpus_per_node, MOST_GPUS_PER_HOST)


# Copies between a device and its host, and what of them overlaps nothing.

TRANSFERS = Formula(
    "step.transfers",
    "max(0, bytes of a direction / link - the pass that overlaps them): saved activations and"
    " offloaded parameters of every pass, gradients as often as they are reduced (with FSDP2 that"
    " accumulates beside nothing), weights that the host has updated",
    "Ren et al., ZeRO-Offload, section 4.1; Rajbhandari et al., ZeRO-Infinity, arXiv:2104.07857,"
    " section 5.1; pytorch/pytorch, _fsdp_collectives.py, foreach_reduce",
)


Pass = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class PassCopies:
    """Bytes that so many passes each send to the host and load from it, and the time of what
    overlaps them."""

    count: int
    sent_bytes: float
    loaded_bytes: float
    overlapping_ns: float

    def compute_exposed_ns(self, bytes_per_ns: float) -> float:
        largest_bytes = max(self.sent_bytes, self.loaded_bytes)
        return self.count * max(0.0, largest_bytes / bytes_per_ns - self.overlapping_ns)


@dataclass(frozen=True, slots=True)
class _Copies:
    """Those of one kind, beside a pass or beside nothing."""

    beside: Pass | None
    count: int
    sent_bytes: float = 0.0
    loaded_bytes: float = 0.0


def compute_offload_ns(hardware: HardwareConfig, copies: Iterable[PassCopies]) -> float:
    """Time of a step in which nothing but copies to or from the host runs (TRANSFERS)."""
    bytes_per_ns = hardware.host.bytes_per_s * hardware.host.ring * 1e-9
    return sum(each.compute_exposed_ns(bytes_per_ns) for each in copies)


def list_copies(
    job: JobConfig,
    parameters: StageParameters,
    saved_bytes: float,
    forward_ns: float,
    backward_ns: float,
) -> tuple[PassCopies, ...]:
    """The copies of a rank's step; saved_bytes are the offloaded activations of a microbatch,
    forward_ns and backward_ns the passes of one."""
    m = count_rank_microbatches(job)
    found = [
        _Copies("forward", m, sent_bytes=saved_bytes),
        _Copies("backward", m, loaded_bytes=saved_bytes),
    ]
    if "parameters" in job.offloaded:
        found += _list_parameter_copies(job, parameters)
    elif "optimizer" in job.offloaded:
        found += _list_update_copies(job, parameters)
    alone = [PassCopies(c.count, c.sent_bytes, c.loaded_bytes, 0.0) for c in found if not c.beside]
    pass_ns: dict[Pass, float] = {"forward": forward_ns, "backward": backward_ns}
    return (*alone, *_merge_by_pass(found, pass_ns))


def _list_parameter_copies(job: JobConfig, parameters: StageParameters) -> Iterator[_Copies]:
    """Weights as often as they are gathered, and gradients as often as they are reduced."""
    m, each = count_rank_microbatches(job), compute_parameter_bytes(job.training)
    weights_bytes = count_shards(job, parameters) * each.weights
    yield _Copies("forward", 1 if is_kept_gathered(job) else m, loaded_bytes=weights_bytes)
    if find_reshard_policy(job) != "never" and not is_kept_gathered(job):
        yield _Copies("backward", m, loaded_bytes=weights_bytes)
    is_once = job.parallel.sum_once or job.parallel.pp > 1
    gradients_bytes = count_updated_parameters(job, parameters) * each.gradients
    blocks = m > 1 and not is_once and job.profile.offload.blocks
    yield _Copies(None if blocks else "backward", 1 if is_once else m, sent_bytes=gradients_bytes)


def _list_update_copies(job: JobConfig, parameters: StageParameters) -> Iterator[_Copies]:
    """Gradients in fp32, DeepSpeed's beside every backward, with the sums of earlier microbatches;
    then the weights: DeepSpeed's in 16 bits, others as they are updated."""
    m, updated = count_rank_microbatches(job), count_updated_parameters(job, parameters)
    gradients_bytes = updated * MASTER_BYTES
    if job.profile.offload.each_backward:
        yield _Copies("backward", m, gradients_bytes, gradients_bytes if m > 1 else 0.0)
        yield _Copies(None, 1, loaded_bytes=updated * job.training.weight_bytes)
    else:
        yield _Copies(None, 1, sent_bytes=gradients_bytes)
        yield _Copies(None, 1, loaded_bytes=updated * count_updated_bytes(job.training))


def _merge_by_pass(
    copies: Iterable[_Copies], pass_ns: Mapping[Pass, float]
) -> Iterator[PassCopies]:
    """Copies beside the same pass share the link in each direction."""
    alike: dict[tuple[Pass, int], list[_Copies]] = {}
    for each in copies:
        if each.beside:
            alike.setdefault((each.beside, each.count), []).append(each)
    for (beside, count), some in alike.items():
        sent_bytes = sum(one.sent_bytes for one in some)
        loaded_bytes = sum(one.loaded_bytes for one in some)
        yield PassCopies(count, sent_bytes, loaded_bytes, pass_ns[beside])
