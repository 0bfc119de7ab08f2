"""What a program that opened a trace tells the one that started it: one line of JSON."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

_T = TypeVar("_T")
_PEAK = re.compile(r"^VmHWM:\s+(\d+) kB", re.MULTILINE)


def open_and_tell(opened: Callable[[], _T], events_in: Callable[[_T], int], times: int = 1) -> None:
    """Opens that many times, each after the last was dropped, and tells how long each took.

    Neither imports nor the counting of events is within the time.
    """
    seconds, events = [], 0
    for _ in range(times):
        begin = time.perf_counter()
        found = opened()
        seconds.append(time.perf_counter() - begin)
        events = events_in(found)
        del found
    result = {"seconds": seconds, "events": events, "own_peak_bytes": own_peak_bytes()}
    sys.stdout.write(f"\n{json.dumps(result)}\n")


def own_peak_bytes() -> int:
    """The most that was resident, as the kernel counts; ru_maxrss would count the parent's too."""
    found = _PEAK.search(Path("/proc/self/status").read_text())
    return 1024 * int(found[1]) if found else 0
