"""What the user states about a run: its mesh in any form, its model and its training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stepsplit.collectors.formats.run_spec import Mesh, ModelSpec, Training
from stepsplit.collectors.guard import warn_on_failure
from stepsplit.collectors.job.process_groups import read_job


@dataclass(frozen=True, slots=True)
class UserSpec:
    """Run metadata given by the user; None means unknown."""

    mesh: Mesh | None = None
    model: ModelSpec | None = None
    training: Training | None = None


MeshLike = Mesh | Mapping[str, int] | Any


def state_mesh(text: str) -> UserSpec:
    """What the user states about a job by its mesh alone; "" for an unknown mesh.

    Rank 0 writes it, and warns if it does not match the job.
    """
    rank, world_size, _ = read_job()
    return UserSpec(mesh=convert_mesh(text, world_size)) if text and rank == 0 else UserSpec()


def convert_mesh(given: MeshLike, world_size: int) -> Mesh | None:
    """Converts the user's mesh to a Mesh; None, with a warning, if it does not match the job."""
    with warn_on_failure(0, "the mesh in run.json"):
        if given is None or isinstance(given, Mesh):
            mesh: Mesh | None = given
        elif isinstance(given, str):
            mesh = Mesh.parse(given)
        elif isinstance(given, Mapping):
            mesh = Mesh.of(given)
        else:
            # A DeviceMesh. The axes of a Mesh number the ranks in order; another order would name
            # the wrong groups.
            ranks = given.mesh.flatten().tolist()
            if given.mesh_dim_names is None or ranks != list(range(len(ranks))):
                raise ValueError(
                    "a DeviceMesh needs mesh_dim_names and all ranks of the job in order"
                )
            mesh = Mesh.of(dict(zip(given.mesh_dim_names, given.mesh.shape, strict=True)))
        if mesh is not None and mesh.world_size != world_size:
            raise ValueError(f"the mesh has {mesh.world_size} ranks but the job has {world_size}")
        return mesh
    return None
