"""Which axes groups without telling names have, by their ranks and by how they are used."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass

from stepsplit.analyzer.split.mesh.group_names import named, one_axis
from stepsplit.analyzer.split.mesh.group_usage import Usage, usages
from stepsplit.analyzer.split.mesh.rank_lines import Line, line_of
from stepsplit.analyzer.split.mesh.stage_chains import Exchanges
from stepsplit.analyzer.trace import Group, RankTrace


@dataclass(frozen=True, slots=True)
class _Seen:
    """The shapes of groups that sum gradients, those with an axis, and the smallest stride."""

    summed: Set[frozenset[int]]
    axes: Set[tuple[frozenset[int], str]]
    closest: int


def used_axes(
    traces: Sequence[RankTrace], rings: Collection[tuple[int, ...]], stage: Mapping[int, int]
) -> dict[Group, str]:
    """The axis of each group without a telling name whose use and ranks leave no doubt.

    A group lies along the axis that all groups of its shape are used for. What spans stages is none
    of them: embeddings of the first and last stage are summed as gradients are.
    """
    every = [group for trace in traces for group in trace.groups if len(group.ranks) > 1]
    mesh = [group for group in every if not named(group.description).experts]
    told = {g: axis for g in mesh if (axis := one_axis(g.description)) is not None}
    told |= {group: "cp" for group in _with_messages(traces) if group.ranks in rings}
    used = {g: u for g, u in usages(traces).items() if g not in told and len(g.ranks) > 1}
    unnamed = {g: u for g, u in used.items() if not named(g.description).axes}
    axes = _by_shape(unnamed, stage)
    seen = _Seen(
        summed={_shape(group) for group, usage in used.items() if usage.sums_gradients},
        axes={(_shape(group), axis) for group, axis in (axes | told).items()},
        closest=min((_stride(group) for group in [*used, *told]), default=1),
    )
    clear = {group: axis for group, axis in axes.items() if not _doubtful(group, axis, seen)}
    lines: dict[str, set[Line | None]] = defaultdict(set)
    for group, axis in (told | clear).items():
        lines[axis].add(line_of(group.ranks))
    one_line = {g: axis for g, axis in clear.items() if axis == "ep" or len(lines[axis]) == 1}
    return one_line | {g: axis for g, axis in told.items() if not named(g.description).axes}


def lines_of(
    axes: Mapping[Group, str], found: Exchanges, present: Collection[int]
) -> dict[str, Line]:
    """The line of each axis of the mesh that groups and messages tell; unclear ones left out.

    A chain counts where all its ranks are there: else it may go on.
    """
    seen: dict[str, set[Line | None]] = defaultdict(set)
    for group, axis in axes.items():
        seen[axis].add(line_of(group.ranks))
    for axis, exchanged in (("pp", found.pipelines), ("cp", found.rings)):
        for ranks in exchanged:
            seen[axis].add(line_of(ranks) if set(ranks) <= set(present) else None)
    only = {axis: next(iter(lines)) for axis, lines in seen.items() if len(lines) == 1}
    return {axis: line for axis, line in only.items() if line is not None and axis != "ep"}


def _by_shape(used: Mapping[Group, Usage], stage: Mapping[int, int]) -> dict[Group, str]:
    """The axes of groups by their use, where all groups of a shape within a stage agree."""
    seen: dict[Line, set[str]] = defaultdict(set)
    axes: dict[Group, str] = {}
    for group, usage in used.items():
        axis, line = usage.axis(), line_of(group.ranks)
        if axis == "ep":
            axes[group] = axis
        elif axis is not None and line and len({stage.get(rank) for rank in group.ranks}) == 1:
            axes[group] = axis
            seen[line].add(axis)
    lines = {group: line_of(group.ranks) for group in axes}
    return {g: a for g, a in axes.items() if a == "ep" or len(seen[lines[g] or Line(1, 1)]) == 1}


def _doubtful(group: Group, axis: str, seen: _Seen) -> bool:
    """Whether the ranks of other groups speak against the axis.

    tp has the closest ranks. Ranks of which a larger group also sums gradients may gather keys and
    values of attention, not weights. What holds a whole line of another axis lies along several.
    """
    shape = _shape(group)
    if axis == "ep":
        return False
    if axis == "tp":
        return _stride(group) > seen.closest
    if axis == "dp_shard" and any(shape < other for other in seen.summed):
        return True
    return any(other < shape for other, of in seen.axes if of not in (axis, "ep"))


def _shape(group: Group) -> frozenset[int]:
    """How far the ranks are from the first: groups of an axis are few shapes, however many."""
    return frozenset(rank - group.ranks[0] for rank in group.ranks)


def _stride(group: Group) -> int:
    line = line_of(group.ranks)
    return line.stride if line is not None else 1


def _with_messages(traces: Sequence[RankTrace]) -> list[Group]:
    """The groups on which messages are sent."""
    return [
        trace.groups[group_id]
        for trace in traces
        for group_id in sorted(set(trace.calls.group_id[trace.calls.is_message].tolist()))
        if group_id >= 0
    ]
