"""The device mesh of a run: coordinates of each rank, axis of each group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stepsplit.analyzer import units
from stepsplit.analyzer.split.mesh_groups import (
    RankLine,
    build_mesh,
    find_named_lines,
    parse_group_name,
    parse_single_axis,
)
from stepsplit.analyzer.split.mesh_inference import (
    Exchanges,
    find_exchanges,
    infer_axes,
    infer_lines,
)
from stepsplit.analyzer.trace import Group, Note, RankTrace
from stepsplit.collectors.run_spec import DATA_PARALLEL, Mesh, RunSpec

# Rank layout: mesh, pipeline coordinate of each rank, axis of each group.

Lines = Mapping[str, RankLine]

DATA_AXES: frozenset[str] = frozenset({*DATA_PARALLEL, "cp"})
"""Axes along which ranks train the same weights on different data and reduce their gradients."""

STAGE_AXES = frozenset({"tp", "cp", "ep"})
"""Axes within a stage: communication along them is part of its forwards and backwards."""

NAMES, MESSAGES, USE = "group names", "messages", "rank sets and operations"
"""Possible sources of a layout that run.json does not define."""

_NO_MESH = "run.json has no mesh"

_UNKNOWN = "unknown mesh: all waits count as skew, none as bubble"

_EVIDENCE = {
    NAMES: "process group names, which do not cover all ranks",
    MESSAGES: "messages between ranks",
    USE: "the ranks and operations of the process groups",
}


@dataclass(frozen=True, slots=True)
class RankLayout:
    """Coordinates of the ranks; mesh and source are None if unknown.

    pipelines holds the ranks of each pipeline, first stage first; stage_of is the pp coordinate.
    known_axes holds the axes of groups that the mesh does not describe, such as expert groups.
    """

    mesh: Mesh | None
    source: str | None
    pipelines: tuple[tuple[int, ...], ...]
    stage_of: Mapping[int, int]
    notes: tuple[Note, ...] = ()
    known_axes: Mapping[Group, frozenset[str]] = field(default_factory=dict)

    @classmethod
    def build(
        cls,
        mesh: Mesh | None,
        source: str | None,
        pipelines: Sequence[Sequence[int]],
        *notes: Note,
        known_axes: Mapping[Group, frozenset[str]] | None = None,
    ) -> RankLayout:
        """The layout with these pipelines."""
        stages = {rank: stage for line in pipelines for stage, rank in enumerate(line)}
        return cls(mesh, source, tuple(map(tuple, pipelines)), stages, notes, known_axes or {})

    def find_stage(self, rank: int) -> int:
        """The rank's pp coordinate, 0 without a pipeline."""
        return self.stage_of.get(rank, 0)

    def find_axes(self, group: Group) -> frozenset[str]:
        """The axes along which the group's ranks differ; empty if unknown.

        Expert groups have their own axes, independent of the mesh.
        """
        if group in self.known_axes:
            return self.known_axes[group]
        if (name := parse_group_name(group.description)).experts:
            return frozenset(name.axes)
        if self.mesh is None:
            described = parse_described_axis(group)
            return frozenset({described} if described else ())
        axes = self.mesh.axes
        spread = {a: {self.mesh.coordinate(rank, a) for rank in group.ranks} for a in axes}
        return frozenset(axis for axis in axes if len(spread[axis]) > 1)

    def find_axis(self, group: Group) -> str | None:
        """The single axis of the group; None for several axes or a group of one rank."""
        if len(group.ranks) < 2:
            return None
        axes = self.find_axes(group)
        if axes or self.mesh is not None:
            return next(iter(axes)) if len(axes) == 1 else None
        stages = {self.find_stage(rank) for rank in group.ranks}
        return "pp" if len(stages) == len(group.ranks) else None


def infer_layout(spec: RunSpec | None, traces: Sequence[RankTrace]) -> RankLayout:
    """The layout from run.json, else inferred from group names, messages and usage."""
    groups = _collect_groups(spec, traces)
    if spec is not None and spec.mesh is not None:
        known_axes = find_expert_axes(groups)
        return RankLayout.build(
            spec.mesh, "run.json", _list_pipelines(spec.mesh), known_axes=known_axes
        )
    world_size = spec.world_size if spec else max(trace.world_size for trace in traces)
    lines = find_named_lines(groups)
    if (mesh := build_mesh(lines, groups, world_size)) is not None:
        note = Note("mesh_inferred", f"{_NO_MESH}: inferred from process group names")
        known_axes = find_expert_axes(groups)
        return RankLayout.build(mesh, NAMES, _list_pipelines(mesh), note, known_axes=known_axes)
    if world_size == 1:
        return RankLayout.build(None, None, ())
    return _infer_from_traffic(traces, groups, lines, world_size)


def parse_described_axis(group: Group) -> str | None:
    """The axis in a group's description, as written by DeviceMesh, Megatron and DeepSpeed."""
    return parse_single_axis(group.description)


def _infer_from_traffic(
    traces: Sequence[RankTrace], groups: Sequence[Group], lines: Lines, world_size: int
) -> RankLayout:
    """The layout inferred from messages and group usage, if names do not cover the world."""
    traffic = find_exchanges(traces)
    pipelines = find_named_pipelines(groups, lines, world_size) or traffic.pipelines
    stage = {rank: i for line in pipelines for i, rank in enumerate(line)}
    used = infer_axes(traces, traffic.rings, stage)
    known_axes = find_named_axes(groups, lines) | {g: frozenset({axis}) for g, axis in used.items()}
    axis_lines = {**infer_lines(used, traffic, {trace.rank for trace in traces}), **lines}
    mesh = build_mesh(axis_lines, groups, world_size)
    if (
        mesh is not None
        and set(_list_pipelines(mesh)) >= set(pipelines)
        and _is_unambiguous(traces, traffic, axis_lines)
    ):
        source = USE if set(used.values()) - {"ep", "cp"} else MESSAGES
        text = f"{_NO_MESH}: inferred from {_EVIDENCE[source]}"
        note = Note("mesh_inferred", text)
        return RankLayout.build(mesh, source, _list_pipelines(mesh), note, known_axes=known_axes)
    if pipelines:
        source = MESSAGES if pipelines == traffic.pipelines else NAMES
        note = Note("mesh_inferred", f"{_NO_MESH}: stages inferred from {_EVIDENCE[source]}")
        return RankLayout.build(None, source, pipelines, note, known_axes=known_axes)
    note = Note("mesh_unknown", _UNKNOWN + _format_doubt(traffic))
    return RankLayout.build(None, USE if used else None, (), note, known_axes=known_axes)


def _is_unambiguous(traces: Sequence[RankTrace], traffic: Exchanges, lines: Lines) -> bool:
    """Whether no message can belong to a pipeline that the mesh lacks."""
    unknown = any(((t.calls.peer < 0) & t.calls.is_message).any() for t in traces)
    return "pp" in lines or not (traffic.doubtful or unknown)


def _format_doubt(traffic: Exchanges) -> str:
    some = units.format_number_list(traffic.doubtful)
    text = f"; messages between ranks {some} could be a pipeline or a ring"
    return text if traffic.doubtful else ""


def _list_pipelines(mesh: Mesh) -> list[tuple[int, ...]]:
    lines = dict.fromkeys(mesh.line(rank, "pp") for rank in range(mesh.world_size))
    return [line for line in lines if len(line) > 1]


def _collect_groups(spec: RunSpec | None, traces: Sequence[RankTrace]) -> list[Group]:
    stated = [Group(g.name, g.ranks, g.description) for g in spec.groups] if spec else []
    every = dict.fromkeys([*stated, *(g for trace in traces for g in trace.groups)])
    return [group for group in every if group.ranks]


# Axes and stages from group names, when the mesh as a whole is unknown.

Axes = dict[Group, frozenset[str]]


def find_named_axes(groups: Sequence[Group], lines: Mapping[str, RankLine]) -> Axes:
    """The axes of each group with a known name, without axes that lines show to have size 1."""
    axes: Axes = {}
    for group in groups:
        name = parse_group_name(group.description)
        several = {a for a in name.axes if a not in lines or lines[a].size > 1}
        alone = parse_single_axis(group.description)
        if name.axes and not name.experts:
            axes[group] = frozenset({alone} if alone and alone in several else several)
    return axes | find_expert_axes(groups)


def find_expert_axes(groups: Sequence[Group]) -> Axes:
    """The axes of the expert groups; one with the same ranks as an ep group lies along ep only."""
    experts = [
        (g, parse_group_name(g.description))
        for g in groups
        if parse_group_name(g.description).experts
    ]
    parallel = {group.ranks for group, name in experts if name.axes == ("ep",)}
    return {
        group: frozenset({"ep"} if "ep" in name.axes and group.ranks in parallel else name.axes)
        for group, name in experts
    }


def find_named_pipelines(
    groups: Sequence[Group], lines: Mapping[str, RankLine], world_size: int
) -> tuple[tuple[int, ...], ...]:
    """The ranks of each pipeline, from groups named pp; empty if these overlap.

    If they form a regular grid, the pipelines of unrecorded ranks are extrapolated.
    """
    named_groups = [(g, parse_group_name(g.description)) for g in groups if len(g.ranks) > 1]
    stages = {g.ranks for g, name in named_groups if name.axes == ("pp",) and name.whole}
    line = lines.get("pp", RankLine(1, 1))
    if line.size > 1 and line.can_fill(world_size) and all(line.is_start(r[0]) for r in stages):
        return tuple(line.list_lines(world_size))
    members = [rank for ranks in stages for rank in ranks]
    return tuple(sorted(stages)) if len(set(members)) == len(members) else ()
