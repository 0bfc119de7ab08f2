"""Speed of one device: what its GEMMs, attention and memory-bound kernels reach."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.comm_ops import is_fused_ring
from stepsplit.analyzer.model.config import (
    QUANTIZED,
    AttentionKernel,
    AttentionRate,
    Efficiency,
    GemmDtype,
    HardwareConfig,
    JobConfig,
)
from stepsplit.analyzer.model.formulas import Formula
from stepsplit.analyzer.model.hardware_config import (
    find_efficiency,
    find_efficiency_origins,
    list_attention_kernels,
    load_attention_rate,
)
from stepsplit.analyzer.model.profile import Origin, load_device

# Kernel time on one device: a roofline with the sum of its two sides.

KERNEL = Formula(
    "step.kernel",
    "t = FLOP / (peak e_gemm) + bytes / (memory bandwidth e_mem) + launch; the sum fits measured"
    " steps better than the larger of the two; bytes of a GEMM's result count r_gemm times",
    "after Williams et al., Roofline, CACM 2009; constants from the rows that the presets name",
)


@dataclass(frozen=True, slots=True)
class DeviceSpeed:
    """FLOP/s and memory bandwidth that the job's kernels reach, per ns."""

    linear_flops_per_ns: float
    head_flops_per_ns: float
    attention_flops_per_ns: float
    attention_backward_flops_per_ns: float
    bytes_per_ns: float
    launch_ns: float
    tile: int = 0
    multiprocessors: int = 0
    operand_bytes: float = 2
    weight_gradient_bytes: int = 2
    result_ratio: float = 1.0
    gemm_ratios: tuple[GemmRatio, ...] = ()
    head_ratios: tuple[GemmRatio, ...] = ()
    memory_ratio: float = 1.0

    @property
    def formulas(self) -> tuple[Formula, ...]:
        """The formulas of its kernels' times."""
        measured = bool(self.gemm_ratios or self.head_ratios)
        loaded = (LOADED,) if self.memory_ratio != 1.0 else ()
        return (KERNEL, *loaded, *(GEMM_TABLE,) * measured)

    @property
    def head_speed(self) -> DeviceSpeed:
        """Speed of the head, whose GEMMs stay in bf16 with fp8 training."""
        return replace(
            self,
            linear_flops_per_ns=self.head_flops_per_ns,
            operand_bytes=2,
            gemm_ratios=self.head_ratios,
        )

    def compute_gemm_ns(
        self, rows: float, columns: float, inner: float, count: int = 1, result_bytes: int = 2
    ) -> float:
        """Time of count GEMMs (rows x inner) (inner x columns) in one kernel, with result_bytes
        moved per element of the result. In a grouped GEMM one result is written beside the next."""
        result_ratio = self.result_ratio if count == 1 else 1.0
        moved_bytes = self.operand_bytes * (rows + columns) * inner
        moved_bytes += result_ratio * result_bytes * rows * columns
        ratio = _compute_wave_ratio(rows, columns, count, self.tile, self.multiprocessors)
        work_ns = 2.0 * rows * columns * inner * ratio / self.linear_flops_per_ns
        time_ns = count * (work_ns + moved_bytes / self.bytes_per_ns) + self.launch_ns
        if self.gemm_ratios and count == 1:
            return time_ns * interpolate_ratio(self.gemm_ratios, rows, columns, inner)
        return time_ns

    def compute_memory_ns(self, count_bytes: float, kernels: int = 0) -> float:
        """Time of a number of kernels that read and write count_bytes in total."""
        return count_bytes / (self.bytes_per_ns * self.memory_ratio) + kernels * self.launch_ns


GEMM_TABLE = Formula(
    "step.gemm_table",
    "t r, r the geometric mean of measured / modelled time of the table's GEMMs, weighted by 1/d^4;"
    " d^2 = the sum of log2(size / size of theirs)^2 over rows, columns and inner size; grouped"
    " GEMMs keep t",
    "Shepard, A two-dimensional interpolation function, ACM 1968; [hardware] gemms",
)


@dataclass(frozen=True, slots=True)
class GemmRatio:
    """Measured time over the model's of a GEMM, and its shape as log2 of rows, columns, inner."""

    shape: tuple[float, float, float]
    ratio: float


def interpolate_ratio(
    known: tuple[GemmRatio, ...], rows: float, columns: float, inner: float
) -> float:
    """The ratio of measured to modelled time at a shape, from those of known shapes
    (GEMM_TABLE)."""
    shape = _measure_shape(rows, columns, inner)
    weights = total = 0.0
    for one in known:
        squared = sum((a - b) ** 2 for a, b in zip(shape, one.shape, strict=True))
        if squared < _SAME_SHAPE:
            return one.ratio
        weight = 1 / squared**2
        weights += weight
        total += weight * math.log(one.ratio)
    return math.exp(total / weights)


def _measure_shape(rows: float, columns: float, inner: float) -> tuple[float, float, float]:
    return math.log2(rows), math.log2(columns), math.log2(inner)


_SAME_SHAPE = 1e-9
"""Squared distance of shapes up to which a measured GEMM counts as the same."""


def _compare_gemms(
    hardware: HardwareConfig, dtype: str, speed: DeviceSpeed
) -> tuple[GemmRatio, ...]:
    """The measured GEMMs of a dtype over their times at the model's speed."""
    ratios = []
    for one in hardware.gemms:
        if one.dtype == dtype:
            measured_ns = 2.0 * one.rows * one.columns * one.inner / one.flops_per_s * 1e9
            modelled_ns = speed.compute_gemm_ns(one.rows, one.columns, one.inner)
            shape = _measure_shape(one.rows, one.columns, one.inner)
            ratios.append(GemmRatio(shape, measured_ns / modelled_ns))
    return tuple(ratios)


COUNTED_GEMM = 1.16
"""Rate of GEMMs where all other kernels are counted, over the family's constant, which was fitted
to runs with others that are not: three Llama runs of transformers on an H200."""

ROW_SCALED = 0.8
"""Rate of fp8 GEMMs with a scale per row over that with a scale per tensor: 6,412 tokens/s against
7,186, and 5,760 in bf16, of Llama 3 8B on 8 H100 (pytorch/torchtitan, commit 7a04053)."""


def compute_device_speed(job: JobConfig) -> DeviceSpeed:
    """Speed of the job's device at its dtype. Raises UsageError if its peak is unknown."""
    hardware, training = job.hardware, job.training
    efficiency = hardware.efficiency
    peak = hardware.peak_flops_per_s(training.dtype)
    wide_peak = find_wide_peak(job)
    if peak is None or wide_peak is None:
        known_dtypes = ", ".join(dtype for dtype, _ in hardware.peaks_flops_per_s)
        missing = training.dtype if peak is None else "bf16, in which other GEMMs run"
        raise UsageError(f"{hardware.name} has no peak FLOP/s at {missing}; known: {known_dtypes}")
    gemm = select_gemm_share(efficiency, training.dtype)
    if training.dtype == "fp8" and training.fp8_scaling == "row":
        gemm *= ROW_SCALED
    # Where all other kernels are counted, and the rate of GEMMs is one of published runs.
    is_eager = job.runs_transformers and not training.compile
    is_fitted = find_efficiency_origins(hardware.family, efficiency)["gemm"] is Origin.FITTED
    counted = COUNTED_GEMM if is_eager and is_fitted else 1.0
    gemm *= counted
    attention = find_attention_rate(job, wide_peak)
    head = wide_peak * efficiency.gemm * counted * hardware.clock
    if is_head_unaligned(job):
        # In proportion to the GEMMs of published runs, so that a calibration of GEMMs holds for the
        # head too; an unknown family has none.
        published = find_efficiency(hardware.family) or efficiency
        head = min(head, UNALIGNED_FLOPS_PER_S * efficiency.gemm / published.gemm)
    speed = DeviceSpeed(
        linear_flops_per_ns=peak * gemm * hardware.clock / 1e9,
        head_flops_per_ns=head / 1e9,
        attention_flops_per_ns=attention.forward_flops_per_s / 1e9,
        attention_backward_flops_per_ns=attention.backward_flops_per_s / 1e9,
        bytes_per_ns=hardware.memory_bytes_per_s * efficiency.memory / 1e9,
        launch_ns=efficiency.launch_ns,
        memory_ratio=compute_memory_ratio(job),
        tile=efficiency.tile,
        multiprocessors=hardware.multiprocessors,
        operand_bytes=OPERAND_BYTES.get(training.dtype, 2),
        weight_gradient_bytes=_count_weight_gradient_bytes(job),
        result_ratio=efficiency.gemm_result,
    )
    if not hardware.gemms:
        return speed
    return replace(
        speed,
        gemm_ratios=_compare_gemms(hardware, training.dtype, speed),
        head_ratios=_compare_gemms(hardware, _find_wide_dtype(job), speed.head_speed),
    )


OPERAND_BYTES: Mapping[GemmDtype, float] = {"fp8": 1, "nvfp4": 0.5 + 1 / 16}
"""Bytes of an operand that is cast: in nvfp4 sixteen elements share a scale of one byte."""


def select_gemm_share(efficiency: Efficiency, dtype: GemmDtype) -> float:
    """The fraction of the peak of a dtype that large GEMMs reach; of one without a constant that of
    the next wider."""
    if dtype == "nvfp4" and efficiency.gemm_nvfp4 is not None:
        return efficiency.gemm_nvfp4
    if dtype in QUANTIZED and efficiency.gemm_fp8 is not None:
        return efficiency.gemm_fp8
    return efficiency.gemm


LOADED = Formula(
    "step.loaded",
    "1 / (1/B + 1/(n 107 GB/s)): torch's own kernels, one for each operation, reach the bandwidth B"
    " less what n multiprocessors can ask for: 2.71 of 3.35 TB/s on H100, 3.58 of 4.8 on H200",
    "own measurements: torch's AdamW by lists of tensors moves 80 bytes per parameter, on an H100"
    " those of 1.92B in 56.4 ms (2.72 TB/s); the H200's is the family's constant",
)


def compute_memory_ratio(job: JobConfig) -> float:
    """Bandwidth of the job's memory-bound kernels over that of fused ones (LOADED).

    1 where the two were not measured apart, as in other families than hopper, where a share is
    stated, and where the bytes of torch's operations were not counted (layer norms cast by FSDP).
    """
    hardware, efficiency = job.hardware, job.hardware.efficiency
    is_llama = job.profile.model.casts == "fsdp" and job.model.norm == "rms"
    is_eager = (job.runs_transformers or is_llama) and not job.training.compile
    each_bytes_per_ns = load_device(hardware.family).multiprocessor_bytes_per_ns
    limit_bytes_per_ns = hardware.multiprocessors * each_bytes_per_ns
    origin = find_efficiency_origins(hardware.family, efficiency)["memory"]
    if not (is_eager and limit_bytes_per_ns) or origin is Origin.STATED:
        return 1.0
    bytes_per_ns = hardware.memory_bytes_per_s / 1e9
    return 1 / (efficiency.memory * (1 + bytes_per_ns / limit_bytes_per_ns))


UNALIGNED = Formula(
    "step.unaligned_head",
    "124 TFLOP/s at most: tensor cores take no rows of the head that are not multiples of 16 bytes;"
    " a vocabulary that is a multiple of 64 avoids it (Megatron-LM pads it)",
    "own measurement: GPT-2's head, 50,257 columns, on an H200 runs at 95 forward, 141 and 151"
    " TFLOP/s backward, by kernels of the Turing generation",
)

UNALIGNED_FLOPS_PER_S = 124e12
"""The harmonic mean of the three rates of UNALIGNED."""

ALIGNED_COLUMNS = 8
"""Columns in 16 bits that fill 16 bytes."""


def is_head_unaligned(job: JobConfig) -> bool:
    """Whether the rows of the head's matrix on a rank are not multiples of 16 bytes, in frameworks
    that take a model's vocabulary as it is."""
    columns = -(-job.padded_vocab // job.parallel.vocab_split)
    is_odd = columns % ALIGNED_COLUMNS != 0 and job.training.dtype != "fp32"
    return is_odd and job.profile.model.odd_vocabulary


def compute_fp32_speed(job: JobConfig, speed: DeviceSpeed) -> DeviceSpeed:
    """Speed of GEMMs in fp32, which run outside of the tensor cores. Raises UsageError."""
    peak = job.hardware.peak_flops_per_s("fp32")
    if peak is None:
        raise UsageError(
            f"{job.hardware.name} has no peak FLOP/s at fp32, in which experts run under autocast;"
            " set peaks.fp32 of [hardware]"
        )
    flops_per_ns = peak * job.hardware.efficiency.gemm * job.hardware.clock / 1e9
    return replace(speed, linear_flops_per_ns=flops_per_ns, operand_bytes=4, gemm_ratios=())


def _count_weight_gradient_bytes(job: JobConfig) -> int:
    """Bytes moved per weight by its gradient's GEMM (ACCUMULATE).

    On A100, whose GEMMs fill no waves by the model either, sums overlap: MegaScale's runs with fp32
    sums would be 5 % too slow with their bytes.
    """
    sums_in_gemm = job.profile.times.accumulation == "gemm"
    if not sums_in_gemm or not job.hardware.efficiency.tile:
        return 2
    return 1 + job.training.gradient_bytes


def _compute_wave_ratio(
    rows: float, columns: float, count: int, tile: int, multiprocessors: int
) -> float:
    """Slowdown of count GEMMs in one kernel because tiles and the last wave of them are not full, a
    ratio >= 1."""
    if not tile or not multiprocessors:
        return 1.0
    tiles = count * math.ceil(rows / tile) * math.ceil(columns / tile)
    waves = math.ceil(tiles / multiprocessors)
    return waves * multiprocessors * tile * tile / (count * rows * columns)


# The rate of attention: by kernel, hardware and the number of tokens that a call sees.

ATTENTION = Formula(
    "step.attention",
    "rate of a kernel of fused attention at s tokens: 0.92 R s / (s + s0), scaled with the peak of"
    " the GPU; the backward has an R and s0 of its own; clocks in a training step are lower than in"
    " a benchmark (0.92)",
    "published benchmarks that presets/attention.toml names; 0.92: fitted",
)

BACKWARD_ATTENTION = 0.8
"""Rate of fused attention's backward over that of its forward where only the latter is known.
Dao, FlashAttention-2, arXiv:2307.08691, section 4.1."""

NARROW_HEAD = 64
"""Size of heads up to which a kernel's rate for narrow ones applies."""

SUSTAINED_ATTENTION = 0.92
"""Rate of an attention kernel in a training step over that in its benchmark: clocks are lower."""


def choose_attention_kernel(job: JobConfig) -> AttentionKernel:
    """The stated kernel, or the one that the framework calls.

    On Hopper and Blackwell that is cuDNN's, through Transformer Engine in Megatron-LM, and through
    torch's SDPA, which prefers it since torch 2.10 (pytorch/pytorch, cuda/sdp_utils.cpp); else
    FlashAttention 2.
    """
    if job.training.attention_kernel:
        return job.training.attention_kernel
    device = load_device(job.hardware.family)
    if device.cudnn and job.profile.model.cudnn:
        return "cudnn"
    return cast(AttentionKernel, device.attention_kernel)


def find_attention_rate(job: JobConfig, peak_flops_per_s: float) -> AttentionRate:
    """What attention reaches in this job, start_tokens already applied.

    By precedence: unfused, measured by the user, a constant fraction of the peak, the published
    rate of the kernel.
    """
    hardware, efficiency = job.hardware, job.hardware.efficiency
    share = efficiency.attention if hardware.attention is None else 0.0
    if not job.training.flash_attention:
        share = efficiency.unfused_attention
    if share:
        forward = peak_flops_per_s * share * hardware.clock
        return AttentionRate(forward, forward * BACKWARD_ATTENTION)
    tokens = count_attended_tokens(job)
    if hardware.attention is not None:
        return _slow_by_start(hardware.attention, tokens, 1.0)
    name = choose_attention_kernel(job)
    kernel = load_attention_rate(name, hardware.family)
    if kernel is None:
        known = ", ".join(list_attention_kernels(hardware.family)) or "none"
        raise UsageError(
            f"no published rate of {name} on {hardware.family} (known: {known}); set"
            " attention_kernel, or forward and backward of [hardware.attention]"
        )
    scale = peak_flops_per_s / kernel.peak_flops_per_s * hardware.clock * SUSTAINED_ATTENTION
    rate = _slow_by_start(kernel.rate, tokens, scale)
    if kernel.whole_backward:
        # It takes as long as without windows, for less work.
        whole = job.training.attended_tokens / (job.parallel.ring if is_fused_ring(job) else 1)
        backward = _slow_by_start(kernel.rate, whole, scale).backward_flops_per_s
        rate = replace(rate, backward_flops_per_s=backward * tokens / whole)
    if job.model.head_size > NARROW_HEAD or job.model.latent is not None:
        return rate
    return AttentionRate(
        rate.forward_flops_per_s * kernel.narrow,
        rate.backward_flops_per_s * kernel.narrow_backward,
    )


def count_attended_tokens(job: JobConfig) -> float:
    """Tokens of the keys that one call sees: a ring passes a part of the sequence at a time.

    With sliding windows the mean of all layers, since a rate of R s / (s + s0) makes the time of a
    call proportional to s + s0.
    """
    keys = job.model.count_attended_keys(job.training.attended_tokens)
    return keys / (job.parallel.ring if is_fused_ring(job) else 1)


def is_attention_stated(job: JobConfig) -> bool:
    """Whether the hardware states a rate of fused attention, which comes before the kernel's."""
    return bool(job.hardware.attention or job.hardware.efficiency.attention)


def compute_attention_share(job: JobConfig) -> float:
    """Fraction of the peak that attention reaches in this job's forward; 0 without a peak."""
    peak = find_wide_peak(job)
    return find_attention_rate(job, peak).forward_flops_per_s / peak if peak else 0.0


def find_wide_peak(job: JobConfig) -> float | None:
    """Peak FLOP/s of what is not cast to 8 or 4 bits: attention and the head; None if unknown."""
    return job.hardware.peak_flops_per_s(_find_wide_dtype(job))


def _find_wide_dtype(job: JobConfig) -> str:
    return "bf16" if job.training.is_quantized else job.training.dtype


def _slow_by_start(rate: AttentionRate, tokens: float, scale: float) -> AttentionRate:
    return AttentionRate(
        scale * rate.forward_flops_per_s * tokens / (tokens + rate.start_tokens),
        scale * rate.backward_flops_per_s * tokens / (tokens + rate.backward_start_tokens),
    )
