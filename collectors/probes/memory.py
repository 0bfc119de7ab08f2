"""Memory of a rank: weights, gradients and optimizer state from the optimizers, allocator peaks."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from stepsplit.collectors.formats.rank_record import MemoryState
from stepsplit.collectors.guard import warn_on_failure
from stepsplit.collectors.probes.memory_snapshot import (
    LOST_SNAPSHOT,
    AllocationHistory,
    write_in_background,
)
from stepsplit.collectors.probes.optimizers import Listener, add_listener, remove_listener

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
            with warn_on_failure(rank, LOST_SNAPSHOT):
                self._history = AllocationHistory()

    def close(self, folder: Path) -> MemoryState:
        """Stops measuring and returns the result; on CPU there are no allocator peaks."""
        remove_listener(self._listener)
        history, self._history = self._history, None
        if history is not None:
            with warn_on_failure(self._rank, LOST_SNAPSHOT):
                snapshot = history.end()
                path = folder / "memory" / f"rank{self._rank}_snapshot.pickle"
                write_in_background(snapshot, path, self._rank)
        measured = bool(self._held)
        retries, before = self._count_retries(), self._retries_before
        return MemoryState(
            weights_bytes=sum(sizes[0] for sizes in self._held.values()) if measured else None,
            gradients_bytes=sum(self._gradients.values()) if measured else None,
            optimizer_bytes=sum(held[1] for held in self._held.values()) if measured else None,
            peak_allocated_bytes=self._read_peak("max_memory_allocated"),
            peak_reserved_bytes=self._read_peak("max_memory_reserved"),
            allocation_retries=None if before is None or retries is None else retries - before,
        )

    def _record_gradients(self, optimizer: Any) -> None:
        if (key := _identify_optimizer(optimizer)) not in self._gradients:
            gradients = (weight.grad for weight in _iterate_weights(optimizer))
            self._gradients[key] = sum_storage_bytes(gradients)

    def _record_weights_and_states(self, optimizer: Any) -> None:
        # After it: the state is made in the first step.
        if (key := _identify_optimizer(optimizer)) not in self._held:
            own = list(_iterate_weights(optimizer))
            states = [
                value
                for state in optimizer.state.values()
                if isinstance(state, dict)
                for value in state.values()
            ]
            weights = _find_module_weights(sys._getframe()) or own
            everything = sum_storage_bytes([*weights, *own, *states])
            held = sum_storage_bytes(weights)
            # What is neither weight nor counted with one: the state, and copies of the weights in
            # higher precision.
            self._held[key] = (held, everything - held)

    def _count_retries(self) -> int | None:
        """How often the CUDA allocator has freed its cache and tried again since the job began."""
        if not torch.cuda.is_initialized():
            return None
        with warn_on_failure(self._rank, "the retries of its CUDA allocator"):
            return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))
        return None

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
            # Flat buffers of FSDP and ZeRO hold many weights in one storage.
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def _iterate_weights(optimizer: Any) -> Iterator[Any]:
    return (weight for group in optimizer.param_groups for weight in group["params"])
