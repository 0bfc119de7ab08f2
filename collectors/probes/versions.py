"""Versions and settings of the software under torch."""

from __future__ import annotations

import ctypes
import os
import platform
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

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
        nccl = None
        # A torch without NCCL has no version of it, and says so in several ways.
        with suppress(Exception):
            nccl = ".".join(map(str, torch.cuda.nccl.version()))
        found = {
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "nccl": nccl,
            "cupti": read_cupti_version() if torch.version.cuda else None,
            "driver": read_driver_version(),
        }
        versions |= {name: str(version) for name, version in found.items() if version}
    return tuple(versions.items())


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
        # Only one that is loaded already, which is the one that Kineto uses.
        paths = {line.split()[-1] for line in _MAPS.read_text().splitlines() if "libcupti" in line}
        number = ctypes.c_uint32()
        for path in paths:
            if ctypes.CDLL(path).cuptiGetVersion(ctypes.byref(number)) == 0:
                return f"API {number.value}"
    return None
