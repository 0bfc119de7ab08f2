"""What groups with telling names say where the mesh as a whole does not: their axes, the stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stepsplit.analyzer.split.mesh.group_names import named, one_axis
from stepsplit.analyzer.split.mesh.rank_lines import Line
from stepsplit.analyzer.trace import Group

Axes = dict[Group, frozenset[str]]


def axes_by_name(groups: Sequence[Group], lines: Mapping[str, Line]) -> Axes:
    """The axes of each group with a telling name, without those that lines show to be of size 1."""
    axes: Axes = {}
    for group in groups:
        name = named(group.description)
        several = {a for a in name.axes if a not in lines or lines[a].size > 1}
        alone = one_axis(group.description)
        if name.axes and not name.experts:
            axes[group] = frozenset({alone} if alone and alone in several else several)
    return axes | expert_axes(groups)


def expert_axes(groups: Sequence[Group]) -> Axes:
    """The axes of the groups of experts; one with the ranks of an ep group lies along ep alone."""
    experts = [(g, named(g.description)) for g in groups if named(g.description).experts]
    parallel = {group.ranks for group, name in experts if name.axes == ("ep",)}
    return {
        group: frozenset({"ep"} if "ep" in name.axes and group.ranks in parallel else name.axes)
        for group, name in experts
    }


def named_pipelines(
    groups: Sequence[Group], lines: Mapping[str, Line], world_size: int
) -> tuple[tuple[int, ...], ...]:
    """The ranks of each pipeline by groups named pp, none where these overlap.

    Where all of them lie as in a grid, those of the ranks that nobody recorded lie so too.
    """
    told = [(g, named(g.description)) for g in groups if len(g.ranks) > 1]
    stages = {g.ranks for g, name in told if name.axes == ("pp",) and name.whole}
    line = lines.get("pp", Line(1, 1))
    if line.size > 1 and line.fills(world_size) and all(line.starts_at(r[0]) for r in stages):
        return tuple(line.all(world_size))
    members = [rank for ranks in stages for rank in ranks]
    return tuple(sorted(stages)) if len(set(members)) == len(members) else ()
