"""How fast one device runs a kernel: a roofline whose two sides add up."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.formula import Formula
from stepsplit.analyzer.model.spec.job import Job

KERNEL = Formula(
    "step.kernel",
    "t = FLOP / (peak e_gemm) + bytes / (memory bandwidth e_mem) + launch;"
    " the sum fits measured steps better than the larger of the two",
    "after Williams et al., Roofline, CACM 2009; constants from the rows that the presets name",
)
BACKWARD_ATTENTION = 0.8
"""Fused attention's backward reaches this share of its forward's rate.
Dao, FlashAttention-2, arXiv:2307.08691, section 4.1."""


@dataclass(frozen=True, slots=True)
class Speed:
    """What the job's kernels reach on its device: FLOP and bytes in a ns."""

    linear_flops_per_ns: float
    head_flops_per_ns: float
    attention_flops_per_ns: float
    bytes_per_ns: float
    launch_ns: float
    tile: int = 0
    multiprocessors: int = 0

    @property
    def of_head(self) -> Speed:
        """The same for the head, whose products fp8 training leaves in bf16."""
        return replace(self, linear_flops_per_ns=self.head_flops_per_ns)

    def product_ns(self, rows: float, columns: float, inner: float, size: int = 2) -> float:
        """One matrix product (rows x inner) (inner x columns) of numbers of size bytes."""
        moved = size * (rows * inner + inner * columns + rows * columns)
        work = 2.0 * rows * columns * inner * _waves(rows, columns, self.tile, self.multiprocessors)
        return work / self.linear_flops_per_ns + moved / self.bytes_per_ns + self.launch_ns

    def moved_ns(self, count_bytes: float, kernels: int = 0) -> float:
        """Kernels that read and write count_bytes in all."""
        return count_bytes / self.bytes_per_ns + kernels * self.launch_ns


def speed_of(job: Job) -> Speed:
    """The rates of the job's device at its dtype. Raises UsageError where no peak is known."""
    hardware, recipe = job.hardware, job.recipe
    efficiency = hardware.efficiency
    peak = hardware.peak_flops_per_s(recipe.dtype)
    wide = hardware.peak_flops_per_s("bf16" if recipe.dtype == "fp8" else recipe.dtype)
    if peak is None or wide is None:
        known = ", ".join(dtype for dtype, _ in hardware.peaks_flops_per_s)
        raise UsageError(f"{hardware.name} has no peak at {recipe.dtype}; known: {known}")
    fused = efficiency.attention if recipe.flash_attention else efficiency.unfused_attention
    return Speed(
        linear_flops_per_ns=peak * efficiency.gemm / 1e9,
        head_flops_per_ns=wide * efficiency.gemm / 1e9,
        attention_flops_per_ns=wide * fused / 1e9,
        bytes_per_ns=hardware.memory_bytes_per_s * efficiency.memory / 1e9,
        launch_ns=efficiency.launch_ns,
        tile=efficiency.tile,
        multiprocessors=hardware.multiprocessors,
    )


def _waves(rows: float, columns: float, tile: int, multiprocessors: int) -> float:
    """How much longer a product takes because its last wave of tiles is not full, a ratio >= 1."""
    if not tile or not multiprocessors:
        return 1.0
    tiles = math.ceil(rows / tile) * math.ceil(columns / tile)
    waves = math.ceil(tiles / multiprocessors)
    return waves * multiprocessors * tile * tile / (rows * columns)
