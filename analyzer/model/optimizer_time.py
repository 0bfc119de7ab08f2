"""Time of the optimizer step: the update of the states, Muon's GEMMs; and of offloading."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stepsplit.analyzer.model.comm_ops import count_rank_microbatches
from stepsplit.analyzer.model.config import TORCH_FRAMEWORKS, JobConfig, TrainingConfig
from stepsplit.analyzer.model.device_speed import DeviceSpeed
from stepsplit.analyzer.model.formulas import Formula
from stepsplit.analyzer.model.layer_time import (
    Gemm,
    list_attention_gemms,
    list_expert_gemms,
    list_mlp_gemms,
)
from stepsplit.analyzer.model.memory_states import (
    compute_parameter_bytes,
    count_moments_bytes,
    count_updated_bytes,
    find_sharding_stage,
    uses_foreach,
)
from stepsplit.analyzer.model.parameters import (
    StageParameters,
    count_updated_parameters,
    list_adapters,
    select_trained,
)

# The update of the states, and their way to the host and back.

UPDATE = Formula(
    "step.optimizer",
    "bytes of gradient, master weight and moments read, master and moments written, 16-bit copy"
    " written, over memory bandwidth: 30 bytes per parameter for Adam, 28 without a copy; clipping"
    " reads the gradients twice and writes them; Megatron-LM and nanotron write zeros to all of a"
    " rank's",
    "arithmetic over Kingma and Ba, arXiv:1412.6980; NVIDIA/Megatron-LM, optimizer/clip_grads.py,"
    " distributed/param_and_grad_buffer.py",
)

FOREACH = Formula(
    "step.foreach",
    "Adam by lists of tensors moves 2 w + g + 10 m bytes per parameter more than in one kernel:"
    " each of its eight operations reads and writes its tensors (w, g, m: bytes of weight, gradient"
    " and moment)",
    "pytorch/pytorch, torch/optim/adam.py, _multi_tensor_adam",
)


def compute_optimizer_ns(job: JobConfig, speed: DeviceSpeed, parameters: StageParameters) -> float:
    """Time of the optimizer step on the device; 0 if it is offloaded to the host."""
    if "optimizer" in job.training.offload:
        return 0.0
    count, training = count_updated_parameters(job, parameters), job.training
    moved_bytes = count * _count_moved_bytes(training)
    if training.clip_gradients:
        moved_bytes += count * 3 * training.gradient_bytes
    if uses_foreach(training):
        weight_bytes = count_updated_bytes(training)
        beside = 2 * weight_bytes + training.gradient_bytes
        moved_bytes += count * (beside + 5 * count_moments_bytes(training))
    if training.framework in ("megatron", "nanotron"):
        moved_bytes += select_trained(job, parameters).total * training.gradient_bytes
    orthogonalize_ns = 0.0
    if training.optimizer == "muon":
        orthogonalize_ns = compute_orthogonalization_ns(job, speed, parameters)
    return speed.compute_memory_ns(moved_bytes, 10) + orthogonalize_ns


def _count_moved_bytes(training: TrainingConfig) -> int:
    """Bytes per parameter that an update in one pass reads and writes."""
    states = count_updated_bytes(training) + count_moments_bytes(training)
    is_copied = training.dtype != "fp32" and training.framework not in TORCH_FRAMEWORKS
    written = training.weight_bytes if is_copied and training.master_weights else 0
    return 2 * states + training.gradient_bytes + written


def list_optimizer_formulas(job: JobConfig) -> tuple[Formula, ...]:
    """The formulas of the optimizer step."""
    if "optimizer" in job.training.offload:
        return (HOST_UPDATE,)
    if job.training.optimizer == "muon":
        return (UPDATE, MUON)
    return (UPDATE, FOREACH) if uses_foreach(job.training) else (UPDATE,)


# Offloading: the update on the host, and copies over the link to its memory.

HOST_UPDATE = Formula(
    "step.host_update",
    "idle: bytes that the update moves (30 per parameter for Adam) of all ranks of a node, over the"
    " bandwidth of its processors; 6 times as long operation by operation",
    "Ren et al., ZeRO-Offload, arXiv:2101.06840, table 4 (CPU-Adam and PyTorch's); 9 times with"
    " torch 2.13 on two processors",
)

FOREACH_ON_HOST = 6.0

TRANSFERS = Formula(
    "step.transfers",
    "copies of gradients to the host and of weights back, once; of saved activations and offloaded"
    " parameters max(0, each direction's bytes / link - compute) of every pass",
    "ZeRO-Offload, section 4.1; Rajbhandari et al., ZeRO-Infinity, arXiv:2104.07857, section 5.1",
)


def compute_host_update_ns(job: JobConfig, parameters: StageParameters) -> float:
    """Time of the update on the host, during which the device is idle; 0 on the device."""
    if "optimizer" not in job.training.offload:
        return 0.0
    moved_bytes = count_updated_parameters(job, parameters) * _count_moved_bytes(job.training)
    if uses_foreach(job.training):
        moved_bytes *= FOREACH_ON_HOST
    ranks = min(job.parallel.world_size, job.hardware.gpus_per_node)
    return moved_bytes * ranks / job.hardware.host_update_bytes_per_s * 1e9


@dataclass(frozen=True, slots=True)
class PassCopies:
    """Bytes that one pass of one microbatch moves to the host and back, and what overlaps them."""

    sent_bytes: float
    loaded_bytes: float
    compute_ns: float


def compute_offload_ns(
    job: JobConfig, parameters: StageParameters, passes: Iterable[PassCopies] = ()
) -> float:
    """Time of a step in which nothing but copies to or from the host runs (TRANSFERS).

    Gradients and weights of an offloaded optimizer are copied once per step, in 16 bits; passes are
    those of one microbatch.
    """
    link = job.hardware.host
    bytes_per_ns = link.bytes_per_s * link.ring * 1e-9
    once_bytes = 0.0
    if "optimizer" in job.training.offload:
        once_bytes = count_updated_parameters(job, parameters) * 2 * job.training.weight_bytes
    exposed_ns = sum(
        max(0.0, max(each.sent_bytes, each.loaded_bytes) / bytes_per_ns - each.compute_ns)
        for each in passes
    )
    return once_bytes / bytes_per_ns + count_rank_microbatches(job) * exposed_ns


def list_pass_copies(
    job: JobConfig,
    parameters: StageParameters,
    saved_bytes: float,
    forward_ns: float,
    backward_ns: float,
) -> tuple[PassCopies, ...]:
    """Copies of the forward and of the backward of a microbatch: saved_bytes of offloaded
    activations, and a rank's shards of offloaded parameters and of their gradients."""
    training = job.training
    weights_bytes = gradients_bytes = 0.0
    if "parameters" in training.offload:
        weights_bytes = _count_shards(job, parameters) * training.weight_bytes
        gradients_bytes = _count_shards(job, select_trained(job, parameters))
        gradients_bytes *= compute_parameter_bytes(training).gradients
    return (
        PassCopies(saved_bytes, weights_bytes, forward_ns),
        PassCopies(gradients_bytes, saved_bytes + weights_bytes, backward_ns),
    )


def _count_shards(job: JobConfig, parameters: StageParameters) -> float:
    """The parameters of a rank, of those that it has before they are sharded."""
    if find_sharding_stage(job) < 3:
        return parameters.total
    layout = job.parallel
    return parameters.dense / layout.shard_size + parameters.experts / layout.expert_shards


# Muon: the momentum of every matrix of the layers is made orthogonal.

MUON = Formula(
    "step.muon",
    "5 Newton-Schulz iterations of 4 m^2 n + 2 m^3 FLOPs, three GEMMs in bf16, of every matrix"
    " m x n, m <= n, of the layers, tp's part of it; ranks that shard the states divide the"
    " matrices, at least one each",
    "torch.optim.Muon (5 steps); Liu et al., Muon is Scalable for LLM Training, arXiv:2502.16982,"
    " section 2; NVIDIA/Megatron-LM, layer_wise_optimizer.py",
)

ITERATIONS = 5


def compute_orthogonalization_ns(
    job: JobConfig, speed: DeviceSpeed, parameters: StageParameters
) -> float:
    """Time of the Newton-Schulz iterations of one rank (MUON).

    Queries, keys and values are one matrix, as are gate and up projection. Embedding, head and
    norms are updated by Adam.
    """
    dense, with_experts = parameters.dense_layers, parameters.expert_layers
    if job.training.lora_rank:
        return _divide_matrices(
            speed, _list_adapter_matrices(job, parameters), job.parallel.shard_size
        )
    own = [(one, dense + with_experts) for one in list_attention_gemms(job)]
    own += [(one, dense) for one in list_mlp_gemms(job, job.model.ffn)]
    routed: list[tuple[Gemm, int]] = []
    if job.model.experts is not None:
        router, first, second, *shared = list_expert_gemms(job, job.model.experts)
        own += [(one, with_experts) for one in (router, *shared)]
        routed += [(one, with_experts * one.count) for one in (first, second)]
    return _divide_matrices(speed, own, job.parallel.shard_size) + _divide_matrices(
        speed, routed, job.parallel.expert_shards
    )


def _list_adapter_matrices(job: JobConfig, parameters: StageParameters) -> list[tuple[Gemm, int]]:
    """The matrices of adapters, and how many of each a rank has."""
    adapters = [(one, parameters.dense_layers) for one in list_adapters(job)]
    adapters += [(one, parameters.expert_layers) for one in list_adapters(job, expert=True)]
    return [
        (Gemm(job.tokens, *shape), count)
        for one, count in adapters
        for shape in one.list_matrices(job.training.lora_rank)
    ]


def _divide_matrices(
    speed: DeviceSpeed, matrices: Sequence[tuple[Gemm, int]], shards: int
) -> float:
    """Time for a rank's share of the matrices, each so many times; a rank has at least one."""
    times = [(time_iterations(speed, one), count) for one, count in matrices if count]
    total_ns = sum(one_ns * count for one_ns, count in times)
    return max((total_ns / shards, *(one_ns for one_ns, _ in times)))


def time_iterations(speed: DeviceSpeed, matrix: Gemm) -> float:
    """Time to make one matrix orthogonal: X X^T, its square, and their product with X."""
    short, long = sorted((matrix.columns, matrix.inner))
    gemm_ns = speed.head_speed.compute_gemm_ns
    once_ns = gemm_ns(short, short, long) + gemm_ns(short, short, short)
    return ITERATIONS * (once_ns + gemm_ns(short, long, short))
