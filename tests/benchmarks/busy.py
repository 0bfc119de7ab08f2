"""How much of the machine others use meanwhile: the noise of a measurement, from /proc/stat."""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path

_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
_IDLE = (3, 4)  # idle and waiting for the disk, among the fields of a line
_FIELDS = 8  # what follows is counted in these already


@dataclass(frozen=True, slots=True)
class Clock:
    """Seconds since some time: of the wall, of all cores at work, and of this program at work."""

    wall: float
    busy: float
    own: float

    def others_cores(self, since: Clock) -> float:
        """How many cores were busy for others since then, on average; stolen time counts."""
        busy, own = self.busy - since.busy, self.own - since.own
        return max(busy - own, 0.0) / (self.wall - since.wall)


def now() -> Clock:
    """The clock; own includes the children that have ended."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1 : 1 + _FIELDS]
    busy = sum(int(ticks) for i, ticks in enumerate(fields) if i not in _IDLE)
    own = sum(
        used.ru_utime + used.ru_stime
        for used in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )
    return Clock(time.perf_counter(), busy / _TICKS_A_SECOND, own)
