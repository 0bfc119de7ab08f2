"""When this process and its first step began, on the clock of the host."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class LaunchTimes:
    """The moments of a rank's start, in ns since 1970; 0 where unknown.

    process_unix_ns: when the process began. torch_unix_ns: when torch's optimizers had been
    imported. first_step_unix_ns: when its first step ended.
    """

    process_unix_ns: int = 0
    torch_unix_ns: int = 0
    first_step_unix_ns: int = 0


UNKNOWN_LAUNCH = LaunchTimes()
"""That of a job that was attached to: its time before is no part of the watch."""

_START_FIELD = 19
"""The start of a process among the fields after its name in /proc/PID/stat, see proc(5)."""


def read_process_start() -> int:
    """When this process began, in ns since 1970, to 10 ms; 0 if the system does not say."""
    with suppress(OSError, ValueError, IndexError, AttributeError):
        # The name of the process, in parentheses, may have spaces and parentheses of its own.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start_ns = int(fields[_START_FIELD]) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
        age_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - start_ns
        if start_ns > 0 and age_ns >= 0:
            return time.time_ns() - age_ns
    return 0
