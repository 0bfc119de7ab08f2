"""The GPU of a rank: clock and throttling, the times of steps on it, and versions of software."""

from __future__ import annotations

import ctypes
import importlib
import os
import platform
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from stepsplit.collectors.rank_record import MAX_KEPT_STEPS, GpuState

# NVML readings: SM clock, throttling, link errors.

_MAX_LINKS = 18


@dataclass(frozen=True, slots=True)
class GpuReading:
    """A reading, and a note: why there is none, or of what it is."""

    state: GpuState | None
    note: str = ""


def find_gpu_uuid() -> str | None:
    """The UUID of this thread's current device; None if the process uses no GPU.

    CUDA_VISIBLE_DEVICES renumbers GPUs for torch, but not for NVML.
    """
    if not torch.cuda.is_initialized():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return str(getattr(properties, "uuid", ""))


def read_gpu(uuid: str) -> GpuReading:
    """A reading taken now. The first one may take long: call it from a background thread."""
    if torch.version.hip:
        return GpuReading(None, "NVML does not read AMD GPUs")
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return GpuReading(None, "pynvml (nvidia-ml-py) is not installed")
    try:
        nvml.nvmlInit()
        handle, note = _open_device(nvml, uuid)
    except Exception as error:  # noqa: BLE001 - NVML has an error class per reason
        return GpuReading(None, f"NVML cannot read GPU {uuid}: {error}")
    state = GpuState(
        at_unix_ns=time.time_ns(),
        sm_clock_mhz=_query_or_none(
            lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
        ),
        throttle_reasons=_query_or_none(
            lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        ),
        link_errors=_sum_link_errors(nvml, handle),
    )
    return GpuReading(state, note)


def _open_device(nvml: Any, uuid: str) -> tuple[Any, str]:
    """The handle of the GPU, or of the whole one that a MIG instance is a part of."""
    try:
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"), ""
    except Exception:  # noqa: BLE001 - NVML has an error class per reason
        part = nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")
    whole = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(part)
    return whole, "a MIG instance: clock, throttling and links are those of the whole GPU"


def _sum_link_errors(nvml: Any, handle: Any) -> int | None:
    """The number of replays of all NVLinks together; None if the GPU has no NVLink."""
    kind = getattr(nvml, "NVML_NVLINK_ERROR_DL_REPLAY", None)
    ask = nvml.nvmlDeviceGetNvLinkErrorCounter
    counts = [_query_or_none(partial(ask, handle, link, kind)) for link in range(_MAX_LINKS)]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _query_or_none(question: Callable[[], Any]) -> int | None:
    """The result of an NVML query; None if this GPU or driver does not support it."""
    try:
        return int(question())
    except Exception:  # noqa: BLE001 - NVML has an error class per reason
        return None


# The times of steps on the GPU, from pooled events that are asked and never waited for.

_MAX_PENDING = 64
"""Steps that the host may be ahead; beyond, no more events are recorded."""


class GpuStepClock:
    """Times steps between events on the current stream: the host may be steps ahead of the GPU.

    A step costs an event and a query, some microseconds. While a CUDA graph is captured nothing is
    recorded or asked, because both would end the capture.
    """

    def __init__(self) -> None:
        self._pool: list[Any] = []
        self._pending: deque[tuple[str, Any]] = deque()
        self._times: dict[str, deque[int]] = {
            "before": deque(maxlen=MAX_KEPT_STEPS),
            "profiled": deque(),
            "after": deque(),
        }

    def step(self, kind: str) -> None:
        """Ends a step: "before", "profiled" or "after"; the times of other steps are not kept."""
        if not torch.cuda.is_initialized():
            return
        if torch.cuda.is_current_stream_capturing() or len(self._pending) >= _MAX_PENDING:
            # The next interval would hold several steps.
            self._pending.clear()
            return
        event = self._pool.pop() if self._pool else torch.cuda.Event(enable_timing=True)
        event.record()
        self._pending.append((kind, event))
        self._resolve()

    def collect(self, kind: str) -> tuple[int, ...]:
        """The times in ns of the steps of a kind that the GPU has ended."""
        if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
            self._resolve()
        return tuple(self._times[kind])

    def _resolve(self) -> None:
        while len(self._pending) > 1 and self._pending[1][1].query():
            _, begin = self._pending.popleft()
            kind, end = self._pending[0]
            times_ns = self._times.get(kind)
            if times_ns is not None and (kind == "before" or len(times_ns) < MAX_KEPT_STEPS):
                times_ns.append(round(begin.elapsed_time(end) * 1e6))
            self._pool.append(begin)


# Versions of the software under torch.

DRIVER_FILES = (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version"))

_MAPS = Path("/proc/self/maps")

_VERSION = re.compile(r"\b\d+\.\d+(?:\.\d+)*\b")

_CUPTI_PACKAGES = ("nvidia-cuda-cupti", "nvidia-cuda-cupti-cu13", "nvidia-cuda-cupti-cu12")


MAX_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Environment variable: the number of queues from the host to a GPU. With 1, kernels of all streams
start in the order of their launches."""


def read_max_connections() -> int | None:
    """CUDA_DEVICE_MAX_CONNECTIONS of this process; None if it is not set to a number."""
    text = os.environ.get(MAX_CONNECTIONS, "")
    return int(text) if text.isdecimal() else None


@cache
def read_versions() -> tuple[tuple[str, str], ...]:
    """The versions of Python and torch; with a GPU of CUDA or HIP, NCCL, CUPTI and the driver."""
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    if torch.cuda.is_available():
        found = {
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "nccl": _read_nccl_version(),
            "cupti": read_cupti_version() if torch.version.cuda else None,
            "driver": read_driver_version(),
        }
        versions |= {name: str(version) for name, version in found.items() if version}
    return tuple(versions.items())


def _read_nccl_version() -> str | None:
    with suppress(Exception):
        return ".".join(map(str, torch.cuda.nccl.version()))
    return None


def read_driver_version(places: Sequence[Path] = DRIVER_FILES) -> str | None:
    """The driver version from the first of the files that has one; None without a driver."""
    for place in places:
        with suppress(OSError, ValueError):
            found = _VERSION.search(place.read_text())
            if found is not None:
                return found[0]
    return None


def read_cupti_version() -> str | None:
    """The version of the CUPTI package, else the API version of the library that is loaded."""
    for package in _CUPTI_PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(package)
    with suppress(OSError, AttributeError):
        paths = {line.split()[-1] for line in _MAPS.read_text().splitlines() if "libcupti" in line}
        number = ctypes.c_uint32()
        for path in paths:
            if ctypes.CDLL(path).cuptiGetVersion(ctypes.byref(number)) == 0:
                return f"API {number.value}"
    return None
