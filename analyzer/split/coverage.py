"""Which waits are measured if only some ranks of a job were recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from msgspec import Struct

from stepsplit.analyzer.arrays import list_distinct
from stepsplit.analyzer.split.matching import MatchedCalls
from stepsplit.analyzer.split.mesh import RankLayout
from stepsplit.analyzer.trace import RankTrace

Holds = Literal["measured", "partly", "estimated"]


class Coverage(Struct, frozen=True):
    """Which share of the waits on one mesh axis is measured rather than estimated.

    Waits are measured in groups whose members were all recorded. With some members missing they are
    estimated from the recorded members, with a single member from the usual time of such a call.
    Compute, copy and idle time, and the sum of all buckets, are always measured.

    Attributes:
        axis: Mesh axis, or the name of the groups as in GroupRow; None if unknown.
        groups: Number of groups that the recorded ranks used.
        whole: Groups with all members recorded.
        alone: Groups with a single member recorded.
        calls: Calls of the recorded ranks on these groups.
        unmatched: Calls without a matching call on the peers.

    Examples:
        >>> report = analyze("sample_traces/tp2_pp2")
        >>> [(row.axis, row.holds) for row in report.coverage]
        [('pp', 'measured'), ('tp', 'measured')]
    """

    axis: str | None
    groups: int
    whole: int
    alone: int
    calls: int
    unmatched: int

    @property
    def holds(self) -> Holds:
        """Is "measured", "partly" (some calls are unmatched) or "estimated" (all are)."""
        if not self.unmatched:
            return "measured"
        return "estimated" if self.unmatched == self.calls else "partly"


def compute_coverage(
    traces: Sequence[RankTrace], matched: MatchedCalls, layout: RankLayout
) -> tuple[Coverage, ...]:
    """One row per axis on which the recorded ranks communicate."""
    present = {trace.rank for trace in traces}
    present_counts = [len(present & set(group.ranks)) for group in matched.groups]
    axis_of = [layout.name_group(group) for group in matched.groups]
    used = list_distinct(matched.group[matched.group >= 0]).tolist()
    rows = []
    for axis in dict.fromkeys(axis_of[group] for group in used):
        axis_groups = [group for group in used if axis_of[group] == axis]
        calls = np.isin(matched.group, axis_groups)
        rows.append(
            Coverage(
                axis,
                len(axis_groups),
                sum(
                    present_counts[group] == len(matched.groups[group].ranks)
                    for group in axis_groups
                ),
                sum(present_counts[group] == 1 for group in axis_groups),
                int(calls.sum()),
                int((calls & (matched.key < 0)).sum()),
            )
        )
    return tuple(rows)
