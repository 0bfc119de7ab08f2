"""Annotations of libraries that communicate without c10d: expert parallelism by Python packages."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import record_function

# Kernels of these libraries carry no arguments. The trace then has this range around the call that
# launches them, and around the hook that receives what a call sent:
#   stepsplit::dispatch library=DeepEP group=5 tokens=4096 bytes=58720256 dtype=bfloat16
# tokens are those that the rank passes in: for a combine the ones that its experts received. Only
# shapes are read: nothing waits for the device.


@dataclass(frozen=True, slots=True)
class LibraryMethod:
    """A method that moves the tokens of experts.

    library: the name of the library. module, owner and method: where it is. kind: dispatch or
    combine. tokens: the parameter that holds the tokens, the first one if it is not passed by name.
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
)
"""The table: a library is a few entries. NCCL EP is called with pointers, of which no shape is
known; torch's symmetric memory is an op of its own in the trace."""


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
        yield


def _annotate(original: Callable[..., Any], entry: LibraryMethod) -> Callable[..., Any]:
    @functools.wraps(original)
    def annotated(buffer: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(buffer, *args, **kwargs)
        label = build_label(entry, buffer, args, kwargs)
        with record_function(label):
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
    # Tokens of eight bits come with their scales.
    tensors = tokens if isinstance(tokens, tuple) else (tokens,)
    if tensors and all(isinstance(one, torch.Tensor) for one in tensors) and tensors[0].dim():
        size = sum(one.numel() * one.element_size() for one in tensors)
        dtype = str(tensors[0].dtype).removeprefix("torch.")
        parts.append(f"tokens={tensors[0].shape[0]} bytes={size} dtype={dtype}")
    return " ".join(parts)


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
