"""NVML readings of a rank's GPU: clock, throttling and link errors."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from stepsplit.collectors.formats.rank_record import GpuState

# nvml.h: NVML_NVLINK_MAX_LINKS, the links of an H100.
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
    note = ""
    try:
        nvml.nvmlInit()
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except Exception:  # noqa: BLE001 - NVML has an error class per reason
            # It is the id of a MIG instance, which has no readings of its own.
            part = nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")
            handle = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(part)
            note = "a MIG instance: clock, throttling and links are those of the whole GPU"
    except Exception as error:  # noqa: BLE001 - NVML has an error class per reason
        return GpuReading(None, f"NVML cannot read GPU {uuid}: {error}")
    # The replays of all NVLinks together; unknown if the GPU has no NVLink.
    kind = getattr(nvml, "NVML_NVLINK_ERROR_DL_REPLAY", None)
    ask = nvml.nvmlDeviceGetNvLinkErrorCounter
    counts = [_query_or_none(partial(ask, handle, link, kind)) for link in range(_MAX_LINKS)]
    known = [count for count in counts if count is not None]
    state = GpuState(
        at_unix_ns=time.time_ns(),
        sm_clock_mhz=_query_or_none(
            lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
        ),
        throttle_reasons=_query_or_none(
            lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        ),
        link_errors=sum(known) if known else None,
    )
    return GpuReading(state, note)


def _query_or_none(question: Callable[[], Any]) -> int | None:
    """The result of an NVML query; None if this GPU or driver does not support it."""
    try:
        return int(question())
    except Exception:  # noqa: BLE001 - NVML has an error class per reason
        return None
