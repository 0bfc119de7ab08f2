"""What a framework reads and writes beside the arithmetic: its constants, by name."""

from __future__ import annotations

from dataclasses import dataclass

from stepsplit.analyzer.model.formula import Formula
from stepsplit.analyzer.model.spec.job import Job

ACCUMULATE = Formula(
    "step.accumulate",
    "every microbatch but the first adds its gradients to those before: 3 b_g bytes a parameter,"
    " 14 in DeepSpeed's bf16 optimizer, none where the product that makes them adds (Megatron-LM)",
    "arithmetic; Megatron-LM gradient_accumulation_fusion; DeepSpeed bf16_optimizer.py",
)
UNIT_COPIES = Formula(
    "step.fsdp_copies",
    "16 bytes a parameter and microbatch: gathered weights are copied out twice (2 x 4),"
    " gradients copied in and cast to fp32 (8), where they are summed",
    "arithmetic; Zhao et al., PyTorch FSDP, arXiv:2304.11277, section 3.2",
)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Constants of a framework.

    elementwise multiplies the bytes of norms, residuals, dropout and activation: 1 where they are
    fused into one read and one write each. accumulate_bytes are moved on average for each
    parameter and microbatch to add its gradient up, unit_bytes to gather a sharded parameter and
    to scatter its gradient. host_ns is what the host needs to launch one layer's forward, a guess:
    some 30 kernels of about 10 us.
    """

    elementwise: float
    accumulate_bytes: float
    unit_bytes: float
    host_ns: float


EAGER = 1.6
"""Operations that are not fused read and write that much more than fused ones. Of 1.4 to 2.2 in
steps of 0.2 the value of least loss on the fitted rows of presets/efficiency.toml."""


def traffic_of(job: Job) -> Traffic:
    """The constants of the job's framework."""
    later = (job.microbatches - 1) / job.microbatches
    match job.recipe.framework:
        case "megatron" | "nanotron":
            return Traffic(1.0, 0.0, 0.0, 250e3)
        case "deepspeed" | "zero-paper":
            return Traffic(1.0, 14.0 * later, 0.0, 400e3)
        case "fsdp2" if job.layout.sum_once:
            added = 3.0 * job.recipe.gradient_bytes * later
            return Traffic(EAGER, added, 8.0 + 8.0 / job.microbatches, 400e3)
        case "fsdp2":
            return Traffic(EAGER, 0.0, 16.0, 400e3)
        case "ddp" | "huggingface":
            return Traffic(EAGER, 3.0 * job.recipe.gradient_bytes * later, 0.0, 400e3)
