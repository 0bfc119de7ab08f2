"""One name for the communication of groups along several axes, on every page and screen."""

from __future__ import annotations

from msgspec import structs
from support.page_text import read_tables
from support.report_builders import MS, report_and_tables

from stepsplit.analyzer.report.axis_names import name_axes
from stepsplit.analyzer.report.report import AxisSize, BlameRow, ExposedRow, GroupRow, Report
from stepsplit.analyzer.split.bandwidth import CollectiveRow
from stepsplit.dashboard.pages.components import View
from stepsplit.dashboard.pages.overview import (
    build_blame_table,
    build_collective_table,
    build_exposed_table,
)
from stepsplit.dashboard.reporters.terminal import build_collectives_table


def with_gradient_norm(*groups: GroupRow) -> Report:
    """The run with two replicas, whose optimizers wait in an all_reduce over these groups."""
    report, _ = report_and_tables()
    mesh = (AxisSize("dp_replicate", 2), AxisSize("pp", 2), AxisSize("tp", 2))
    norms = [
        CollectiveRow(one.id, "all_reduce", "float32", 4, 8, MS, 2 * MS, None, None)
        for one in groups
    ]
    waits = [
        ExposedRow(row.rank, row.step, None, "optimizer", MS, 0, MS, 0) for row in report.steps
    ]
    return structs.replace(
        report,
        run=structs.replace(report.run, mesh=mesh, world_size=8),
        groups=(*report.groups, *groups),
        collectives=(*report.collectives, *norms),
        exposed=(*report.exposed, *waits),
        blame=(BlameRow(3, "compute", 8 * MS, 0, 8 * MS, None, (5,)),),
    )


def list_axes(report: Report) -> set[str]:
    """What the tables of the pages call the axes."""
    sections = [
        *build_exposed_table(report),
        *build_collective_table(report),
        *build_blame_table(View("run", report, None)),
    ]
    return {row["axis"] for rows in read_tables(sections) for row in rows}


def test_a_group_along_several_axes_has_their_names_in_every_table() -> None:
    norms = [
        GroupRow(7 + at, None, "MODEL_PARALLEL_GROUP", tuple(range(4 * at, 4 * at + 4)))
        for at in (0, 1)
    ]
    report = with_gradient_norm(*norms)
    assert list_axes(report) == {"pp", "tp", "pp+tp"}
    assert "pp+tp" in list(build_collectives_table(report).columns[0].cells)


def test_a_group_of_all_ranks_is_called_so() -> None:
    assert list_axes(with_gradient_norm(GroupRow(7, None, "default_pg", tuple(range(8))))) == {
        "pp",
        "tp",
        "all ranks",
    }


def test_rows_of_several_kinds_of_groups_are_of_other_axes() -> None:
    world = GroupRow(7, None, "default_pg", tuple(range(8)))
    names = name_axes(with_gradient_norm(world, GroupRow(8, None, "", (0, 1, 2, 3))))
    assert (names.name_group(7), names.name_group(8), names.name(None)) == (
        "all ranks",
        "pp+tp",
        "other",
    )


def test_without_a_mesh_a_group_has_its_description() -> None:
    report = with_gradient_norm(GroupRow(7, None, "MODEL_PARALLEL_GROUP", (0, 1, 2, 3)))
    for mesh in (None, (AxisSize("tp", 2),), (AxisSize("tp", 0),)):
        unknown = structs.replace(report, run=structs.replace(report.run, mesh=mesh))
        assert name_axes(unknown).name_group(7) == "MODEL_PARALLEL_GROUP"


def test_calls_without_a_group_have_another_name_than_those_with_one() -> None:
    report = with_gradient_norm(GroupRow(7, None, "", (0, 1, 2, 3)))
    without = CollectiveRow(-1, "all_reduce", "float32", 4, 8, MS, 2 * MS, None, None)
    names = name_axes(structs.replace(report, collectives=(*report.collectives, without)))
    assert (names.name_group(-1), names.name(None)) == ("other", "other")
