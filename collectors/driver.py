"""The version of the GPU driver, from what the kernel says of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

PLACES = (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version"))
_VERSION = re.compile(r"\b\d+\.\d+(?:\.\d+)*\b")


def driver_version(places: Sequence[Path] = PLACES) -> str | None:
    """The version that the first of the files names, None without a driver that tells one."""
    for place in places:
        with suppress(OSError, ValueError):
            found = _VERSION.search(place.read_text())
            if found is not None:
                return found[0]
    return None
