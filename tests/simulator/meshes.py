"""Which ranks make up which groups, on which host each rank sits, how fast their links are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from simulator.program import ProcessGroup

MEGATRON = {
    "tp": "TENSOR_MODEL_PARALLEL_GROUP",
    "pp": "PIPELINE_MODEL_PARALLEL_GROUP",
    "cp": "CONTEXT_PARALLEL_GROUP",
    "dp_replicate": "DATA_PARALLEL_GROUP",
    "dp_shard": "DATA_PARALLEL_GROUP",
    "ep": "EXPERT_MODEL_PARALLEL_GROUP",
    "mp": "MODEL_PARALLEL_GROUP",
}
Mesh = tuple[tuple[str, int], ...]
_SPANS = {"mp": ("pp", "tp"), "ep": ("dp_replicate",)}
_INTRA_BYTES_PER_S, _INTER_BYTES_PER_S = 200e9, 40e9
_LATENCY_NS = 15_000


@dataclass(frozen=True, slots=True)
class Fleet:
    """The ranks of a job as a mesh of (axis, size), outermost first, spread over hosts evenly.

    beside names groups that are no axis of the mesh: mp (all of one replica of the model) and ep
    (along dp_replicate). naming is how groups are described: "megatron" or "mesh" (DeviceMesh).
    """

    mesh: Mesh
    beside: tuple[str, ...] = ()
    naming: str = "megatron"
    nodes: int = 1

    @property
    def world_size(self) -> int:
        return math.prod(size for _, size in self.mesh)

    @property
    def axes(self) -> tuple[str, ...]:
        """Along which there are groups: the axes of the mesh and those beside."""
        return (*(axis for axis, _ in self.mesh), *self.beside)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host of each rank."""
        return tuple(f"node{self._node(rank)}" for rank in self._ranks)

    @property
    def stage_of(self) -> tuple[int, ...]:
        """The pp coordinate of each rank, 0 without a pipeline."""
        return tuple(self.coordinate(rank, "pp") for rank in self._ranks)

    @property
    def groups(self) -> tuple[ProcessGroup, ...]:
        """The default group and those of every axis and rank, named "0", "1", ... as torch does."""
        lines = ((axis, self.line(rank, axis)) for axis in self.axes for rank in self._ranks)
        made = [ProcessGroup("0", tuple(self._ranks), "default_pg")]
        for axis, ranks in dict.fromkeys(lines):
            made.append(ProcessGroup(str(len(made)), ranks, self._description(axis)))
        return tuple(made)

    def group(self, rank: int, axis: str) -> str:
        """The name of the rank's group along the axis."""
        wanted = self.line(rank, axis), self._description(axis)
        return next(g.name for g in self.groups if (g.ranks, g.description) == wanted)

    def line(self, rank: int, axis: str) -> tuple[int, ...]:
        """The ranks that differ from this one along the axis only, itself included, in order."""
        return _line(self.mesh, rank, _SPANS.get(axis, (axis,)))

    def coordinate(self, rank: int, axis: str) -> int:
        """The rank's place along the axis, 0 where the mesh lacks it."""
        return _coordinate(self.mesh, rank, axis)

    def transfer_ns(self, ranks: tuple[int, ...], wire_bytes: float) -> int:
        """How long so many bytes take between these ranks when all links are free."""
        within = len({self._node(rank) for rank in ranks}) == 1
        bytes_per_s = _INTRA_BYTES_PER_S if within else _INTER_BYTES_PER_S
        return _LATENCY_NS + round(wire_bytes / bytes_per_s * 1e9)

    @property
    def _ranks(self) -> range:
        return range(self.world_size)

    def _node(self, rank: int) -> int:
        return rank * self.nodes // self.world_size

    def _description(self, axis: str) -> str:
        if self.naming == "megatron":
            return MEGATRON[axis]
        return "mesh_" + "_".join(_SPANS[axis] if axis == "mp" else (axis,))


@cache
def _line(mesh: Mesh, rank: int, spanned: tuple[str, ...]) -> tuple[int, ...]:
    others = [axis for axis, _ in mesh if axis not in spanned]
    here = [_coordinate(mesh, rank, axis) for axis in others]
    world = range(math.prod(size for _, size in mesh))
    return tuple(r for r in world if [_coordinate(mesh, r, axis) for axis in others] == here)


def _coordinate(mesh: Mesh, rank: int, axis: str) -> int:
    for name, size in reversed(mesh):
        if name == axis:
            return rank % size
        rank //= size
    return 0
