"""How a job of accelerate is parallel, and so one of transformers' Trainer: by AcceleratorState."""

from __future__ import annotations

import math
from typing import Any

from stepsplit.collectors.integrations.words import data_axis

_NOT_DATA = ("tp", "cp", "sp")


def mesh_of_state(state: Any) -> dict[str, int] | None:
    """{axis: size}, outermost first; None where the state leaves it open."""
    mesh = getattr(state, "device_mesh", None)
    if mesh is not None:
        # What accelerate calls sp cuts sequences, as cp does.
        names = ("cp" if name == "sp" else name for name in mesh.mesh_dim_names)
        return dict(zip(names, mesh.shape, strict=True))
    axis = _data_axis(state)
    return None if axis is None else {axis: state.num_processes}


def replicas(state: Any) -> int:
    """Ranks that read different data."""
    mesh = getattr(state, "device_mesh", None)
    if mesh is None:
        return int(state.num_processes)
    sizes = zip(mesh.mesh_dim_names, mesh.shape, strict=True)
    return math.prod(size for name, size in sizes if name not in _NOT_DATA)


def framework_of(state: Any, plain: str) -> str:
    """Whose way of training it is: deepspeed, or `plain` where it is accelerate's own."""
    return "deepspeed" if state.distributed_type.name == "DEEPSPEED" else plain


def _data_axis(state: Any) -> str | None:
    kind = state.distributed_type.name
    if kind == "DEEPSPEED":
        return data_axis(state.deepspeed_plugin.zero_stage)
    if kind == "FSDP":
        return _fsdp_axis(state.fsdp_plugin)
    return "dp_replicate" if kind == "NO" or kind.startswith("MULTI_") else None


def _fsdp_axis(plugin: Any) -> str | None:
    """Of FSDP2 every way shards; of FSDP1 a hybrid says not how many ranks share a copy."""
    if getattr(plugin, "fsdp_version", 1) == 2:
        return "dp_shard"
    way = plugin.sharding_strategy or plugin.reshard_after_forward
    name = getattr(way, "name", "")
    known = {"FULL_SHARD": "dp_shard", "SHARD_GRAD_OP": "dp_shard", "NO_SHARD": "dp_replicate"}
    return known.get(name)
