"""The device mesh of a run: coordinates of each rank, axis of each group."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from msgspec import Struct, field, structs

from stepsplit.analyzer import units
from stepsplit.analyzer.split.call_purposes import find_call_purposes
from stepsplit.analyzer.split.job_size import JobSize
from stepsplit.analyzer.split.mesh_groups import (
    RankLine,
    build_mesh,
    find_expert_axes,
    find_named_axes,
    find_named_lines,
    find_named_pipelines,
    parse_group_name,
    parse_single_axis,
)
from stepsplit.analyzer.split.mesh_inference import (
    find_marked_axes,
    find_sharded_groups,
    infer_axes,
    infer_lines,
)
from stepsplit.analyzer.split.message_patterns import Exchanges, find_exchanges
from stepsplit.analyzer.trace import Group, Note, RankTrace, find_earlier_calls
from stepsplit.collectors.formats.run_spec import AXES, DATA_PARALLEL, Mesh, RunSpec, is_described

Lines = Mapping[str, RankLine]

DATA_AXES: frozenset[str] = frozenset({*DATA_PARALLEL, "cp"})
"""Axes along which ranks train the same weights on different data and reduce their gradients."""

STAGE_AXES = frozenset({"tp", "cp", "ep"})
"""Axes within a stage: communication along them is part of its forwards and backwards."""

NAMES, MESSAGES, USE = "group names", "messages", "rank sets and operations"
"""Possible sources of a layout that run.json does not define."""

RUN_JSON, STATED = "run.json", "stated"
"""The sources of a mesh that the job or, for the analysis, the user states."""

_NO_MESH = "run.json has no mesh"

_UNKNOWN = "unknown mesh: all waits count as skew, none as bubble"

_EVIDENCE = {
    NAMES: "process group names, which do not cover all ranks",
    MESSAGES: "messages between ranks",
    USE: "the ranks and operations of the process groups",
}

_MAX_DESCRIPTION = 64
"""Characters of a description in a name: each exposed row and wait repeats it, and a trace may
state one of any length. Megatron-LM's longest has 42."""

_MARKED = "the code that issued the calls of the process groups"


class RankLayout(Struct, frozen=True):
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

    @property
    def is_stated(self) -> bool:
        """Whether the user or run.json states the mesh."""
        return self.source in (STATED, RUN_JSON)

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
        return find_spread_axes(self.mesh, tuple(group.ranks))

    def find_axis(self, group: Group) -> str | None:
        """The single axis of the group; None for several axes or a group of one rank."""
        if len(group.ranks) < 2:
            return None
        axes = self.find_axes(group)
        if axes or self.mesh is not None:
            return next(iter(axes)) if len(axes) == 1 else None
        stages = {self.find_stage(rank) for rank in group.ranks}
        return "pp" if len(stages) == len(group.ranks) else None

    def name_group(self, group: Group) -> str | None:
        """What the communication of the group is called wherever it is named: its axis, the axes
        that it spans ("pp x tp"), else its description; None if it has none."""
        if axes := self.find_axis(group) or format_axes(self.find_axes(group)):
            return axes
        named = is_described(group.description)
        return group.description[:_MAX_DESCRIPTION] if named else None

    def find_line(self, rank: int, peer: int) -> tuple[int, ...]:
        """All ranks that differ from both ranks only along the one axis in which the two differ; ()
        if they differ along several axes, or if the axes are unknown."""
        if self.mesh is not None:
            if max(rank, peer) >= self.mesh.world_size:
                return ()
            lines = [self.mesh.line(rank, axis) for axis in self.mesh.axes]
        else:
            lines = [line for line in self.pipelines if rank in line]
        along = [line for line in lines if peer in line and peer != rank]
        return along[0] if len(along) == 1 else ()


def format_axes(axes: Collection[str]) -> str:
    """The axes of a group as a product, outermost first, such as "dp_shard x cp"."""
    return " x ".join(sorted(axes, key=AXES.index))


@lru_cache(maxsize=65_536)
def find_spread_axes(mesh: Mesh, ranks: tuple[int, ...]) -> frozenset[str]:
    """The axes along which these ranks differ; asked for again with every call of a group."""
    spread = {axis: {mesh.coordinate(rank, axis) for rank in ranks} for axis in mesh.axes}
    return frozenset(axis for axis in mesh.axes if len(spread[axis]) > 1)


def infer_layout(
    spec: RunSpec | None, traces: Sequence[RankTrace], mesh: Mesh | None, size: JobSize
) -> RankLayout:
    """The layout from the mesh that the user states, else from run.json, else inferred from group
    names, messages and usage.

    Stated axes are compared with the names of the groups and the code that issued their calls; a
    contradiction is a note.
    """
    listed = [Group(g.name, g.ranks, g.description) for g in spec.groups] if spec else []
    every = dict.fromkeys([*listed, *(g for trace in traces for g in trace.groups)])
    groups = [group for group in every if group.ranks]
    stated, source = mesh, STATED
    if stated is None and spec is not None:
        stated, source = spec.mesh, RUN_JSON
    if stated is None:
        return _shard_weights(_infer_unstated(size, traces, groups), traces)
    known_axes = find_expert_axes(groups)
    layout = RankLayout.build(stated, source, _list_pipelines(stated), known_axes=known_axes)
    return structs.replace(layout, notes=tuple(_find_contradictions(layout, traces, groups)))


def _find_contradictions(
    layout: RankLayout, traces: Sequence[RankTrace], groups: Sequence[Group]
) -> Iterator[Note]:
    """A note on the first group that is on another axis than the stated mesh says, and one on the
    first pipeline that it lacks."""
    for group, axis in find_marked_axes(traces).items():
        if not _is_possible(axis, layout.find_axes(group), marked=True):
            yield _note_contradiction(
                layout, group.ranks, axis, "the code that issued their calls shows"
            )
            return
    for group, axis in _find_named_otherwise(layout, groups):
        yield _note_contradiction(layout, group.ranks, axis, "the name of their group shows")
        return
    for ranks in find_exchanges(traces).pipelines:
        if not any(set(ranks) <= set(pipeline) for pipeline in layout.pipelines):
            yield _note_contradiction(layout, ranks, "pp", "their messages show")
            return


def _find_named_otherwise(layout: RankLayout, groups: Sequence[Group]) -> list[tuple[Group, str]]:
    """The groups with the name of another axis than the stated one, unless another group of the
    same ranks has a name that fits."""
    named = [(g, axis) for g in groups if (axis := parse_described_axis(g)) and len(g.ranks) > 1]
    fit = {
        frozenset(group.ranks)
        for group, axis in named
        if _is_possible(axis, layout.find_axes(group), marked=False)
    }
    return [(group, axis) for group, axis in named if frozenset(group.ranks) not in fit]


def _is_possible(axis: str, along: frozenset[str], *, marked: bool) -> bool:
    """Whether a group along these stated axes can be on this one.

    Names do not distinguish sharded from replicated weights. Ranks along cp reduce gradients too.
    """
    if not along or axis in along:
        return True
    same = "cp" in along or (not marked and bool(along & {*DATA_PARALLEL}))
    return axis in DATA_PARALLEL and same


def _note_contradiction(layout: RankLayout, ranks: Sequence[int], axis: str, evidence: str) -> Note:
    along = layout.find_axes(Group("", tuple(ranks), ""))
    where = format_axes(along) or "no axis"
    some = units.format_number_list(ranks)
    return Note(
        "mesh_contradicted",
        f"stated mesh {layout.mesh.format() if layout.mesh else ''}: ranks {some} are along "
        f"{where}, but {evidence} {axis}",
    )


def _infer_unstated(
    size: JobSize, traces: Sequence[RankTrace], groups: Sequence[Group]
) -> RankLayout:
    """The layout from group names, messages and usage."""
    lines = find_named_lines(groups)
    if (mesh := _build_whole_mesh(lines, groups, size)) is not None:
        note = Note("mesh_inferred", f"{_NO_MESH}: inferred from process group names")
        known_axes = find_expert_axes(groups)
        return RankLayout.build(mesh, NAMES, _list_pipelines(mesh), note, known_axes=known_axes)
    if size.ranks == 1:
        return RankLayout.build(None, None, ())
    return _infer_from_traffic(traces, groups, lines, size)


def _build_whole_mesh(lines: Lines, groups: Sequence[Group], size: JobSize) -> Mesh | None:
    """The mesh of these axes; None if they do not cover the job, or its size is unknown."""
    return build_mesh(lines, groups, size.ranks) if size.is_known else None


def _shard_weights(layout: RankLayout, traces: Sequence[RankTrace]) -> RankLayout:
    """The layout with the data parallel axis of groups that gather weights as dp_shard.

    Megatron-LM's and DeepSpeed's names of these groups are the same for sharded and for replicated
    weights.
    """
    mesh, known_axes = layout.mesh, dict(layout.known_axes)
    axes = {g: layout.find_axes(g) for g in {*known_axes, *(g for t in traces for g in t.groups)}}
    replicated = {g for g, found in axes.items() if "dp_replicate" in found and "ep" not in found}
    if not replicated or any("dp_shard" in found for found in axes.values()):
        return layout
    named = {group for group in replicated if parse_group_name(group.description).whole}
    if not named or not named & find_sharded_groups(traces):
        return layout
    if mesh is not None:
        renamed = ["dp_shard" if axis == "dp_replicate" else axis for axis in mesh.axes]
        mesh = replace(mesh, axes=tuple(renamed))
    known_axes |= {g: axes[g] - {"dp_replicate"} | {"dp_shard"} for g in replicated}
    return structs.replace(layout, mesh=mesh, known_axes=known_axes)


def parse_described_axis(group: Group) -> str | None:
    """The axis in a group's description, as written by DeviceMesh, Megatron and DeepSpeed."""
    return parse_single_axis(group.description)


def _infer_from_traffic(
    traces: Sequence[RankTrace], groups: Sequence[Group], lines: Lines, size: JobSize
) -> RankLayout:
    """The layout inferred from messages and group usage, if names do not cover the world."""
    traffic = find_exchanges(traces)
    pipelines = find_named_pipelines(groups, lines, size.ranks) or traffic.pipelines
    stage = {rank: i for line in pipelines for i, rank in enumerate(line)}
    inferred = infer_axes(traces, traffic.rings, stage)
    used = inferred.axes
    known_axes = find_named_axes(groups, lines) | {g: frozenset({axis}) for g, axis in used.items()}
    known_axes |= inferred.spans
    present = {trace.rank for trace in traces}
    axis_lines = {**infer_lines(used, traffic, present), **inferred.lines, **lines}
    mesh = _build_whole_mesh(axis_lines, groups, size)
    if (
        mesh is not None
        and set(_list_pipelines(mesh)) >= set(pipelines)
        and _is_unambiguous(traces, traffic, axis_lines)
    ):
        by_use = {
            group
            for group, axis in [*used.items(), *((group, "") for group in inferred.spans)]
            if axis != "ep" and not (axis == "cp" and group.ranks in traffic.rings)
        }
        source = USE if by_use else MESSAGES
        sure = bool(by_use) and by_use <= inferred.marked
        # sure: the ranges around the calls show the axis of every group that is inferred from
        # use.
        evidence = _MARKED if source == USE and sure else _EVIDENCE[source]
        grade = {USE: f" (confidence: {'high' if sure else 'medium'})"}.get(source, "")
        note = Note("mesh_inferred", f"{_NO_MESH}: inferred from {evidence}{grade}")
        return RankLayout.build(mesh, source, _list_pipelines(mesh), note, known_axes=known_axes)
    if pipelines:
        source = MESSAGES if pipelines == traffic.pipelines else NAMES
        note = Note("mesh_inferred", f"{_NO_MESH}: stages inferred from {_EVIDENCE[source]}")
        return RankLayout.build(None, source, pipelines, note, known_axes=known_axes)
    some = units.format_number_list(traffic.doubtful)
    text = f"; messages between ranks {some} could be a pipeline or a ring"
    doubt = (text if traffic.doubtful else "") + _format_tensor_layers(traces, size)
    note = Note("mesh_unknown", _UNKNOWN + doubt)
    return RankLayout.build(None, USE if used else None, (), note, known_axes=known_axes)


def _is_unambiguous(traces: Sequence[RankTrace], traffic: Exchanges, lines: Lines) -> bool:
    """Whether no message can belong to a pipeline that the mesh lacks."""
    unknown = any(
        ((t.calls.peer < 0) & t.calls.is_message & ~find_earlier_calls(t)).any() for t in traces
    )
    return "pp" in lines or not (traffic.doubtful or unknown)


def _format_tensor_layers(traces: Sequence[RankTrace], size: JobSize) -> str:
    """What the names of modules say of calls without a group: tp, but not of how many ranks."""
    unnamed = [
        find_call_purposes(trace).activations & (trace.calls.group_id < 0) for trace in traces
    ]
    if not any(calls.any() for calls in unnamed):
        return ""
    return (
        "; layers of tensor parallelism issued calls without a group: if all ranks are in one,"
        f" state --mesh tp={size.ranks if size.is_known else 'N'}"
    )


def assign_message_groups(trace: RankTrace, layout: RankLayout) -> RankTrace:
    """The trace with its messages on the groups of their endpoints.

    A send over a group of several axes (often the world) between ranks that differ along one axis
    is communication on that axis: it gets a group of the ranks along it, with the name and the
    description of its own group. Other messages keep theirs.
    """
    calls = trace.calls
    rows = np.flatnonzero(calls.is_message & (calls.peer >= 0))
    own = [layout.find_axis(group) is not None for group in trace.groups]
    rows = rows[~np.array([*own, False])[calls.group_id[rows]]]
    ends = np.stack((calls.group_id[rows], calls.peer[rows]), axis=1)
    kinds, kind = np.unique(ends, axis=0, return_inverse=True)
    groups, assigned = list(trace.groups), []
    for group_id, peer in kinds.tolist():
        base = trace.groups[group_id] if group_id >= 0 else Group("", (), "")
        line = structs.replace(base, ranks=layout.find_line(trace.rank, peer))
        if line.ranks and line not in groups:
            groups.append(line)
        assigned.append(groups.index(line) if line.ranks else group_id)
    if len(groups) == len(trace.groups):
        return trace
    group_id = calls.group_id.copy()
    group_id[rows] = np.array(assigned, dtype=np.int32)[kind.ravel()]
    return structs.replace(
        trace, calls=structs.replace(calls, group_id=group_id), groups=tuple(groups)
    )


def _list_pipelines(mesh: Mesh) -> list[tuple[int, ...]]:
    lines = dict.fromkeys(mesh.line(rank, "pp") for rank in range(mesh.world_size))
    return [line for line in lines if len(line) > 1]
