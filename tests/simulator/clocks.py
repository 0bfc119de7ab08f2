"""What the clock of a host shows at a true time."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.program import Scenario


@dataclass(frozen=True, slots=True)
class HostClock:
    """A clock that is offset_ns ahead at true time 0 and gains drift_ppm microseconds a second."""

    offset_ns: int = 0
    drift_ppm: float = 0.0

    def shows_ns(self, true_ns: int) -> int:
        """The clock's time in whole ns."""
        return true_ns + self.offset_ns + round(true_ns * self.drift_ppm / 1e6)


def clock_of(scenario: Scenario, rank: int) -> HostClock:
    """The clock that the rank reads: that of its host."""
    host = scenario.job.hosts[rank]
    return HostClock(scenario.offset_ns.get(host, 0), scenario.drift_ppm.get(host, 0.0))
