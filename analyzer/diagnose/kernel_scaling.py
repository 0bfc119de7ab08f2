"""The duration of a recorded kernel on another device, by the model's rates on both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import cast

import numpy as np

from stepsplit.analyzer.diagnose.replay import Float
from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.config import (
    AttentionKernel,
    Dtype,
    HardwareConfig,
    JobConfig,
    ModelConfig,
    ParallelConfig,
    TrainingConfig,
)
from stepsplit.analyzer.model.hardware_config import load_attention_rate
from stepsplit.analyzer.model.layer_time import DeviceSpeed, compute_device_speed
from stepsplit.analyzer.split.kernels import (
    ATTENTION_FAMILY,
    GEMM_FAMILIES,
    MEMORY_FAMILIES,
    KernelWork,
    compute_self_ns,
    find_attention_kernel,
    find_dtype,
    find_kernel_work,
    is_backward,
    parse_attention,
    parse_gemm,
)
from stepsplit.analyzer.trace import EventKind, Int64, RankTrace

# How the kernels of a rank scale.

KINDS = ("gemm", "attention", "memory", "unknown")
"""Kinds of kernels by what limits them."""

ERRORS = {"gemm": 0.45, "attention": 0.5, "memory": 0.35, "unknown": 0.6}
"""Error (a ratio) of the duration of all kernels of a kind on another device. On the public pair of
recordings with long kernels (docs/causes.md) the largest are 0.42 for GEMMs, 0.29 for attention and
0.14 for memory-bound kernels; no pair has unknown ones."""

SHORTEST_NS = {"gemm": 5_000, "attention": 5_000, "memory": 2_000, "unknown": 2_000}
"""Duration of a GPU kernel of little work, which no rate shortens: the small kernels of BERT in the
public recordings take 5.0 to 5.8 us (GEMM) and 1.6 to 2.2 us (elementwise) on H100 and MI300X."""

LARGE_GEMM = 8_192
"""Rows, columns and inner size assumed for a GEMM without recorded shapes."""

LONG_SEQUENCE = 4_096
"""Tokens assumed for attention without recorded shapes."""


@dataclass(frozen=True, slots=True)
class KernelScaling:
    """The compute events of a rank and how their durations change; columns of equal length.

    row indexes the events and kind KINDS; took_ns is the duration (of an op on a CPU without the
    ops inside it); factor, low and high are the ratio of the new duration to the old and its band;
    by_shape marks kernels whose shapes are known.
    """

    row: Int64
    kind: Int64
    took_ns: Int64
    factor: Float
    low: Float
    high: Float
    by_shape: np.ndarray[tuple[int], np.dtype[np.bool_]]


def scale_kernels(
    trace: RankTrace, source: HardwareConfig, target: HardwareConfig
) -> KernelScaling:
    """Scale the compute events of a rank recorded on source to target."""
    rows = np.flatnonzero(trace.kinds.computes)
    took = trace.events.dur_ns[rows] if trace.on_device else compute_self_ns(trace.events, rows)
    work, work_id = find_kernel_work(trace, rows)
    family_of = {
        trace.events.names[name]: trace.kinds.find_family(name)
        for name in np.unique(trace.events.name_id[rows]).tolist()
    }
    rates = _Rates(source, target)
    kinds = np.array(
        [KINDS.index(classify_family(family_of[one.name])) for one in work], dtype=np.int64
    )
    ratios = [
        rates.find_ratio(KINDS[kind], one) for kind, one in zip(kinds.tolist(), work, strict=True)
    ]
    ratio = np.array([one.value for one in ratios])[work_id]
    by_shape = np.array([one.by_shape for one in ratios], dtype=np.bool_)[work_id]
    kind = kinds[work_id]
    fused = trace.kinds.kind[rows] == EventKind.FUSED
    kind[fused] = KINDS.index("unknown")
    shortest = np.array([SHORTEST_NS[one] for one in KINDS])[kind] * trace.on_device
    kept = np.minimum(took, shortest) / np.maximum(took, 1)
    factor = np.where(fused, 1.0, kept + (1 - kept) * ratio)
    error = 1 + np.array([ERRORS[one] for one in KINDS])[kind] * (source != target)
    return KernelScaling(rows, kind, took, factor, factor / error, factor * error, by_shape)


def classify_family(family: str) -> str:
    """The kind (of KINDS) of a kernel family."""
    if family in GEMM_FAMILIES:
        return "gemm"
    if family == ATTENTION_FAMILY:
        return "attention"
    return "memory" if family in MEMORY_FAMILIES else "unknown"


@dataclass(frozen=True, slots=True)
class _Ratio:
    value: float
    by_shape: bool


@dataclass(frozen=True, slots=True)
class _Rates:
    """The rates of the model on two devices."""

    source: HardwareConfig
    target: HardwareConfig

    def find_ratio(self, kind: str, work: KernelWork) -> _Ratio:
        """The time on target over that on source, for work of this kind."""
        match kind:
            case "gemm":
                return self._compare_gemm(work)
            case "attention":
                return self._compare_attention(work)
        return _Ratio(self._compare_memory(), kind == "memory")

    def _compare_gemm(self, work: KernelWork) -> _Ratio:
        shape, dtype = parse_gemm(work.shapes), find_dtype(work)
        size = (LARGE_GEMM,) * 3 if shape is None else (shape.rows, shape.columns, shape.inner)
        before, after = (
            _time_gemm(build_device_speed(one, dtype), *size) for one in (self.source, self.target)
        )
        return _Ratio(after / before, shape is not None)

    def _compare_attention(self, work: KernelWork) -> _Ratio:
        shape, dtype = parse_attention(work.shapes), find_dtype(work)
        # Fused attention has no fp32 on GPUs: a name without a dtype is of 16 bits.
        dtype = "bf16" if shape is None and dtype == "fp32" else dtype
        tokens = LONG_SEQUENCE if shape is None else shape.tokens
        kernel = find_attention_kernel(work.name)
        devices = (self.source, self.target)
        if not all(load_attention_rate(cast(AttentionKernel, kernel), d.family) for d in devices):
            kernel = ""
        before, after = (build_device_speed(one, dtype, tokens, kernel) for one in devices)
        if is_backward(work.name):
            ratio = before.attention_backward_flops_per_ns / after.attention_backward_flops_per_ns
        else:
            ratio = before.attention_flops_per_ns / after.attention_flops_per_ns
        return _Ratio(ratio, shape is not None)

    def _compare_memory(self) -> float:
        before, after = (build_device_speed(one, "fp32") for one in (self.source, self.target))
        return before.bytes_per_ns / after.bytes_per_ns


def _time_gemm(speed: DeviceSpeed, rows: int, columns: int, inner: int) -> float:
    """Time of a GEMM without its launch; one that does not fill the device with tiles of the
    model's size runs in smaller ones."""
    tiles = math.ceil(rows / max(speed.tile, 1)) * math.ceil(columns / max(speed.tile, 1))
    tile = speed.tile if tiles >= speed.multiprocessors else 0
    return replace(speed, launch_ns=0.0, tile=tile).compute_gemm_ns(rows, columns, inner)


_DTYPES: dict[str, Sequence[str]] = {
    "fp8": ("fp8", "bf16", "fp16", "fp32"),
    "bf16": ("bf16", "fp16", "fp32"),
    "fp16": ("fp16", "bf16", "fp32"),
    "tf32": ("tf32", "bf16", "fp32"),
    "fp32": ("fp32", "bf16"),
}
"""The dtype at which a device computes: the first one of which it has a peak."""


@lru_cache(maxsize=1024)
def build_device_speed(
    hardware: HardwareConfig, dtype: str, tokens: int = LONG_SEQUENCE, kernel: str = ""
) -> DeviceSpeed:
    """The rates of the model on a device for one dtype, and for attention of these tokens.

    kernel is the implementation of attention; "" that of torch's SDPA. Raises UsageError without a
    peak.
    """
    peaks = dict(hardware.peaks_flops_per_s)
    known = next((one for one in _DTYPES[dtype] if one in peaks), None)
    if known is None:
        raise UsageError(f"{hardware.name} has no peak FLOP/s at {dtype}; give one in its file")
    if known == "tf32":
        # The model has no tf32: fp32 at the peak of its matrix units.
        peaks["fp32"], known = peaks["tf32"], "fp32"
        hardware = replace(hardware, peaks_flops_per_s=tuple(peaks.items()))
    training = TrainingConfig(
        seq_len=tokens, micro_batch=1, global_batch=1, dtype=cast(Dtype, known), framework="ddp",
        attention_kernel=cast(AttentionKernel, kernel),
    )  # fmt: skip
    return compute_device_speed(JobConfig(_ONE_LAYER, ParallelConfig(), training, hardware))


_ONE_LAYER = ModelConfig(
    layers=1, hidden=4_096, heads=32, kv_heads=32, head_size=128, ffn=16_384, vocab=32_000
)
