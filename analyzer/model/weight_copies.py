"""Copies of whole weights and gradients: by FSDP, by autocast, and to the buckets of DDP."""

from __future__ import annotations

from stepsplit.analyzer.model.config import JobConfig
from stepsplit.analyzer.model.device_speed import DeviceSpeed
from stepsplit.analyzer.model.formulas import Formula
from stepsplit.analyzer.model.layer_time import LayerPass
from stepsplit.analyzer.model.memory_states import count_updated_bytes, has_buckets, is_autocast
from stepsplit.analyzer.model.parameters import StageParameters, select_trained
from stepsplit.analyzer.model.rank_layout import Chunk

UNIT_COPIES = Formula(
    "step.fsdp_copies",
    "16 bytes per parameter and microbatch: gathered weights are copied out twice (2 x 4),"
    " gradients copied in and cast to fp32 (8), in which they are summed",
    "arithmetic; Zhao et al., PyTorch FSDP, arXiv:2304.11277, section 3.2",
)

AUTOCAST = Formula(
    "step.autocast",
    "12 bytes per parameter and microbatch: autocast reads each fp32 weight and writes it in 16"
    " bits forward, and each gradient the other way backward",
    "arithmetic; torch.autocast, which caches a weight's cast until the end of its block",
)

BUCKET_COPIES = Formula(
    "step.bucket_copies",
    "4 g bytes per parameter and step: DistributedDataParallel copies each gradient, divided by the"
    " ranks, to its bucket and the sum back",
    "torch/csrc/distributed/c10d/reducer.cpp",
)

BUCKET_PASSES = 4
"""Reads and writes of each gradient: to its bucket and back."""


def time_weight_copies(
    job: JobConfig, speed: DeviceSpeed, parameters: StageParameters, chunk: Chunk
) -> LayerPass:
    """Time of a chunk's copies in one microbatch, or in a step if its weights stay gathered.

    Copies to buckets run once per step, and are spread over its microbatches.
    """
    casts, has_own_buckets = job.runs_transformers, has_buckets(job)
    if not (job.is_fsdp or casts or has_own_buckets):
        return LayerPass(0.0, 0.0, 0.0)
    copied_bytes = count_copied_bytes(job)
    layers = parameters.dense_layers + parameters.expert_layers
    share = chunk.layers / layers if layers else 0.0
    # Half of the bytes are of weights and half of gradients, which frozen weights do not have.
    weights_ns = speed.compute_memory_ns(copied_bytes * (parameters.total * share)) / 2
    gradients_ns = 0.0 if job.training.lora_rank else weights_ns
    # Autocast casts a weight once, FSDP copies it out in the forward and again in the backward.
    forward_ns = weights_ns if casts else weights_ns / 2
    backward_ns = weights_ns - forward_ns + gradients_ns
    formulas: tuple[Formula, ...] = ()
    if copied_bytes:
        formulas += (AUTOCAST if casts else UNIT_COPIES,)
    if has_own_buckets:
        formulas += (BUCKET_COPIES,)
        reduced = select_trained(job, parameters).total * share
        bucket_bytes = BUCKET_PASSES * count_updated_bytes(job.training) * reduced
        backward_ns += speed.compute_memory_ns(bucket_bytes) / job.microbatches
    return LayerPass(forward_ns, 0.0, backward_ns, formulas=formulas)


def count_copied_bytes(job: JobConfig) -> float:
    """Bytes per parameter and microbatch that FSDP or autocast copies, of weights and gradients."""
    costs = job.profile.times
    if job.runs_transformers:
        return costs.cast_bytes if is_autocast(job) else 0.0
    if not job.is_fsdp:
        return 0.0
    if job.parallel.sum_once:
        # Weights are copied for every microbatch, gradients once.
        return costs.unit_copy_bytes / 2 + costs.unit_copy_bytes / 2 / job.microbatches
    return costs.unit_copy_bytes
