"""What each framework can run, and so what is worth considering in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from stepsplit.analyzer.model.spec.habits import habits_of
from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.spec.layout import Layout, Schedule
from stepsplit.analyzer.model.spec.recipe import Dtype, Framework, Recipe, Recompute

ZEROS: Mapping[Framework, tuple[int, ...]] = {
    "megatron": (0, 1), "fsdp2": (0, 2, 3), "deepspeed": (0, 1, 2, 3), "ddp": (0, 1),
    "huggingface": (0,), "nanotron": (0, 1), "zero-paper": (0, 1, 2, 3),
}  # fmt: skip
SCHEDULES: Mapping[Framework, tuple[Schedule, ...]] = {
    "megatron": ("1f1b", "interleaved"),
    "fsdp2": ("1f1b", "interleaved"),
}
"""gpipe and naive take no less time than 1f1b and no less memory. PyTorch's zb-v and dualpipe-v
refuse torch.compile (2.13, pipelining/schedules.py, _check_torch_compile_compatibility), under
which fsdp2's memory is counted. Others have 1f1b alone."""
SEQUENCE_PARALLEL: tuple[Framework, ...] = ("megatron", "fsdp2", "nanotron")
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")


def zeros(job: Job, data_ranks: int, pp: int) -> tuple[int, ...]:
    """ZeRO stages that make a difference; DeepSpeed has no ZeRO-2 and 3 in a pipeline."""
    if data_ranks == 1:
        return (0,)
    known = {*ZEROS[job.recipe.framework], job.layout.zero}
    most = 1 if pp > 1 and job.recipe.framework in ("deepspeed", "zero-paper") else 3
    return tuple(zero for zero in sorted(known) if zero <= most)


def schedules(job: Job) -> tuple[Schedule, ...]:
    """The framework's, and the one that the job names."""
    known = SCHEDULES.get(job.recipe.framework, ("1f1b",))
    return tuple(dict.fromkeys((*known, job.layout.schedule)))


def sequence_parallel(job: Job, tp: int) -> tuple[bool, ...]:
    if tp == 1:
        return (False,)
    can = job.recipe.framework in SEQUENCE_PARALLEL or job.layout.sequence_parallel
    return (True, False) if can else (False,)


def recomputes(job: Job) -> tuple[Recompute, ...]:
    """The job's own among them. Where attention is fused, selective has nothing left to drop but
    in torchtitan, whose policy drops more."""
    fused = job.recipe.flash_attention and job.recipe.framework != "fsdp2"
    known = tuple(each for each in RECOMPUTES if not (fused and each == "selective"))
    own = job.recipe.recompute
    return known if own in RECOMPUTES else (*known, own)


def recipe_on(job: Job, layout: Layout) -> Recipe:
    """The job's recipe on another layout; what the framework chooses by the layout follows it."""
    recipe = job.recipe
    usual, here = _activations(job, job.layout), _activations(job, layout)
    if usual == here or recipe.activation_dtype != usual:
        return recipe
    return replace(recipe, activation_dtype=here)


def _activations(job: Job, layout: Layout) -> Dtype:
    recipe = job.recipe
    habits = habits_of(recipe.framework, recipe.dtype, layout, job.model, job.hardware)
    return habits.activation_dtype
