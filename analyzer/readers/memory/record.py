"""The nouns of recorded memory: what each device of one process held, and when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from stepsplit.analyzer.trace import Int64, Note


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """What was held after each event: three columns of one length, in the order of the events.

    time_ns is on the wall clock, -1 where no time was recorded. A snapshot's first row is the state
    before its first event. reserved_bytes is -1 where it was not recorded.
    """

    time_ns: Int64
    allocated_bytes: Int64
    reserved_bytes: Int64

    def __len__(self) -> int:
        return len(self.time_ns)


def empty_curve() -> MemoryCurve:
    """The curve where nothing over time was recorded."""
    nothing = np.empty(0, dtype=np.int64)
    return MemoryCurve(nothing, nothing, nothing)


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """One device's memory at the end of the record, and its peaks; -1 is unknown.

    allocated_bytes belong to live tensors, active_bytes also to those whose last use still runs,
    requested_bytes is what active blocks were asked for, reserved_bytes is what the allocator holds
    of the device, in so many segments. A peak is that of the curve: of the time that was recorded.
    device is -1 where the file does not name it.
    """

    device: int
    allocated_bytes: int
    reserved_bytes: int
    active_bytes: int
    requested_bytes: int
    segments: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    curve: MemoryCurve


@dataclass(frozen=True, slots=True)
class CategoryMemory:
    """What tensors of one kind held: at most, and when all kinds together held most.

    The at_peak_bytes of all categories add up to the device's peak_allocated_bytes.
    """

    name: str
    peak_bytes: int
    at_peak_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryRecord:
    """The memory of one process, as the caching allocator or torch.profiler recorded it."""

    source: str
    kind: Literal["snapshot", "timeline"]
    devices: tuple[DeviceMemory, ...]
    categories: tuple[CategoryMemory, ...]
    notes: tuple[Note, ...] = ()
