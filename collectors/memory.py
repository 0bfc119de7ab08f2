"""Memory of a rank: weights, gradients and optimizer state from the optimizers, activations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from stepsplit.collectors.optimizers import Listener, add_listener, remove_listener
from stepsplit.collectors.rank_record import MemoryState
from stepsplit.collectors.run_spec import replace_whole

_OptimizerKey = tuple[int, int]
"""The id of an optimizer and the address of its first weight."""
_MAX_SNAPSHOT_ENTRIES = 200_000


class MemoryMeter:
    """Measures each optimizer once, when it steps, until closed.

    closely: also measures the allocations of the steps, and writes a CUDA memory snapshot.
    """

    def __init__(self, detailed: bool) -> None:
        self._closely = detailed
        self._gradients: dict[_OptimizerKey, int] = {}
        self._held: dict[_OptimizerKey, tuple[int, int]] = {}
        self._listener = Listener(self._record_gradients, self._record_weights_and_states)
        add_listener(self._listener)
        if detailed and torch.cuda.is_initialized():
            torch.cuda.memory._record_memory_history(max_entries=_MAX_SNAPSHOT_ENTRIES)

    def close(self, profiler: Any, folder: Path, rank: int) -> MemoryState:
        """Stops measuring and returns the result; on CPU there are no allocator peaks."""
        remove_listener(self._listener)
        measured = bool(self._held)
        if self._closely and torch.cuda.is_initialized():
            _write_snapshot(folder / "memory" / f"rank{rank}_snapshot.pickle")
        return MemoryState(
            weights_bytes=sum(sizes[0] for sizes in self._held.values()) if measured else None,
            gradients_bytes=sum(self._gradients.values()) if measured else None,
            optimizer_bytes=sum(held[1] for held in self._held.values()) if measured else None,
            activations_bytes=compute_activations_bytes(profiler)
            if self._closely and profiler
            else None,
            peak_allocated_bytes=_read_peak("max_memory_allocated"),
            peak_reserved_bytes=_read_peak("max_memory_reserved"),
        )

    def _record_gradients(self, optimizer: Any) -> None:
        if (key := _identify_optimizer(optimizer)) not in self._gradients:
            gradients = (weight.grad for weight in _iterate_weights(optimizer))
            self._gradients[key] = sum_storage_bytes(gradients)

    def _record_weights_and_states(self, optimizer: Any) -> None:
        if (key := _identify_optimizer(optimizer)) not in self._held:
            self._held[key] = (
                sum_storage_bytes(_iterate_weights(optimizer)),
                sum_storage_bytes(_iterate_states(optimizer)),
            )


def _identify_optimizer(optimizer: Any) -> _OptimizerKey:
    """A key per optimizer and weight group: DeepSpeed's ZeRO-3 steps once per weight group."""
    first = next(_iterate_weights(optimizer), None)
    return id(optimizer), 0 if first is None else first.data_ptr()


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


def compute_activations_bytes(profiler: Any) -> int | None:
    """Peak activation memory of the recorded steps in bytes; None without memory events.

    It is the peak above the memory allocated at both the begin and the end of a step: memory still
    allocated at the end is new gradients or optimizer state.
    """
    events = profiler.profiler.kineto_results.events()
    steps = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in events
        if event.name().startswith("ProfilerStep#")
    )
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    peaks = [_compute_peak_growth(changes, begin, end) for begin, end in steps]
    return max(peaks, default=0) if changes and peaks else None


def _compute_peak_growth(changes: list[tuple[int, int]], begin: int, end: int) -> int:
    current_bytes = peak_bytes = 0
    for at, change in changes:
        if begin <= at < end:
            current_bytes += change
            peak_bytes = max(peak_bytes, current_bytes)
    return peak_bytes - max(current_bytes, 0)


def _write_snapshot(path: Path) -> None:
    """Writes the snapshot of CUDA's allocator atomically and stops its recording."""
    try:
        with replace_whole(path) as draft:
            torch.cuda.memory._dump_snapshot(str(draft))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def _iterate_weights(optimizer: Any) -> Iterator[Any]:
    return (weight for group in optimizer.param_groups for weight in group["params"])


def _iterate_states(optimizer: Any) -> Iterator[Any]:
    states = (state for state in optimizer.state.values() if isinstance(state, dict))
    return (value for state in states for value in state.values())


def _read_peak(name: str) -> int | None:
    return int(getattr(torch.cuda, name)()) if torch.cuda.is_initialized() else None
