"""Which machine a rank runs on."""

from __future__ import annotations

import os
import platform
import socket
from pathlib import Path

import torch

from stepsplit.collectors.run_spec import HostInfo


def machine() -> HostInfo:
    """This machine; of GPUs only those of a process that uses one, so that none is woken."""
    gpus = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    return HostInfo(
        host=socket.gethostname(),
        cpu=_cpu(),
        cores=os.cpu_count() or 0,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpu=torch.cuda.get_device_name() if gpus else None,
        gpus=gpus,
        gpu_memory_bytes=torch.cuda.get_device_properties(0).total_memory if gpus else 0,
    )


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
