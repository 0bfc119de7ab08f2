"""What every cause is looked for in: the recording, its graph, and what several causes need."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from stepsplit.analyzer.diagnose.causes.host_time import HostTime
from stepsplit.analyzer.diagnose.causes.peer_speed import measure_peer_speed
from stepsplit.analyzer.diagnose.causes.unusual_steps import UnusualSteps, find_unusual_steps
from stepsplit.analyzer.diagnose.counted_work import WorkLaw
from stepsplit.analyzer.diagnose.graph.replay import ReplayContext
from stepsplit.analyzer.trace import Float


class CauseContext(ReplayContext, frozen=True, dict=True):
    """The input of every search for a cause; what costs time to compute is computed once.

    law is what the counted work explains; None where no work is known, or all ranks have the same.
    """

    law: WorkLaw | None = None

    @cached_property
    def host(self) -> HostTime:
        """The idle time that hosts cause, and what of it has a cause with a name."""
        return HostTime.measure(self)

    @cached_property
    def peer_speed(self) -> Float:
        """For each row of the steps, its compute at the speed of its peers over the measured
        one."""
        return measure_peer_speed(self, self.law)

    @cached_property
    def work_factor(self) -> Float:
        """For each row its compute at the mean work of its stage over that at its own, by the
        counted work; 1 where that is not known."""
        return np.ones(len(self.split_ns)) if self.law is None else self.law.factor

    @cached_property
    def unusual_steps(self) -> tuple[UnusualSteps, ...]:
        """The steps in which a rank computes longer than in its others."""
        return find_unusual_steps(self, self.law)
