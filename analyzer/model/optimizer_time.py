"""Time of the optimizer step on the device: the update of the states, and Muon's GEMMs."""

from __future__ import annotations

from collections.abc import Sequence

from stepsplit.analyzer.model.config import JobConfig
from stepsplit.analyzer.model.device_speed import DeviceSpeed
from stepsplit.analyzer.model.formulas import Formula
from stepsplit.analyzer.model.layer_time import (
    Gemm,
    list_attention_gemms,
    list_expert_gemms,
    list_mlp_gemms,
)
from stepsplit.analyzer.model.memory_states import (
    count_moments_bytes,
    count_update_traffic_bytes,
    count_updated_bytes,
    uses_foreach,
)
from stepsplit.analyzer.model.offload import HOST_UPDATE
from stepsplit.analyzer.model.parameters import (
    StageParameters,
    count_updated_parameters,
    list_adapters,
    select_trained,
)

# The update of the states.

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
    if "optimizer" in job.offloaded:
        return 0.0
    count, training = count_updated_parameters(job, parameters), job.training
    moved_bytes = count * count_update_traffic_bytes(training)
    if training.clip_gradients:
        moved_bytes += count * 3 * training.gradient_bytes
    if uses_foreach(training):
        weight_bytes = count_updated_bytes(training)
        beside = 2 * weight_bytes + training.gradient_bytes
        moved_bytes += count * (beside + 5 * count_moments_bytes(training))
    if job.profile.times.zeroes_gradients:
        moved_bytes += select_trained(job, parameters).total * training.gradient_bytes
    orthogonalize_ns = 0.0
    if training.optimizer == "muon":
        orthogonalize_ns = compute_orthogonalization_ns(job, speed, parameters)
    return speed.compute_memory_ns(moved_bytes, 10) + orthogonalize_ns


def list_optimizer_formulas(job: JobConfig) -> tuple[Formula, ...]:
    """The formulas of the optimizer step."""
    if "optimizer" in job.offloaded:
        return (HOST_UPDATE,)
    if job.training.optimizer == "muon":
        return (UPDATE, MUON)
    return (UPDATE, FOREACH) if uses_foreach(job.training) else (UPDATE,)


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
"""Newton-Schulz steps, the default of torch.optim.Muon."""


def compute_orthogonalization_ns(
    job: JobConfig, speed: DeviceSpeed, parameters: StageParameters
) -> float:
    """Time of the Newton-Schulz iterations of one rank (MUON).

    Queries, keys and values are one matrix, as are gate and up projection. Embedding, head and
    norms are updated by Adam.
    """
    dense, with_experts = parameters.dense_layers, parameters.expert_layers
    if job.training.lora_rank:
        # The matrices of adapters, and how many of each a rank has.
        adapters = [(one, parameters.dense_layers) for one in list_adapters(job)]
        adapters += [(one, parameters.expert_layers) for one in list_adapters(job, expert=True)]
        return _divide_matrices(
            speed,
            [
                (Gemm(job.tokens, *shape), count)
                for one, count in adapters
                for shape in one.list_matrices(job.training.lora_rank)
            ],
            job.parallel.shard_size,
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
