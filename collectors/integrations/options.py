"""What every integration lets its user choose: the options of profile_run, all of them optional."""

from __future__ import annotations

from typing import TypedDict

from stepsplit.collectors.mesh_like import MeshLike
from stepsplit.collectors.run_spec import ModelSpec, Training


class Options(TypedDict, total=False):
    """As profile_run's. What model and training leave open is filled in by the framework."""

    name: str | None
    mesh: MeshLike
    model: ModelSpec | None
    training: Training | None
    wait: int
    warmup: int
    active: int
    ranks: str
    record_shapes: bool
    profile_memory: bool
    with_stack: bool
