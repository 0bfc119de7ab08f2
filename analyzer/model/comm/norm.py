"""What clipping gradients sends: their norm over all parameters."""

from __future__ import annotations

from stepsplit.analyzer.model.comm.calls import Place, all_reduce
from stepsplit.analyzer.model.formula import Formula
from stepsplit.analyzer.model.prediction import Message
from stepsplit.analyzer.model.spec.job import Job

NORM = Formula(
    "comm.norm",
    "1 all_reduce of 4 bytes over each axis whose ranks hold different gradients",
    "NVIDIA/Megatron-LM, core/optimizer/clip_grads.py; pytorch/torchtitan, clip_grad_norm_",
)
NORM_BYTES = 4


def norm_messages(job: Job, stage: int) -> tuple[Message, ...]:
    """Frameworks that sum over several axes in one call (Megatron-LM) send no more."""
    layout = job.layout
    sizes = {"tp": layout.tp, "pp": layout.pp}
    if layout.zero == 3:
        sizes["dp_shard"] = layout.shard_size
    elif layout.zero:
        sizes["dp"] = layout.shard_size
    return tuple(
        all_reduce(Place("norm", axis, stage, "optimizer"), 1, NORM_BYTES, ranks)
        for axis, ranks in sizes.items()
        if ranks > 1
    )
