"""A CUDA device as the collectors see it, for machines without one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

UUID = "5f6a1c2e-0000-0000-0000-000000000007"


class FakeGpu:
    """One device in use by this process; its allocator keeps a history if `allocator` is native.

    history is the arguments with which the history runs, None while it is off; snapshots counts the
    snapshots taken. What is queued on the GPU lasts until queued_ms of its own time, of which
    done_ms have passed. capturing: a graph is captured.
    """

    capturing = False
    queued_ms = done_ms = 0.0
    events = 0

    def __init__(self, patch: pytest.MonkeyPatch, allocator: str = "native") -> None:
        self.allocator, self.snapshots = allocator, 0
        self.history: tuple[Any, ...] | None = None
        properties = SimpleNamespace(uuid=UUID, total_memory=80 << 30)
        for name, value in {
            "is_initialized": lambda: True,
            "current_device": lambda: 0,
            "device_count": lambda: 1,
            "get_device_name": lambda device=None: "NVIDIA H100 80GB HBM3",
            "get_device_properties": lambda device=None: properties,
            "is_current_stream_capturing": lambda: self.capturing,
            "Event": lambda enable_timing: FakeEvent(self, enable_timing),
            "max_memory_allocated": lambda: self.peak(50),
            "max_memory_reserved": lambda: self.peak(64),
        }.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(torch._C, "_cuda_isHistoryEnabled", self.is_recording, raising=False)
        patch.setattr(torch._C, "_cuda_record_memory_history", self.record, raising=False)
        patch.setattr(torch._C, "_cuda_memorySnapshot", self.snapshot, raising=False)

    def peak(self, number: int) -> int:
        if self.allocator == "pluggable":
            raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats.")
        return number

    def is_recording(self) -> bool:
        self._check_history()
        return self.history is not None

    def record(self, enabled: str | None, *options: Any) -> None:
        self._check_history()
        self.history = None if enabled is None else (enabled, *options)

    def snapshot(self, *_: Any) -> dict[str, Any]:
        self.snapshots += 1
        return {"segments": [], "device_traces": [[{"action": "alloc", "size": 512}]]}

    def _check_history(self) -> None:
        if self.allocator != "native":
            raise RuntimeError(
                f"{self.allocator} does not yet support recordHistory.\nFile an issue."
            )


class FakeEvent:
    """An event: recorded behind what is queued, over when the GPU has got there."""

    def __init__(self, gpu: FakeGpu, enable_timing: bool) -> None:
        assert enable_timing
        self.gpu, self.at_ms = gpu, -1.0
        gpu.events += 1

    def record(self) -> None:
        assert not self.gpu.capturing, "an event in a capture becomes a node of the graph"
        self.at_ms = self.gpu.queued_ms

    def query(self) -> bool:
        assert not self.gpu.capturing, "a query ends the capture with an error"
        return self.at_ms <= self.gpu.done_ms

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.query() and end.query(), "not both over: torch would raise or wait"
        return end.at_ms - self.at_ms

    def synchronize(self) -> None:
        raise AssertionError("the training waits for the GPU")
