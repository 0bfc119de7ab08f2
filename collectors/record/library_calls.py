"""Annotations of communication without c10d: expert parallelism and torch's symmetric memory."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import record_function

# Kernels of these libraries carry no arguments. The trace then has this range around the call that
# launches them, and around the hook that receives what a call sent:
#   stepsplit::dispatch library=DeepEP group=5 tokens=4096 bytes=58720256 dtype=bfloat16
# tokens are those that the rank passes in: for a combine the ones that its experts received. Only
# shapes are read: nothing waits for the device. An op of symmetric memory, whose trace has neither
# its group nor, without shapes, its size, is in a range of the same kind:
#   stepsplit::symm_mem library=symmetric_memory group=5 tokens=4096 bytes=58720256 dtype=bfloat16


@dataclass(frozen=True, slots=True)
class LibraryMethod:
    """A method that moves the tokens of experts.

    library: the name of the library, without spaces. module, owner and method: where it is. kind:
    dispatch or combine, "" for what completes the last one of its object. tokens: the parameter
    that holds the tokens, the first one if it is not passed by name.
    """

    library: str
    module: str
    owner: str
    method: str
    kind: str
    tokens: str


LIBRARY_METHODS = (
    # deepseek-ai/DeepEP: deep_ep/buffers/legacy.py and elastic.py, branch hybrid-ep.
    LibraryMethod("DeepEP", "deep_ep", "Buffer", "dispatch", "dispatch", "x"),
    LibraryMethod("DeepEP", "deep_ep", "Buffer", "combine", "combine", "x"),
    LibraryMethod("DeepEP", "deep_ep", "Buffer", "low_latency_dispatch", "dispatch", "x"),
    LibraryMethod("DeepEP", "deep_ep", "Buffer", "low_latency_combine", "combine", "x"),
    LibraryMethod("DeepEP", "deep_ep", "ElasticBuffer", "dispatch", "dispatch", "x"),
    LibraryMethod("DeepEP", "deep_ep", "ElasticBuffer", "combine", "combine", "x"),
    LibraryMethod("HybridEP", "deep_ep", "HybridEPBuffer", "dispatch", "dispatch", "hidden"),
    LibraryMethod("HybridEP", "deep_ep", "HybridEPBuffer", "combine", "combine", "hidden"),
    LibraryMethod(
        "HybridEP", "deep_ep", "HybridEPBuffer", "dispatch_with_permute", "dispatch", "hidden"
    ),
    LibraryMethod(
        "HybridEP", "deep_ep", "HybridEPBuffer", "combine_with_unpermute", "combine", "hidden"
    ),
    # ROCm/mori: python/mori/ops/dispatch_combine.py.
    LibraryMethod("MORI", "mori.ops", "EpDispatchCombineOp", "dispatch", "dispatch", "input"),
    LibraryMethod("MORI", "mori.ops", "EpDispatchCombineOp", "combine", "combine", "input"),
    # NVIDIA/nccl, nccl4py 0.3.1: nccl/ep/handle.py. The ctypes of contrib/nccl_ep take pointers, of
    # which no shape is known.
    LibraryMethod("NCCL_EP", "nccl.ep", "Handle", "dispatch", "dispatch", "inputs"),
    LibraryMethod("NCCL_EP", "nccl.ep", "Handle", "combine", "combine", "inputs"),
    LibraryMethod("NCCL_EP", "nccl.ep", "Handle", "complete", "", ""),
)
"""The table: a library is a few entries."""

_SYMMETRIC_MEMORY = "torch.distributed._symmetric_memory"

SYMMETRIC_OPS = (
    "one_shot_all_reduce", "one_shot_all_reduce_out", "one_shot_all_reduce_copy",
    "one_shot_all_reduce_copy_out", "two_shot_all_reduce_", "two_shot_all_reduce_out",
    "multimem_all_reduce_", "multimem_one_shot_all_reduce", "multimem_one_shot_all_reduce_out",
    "multimem_one_shot_reduce_out", "multimem_all_gather_out", "reduce_scatter_out",
    "_low_contention_all_gather", "_low_contention_reduce_scatter", "all_to_all_vdev",
    "all_to_all_vdev_2d", "all_to_all_vdev_2d_offset", "nvshmem_all_to_all", "nvshmem_broadcast",
    "fused_all_gather_matmul", "fused_all_gather_scaled_matmul", "fused_matmul_reduce_scatter",
    "fused_scaled_matmul_reduce_scatter",
)  # fmt: skip
"""Ops of torch.ops.symm_mem (torch 2.13) with a group_name. A fused one makes several calls, so
that its size is no size of a call."""


@contextmanager
def annotate_library_calls() -> Iterator[None]:
    """Annotates the calls of the libraries that the script has imported, within the block."""
    with ExitStack() as undo:
        for entry in LIBRARY_METHODS:
            # An import would start a library that the script does not use.
            owner = getattr(sys.modules.get(entry.module), entry.owner, None)
            original = getattr(owner, "__dict__", {}).get(entry.method)
            if callable(original):
                undo.callback(setattr, owner, entry.method, original)
                setattr(owner, entry.method, _annotate(original, entry))
        if _SYMMETRIC_MEMORY in sys.modules:
            _annotate_symmetric_memory(undo)
        yield


_begun: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""The label of the last call of an object whose halves are calls of their own."""


def _annotate(original: Callable[..., Any], entry: LibraryMethod) -> Callable[..., Any]:
    @functools.wraps(original)
    def annotated(buffer: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(buffer, *args, **kwargs)
        label = build_label(entry, buffer, args, kwargs) if entry.kind else ""
        if entry.library == _HALVED:
            with suppress(TypeError):  # of an object without hash or weak references
                label = label or _begun.get(buffer, "")
                _begun[buffer] = label
        with record_function(label) if label else nullcontext():
            result = original(buffer, *args, **kwargs)
        return _annotate_hook(result, label)

    return annotated


def build_label(
    entry: LibraryMethod, buffer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str:
    """The name of the range; what cannot be read is left out of it, and never raises."""
    parts = [f"stepsplit::{entry.kind} library={entry.library}"]
    name = getattr(getattr(buffer, "group", None), "group_name", "")
    parts.append(f"group={name if isinstance(name, str) else ''}")
    tokens = kwargs.get(entry.tokens, args[0] if args else None)
    if entry.library == _HALVED:
        # A bundle of descriptors, of which each holds what it was made from.
        bundle = [getattr(getattr(tokens, name, None), "buffer", None) for name in _BUNDLED]
        tokens = tuple(one for one in bundle if one is not None)
    return " ".join([*parts, *_describe_tensors(tokens)])


_HALVED, _BUNDLED = "NCCL_EP", ("tokens", "scales")


def _describe_tensors(tokens: Any) -> list[str]:
    """The number of tokens, their bytes and dtype; nothing of what is no tensor."""
    # Tokens of eight bits come with their scales.
    tensors = tokens if isinstance(tokens, tuple) else (tokens,)
    if not tensors or not all(isinstance(one, torch.Tensor) for one in tensors):
        return []
    if not tensors[0].dim():
        return []
    size = sum(one.numel() * one.element_size() for one in tensors)
    dtype = str(tensors[0].dtype).removeprefix("torch.")
    return [f"tokens={tensors[0].shape[0]} bytes={size} dtype={dtype}"]


class _RangedOp:
    """What a torch.ops object calls, in a range: of the same hash, by which torch finds the op."""

    def __init__(self, original: Any, names: list[str], *, sized: bool) -> None:
        self._original, self._names, self._sized = original, names, sized

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._original(*args, **kwargs)
        given = dict(zip(self._names, args, strict=False)) | kwargs
        group = given.get("group_name")
        parts = [f"stepsplit::symm_mem library=symmetric_memory group={group or ''}"]
        # symm_buffer is where local_input goes; a compiler may ask what the shapes would be.
        sent = given.get("local_input", given.get(self._names[0]))
        if self._sized and type(sent) in (torch.Tensor, torch.nn.Parameter):
            parts += _describe_tensors(sent)
        with record_function(" ".join(parts)):
            return self._original(*args, **kwargs)

    def __hash__(self) -> int:
        return hash(self._original)

    def __eq__(self, other: object) -> bool:
        return bool(self._original == other)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def _annotate_symmetric_memory(undo: ExitStack) -> None:
    """Annotates the ops within their objects: a compiler that compares those finds them as ever."""
    for name in SYMMETRIC_OPS:
        packet = getattr(torch.ops.symm_mem, name, None)
        overloads = [getattr(packet, one) for one in packet.overloads()] if packet else []
        for op in (packet, *overloads):
            if callable(original := getattr(op, "_op", None)):
                names = [one.name for one in overloads[0]._schema.arguments]
                undo.callback(setattr, op, "_op", original)
                op._op = _RangedOp(original, names, sized="fused" not in name)


def _annotate_hook(result: Any, label: str) -> Any:
    """The result, with its hook that receives what was sent annotated, if it has one."""
    if type(result) is not tuple or not result or not callable(result[-1]):
        return result
    hook = result[-1]
    if isinstance(hook, torch.nn.Module | type) or getattr(hook, "__name__", "") == "":
        return result

    @functools.wraps(hook)
    def annotated() -> Any:
        with record_function(label):
            return hook()

    return (*result[:-1], annotated)
