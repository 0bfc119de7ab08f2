"""Where ranks sit: stated, or told by the names of groups, or by who sends to whom."""

from __future__ import annotations

import json
from pathlib import Path

from builders import CpuTrace

from stepsplit.analyzer import analyze
from stepsplit.analyzer.split.layout import layout_of
from stepsplit.analyzer.trace import Group
from stepsplit.collectors.run_spec import GroupInfo, Mesh, RunSpec

MESH = Mesh.of({"pp": 2, "dp": 2, "tp": 2})


def spec(mesh: Mesh | None, *groups: GroupInfo) -> RunSpec:
    return RunSpec("run", 8, "gloo", mesh=mesh, groups=groups)


def mesh_groups(*axes: str) -> list[GroupInfo]:
    lines = {(axis, MESH.line(rank, axis)) for axis in axes for rank in range(8)}
    return [GroupInfo(f"{i}", f"mesh_{a}", r) for i, (a, r) in enumerate(sorted(lines))]


def test_the_stated_mesh_says_every_axis() -> None:
    layout = layout_of(spec(MESH), [])
    assert (layout.source, layout.notes) == ("run.json", ())
    assert layout.pipelines == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert [layout.stage(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    axes = [
        layout.axis_of(Group("x", ranks, "")) for ranks in ((0, 4), (1, 3), (6, 7), (0, 1, 2, 3))
    ]
    assert axes == ["pp", "dp_replicate", "tp", None]


def test_the_names_of_groups_make_the_same_mesh() -> None:
    layout = layout_of(spec(None, *mesh_groups("pp", "dp_replicate", "tp")), [])
    assert (layout.mesh, layout.source) == (MESH, "group names")
    assert [note.code for note in layout.notes] == ["mesh_inferred"]


def test_groups_that_do_not_make_up_the_world_are_no_mesh() -> None:
    layout = layout_of(spec(None, *mesh_groups("pp", "tp")), [])
    assert (layout.mesh, layout.pipelines) == (None, ())
    assert [note.code for note in layout.notes] == ["mesh_unknown"]


def test_a_chain_of_messages_is_a_pipeline_and_who_sends_first_is_its_start(tmp_path: Path) -> None:
    world = [("0", "default_pg", [0, 1, 2])]
    order = {2: 1, 1: 0}
    for rank in range(3):
        trace = CpuTrace(rank, 3, world).step(2, 0, 100).op("aten::mm", 0, 10)
        if rank in (1, 0):
            trace.message("recv", rank + 1, 20, 30)
        if rank in order:
            trace.message("send", order[rank], 40, 50)
        trace.write(tmp_path)
    report = analyze(tmp_path)
    assert report.run.mesh_source == "messages"
    assert {row.phase for row in report.exposed if row.axis == "pp"} == {"forward"}


def test_run_json_without_its_mesh_changes_only_a_warning(tmp_path: Path) -> None:
    world = [("0", "default_pg", [0, 1])]
    first = CpuTrace(0, 2, world).step(2, 0, 100).op("aten::mm", 0, 40)
    first.message("send", 1, 40, 50).op("aten::mm", 50, 100)
    last = CpuTrace(1, 2, world).step(2, 0, 100).message("recv", 0, 5, 50).op("aten::mm", 50, 100)
    for trace in (first, last):
        trace.write(tmp_path)
    body = {"schema": "stepsplit.run/1", "name": "r", "world_size": 2, "backend": "gloo"}
    stated = body | {"mesh": [{"axis": "pp", "size": 2}]}
    (tmp_path / "run.json").write_text(json.dumps(stated))
    with_mesh = analyze(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps(body))
    without = analyze(tmp_path)
    assert with_mesh.steps == without.steps
    assert with_mesh.exposed == without.exposed
    assert {row.code for row in without.warnings} - {row.code for row in with_mesh.warnings} == {
        "mesh_inferred"
    }


def test_two_ranks_that_swap_data_are_a_ring_and_no_pipeline(tmp_path: Path) -> None:
    world = [("0", "default_pg", [0, 1])]
    for rank in (0, 1):
        trace = CpuTrace(rank, 2, world).step(2, 0, 100).op("aten::mm", 0, 10 + 30 * rank)
        at = 10 + 30 * rank
        trace.message("send", 1 - rank, at, 60).message("recv", 1 - rank, at + 1.5, 62)
        trace.op("aten::mm", 62, 100).write(tmp_path)
    report = analyze(tmp_path)
    assert {row.bubble_ns for row in report.steps} == {0}
    assert report.steps[0].skew_ns > 0
