"""What every cause is looked for in: the recording, its graph, and what several causes need."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from msgspec import Struct

from stepsplit.analyzer.diagnose.causes.host_time import HostTime
from stepsplit.analyzer.diagnose.causes.peer_speed import measure_peer_speed
from stepsplit.analyzer.diagnose.causes.unusual_steps import UnusualSteps, find_unusual_steps
from stepsplit.analyzer.diagnose.graph.dependency_graph import DependencyGraph
from stepsplit.analyzer.diagnose.graph.replay import ReplayContext, ReplayedSteps, replay
from stepsplit.analyzer.trace import Float, Int64


class StepGains(Struct, frozen=True):
    """By how much a change shortens the counted steps: of each rank (rows), and in the mean of each
    number (by_step), in ns."""

    numbers: Int64
    rows: Float
    by_step: Float


@dataclass(frozen=True)
class CauseContext(ReplayContext):
    """The input of every search for a cause; what costs time to compute is computed once."""

    def compute_step_gains_ns(self, changed: DependencyGraph) -> StepGains:
        """The reduction of each counted step with the changed graph."""
        steps, counted = self.graph.steps, self.counted
        rows_ns = (self._replayed.step_ns - replay(changed).step_ns)[counted].astype(np.float64)
        numbers, place = np.unique(steps.step[counted], return_inverse=True)
        return StepGains(numbers, rows_ns, np.bincount(place, rows_ns) / np.bincount(place))

    @cached_property
    def _replayed(self) -> ReplayedSteps:
        return replay(self.graph)

    @cached_property
    def host(self) -> HostTime:
        """The idle time that hosts cause, and what of it has a cause with a name."""
        return HostTime.measure(self)

    @cached_property
    def peer_speed(self) -> Float:
        """For each row of the steps, its compute at the speed of its peers over the measured
        one."""
        return measure_peer_speed(self)

    @cached_property
    def unusual_steps(self) -> tuple[UnusualSteps, ...]:
        """The steps in which a rank computes longer than in its others."""
        return find_unusual_steps(self)
