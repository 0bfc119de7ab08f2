"""What a kernel computed, by its name and the input shapes of the op that launched it."""

from __future__ import annotations

import json
import re
from math import prod

from msgspec import Struct

from stepsplit.analyzer.split.kernels import KernelWork

GEMM_FAMILIES = ("gemm", "convolution", "moe")
"""Kernel families that are limited by FLOP/s."""

ATTENTION_FAMILY = "attention"

MEMORY_FAMILIES = (
    "elementwise", "memory", "reduce", "normalization", "softmax", "embedding", "optimizer",
    "random", "fused", "quantize", "pooling", "sort",
)  # fmt: skip
"""Kernel families that are limited by memory bandwidth."""


class GemmShape(Struct, frozen=True):
    """count products of (rows x inner) by (inner x columns)."""

    rows: int
    columns: int
    inner: int
    count: int = 1

    @property
    def flops(self) -> int:
        return 2 * self.count * self.rows * self.columns * self.inner


class AttentionShape(Struct, frozen=True):
    """Fused attention of batch x heads heads of size head, over tokens queries and keys.

    keys may be fewer heads (GQA).
    """

    batch: int
    heads: int
    tokens: int
    head: int

    @property
    def causal_forward_flops(self) -> int:
        """FLOPs of the forward of the causal half."""
        return 2 * self.batch * self.heads * self.tokens * self.tokens * self.head


def parse_gemm(shapes: str | None) -> GemmShape | None:
    """The GEMM of these input shapes; None if they are unknown or not those of a GEMM.

    The last two matrices are multiplied: (m, k) by (k, n), or by (n, k) as in aten::linear; those
    of three dimensions are a batch.
    """
    matrices = [dims for dims in _parse_dims(shapes) if len(dims) >= 2]
    if len(matrices) < 2 or any(size <= 0 for dims in matrices[-2:] for size in dims):
        return None
    left, right = matrices[-2:]
    if len(left) == len(right) == 3 and left[0] == right[0] and left[2] == right[1]:
        return GemmShape(left[1], right[2], left[2], left[0])
    if len(right) != 2:
        return None
    if left[-1] == right[0]:
        return GemmShape(prod(left[:-1]), right[1], left[-1])
    if left[-1] == right[1]:
        return GemmShape(prod(left[:-1]), right[0], left[-1])
    return None


def parse_attention(shapes: str | None) -> AttentionShape | None:
    """The attention of these input shapes; None if they are unknown or not those of attention.

    Queries, keys and values have four dimensions, in the order batch, tokens, heads, head or batch,
    heads, tokens, head: the larger one of the middle two counts as tokens.
    """
    tensors = [dims for dims in _parse_dims(shapes) if len(dims) == 4]
    if len(tensors) < 3 or any(size <= 0 for size in tensors[0]):
        return None
    batch, one, other, head = tensors[0]
    return AttentionShape(batch, min(one, other), max(one, other), head)


def _parse_dims(shapes: str | None) -> list[list[int]]:
    """The inputs that are tensors; lists of tensors and scalars are left out."""
    end = (shapes or "").rfind("]") + 1
    if shapes is None or not shapes.startswith("["):
        return []
    try:
        inputs = json.loads(shapes[:end])
    except ValueError:
        return []
    return [dims for dims in inputs if dims and all(type(size) is int for size in dims)]


_NAMED_DTYPES = (
    ("fp8", re.compile(r"e4m3|e5m2|fp8|float8|f8f8|_F8|nvjet_(sm\d+_)?[qro]{2}")),
    ("bf16", re.compile(r"bf16|bfloat16|_BB?S_|nvjet_(sm\d+_)?t")),
    (
        "fp16",
        re.compile(
            r"fp16|float16|_h[a-z]*gemm|hgemm|f16f16|s16816gemm|_HH?S_|half|nvjet_(sm\d+_)?h"
        ),
    ),
    ("tf32", re.compile(r"tf32|s1688|nvjet_(sm\d+_)?s")),
)
"""cuBLAS names its nvjet kernels by a letter for each operand: t bf16, h fp16, s fp32, two of them
for the inputs in fp8 (nvjet_qqtst)."""


def find_dtype(work: KernelWork) -> str:
    """The dtype of a kernel's inputs: that of the recorded shapes, else by its name; fp32 if
    neither has one. tf32 is that of fp32 inputs on matrix units."""
    stated = (work.shapes or "").rpartition("]")[2].split()
    for text in (*stated, work.name):
        for dtype, pattern in _NAMED_DTYPES:
            if pattern.search(text):
                return dtype
    return "fp32"


_BACKWARD = re.compile(r"bwd|backward|dgrad|wgrad|_dkv|_dq", re.IGNORECASE)


def is_backward(name: str) -> bool:
    """Whether a kernel says by its name that it computes gradients."""
    return _BACKWARD.search(name) is not None


_KERNELS = (
    ("flash-4", re.compile(r"flash.*sm100|fa4|FlashAttention.*Sm100", re.IGNORECASE)),
    ("flash-3", re.compile(r"FlashAttn(Fwd|Bwd)Sm90|flash.*sm90|flash_attn_3", re.IGNORECASE)),
    ("cudnn", re.compile(r"cudnn|sdpa_sm\d+", re.IGNORECASE)),
    ("aiter", re.compile(r"aiter|fmha_(fwd|bwd)_hd\d+.*(bf16|fp16).*(rtne|rtna|rtz|a16|a32)")),
    ("ck", re.compile(r"ck_tile|FmhaFwdKernel|FmhaBwd")),
    ("triton", re.compile(r"^attn_(fwd|bwd)|triton_tem|^_(attn_)?(fwd|bwd)_")),
    ("flash-2", re.compile(r"flash::?|flash_(fwd|bwd)|fmha", re.IGNORECASE)),
)


def find_attention_kernel(name: str) -> str:
    """The implementation of fused attention that this kernel is of, as `attention_kernel` in
    job.toml; "" if its name says none."""
    return next((kernel for kernel, pattern in _KERNELS if pattern.search(name)), "")
