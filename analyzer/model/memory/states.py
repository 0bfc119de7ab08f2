"""How many bytes the weights, gradients and optimizer of one rank take."""

from __future__ import annotations

from dataclasses import dataclass

from stepsplit.analyzer.model.formula import Formula
from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.spec.recipe import Recipe
from stepsplit.analyzer.model.work.parameters import StageParameters

STATES = Formula(
    "memory.states",
    "(2 + 2 + 12) P; ZeRO-1 4P + 12P/N, ZeRO-2 2P + 14P/N, ZeRO-3 16P/N"
    " (16-bit weights and gradients; fp32 weights and Adam's two moments)",
    "Rajbhandari et al., ZeRO, SC'20, arXiv:1910.02054, section 3.1 and figure 1",
)
MEGATRON = Formula(
    "memory.states_megatron",
    "bf16 with fp32 gradients 18P -> 6P + 12P/N, fp16 20P -> 4P + 16P/N, fp32 16P -> 8P + 8P/N",
    "Megatron-Core docs, distrib_optimizer.md",
)
DEEPSPEED = Formula(
    "memory.states_deepspeed",
    "ZeRO-2 4P + 16P/N; ZeRO-3 4 largest layer + 18P/N",
    "DeepSpeed docs, memory.rst",
)
FSDP = Formula(
    "memory.states_fsdp",
    "(4 + 4 + 8) P/N, all of them fp32 shards",
    "Zhao et al., PyTorch FSDP, arXiv:2304.11277; torchtitan, arXiv:2410.06511",
)
MASTER_BYTES = 4
MOMENTS_BYTES = {
    "adam": 8, "adam-8bit": 2, "sgd": 0, "sgd-momentum": 4, "muon": 4, "lion": 4,
}  # fmt: skip
"""Of one parameter. Two moments of Adam, fp32 or 8 bits (Dettmers et al., arXiv:2110.02861,
without its scales, 3 % of that); one of SGD, Muon and Lion."""
KEEPS_FP32 = ("fsdp2", "ddp", "huggingface")
"""Frameworks whose weights stay fp32; each layer is cast as it runs."""


@dataclass(frozen=True, slots=True)
class ParameterBytes:
    """Bytes of one parameter before sharding.

    The fp32 weights beside 16-bit ones count with the optimizer. adam_beside is what Muon adds for
    a parameter outside the layers' matrices, which Adam trains (Jordan et al., 2024).
    """

    weights: int
    gradients: int
    optimizer: int
    adam_beside: int = 0


@dataclass(frozen=True, slots=True)
class States:
    """Bytes of one rank."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes

    def __add__(self, other: States) -> States:
        return States(
            self.weights_bytes + other.weights_bytes,
            self.gradients_bytes + other.gradients_bytes,
            self.optimizer_bytes + other.optimizer_bytes,
        )


def parameter_bytes(recipe: Recipe) -> ParameterBytes:
    """What one parameter costs in the framework's own convention, in bytes, unsharded.

    zero-paper and nanotron: 16-bit weights, gradients of gradient_dtype (fp16 and bf16 recipes of
    the paper: 2). nanotron adds the fp32 buffer into which it accumulates 16-bit gradients.
    """
    moments = MOMENTS_BYTES[recipe.optimizer]
    beside = MOMENTS_BYTES["adam"] - moments if recipe.optimizer == "muon" else 0
    if recipe.dtype == "fp32" or recipe.framework in KEEPS_FP32:
        return ParameterBytes(4, 4, moments, beside)
    gradients, own = _mixed(recipe)
    return ParameterBytes(recipe.weight_bytes, gradients, own + MASTER_BYTES + moments, beside)


def _mixed(recipe: Recipe) -> tuple[int, int]:
    """Bytes of a gradient and of its fp32 copy in the optimizer."""
    match recipe.framework:
        case "deepspeed":
            return 2, 4
        case "nanotron":
            return 2 + 4, 0
        case "megatron":
            return recipe.gradient_bytes, 0 if recipe.gradient_bytes == 4 else 4
    return 2, 0


def share(parameters: int, shards: int, each: ParameterBytes, recipe: Recipe, zero: int) -> States:
    """States of parameters that shards ranks spread as the ZeRO stage says (N = shards)."""
    deepspeed = recipe.framework == "deepspeed"
    weights = shards if zero >= 3 else 1
    gradients = shards if zero >= 2 and not deepspeed else 1
    optimizer = shards if zero >= 1 else 1
    return States(
        _part(parameters * each.weights, weights),
        0 if deepspeed and zero >= 3 else _part(parameters * each.gradients, gradients),
        _part(parameters * each.optimizer, optimizer),
    )


def states_of(job: Job, stage: StageParameters) -> States:
    """Weights, gradients and optimizer of one rank of a stage, at rest between passes.

    Dense parameters and experts are spread over groups of their own (Layout.shard_size, and
    N_e = d c t / (e e_t)). FSDP shards everything at ZeRO-2 too (SHARD_GRAD_OP: it only keeps the
    gathered weights until the backward pass ends). Adds what Muon keeps for embedding, head, norms.
    """
    each, zero = parameter_bytes(job.recipe), job.layout.zero
    if zero == 2 and job.recipe.framework == "fsdp2":
        zero = 3
    dense = share(stage.dense, job.layout.shard_size, each, job.recipe, zero)
    experts = share(stage.experts, job.layout.expert_shards, each, job.recipe, zero)
    beside = stage.embedding + stage.head + stage.final_norm
    return dense + experts + States(0, 0, _part(beside * each.adam_beside, job.layout.shard_size))


def _part(whole: int, shards: int) -> int:
    return -(-whole // shards)
