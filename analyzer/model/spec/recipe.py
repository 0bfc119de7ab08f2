"""How one step trains: batch, precision, optimizer, what is recomputed and offloaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Dtype = Literal["fp32", "bf16", "fp16", "fp8"]
DTYPES: tuple[Dtype, ...] = ("fp32", "bf16", "fp16", "fp8")
Optimizer = Literal["adam", "adam-8bit", "sgd", "sgd-momentum", "muon", "lion"]
OPTIMIZERS: tuple[Optimizer, ...] = ("adam", "adam-8bit", "sgd", "sgd-momentum", "muon", "lion")
Recompute = Literal["none", "selective", "full", "every", "sqrt"]
Framework = Literal[
    "zero-paper", "megatron", "deepspeed", "fsdp2", "ddp", "huggingface", "nanotron"
]
FRAMEWORKS: tuple[Framework, ...] = (
    "zero-paper", "megatron", "deepspeed", "fsdp2", "ddp", "huggingface", "nanotron",
)  # fmt: skip
Target = Literal["cpu", "nvme"]
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


@dataclass(frozen=True, slots=True)
class Recipe:
    """One optimizer step: seq_len in tokens, micro_batch in sequences a microbatch and rank,
    global_batch in sequences a step.

    dtype is that of the matrix products; weights and activations of fp8 training stay in bf16.
    recompute "every" keeps the input of each recompute_every-th layer. gradient_dtype is the one
    in which gradients are reduced, activation_dtype that of what layers hand on.
    """

    seq_len: int
    micro_batch: int
    global_batch: int
    dtype: Dtype = "bf16"
    optimizer: Optimizer = "adam"
    recompute: Recompute = "none"
    recompute_every: int = 1
    framework: Framework = "megatron"
    gradient_dtype: Dtype = "fp32"
    activation_dtype: Dtype = "bf16"
    flash_attention: bool = True
    dropout: bool = False
    fused_loss: bool = True
    offload: frozenset[str] = frozenset()
    offload_to: Target = "cpu"

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight as the forward pass reads it."""
        return 4 if self.dtype == "fp32" else 2

    @property
    def activation_bytes(self) -> int:
        """Bytes of a number that one layer hands to the next."""
        return BYTES[self.activation_dtype]

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a gradient where ranks sum it."""
        return BYTES[self.gradient_dtype]
