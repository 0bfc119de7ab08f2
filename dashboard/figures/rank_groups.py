"""Ways to group the ranks of a run: by pipeline stage, host and mesh axis."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stepsplit.analyzer.report.report import Report, Run
from stepsplit.analyzer.report.tables import Tables
from stepsplit.collectors.formats.run_spec import Mesh
from stepsplit.dashboard.figures.communication import RankGroup


@dataclass(frozen=True, slots=True)
class RankLocation:
    """A rank with its host and pipeline stage; None if unknown."""

    rank: int
    host: str | None
    stage: int | None


def list_rank_locations(report: Report, tables: Tables) -> tuple[RankLocation, ...]:
    """The recorded ranks with their host and pipeline stage."""
    hosts = {rank: one.host for one in report.run.hosts for rank in one.ranks}
    boxes = tables.boxes
    stages: dict[int, list[int]] = defaultdict(list)
    for rank, stage in np.unique(np.column_stack((boxes.rank, boxes.stage)), axis=0).tolist():
        stages[rank].append(stage)
    # A rank with stages of several chunks has no single one.
    single = {rank: own[0] for rank, own in stages.items() if len(own) == 1}
    return tuple(
        RankLocation(rank, _drop_unknown(hosts.get(rank)), single.get(rank))
        for rank in report.run.ranks
    )


def list_report_groupings(report: Report) -> tuple[RankGrouping, ...]:
    """As list_rank_groupings without tables: the stages are those of the mesh."""
    hosts = {rank: _drop_unknown(one.host) for one in report.run.hosts for rank in one.ranks}
    return list_groupings(report, dict.fromkeys(report.run.ranks), hosts)


def list_rank_groupings(report: Report, ranks: Sequence[RankLocation]) -> tuple[RankGrouping, ...]:
    """The ways to group the ranks that yield several groups: by stage, host and mesh axis."""
    stages = {one.rank: one.stage for one in ranks}
    return list_groupings(report, stages, {one.rank: one.host for one in ranks})


def _drop_unknown(host: str | None) -> str | None:
    return None if host in (None, "unknown") else host


_Label = tuple[int, str]
"""The number of a group, by which groups are ordered, and its name."""


@dataclass(frozen=True, slots=True)
class RankGrouping:
    """A way to group the ranks: the groups of recorded ranks."""

    by: str
    groups: tuple[RankGroup, ...]


def list_groupings(
    report: Report, stages: Mapping[int, int | None], hosts: Mapping[int, str | None]
) -> tuple[RankGrouping, ...]:
    """The ways to group the ranks that yield several groups: by stage, host and mesh axis."""
    mesh = _find_mesh(report.run)
    by_stage: dict[int, _Label | None] = {}
    for rank, stage in stages.items():
        number = stage
        if number is None and mesh is not None and "pp" in mesh.axes:
            # Ranks with several stages, or none in the pipeline grid, have that of the mesh.
            number = mesh.coordinate(rank, "pp")
        by_stage[rank] = None if number is None else (number, f"stage {number}")
    # Hosts in the order of their first ranks: n2 before n10.
    first: dict[str, int] = {}
    for rank, host in sorted(hosts.items()):
        if host is not None:
            first.setdefault(host, rank)
    keys: dict[str, Mapping[int, _Label | None]] = {
        "stage": by_stage,
        "host": {
            rank: None if host is None else (first[host], host) for rank, host in hosts.items()
        },
    }
    axes = [*(mesh.axes if mesh else ()), *(one.axis for one in report.groups if one.axis)]
    for axis in dict.fromkeys(axes):
        keys[axis] = _label_axis_groups(axis, mesh, report)
    made = (_group_ranks(by, own) for by, own in keys.items())
    return tuple(one for one in made if len(one.groups) > 1)


def _find_mesh(run: Run) -> Mesh | None:
    """The mesh of a run, if it covers all ranks of the job."""
    try:
        mesh = Mesh.of({one.axis: one.size for one in run.mesh or ()})
    except ValueError:  # the report of another program
        return None
    return mesh if mesh.axes and mesh.world_size == run.world_size else None


def _label_axis_groups(axis: str, mesh: Mesh | None, report: Report) -> dict[int, _Label | None]:
    """The group of each rank along the axis: by the mesh, else its largest recorded group."""
    own = sorted((g.ranks for g in report.groups if g.axis == axis), key=len, reverse=True)
    groups: dict[int, tuple[int, ...] | None] = {}
    for rank in report.run.ranks:
        if mesh is not None and axis in mesh.axes:
            groups[rank] = mesh.line(rank, axis)
        else:
            groups[rank] = next((group for group in own if rank in group), None)
    numbers = {group: n for n, group in enumerate(sorted({g for g in groups.values() if g}))}
    return {
        rank: (numbers[group], f"{axis} group {numbers[group]}") if group else None
        for rank, group in groups.items()
    }


def _group_ranks(by: str, labels: Mapping[int, _Label | None]) -> RankGrouping:
    members: dict[_Label, list[int]] = defaultdict(list)
    for rank, label in labels.items():
        members[label or (len(labels), "other ranks")].append(rank)
    groups = tuple(RankGroup(name, tuple(own)) for (_, name), own in sorted(members.items()))
    return RankGrouping(by, groups)
