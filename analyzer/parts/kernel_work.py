"""The FLOPs and bytes of a kernel or op by the shapes of its inputs, and what a device reaches."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import lru_cache
from math import prod
from typing import Literal

from msgspec import Struct

from stepsplit.analyzer.errors import StepsplitError
from stepsplit.analyzer.model.config import HardwareConfig
from stepsplit.analyzer.model.config_file import load_hardware
from stepsplit.analyzer.model.device_speed import (
    BACKWARD_ATTENTION,
    SUSTAINED_ATTENTION,
    DeviceSpeed,
    select_gemm_share,
)
from stepsplit.analyzer.model.hardware_config import load_attention_rate
from stepsplit.analyzer.model.preset_names import find_preset
from stepsplit.analyzer.split.kernel_shapes import (
    ATTENTION_FAMILY,
    MEMORY_FAMILIES,
    find_attention_kernel,
    find_dtype,
    is_backward,
    parse_attention,
    parse_gemm,
)
from stepsplit.analyzer.split.kernels import KernelWork

Limit = Literal["compute", "memory", ""]
"""What bounds a kernel: FLOP/s, or the memory's bandwidth; "" if its work is unknown."""

_ELEMENT_BYTES = {"fp8": 1, "bf16": 2, "fp16": 2, "tf32": 4, "fp32": 4}

_GEMM_OPS = re.compile(r"aten::(mm|addmm|bmm|baddbmm|_scaled_mm|_addmm_activation)$")
"""The ops of a CPU run that multiply themselves; those around them have the same shapes."""

_ATTENTION_OPS = re.compile(r"aten::_(scaled_dot_product_)?flash_attention\w*_for_cpu\w*$")

_SECOND_KERNEL = re.compile(r"\A(?=.*split_?k)(?=.*reduce)", re.IGNORECASE)
"""The second kernel of a GEMM with a split inner dimension, which has the shapes of the first."""

ATTENTION_BACKWARD_FLOPS = 2.5
"""FLOPs of fused attention's backward over its forward: five products for two (Dao, 2307.08691)."""

_LISTS = re.compile(r"_foreach_|multi_tensor|_fused_(adam|sgd|adagrad)")
"""Ops on lists of tensors, of which a device runs a part in each kernel."""


class CallWork(Struct, frozen=True):
    """FLOPs and bytes moved by one call."""

    flops: int
    bytes: int
    limit: Limit


def is_product(op: str) -> bool:
    """Whether an op of a CPU run multiplies itself, and is not one that calls such an op."""
    return _GEMM_OPS.search(op) is not None or _ATTENTION_OPS.search(op) is not None


def estimate_work(work: KernelWork, family: str, on_device: bool) -> CallWork | None:
    """The work of a kernel by its shapes; None if they are unknown or say nothing of it.

    FLOPs are those that a kernel executes, as the model times them: of fused attention the causal
    half, in the backward 2.5 times as many, for it computes the scores again. The FLOPs of a step
    by the conventions of model/parameters.py differ from that: in C5 this backward is twice the
    forward, C1 has both halves. What is elementwise reads each input and writes a result of the
    largest one's size.
    """
    if work.shapes is None or not work.shapes.startswith("[") or _SECOND_KERNEL.search(work.name):
        return None
    size = _ELEMENT_BYTES[find_dtype(work)]
    if family == "moe" and (grouped := _parse_grouped(work.shapes)) is not None:
        tokens, inner, columns, count = grouped
        moved = size * (tokens * inner + count * inner * columns + tokens * columns)
        return CallWork(2 * tokens * inner * columns, moved, "compute")
    if family in ("gemm", "moe") and (on_device or _GEMM_OPS.search(work.name)):
        shape = parse_gemm(work.shapes)
        if shape is None:
            return None
        moved = (
            shape.count
            * size
            * (shape.rows * shape.inner + shape.inner * shape.columns + shape.rows * shape.columns)
        )
        return CallWork(shape.flops, moved, "compute")
    if family == ATTENTION_FAMILY and (on_device or _ATTENTION_OPS.search(work.name)):
        core = parse_attention(work.shapes)
        if core is None:
            return None
        again = ATTENTION_BACKWARD_FLOPS if is_backward(work.name) else 1.0
        tensor = core.batch * core.heads * core.tokens * core.head
        moved = size * tensor * (8 if is_backward(work.name) else 4)
        return CallWork(round(again * core.causal_forward_flops), moved, "compute")
    if family in MEMORY_FAMILIES and not _LISTS.search(work.name):
        sizes = [prod(dims) for dims in _list_tensors(work.shapes)]
        if not sizes or min(sizes) < 0:
            return None
        return CallWork(0, size * (sum(sizes) + max(sizes)), "memory")
    return None


def _list_tensors(shapes: str) -> Iterator[list[int]]:
    """The tensors among the inputs, those of lists included."""
    try:
        inputs = json.loads(shapes[: shapes.rfind("]") + 1])
    except (ValueError, RecursionError):
        return
    for dims in inputs if isinstance(inputs, list) else ():
        if not isinstance(dims, list):
            continue
        for own in dims if dims and isinstance(dims[0], list) else [dims]:
            if own and all(type(size) is int for size in own):
                yield own


def _parse_grouped(shapes: str) -> tuple[int, int, int, int] | None:
    """(tokens, inner, columns, groups) of a grouped GEMM: the tokens of all groups by a matrix for
    each group."""
    tensors = [dims for dims in _list_tensors(shapes) if len(dims) > 1]
    if len(tensors) < 2 or len(tensors[0]) != 2 or len(tensors[1]) != 3:
        return None
    (tokens, inner), (count, one, other) = tensors[:2]
    if inner not in (one, other) or min(tokens, inner, one, other) <= 0:
        return None
    return tokens, inner, other if inner == one else one, count


# What a device reaches.


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
            result_bytes=_ELEMENT_BYTES[dtype],
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
            operand_bytes=_ELEMENT_BYTES.get(dtype, 2),
            result_ratio=efficiency.gemm_result,
        )
    return DeviceLimits(hardware, speeds)
