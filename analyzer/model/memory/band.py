"""How sure a predicted peak is, and what the allocator takes from the device for it."""

from __future__ import annotations

from dataclasses import dataclass

from stepsplit.analyzer.model.formula import Formula
from stepsplit.analyzer.model.memory.calibrate import Calibration
from stepsplit.analyzer.model.memory.frameworks import coefficients
from stepsplit.analyzer.model.prediction import StageMemory
from stepsplit.analyzer.model.spec.job import Job

RESERVED = Formula(
    "memory.reserved",
    "reserved = 1.05 (1.03 to 1.09) allocated",
    "SimuMax, docs/b200: max_reserved over max_allocated of 43 Megatron-LM runs",
)
RESERVED_OVER_ALLOCATED = (1.03, 1.05, 1.09)
CALIBRATED = (0.9, 1.1)
"""What a measured peak may be over a calibrated one."""
CONTEXT_BYTES = 1 << 30
"""Outside PyTorch's allocator: the CUDA context and NCCL's buffers, 0.5 to 2 GiB a rank."""


@dataclass(frozen=True, slots=True)
class BytesBand:
    """Bytes with what they may well be instead: low_bytes <= bytes <= high_bytes."""

    bytes: int
    low_bytes: int
    high_bytes: int


def reserved_bytes(allocated_bytes: int) -> BytesBand:
    """What PyTorch's allocator takes from the device to serve so many allocated bytes."""
    low, middle, high = (round(allocated_bytes * ratio) for ratio in RESERVED_OVER_ALLOCATED)
    return BytesBand(middle, low, high)


def allocated_band(
    job: Job, stage: StageMemory, calibration: Calibration | None = None
) -> BytesBand:
    """A stage's predicted peak with what a measurement may show, by framework or calibration."""
    found = coefficients(job.recipe.framework)
    low, high = CALIBRATED if calibration else (found.low, found.high)
    total = stage.total_bytes
    return BytesBand(total, round(total * low), round(total * high))
