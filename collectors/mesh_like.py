"""The mesh as users state it: ours, sizes by axis, or torch's DeviceMesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stepsplit.collectors.guard import guarded
from stepsplit.collectors.run_spec import Mesh

MeshLike = Mesh | Mapping[str, int] | Any


def mesh_of(given: MeshLike, world_size: int) -> Mesh | None:
    """The user's mesh as ours; None, with a warning, where it does not fit the job."""
    with guarded(0, "the mesh in run.json"):
        if given is None or isinstance(given, Mesh):
            mesh: Mesh | None = given
        elif isinstance(given, Mapping):
            mesh = Mesh.of(given)
        else:
            mesh = _device_mesh(given)
        if mesh is not None and mesh.world_size != world_size:
            raise ValueError(f"it has {mesh.world_size} ranks, the job {world_size}")
        return mesh
    return None


def _device_mesh(given: Any) -> Mesh:
    ranks = given.mesh.flatten().tolist()
    if given.mesh_dim_names is None or ranks != list(range(len(ranks))):
        raise ValueError("a DeviceMesh needs names of its dims and all ranks of the job in order")
    return Mesh.of(dict(zip(given.mesh_dim_names, given.mesh.shape, strict=True)))
