"""What the batch, the precision and ZeRO ask for."""

from __future__ import annotations

from stepsplit.analyzer.model.spec.fault import Fault
from stepsplit.analyzer.model.spec.job import Job


def _global_batch(job: Job) -> Fault | None:
    recipe, dp = job.recipe, job.layout.dp
    each = recipe.micro_batch * dp
    if recipe.micro_batch >= 1 and recipe.global_batch >= 1 and recipe.global_batch % each == 0:
        return None
    if recipe.micro_batch < 1:
        return Fault(f"micro_batch {recipe.micro_batch} < 1", "mend micro_batch")
    problem = (
        f"global_batch {recipe.global_batch} / (micro_batch {recipe.micro_batch} x dp {dp}) = "
        f"{recipe.global_batch / each:g} microbatches"
    )
    return Fault(problem, f"make global_batch a multiple of {each}")


def _positions(job: Job) -> Fault | None:
    positions, seq_len = job.model.positions, job.recipe.seq_len
    if positions == 0 or seq_len <= positions:
        return None
    return Fault(f"seq_len {seq_len} > learned_positions {positions}", "raise learned_positions")


def _dtype(job: Job) -> Fault | None:
    hardware, dtype = job.hardware, job.recipe.dtype
    if hardware.peak_flops_per_s(dtype) is not None:
        return None
    known = ", ".join(dtype for dtype, _ in hardware.peaks_flops_per_s)
    return Fault(f"{hardware.name} has no {dtype} peak, only {known}", "choose another dtype")


def _shards(job: Job) -> Fault | None:
    """dp_shard is of ZeRO 3 alone, and ZeRO 3 needs ranks to shard over."""
    layout = job.layout
    if layout.zero != 3 and layout.dp_shard > 1:
        problem = f"dp_shard {layout.dp_shard} with zero = {layout.zero}"
        return Fault(problem, "write dp instead, or zero = 3")
    if layout.zero == 3 and layout.shard_size == 1 and layout.dp_replicate > 1:
        return Fault(
            "zero = 3 shards over dp_shard 1 x cp 1 = 1 rank", "write dp_shard or zero = 0"
        )
    return None


def _ddp(job: Job) -> Fault | None:
    """DDP beside ZeroRedundancyOptimizer is zero = 1."""
    if job.recipe.framework != "ddp" or job.layout.zero <= 1:
        return None
    problem = f"ddp shards no gradient and no weight, but zero = {job.layout.zero}"
    return Fault(problem, 'write framework = "fsdp2"')


BATCH_CHECKS = (_global_batch, _positions, _dtype, _shards, _ddp)
