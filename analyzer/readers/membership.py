"""Groups that no trace lists the ranks of: their members are who names them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from stepsplit.analyzer.trace import Group, RankTrace


def with_members(traces: Sequence[RankTrace]) -> tuple[RankTrace, ...]:
    """The traces, with the ranks of groups of which only an identity is told.

    Such a group (an NCCL communicator in an Nsight export) has the same name on all its members, so
    that they are known where every rank of the run is there.
    """
    if len(traces) < max(trace.world_size for trace in traces):
        return tuple(traces)
    members: dict[str, list[int]] = defaultdict(list)
    for trace in traces:
        for name in {group.name for group in trace.groups if not group.ranks}:
            members[name].append(trace.rank)
    return tuple(_filled(trace, members) for trace in traces)


def _filled(trace: RankTrace, members: dict[str, list[int]]) -> RankTrace:
    if all(group.ranks for group in trace.groups):
        return trace
    groups = tuple(
        group if group.ranks else Group(group.name, tuple(sorted(members[group.name])), "")
        for group in trace.groups
    )
    return replace(trace, groups=groups)
