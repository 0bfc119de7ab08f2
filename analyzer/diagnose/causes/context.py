"""What every cause is looked for in: the recording, its graph, and what several causes need."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from stepsplit.analyzer.diagnose.causes.host_time import HostTime
from stepsplit.analyzer.diagnose.graph.replay import ReplayContext


@dataclass(frozen=True)
class CauseContext(ReplayContext):
    """The input of every search for a cause; what costs time to compute is computed once."""

    @cached_property
    def host(self) -> HostTime:
        """The idle time that hosts cause, and what of it has a cause with a name."""
        return HostTime.measure(self)
