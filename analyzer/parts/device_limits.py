"""What a device reaches: its peaks, and the rates that the model has for its kernels."""

from __future__ import annotations

from functools import lru_cache

from msgspec import Struct

from stepsplit.analyzer.errors import StepsplitError
from stepsplit.analyzer.model.config import HardwareConfig
from stepsplit.analyzer.model.device_speed import (
    BACKWARD_ATTENTION,
    SUSTAINED_ATTENTION,
    DeviceSpeed,
    select_gemm_share,
)
from stepsplit.analyzer.model.hardware_config import load_attention_rate, load_hardware
from stepsplit.analyzer.model.preset_names import find_preset
from stepsplit.analyzer.parts.kernel_work import ELEMENT_BYTES, CallWork, Limit
from stepsplit.analyzer.split.kernel_shapes import (
    ATTENTION_FAMILY,
    find_attention_kernel,
    find_dtype,
    is_backward,
    parse_attention,
    parse_gemm,
)
from stepsplit.analyzer.split.kernels import KernelWork


class DeviceLimits(Struct, frozen=True):
    """What a device can do, and what the model says that kernels reach of it.

    Attributes:
        hardware: The device.
        speeds: The speed of the model by dtype.
    """

    hardware: HardwareConfig
    speeds: dict[str, DeviceSpeed]

    def find_peak(self, dtype: str, limit: Limit) -> float | None:
        """The peak in FLOP/s of the dtype, or of the memory in bytes/s."""
        if limit == "memory":
            return self.hardware.memory_bytes_per_s
        return self.hardware.peak_flops_per_s(dtype)

    def compute_reachable_ns(self, one: KernelWork, work: CallWork, family: str) -> float | None:
        """The time of a call at the rate that the model has for its shape; None without one."""
        dtype = find_dtype(one)
        speed = self.speeds.get(dtype) or next(iter(self.speeds.values()))
        if work.limit == "memory":
            return speed.compute_memory_ns(work.bytes, 1)
        if dtype not in self.speeds:
            return None
        if family == ATTENTION_FAMILY:
            return self._compute_attention_ns(one, work, dtype)
        shape = parse_gemm(one.shapes)
        if shape is None:
            return work.flops / speed.linear_flops_per_ns + work.bytes / speed.bytes_per_ns
        return speed.compute_gemm_ns(
            shape.rows, shape.columns, shape.inner, shape.count,
            result_bytes=ELEMENT_BYTES[dtype],
        )  # fmt: skip

    def _compute_attention_ns(self, one: KernelWork, work: CallWork, dtype: str) -> float | None:
        kernel = find_attention_kernel(one.name)
        known = load_attention_rate(kernel, self.hardware.family) if kernel else None  # type: ignore[arg-type]
        core, peak = parse_attention(one.shapes), self.hardware.peak_flops_per_s(dtype)
        if known is None or core is None or peak is None:
            return None
        scale = peak / known.peak_flops_per_s * self.hardware.clock * SUSTAINED_ATTENTION
        rate, start = known.rate.forward_flops_per_s, known.rate.start_tokens
        if is_backward(one.name):
            rate = known.rate.backward_flops_per_s or rate * BACKWARD_ATTENTION
            start = known.rate.backward_start_tokens
        rate *= scale * core.tokens / (core.tokens + start)
        return work.flops / rate * 1e9


@lru_cache(16)
def find_limits(device: str) -> DeviceLimits | None:
    """The limits of a device of this name as its driver reports it; None without a preset."""
    preset = find_preset(device)
    if preset is None:
        return None
    try:
        hardware = load_hardware(preset)
    except StepsplitError:
        return None
    efficiency = hardware.efficiency
    speeds = {}
    for dtype, peak in hardware.peaks_flops_per_s:
        share = select_gemm_share(efficiency, "fp8" if dtype == "fp8" else "bf16")
        speeds[dtype] = DeviceSpeed(
            linear_flops_per_ns=peak * share * hardware.clock / 1e9,
            head_flops_per_ns=peak * share * hardware.clock / 1e9,
            attention_flops_per_ns=0.0,
            attention_backward_flops_per_ns=0.0,
            bytes_per_ns=hardware.memory_bytes_per_s * efficiency.memory / 1e9,
            launch_ns=efficiency.launch_ns,
            tile=efficiency.tile,
            multiprocessors=hardware.multiprocessors,
            operand_bytes=ELEMENT_BYTES.get(dtype, 2),
            result_ratio=efficiency.gemm_result,
        )
    return DeviceLimits(hardware, speeds)
