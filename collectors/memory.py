"""Memory of a rank: weights, gradients and optimizer state from the optimizers, activations."""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from stepsplit.collectors.guard import warn_on_failure
from stepsplit.collectors.optimizers import Listener, add_listener, remove_listener
from stepsplit.collectors.rank_record import MemoryState
from stepsplit.collectors.run_spec import whole_file

_OptimizerKey = tuple[int, int]
"""The id of an optimizer and the address of its first weight."""


class MemoryMeter:
    """Measures each optimizer once, when it steps, until closed.

    detailed: also writes a CUDA memory snapshot. A part that fails is lost with a warning; neither
    the other parts nor the caller notice.
    """

    def __init__(self, detailed: bool, rank: int) -> None:
        self._rank = rank
        self._gradients: dict[_OptimizerKey, int] = {}
        self._held: dict[_OptimizerKey, tuple[int, int]] = {}
        self._listener = Listener(self._record_gradients, self._record_weights_and_states)
        self._history: AllocationHistory | None = None
        self._retries_before = self._count_retries()
        with warn_on_failure(rank, "its memory usage"):
            add_listener(self._listener)
        if detailed and torch.cuda.is_initialized():
            with warn_on_failure(rank, _SNAPSHOT):
                self._history = AllocationHistory()

    def close(self, folder: Path) -> MemoryState:
        """Stops measuring and returns the result; on CPU there are no allocator peaks."""
        remove_listener(self._listener)
        history, self._history = self._history, None
        if history is not None:
            with warn_on_failure(self._rank, _SNAPSHOT):
                snapshot = history.end()
                path = folder / "memory" / f"rank{self._rank}_snapshot.pickle"
                _write_in_background(snapshot, path, self._rank)
        measured = bool(self._held)
        return MemoryState(
            weights_bytes=sum(sizes[0] for sizes in self._held.values()) if measured else None,
            gradients_bytes=sum(self._gradients.values()) if measured else None,
            optimizer_bytes=sum(held[1] for held in self._held.values()) if measured else None,
            peak_allocated_bytes=self._read_peak("max_memory_allocated"),
            peak_reserved_bytes=self._read_peak("max_memory_reserved"),
            allocation_retries=self._count_retries_since_begin(),
        )

    def _record_gradients(self, optimizer: Any) -> None:
        if (key := _identify_optimizer(optimizer)) not in self._gradients:
            gradients = (weight.grad for weight in _iterate_weights(optimizer))
            self._gradients[key] = sum_storage_bytes(gradients)

    def _record_weights_and_states(self, optimizer: Any) -> None:
        if (key := _identify_optimizer(optimizer)) not in self._held:
            own, states = list(_iterate_weights(optimizer)), list(_iterate_states(optimizer))
            weights = _find_module_weights(sys._getframe()) or own
            everything = sum_storage_bytes([*weights, *own, *states])
            held = sum_storage_bytes(weights)
            self._held[key] = (held, everything - held)

    def _count_retries(self) -> int | None:
        """How often the CUDA allocator has freed its cache and tried again since the job began."""
        if not torch.cuda.is_initialized():
            return None
        with warn_on_failure(self._rank, "the retries of its CUDA allocator"):
            return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))
        return None

    def _count_retries_since_begin(self) -> int | None:
        before, now = self._retries_before, self._count_retries()
        return None if before is None or now is None else now - before

    def _read_peak(self, name: str) -> int | None:
        """A peak of the CUDA allocator; a pluggable allocator has none."""
        if not torch.cuda.is_initialized():
            return None
        with warn_on_failure(self._rank, "the peak of its CUDA allocator"):
            return int(getattr(torch.cuda, name)())
        return None


def _identify_optimizer(optimizer: Any) -> _OptimizerKey:
    """A key per optimizer and weight group: DeepSpeed's ZeRO-3 steps once per weight group."""
    first = next(_iterate_weights(optimizer), None)
    return id(optimizer), 0 if first is None else first.data_ptr()


_MODULE_GROUPS = (
    ("bit16_groups",),
    ("model_float16_groups", "model_fp32_groups"),
    ("float16_groups", "fp32_from_fp32_groups"),
)
"""Attributes of optimizers that step another one on a partition or on copies of the weights, with
the module's own weights in lists: DeepSpeed's ZeRO 1 and 2, Megatron-LM with and without a
distributed optimizer."""


def _find_module_weights(frame: FrameType | None) -> list[Any]:
    """The module's weights, if an optimizer of these frameworks called the one that steps."""
    while frame is not None:
        caller = frame.f_locals.get("self")
        for names in _MODULE_GROUPS:
            groups = [getattr(caller, name, None) for name in names]
            if all(isinstance(group, list) for group in groups):
                return [weight for group in groups for some in group or () for weight in some]
        frame = frame.f_back
    return []


def sum_storage_bytes(tensors: Iterable[Any]) -> int:
    """Bytes of the tensors' storages on the training device, each storage counted once."""
    device = "cuda" if torch.cuda.is_initialized() else "cpu"
    sizes: dict[int, int] = {}
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)
        if isinstance(local, torch.Tensor) and local.device.type == device:
            storage = local.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def _iterate_weights(optimizer: Any) -> Iterator[Any]:
    return (weight for group in optimizer.param_groups for weight in group["params"])


def _iterate_states(optimizer: Any) -> Iterator[Any]:
    states = (state for state in optimizer.state.values() if isinstance(state, dict))
    return (value for state in states for value in state.values())


# The history of CUDA's allocator and its snapshot.

_SNAPSHOT = "its memory snapshot"

MAX_HISTORY_ENTRIES = 50_000
"""Allocations and frees kept: the training waits while the snapshot makes objects of them."""

_SWITCHES = ("_cuda_record_memory_history", "_cuda_record_memory_history_legacy")
"""Functions of torch._C through which every call of torch switches the history."""


class AllocationHistory:
    """The allocator's history since this object was made, with the Python stacks of allocations.

    C++ stacks are left out: torch would symbolize them in the snapshot, which took 461 s instead of
    4 s on a rank of an 8-GPU job (pytorch/torchtitan#3628), near the time-out of a collective.

    Raises RuntimeError if the training records its own history, which must go on unchanged, or if
    the allocator has none (cudaMallocAsync and pluggable ones).
    """

    def __init__(self) -> None:
        self._ours, self._patches = True, ExitStack()
        if torch._C._cuda_isHistoryEnabled():
            raise RuntimeError("the training records a memory history of its own")
        torch.cuda.memory._record_memory_history(
            "all", context="alloc", stacks="python", max_entries=MAX_HISTORY_ENTRIES
        )
        for name in _SWITCHES:
            self._watch_switch(name)

    def end(self) -> Any:
        """Takes the snapshot and ends the history, unless the training has switched it since."""
        self._patches.close()
        if not self._ours:
            raise RuntimeError("the training has begun or ended a memory history of its own")
        try:
            return torch.cuda.memory._snapshot()
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)

    def _watch_switch(self, name: str) -> None:
        original: Callable[..., Any] | None = getattr(torch._C, name, None)
        if original is None:
            return

        def switch(*args: Any, **kwargs: Any) -> Any:
            self._ours = False
            return original(*args, **kwargs)

        setattr(torch._C, name, switch)
        self._patches.callback(_restore_switch, name, switch, original)


def _restore_switch(name: str, switch: Callable[..., Any], original: Callable[..., Any]) -> None:
    if getattr(torch._C, name, None) is switch:
        setattr(torch._C, name, original)


def _write_in_background(snapshot: Any, path: Path, rank: int) -> None:
    """Writes the snapshot from a thread: no training step waits for the disk."""

    def write() -> None:
        with warn_on_failure(rank, _SNAPSHOT), whole_file(path) as file:
            pickle.dump(snapshot, file)

    threading.Thread(target=write, name="stepsplit-memory").start()
