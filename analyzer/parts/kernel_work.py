"""The FLOPs and bytes of a kernel or op by the shapes of its inputs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from math import prod
from typing import Literal

from msgspec import Struct

from stepsplit.analyzer.split.kernel_shapes import (
    ATTENTION_FAMILY,
    MEMORY_FAMILIES,
    find_dtype,
    is_backward,
    parse_attention,
    parse_gemm,
)
from stepsplit.analyzer.split.kernels import KernelWork

Limit = Literal["compute", "memory", ""]
"""What bounds a kernel: FLOP/s, or the memory's bandwidth; "" if its work is unknown."""

ELEMENT_BYTES = {"fp8": 1, "bf16": 2, "fp16": 2, "tf32": 4, "fp32": 4}

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
    size = ELEMENT_BYTES[find_dtype(work)]
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
