"""Which rank sits where: the mesh, the pipeline coordinate of each rank, the axis of each group."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from stepsplit.analyzer.trace import OP_CODE, Group, Note, RankTrace
from stepsplit.collectors.run_spec import AXES, SHORTHAND, Mesh, RunSpec

_DESCRIBED = re.compile(r"^mesh_(\w+)$")
_MEGATRON = {
    "TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "CONTEXT_PARALLEL_GROUP": "cp",
    "DATA_PARALLEL_GROUP": "dp",
}


@dataclass(frozen=True, slots=True)
class Layout:
    """Where ranks sit; mesh and source are None where unknown.

    pipelines holds the ranks of each pipeline, first stage first; stage_of is the pp coordinate.
    """

    mesh: Mesh | None
    source: str | None
    pipelines: tuple[tuple[int, ...], ...]
    stage_of: Mapping[int, int]
    notes: tuple[Note, ...] = ()

    @classmethod
    def along(
        cls, mesh: Mesh | None, source: str | None, pipelines: Sequence[Sequence[int]], *notes: Note
    ) -> Layout:
        """The layout whose pipelines are these."""
        stages = {rank: stage for line in pipelines for stage, rank in enumerate(line)}
        return cls(mesh, source, tuple(map(tuple, pipelines)), stages, notes)

    def stage(self, rank: int) -> int:
        """The rank's pp coordinate, 0 where there is no pipeline."""
        return self.stage_of.get(rank, 0)

    def axes_of(self, group: Group) -> frozenset[str]:
        """The axes along which the group's ranks differ; none where the mesh is not known."""
        if self.mesh is None:
            described = described_axis(group)
            return frozenset({described} if described else ())
        axes = self.mesh.axes
        spread = {a: {self.mesh.coordinate(rank, a) for rank in group.ranks} for a in axes}
        return frozenset(axis for axis in axes if len(spread[axis]) > 1)

    def axis_of(self, group: Group) -> str | None:
        """The axis along which the group lies; None for a group along several or of one rank."""
        if len(group.ranks) < 2:
            return None
        if self.mesh is not None:
            lines = (a for a in self.mesh.axes if self.mesh.line(group.ranks[0], a) == group.ranks)
            return next(lines, None)
        if described := described_axis(group):
            return described
        stages = {self.stage(rank) for rank in group.ranks}
        return "pp" if len(stages) == len(group.ranks) else None


def layout_of(spec: RunSpec | None, traces: Sequence[RankTrace]) -> Layout:
    """The layout that run.json states, else what group names or the chain of messages tell."""
    if spec is not None and spec.mesh is not None:
        return Layout.along(spec.mesh, "run.json", _pipelines(spec.mesh))
    groups = _all_groups(spec, traces)
    world_size = spec.world_size if spec else max(trace.world_size for trace in traces)
    if (mesh := _mesh_of_names(groups, world_size)) is not None:
        note = Note("mesh_inferred", "run.json states no mesh: taken from the names of the groups")
        return Layout.along(mesh, "group names", _pipelines(mesh), note)
    return _layout_of_messages(traces, world_size)


def described_axis(group: Group) -> str | None:
    """The axis that a group's description names, as DeviceMesh and Megatron describe groups."""
    match = _DESCRIBED.match(group.description)
    named = match[1] if match else _MEGATRON.get(group.description)
    axis = SHORTHAND.get(named, named) if named else None
    return axis if axis in AXES else None


def _pipelines(mesh: Mesh) -> list[tuple[int, ...]]:
    lines = dict.fromkeys(mesh.line(rank, "pp") for rank in range(mesh.world_size))
    return [line for line in lines if len(line) > 1]


def _all_groups(spec: RunSpec | None, traces: Sequence[RankTrace]) -> list[Group]:
    stated = [Group(g.name, g.ranks, g.description) for g in spec.groups] if spec else []
    return list(dict.fromkeys([*stated, *(g for trace in traces for g in trace.groups)]))


def _mesh_of_names(groups: Iterable[Group], world_size: int) -> Mesh | None:
    """The mesh whose lines are the described groups; None where they do not make up the world."""
    lines: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for group in groups:
        if (axis := described_axis(group)) is not None and len(group.ranks) > 1:
            lines[axis].add(group.ranks)
    if not lines:
        return None
    stride = {axis: min(r[1] - r[0] for r in ranks) for axis, ranks in lines.items()}
    outermost_first = sorted(lines, key=lambda axis: -stride[axis])
    mesh = Mesh.of({axis: len(next(iter(lines[axis]))) for axis in outermost_first})
    fits = mesh.world_size == world_size and all(
        mesh.line(ranks[0], axis) == ranks for axis in lines for ranks in lines[axis]
    )
    return mesh if fits else None


def _layout_of_messages(traces: Sequence[RankTrace], world_size: int) -> Layout:
    """Ranks that pass messages along a chain are stages; the first to send is the first."""
    first_is_send, neighbors = _messages(traces)
    chains = [chain for chain in _chains(neighbors) if not _exchange(chain, first_is_send)]
    pipelines = [chain if first_is_send.get(chain[0], True) else chain[::-1] for chain in chains]
    if pipelines:
        note = Note(
            "mesh_inferred", "run.json states no mesh: stages taken from the chain of messages"
        )
        return Layout.along(None, "messages", pipelines, note)
    if world_size == 1:
        return Layout.along(None, None, ())
    note = Note("mesh_unknown", "no mesh known: every wait counts as skew, none as bubble")
    return Layout.along(None, None, (), note)


def _messages(traces: Sequence[RankTrace]) -> tuple[dict[int, bool], dict[int, set[int]]]:
    """Whether each rank's first message is a send, and with whom each rank exchanges messages."""
    first: dict[int, bool] = {}
    neighbors: dict[int, set[int]] = defaultdict(set)
    for trace in traces:
        known = trace.calls.is_message & (trace.calls.peer >= 0) & (trace.calls.peer != trace.rank)
        for op, peer in zip(
            trace.calls.op[known].tolist(), trace.calls.peer[known].tolist(), strict=True
        ):
            first.setdefault(trace.rank, op == OP_CODE["send"])
            neighbors[trace.rank].add(peer)
            neighbors[peer].add(trace.rank)
    return first, neighbors


def _exchange(chain: Sequence[int], first_is_send: Mapping[int, bool]) -> bool:
    """Two ranks that begin alike swap data, as a ring does; of two stages one sends first."""
    return len(chain) == 2 and len({first_is_send.get(rank) for rank in chain}) == 1


def _chains(neighbors: Mapping[int, set[int]]) -> list[list[int]]:
    """The paths among the neighbors, from end to end; rings and branches are none."""
    chains, seen = [], set()
    for end in sorted(rank for rank, others in neighbors.items() if len(others) == 1):
        if end in seen:
            continue
        chain, following = [end], neighbors[end]
        while following:
            chain.append(min(following))
            following = neighbors[chain[-1]] - {chain[-2]}
            if len(following) > 1:
                break
        seen |= set(chain)
        if not following:
            chains.append(chain)
    return chains
