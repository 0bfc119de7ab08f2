"""What communication is called that is not along a single axis of the mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stepsplit.analyzer.report.report import GroupRow, Report, Run
from stepsplit.collectors.formats.run_spec import Mesh

UNKNOWN_AXIS = "other"


@dataclass(frozen=True, slots=True)
class AxisNames:
    """One name for each group and for rows without an axis, the same in every table and chart.

    Attributes:
        of_groups: by a group's id its axis; the axes of a group along several ("pp+tp"), or "all
            ranks"; its description where the mesh is unknown.
        without_axis: of rows whose axis is None: the name of all calls without a single axis, if
            they have one, else "other".
    """

    of_groups: Mapping[int, str]
    without_axis: str

    def name(self, axis: str | None) -> str:
        """The axis of a row in words."""
        return axis or self.without_axis

    def name_group(self, group: int) -> str:
        """The name of a group; "other" if the calls state none."""
        return self.of_groups.get(group, UNKNOWN_AXIS)


def name_axes(report: Report) -> AxisNames:
    """The names of the groups of a report and of its rows without an axis."""
    mesh = find_mesh(report.run)
    names = {group.id: group.axis or _describe(mesh, group) for group in report.groups}
    with_axis = {group.id for group in report.groups if group.axis}
    others = {row.group for row in report.collectives} - with_axis
    several = {names.get(group, UNKNOWN_AXIS) for group in others}
    return AxisNames(names, several.pop() if len(several) == 1 else UNKNOWN_AXIS)


def find_mesh(run: Run) -> Mesh | None:
    """The mesh of a run, if it covers all ranks of the job."""
    try:
        mesh = Mesh.of({one.axis: one.size for one in run.mesh or ()})
    except ValueError:  # the report of another program
        return None
    return mesh if mesh.axes and mesh.world_size == run.world_size else None


def _describe(mesh: Mesh | None, group: GroupRow) -> str:
    if mesh is not None and max(group.ranks, default=mesh.world_size) < mesh.world_size:
        places = {axis: {mesh.coordinate(rank, axis) for rank in group.ranks} for axis in mesh.axes}
        along = [axis for axis in mesh.axes if len(places[axis]) > 1]
        if len(along) > 1:
            return "all ranks" if len(group.ranks) == mesh.world_size else "+".join(along)
    return group.description or UNKNOWN_AXIS
