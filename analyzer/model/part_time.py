"""The predicted compute of a rank by part of the model."""

from __future__ import annotations

from collections import defaultdict

from stepsplit.analyzer.model.comm_measured import Rates
from stepsplit.analyzer.model.comm_ops import count_rank_microbatches
from stepsplit.analyzer.model.config import JobConfig
from stepsplit.analyzer.model.device_speed import DeviceSpeed, compute_device_speed
from stepsplit.analyzer.model.elementwise import time_elementwise
from stepsplit.analyzer.model.layer_time import (
    LayerPass,
    add_recompute,
    compute_chunk_passes,
    list_attention_gemms,
    time_attention_core,
    time_casts,
    time_dense_layer,
    time_expert_layer,
    time_head,
    time_linear,
)
from stepsplit.analyzer.model.predict import time_step
from stepsplit.analyzer.model.rank_layout import Chunk
from stepsplit.analyzer.model.stage_time import StageTime

PARTS = ("embedding", "attention", "mlp", "experts", "norm", "head", "optimizer")
"""The parts that are predicted. "norm" is norms, residuals and rotary embeddings, and all else of a
layer that is neither attention nor an MLP; "head" has the loss."""


def predict_part_times(job: JobConfig, rates: Rates) -> tuple[dict[str, int], ...]:
    """The compute of a rank's step in ns by part of PARTS, of each pipeline stage; the parts of a
    stage add up to its predicted compute. Raises UsageError if the job is not valid."""
    step, speed = time_step(job, rates), compute_device_speed(job)
    return tuple(
        _divide_stage(job, speed, stage, split.compute_ns)
        for stage, split in zip(step.stages, step.splits, strict=True)
    )


def _divide_stage(
    job: JobConfig, speed: DeviceSpeed, stage: StageTime, compute_ns: int
) -> dict[str, int]:
    sums: dict[str, float] = defaultdict(float)
    for chunk in stage.stage.chunks:
        for part, one in _time_chunk(job, speed, chunk).items():
            sums[part] += one.forward_ns + one.input_ns + one.weight_ns
    times = count_rank_microbatches(job)
    parts = {part: round(times * ns) for part, ns in sums.items()}
    parts["optimizer"] = round(stage.optimizer_ns)
    # What recomputation leaves out or adds between the parts, and copies, are of no part.
    parts["norm"] = compute_ns - sum(parts.values())
    return {part: parts[part] for part in PARTS if parts.get(part)}


def _time_chunk(job: JobConfig, speed: DeviceSpeed, chunk: Chunk) -> dict[str, LayerPass]:
    """The compute of a microbatch by part, but for "norm"."""
    gemms = list_attention_gemms(job)
    attention = (
        time_linear(job, speed, gemms) + time_casts(job, speed, gemms)
        + time_attention_core(job, speed)
    )  # fmt: skip
    between = time_elementwise(job, speed, 0.0)
    # An MLP has all of a layer that is not there without it, its activation function included.
    without = (attention + LayerPass(between.forward_ns, between.backward_ns, 0.0)) * -1
    parts = {"attention": add_recompute(job, attention * chunk.layers, chunk.layers)}
    if chunk.dense_layers:
        mlp = (time_dense_layer(job, speed) + without) * chunk.dense_layers
        parts["mlp"] = add_recompute(job, mlp, chunk.layers)
    if chunk.expert_layers and job.model.experts is not None:
        experts = (time_expert_layer(job, speed, job.model.experts) + without) * chunk.expert_layers
        parts["experts"] = add_recompute(job, experts, chunk.layers)
    if chunk.embedding:
        (parts["embedding"],) = compute_chunk_passes(job, speed, (Chunk(0, 0, True, False),))
    if chunk.head:
        parts["head"] = time_head(job, speed) * (1 + chunk.mtp_layers)
    return parts
