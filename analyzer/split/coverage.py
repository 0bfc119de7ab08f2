"""Which numbers hold where only some of a job's ranks were recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from stepsplit.analyzer.arrays import distinct
from stepsplit.analyzer.split.calls.match import Matched
from stepsplit.analyzer.split.mesh.layout import Layout
from stepsplit.analyzer.trace import RankTrace

Holds = Literal["measured", "partly", "estimated"]


@dataclass(frozen=True, slots=True)
class Coverage:
    """How far waiting on one axis (None: along none alone) is measured.

    Of the groups that the recorded ranks called, whole had all of their members recorded and alone
    only one. Waits are measured in whole groups; where some members are there the others are
    estimated from what was seen of the call, and for one member alone from how long such a call
    takes. unmatched of calls lack a counterpart. compute, copy and idle hold whatever is missing,
    and so does the sum.
    """

    axis: str | None
    groups: int
    whole: int
    alone: int
    calls: int
    unmatched: int

    @property
    def holds(self) -> Holds:
        """Whether waits on this axis are measured, partly so, or estimated throughout."""
        if not self.unmatched:
            return "measured"
        return "estimated" if self.unmatched == self.calls else "partly"


def coverage_of(
    traces: Sequence[RankTrace], matched: Matched, layout: Layout
) -> tuple[Coverage, ...]:
    """A row an axis on which the recorded ranks communicate."""
    present = {trace.rank for trace in traces}
    there = [len(present & set(group.ranks)) for group in matched.groups]
    axis_of = [layout.axis_of(group) for group in matched.groups]
    used = distinct(matched.group[matched.group >= 0]).tolist()
    found = []
    for axis in dict.fromkeys(axis_of[group] for group in used):
        mine = [group for group in used if axis_of[group] == axis]
        calls = np.isin(matched.group, mine)
        found.append(
            Coverage(
                axis,
                len(mine),
                sum(there[group] == len(matched.groups[group].ranks) for group in mine),
                sum(there[group] == 1 for group in mine),
                int(calls.sum()),
                int((calls & (matched.key < 0)).sum()),
            )
        )
    return tuple(found)
