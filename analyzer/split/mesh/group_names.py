"""Which axes the description of a process group names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

_DATA, _SHARDED = ("dp_replicate", "dp_shard"), ("dp_shard", "cp")
_DIMS: dict[str, tuple[str, ...]] = {
    "pp": ("pp",),
    "pipe": ("pp",),
    "dp_replicate": ("dp_replicate",),
    "replicate": ("dp_replicate",),
    "ddp": ("dp_replicate",),
    "data": ("dp_replicate",),
    "dp_shard": ("dp_shard",),
    "shard": ("dp_shard",),
    "dp": _DATA,
    "batch": _DATA,
    "fsdp": _SHARDED,
    "loss": (*_DATA, "cp"),
    "cp": ("cp",),
    "tp": ("tp",),
    "tensor": ("tp",),
    "model": ("tp",),
    "slice": ("tp",),
    "ep": ("ep",),
    "expert": ("ep",),
}
"""Dims of DeviceMesh as torchtitan, Accelerate and the tutorials of PyTorch name them, and the axes
of DeepSpeed's topology. torchtitan: batch = dp_replicate x dp_shard, fsdp = dp_shard x cp."""
_PARTS = {"dp_shard_mod_ep": ("dp_shard",), "dp_shard_in_ep": ("dp_shard",)}
_EXPERT_DIMS = {"etp": ("tp",), "efsdp": ("dp_shard",), "edp": ("dp_replicate",)}
_PARALLEL: dict[str, tuple[str, ...]] = {
    "tensor_model": ("tp",),
    "tensor": ("tp",),
    "slice": ("tp",),
    "pipeline_model": ("pp",),
    "pipeline": ("pp",),
    "pipe": ("pp",),
    "context": ("cp",),
    "sequence": ("cp",),
    "data": ("dp_replicate",),
    "sequence_data": ("dp_replicate", "cp"),
    "model": ("tp", "pp"),
    "tensor_and_data": ("tp", "dp_replicate"),
    "tensor_and_context": ("tp", "cp"),
}
"""What stands before _parallel in the names of Megatron-LM's parallel_state and of DeepSpeed."""
_EXPERT_PARALLEL = {
    "expert": ("ep",),
    "expert_model": ("ep",),
    "expert_tensor": ("tp",),
    "expert_data": ("dp_replicate",),
    "data_modulo_expert": ("dp_replicate",),
    "tensor_and_expert": ("tp", "ep"),
    "expert_tensor_and_model": ("tp", "ep"),
    "expert_tensor_model_pipeline": ("tp", "ep", "pp"),
}
_ENDS = {"embedding": ("pp",), "position_embedding": ("pp",)}
_PART_OF = re.compile(r"^(?:intra_partial|inter_partial|hierarchical)_(.+?)(?:_l\d+)?$")
_HYBRID = re.compile(r"^hybrid_dp_cp_\d+$")
_WHAT_FOR = re.compile(r"(?:_gloo|_ag)$|_group(?=_|$)")
_EP_SIZE = re.compile(r"^ep_size_\d+$")


@dataclass(frozen=True, slots=True)
class Named:
    """The axes along which the ranks of a group so described differ, if their sizes are above 1.

    whole: they are all the ranks that differ along these axes alone, not a part of them.
    experts: the group is of the experts' own grid, which lies beside the mesh.
    """

    axes: tuple[str, ...] = ()
    whole: bool = False
    experts: bool = False


@cache
def named(description: str) -> Named:
    """What the description names, by DeviceMesh, Megatron-LM or DeepSpeed; no axis if nothing."""
    text = _WHAT_FOR.sub("", description.lower())
    if (part := _PART_OF.match(text)) is not None:
        of = _parallel(part[1])
        return Named(of.axes, whole=False, experts=of.experts)
    found = _parallel(text)
    return found if found.axes else _dims(text.removeprefix("mesh_"))


def one_axis(description: str) -> str | None:
    """The axis of a description that names a single one: dp is short for dp_replicate, fsdp for
    dp_shard, as in run.json."""
    found = named(description)
    if len(found.axes) == 1 or description.lower().removeprefix("mesh_") in ("dp", "fsdp"):
        return found.axes[0]
    return None


def _parallel(text: str) -> Named:
    """Of a name such as tensor_and_data_parallel_with_cp."""
    if text in _ENDS or _HYBRID.match(text):
        return Named(_ENDS.get(text, ("dp_replicate", "cp")), whole=False)
    base = text.removesuffix("_with_cp")
    kind = base.removesuffix("_parallel")
    if kind == base:
        return Named(("ep",), whole=True, experts=True) if _EP_SIZE.match(text) else Named()
    if kind in _EXPERT_PARALLEL:
        return Named(_EXPERT_PARALLEL[kind], whole=True, experts=True)
    axes = _PARALLEL.get(kind, ())
    return Named((*axes, "cp") if axes and base != text else axes, whole=bool(axes))


def _dims(text: str) -> Named:
    """Of a dim of a DeviceMesh; flattened dims are joined by underscores."""
    if text in _PARTS:
        return Named(_PARTS[text], whole=False)
    axes: list[str] = []
    experts, rest = False, text
    while rest:
        dim = next((d for d in _BY_LENGTH if rest == d or rest.startswith(f"{d}_")), None)
        if dim is None:
            return Named()
        axes += _DIMS[dim] if dim in _DIMS else _EXPERT_DIMS[dim]
        experts |= dim in _EXPERT_DIMS or "ep" in axes
        rest = rest[len(dim) + 1 :]
    return Named(tuple(dict.fromkeys(axes)), whole=bool(axes), experts=experts)


_BY_LENGTH = sorted((*_DIMS, *_EXPERT_DIMS), key=len, reverse=True)
