"""What NVML says of this rank's GPU: clock, throttling, link errors."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from stepsplit.collectors.rank_record import GpuState

_MOST_LINKS = 18


def gpu_state() -> GpuState | None:
    """A reading now; None without a GPU in use or without pynvml (pip install nvidia-ml-py)."""
    if not torch.cuda.is_initialized():
        return None
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(_uuid())
    except Exception:  # noqa: BLE001 - a driver that does not answer is no reason to complain
        return None
    return GpuState(
        at_unix_ns=time.time_ns(),
        sm_clock_mhz=_asked(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
        throttle_reasons=_asked(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
        link_errors=_link_errors(nvml, handle),
    )


def _uuid() -> str:
    """By UUID: CUDA_VISIBLE_DEVICES renumbers what torch sees, not what NVML does."""
    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


def _link_errors(nvml: Any, handle: Any) -> int | None:
    """Replays of all NVLinks together; None where the GPU has none."""
    kind = getattr(nvml, "NVML_NVLINK_ERROR_DL_REPLAY", None)
    ask = nvml.nvmlDeviceGetNvLinkErrorCounter
    counts = [_asked(partial(ask, handle, link, kind)) for link in range(_MOST_LINKS)]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _asked(question: Callable[[], Any]) -> int | None:
    """The answer; None where this GPU or driver does not know."""
    try:
        return int(question())
    except Exception:  # noqa: BLE001 - NVML has an error of its own for each reason
        return None
