"""Mesh axes from the names and ranks of process groups."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import product

from msgspec import Struct

from stepsplit.analyzer.trace import Group
from stepsplit.collectors.formats.run_spec import DATA_PARALLEL, Mesh

# Axis sizes and strides from the ranks of groups, and the mesh they form.

_MAY_BE_ONE = ("dp_shard", "cp")
"""Axes that frameworks include in a combined group name even if the job does not use them."""


class RankLine(Struct, frozen=True):
    """Layout of ranks along one axis: stride and size."""

    stride: int
    size: int

    @property
    def offsets(self) -> range:
        return range(0, self.stride * self.size, self.stride)

    def is_start(self, rank: int) -> bool:
        """Whether the rank can be the first of such a line, in a grid that starts at rank 0."""
        return rank // self.stride % self.size == 0

    def can_fill(self, world_size: int) -> bool:
        """Whether such lines can tile this many ranks."""
        return world_size % (self.stride * self.size) == 0

    def list_lines(self, world_size: int) -> list[tuple[int, ...]]:
        """All lines in a world of this size."""
        starts = (rank for rank in range(world_size) if self.is_start(rank))
        return [tuple(start + offset for offset in self.offsets) for start in starts]


def fit_line(ranks: Sequence[int]) -> RankLine | None:
    """The line of equally spaced, ascending ranks; None for others."""
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if stride < 1 or tuple(ranks) != tuple(ranks[0] + i * stride for i in range(len(ranks))):
        return None
    return RankLine(stride, len(ranks))


def find_named_lines(groups: Iterable[Group]) -> dict[str, RankLine]:
    """The line of each axis named in descriptions, with size 1; contradictory ones are dropped.

    A group along several axes yields the axis that is left after removing the known ones, such as
    data parallel ranks from a group with cp.
    """
    described = {
        (parse_group_name(g.description), tuple(rank - g.ranks[0] for rank in g.ranks))
        for g in groups
    }
    spans = sorted((n.axes, offsets) for n, offsets in described if n.whole and not n.experts)
    candidates: dict[str, set[RankLine | None]] = {}
    for axes, offsets in spans:
        if len(axes) == 1:
            candidates.setdefault(axes[0], set()).add(fit_line(offsets))
    lines: dict[str, RankLine] = {}
    for axis, options in candidates.items():
        (line, *others) = options
        if line is not None and not others:
            lines[axis] = line
    several = [(axes, offsets) for axes, offsets in spans if len(axes) > 1]
    for strict in (True, False):
        for _ in several:
            lines |= _deduce_line(several, lines, frozenset(candidates), strict)
    return lines


def build_mesh(
    lines: Mapping[str, RankLine], groups: Iterable[Group], world_size: int
) -> Mesh | None:
    """The mesh of these lines; None if they do not cover the world or contradict named groups."""
    outermost_first = sorted(
        (axis for axis, line in lines.items() if line.size > 1), key=lambda a: -lines[a].stride
    )
    stride = 1
    for axis in reversed(outermost_first):
        if lines[axis].stride != stride:
            return None
        stride *= lines[axis].size
    if stride != world_size or not outermost_first:
        return None
    mesh = Mesh.of({axis: lines[axis].size for axis in outermost_first})
    return (
        mesh
        if all(_is_in_mesh(mesh, group, parse_group_name(group.description)) for group in groups)
        else None
    )


def _deduce_line(
    several: Sequence[tuple[tuple[str, ...], tuple[int, ...]]],
    lines: Mapping[str, RankLine],
    pure: frozenset[str],
    strict: bool,
) -> dict[str, RankLine]:
    """The first line deduced from a group along several axes.

    If not strict, axes that no group names and that a combined name includes only for completeness
    get size 1.
    """
    for axes, offsets in several:
        unknown = [axis for axis in axes if axis not in lines]
        if not unknown or pure & set(unknown) or (strict and len(unknown) > 1):
            continue
        if any(axis not in _MAY_BE_ONE for axis in unknown[1:]):
            continue
        line = fit_line(remove_lines(offsets, [lines[axis] for axis in axes if axis in lines]))
        if line is not None:
            return {unknown[0]: line} | {axis: RankLine(1, 1) for axis in unknown[1:]}
    return {}


def remove_lines(offsets: Sequence[int], known: Sequence[RankLine]) -> tuple[int, ...]:
    """The offsets left after collapsing the known lines; (0, 0) if the offsets do not contain
    them."""
    block = [sum(steps) for steps in product(*(line.offsets for line in known))]
    left, remain = dict.fromkeys(sorted(offsets)), []
    while left:
        first = next(iter(left))
        if any(first + step not in left for step in block):
            return (0, 0)
        for step in block:
            del left[first + step]
        remain.append(first)
    return tuple(remain)


def _is_in_mesh(mesh: Mesh, group: Group, name: GroupName) -> bool:
    """Whether the group's ranks match its description; true for groups without a complete
    description."""
    if not name.whole or name.experts:
        return True
    lines = [mesh.line(group.ranks[0], axis) for axis in name.axes if axis in mesh.axes]
    spanned = sorted(
        group.ranks[0] + sum(rank - group.ranks[0] for rank in ranks) for ranks in product(*lines)
    )
    return spanned == sorted(group.ranks)


# Axes from the description of a process group.

_SHARDED = ("dp_shard", "cp")

_DIMS: dict[str, tuple[str, ...]] = {
    "pp": ("pp",),
    "pipe": ("pp",),
    "dp_replicate": ("dp_replicate",),
    "replicate": ("dp_replicate",),
    "ddp": ("dp_replicate",),
    "data": ("dp_replicate",),
    "dp_shard": ("dp_shard",),
    "shard": ("dp_shard",),
    "dp": DATA_PARALLEL,
    "batch": DATA_PARALLEL,
    "fsdp": _SHARDED,
    "loss": (*DATA_PARALLEL, "cp"),
    "cp": ("cp",),
    "tp": ("tp",),
    "tensor": ("tp",),
    "model": ("tp",),
    "slice": ("tp",),
    "ep": ("ep",),
    "expert": ("ep",),
}
"""Dims of DeviceMesh as named in torchtitan, Accelerate and the PyTorch tutorials, and the axes of
DeepSpeed's topology. torchtitan: batch = dp_replicate x dp_shard, fsdp = dp_shard x cp."""

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
"""Names before _parallel in Megatron-LM's parallel_state and in DeepSpeed."""

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


class GroupName(Struct, frozen=True):
    """The axes along which a group's ranks differ, by its description, if their sizes exceed 1.

    whole: the group contains all ranks that differ along these axes only. experts: the group
    belongs to the separate mesh of the experts.
    """

    axes: tuple[str, ...] = ()
    whole: bool = False
    experts: bool = False


@cache
def parse_group_name(description: str) -> GroupName:
    """Parses a description by DeviceMesh, Megatron-LM or DeepSpeed; no axes if unknown."""
    text = _WHAT_FOR.sub("", description.lower())
    if (part := _PART_OF.match(text)) is not None:
        of = _parse_parallel(part[1])
        return GroupName(of.axes, whole=False, experts=of.experts)
    parsed = _parse_parallel(text)
    return parsed if parsed.axes else _parse_dims(text.removeprefix("mesh_"))


def parse_single_axis(description: str) -> str | None:
    """The axis of a description with a single one; dp means dp_replicate and fsdp dp_shard, as in
    run.json."""
    parsed = parse_group_name(description)
    if len(parsed.axes) == 1 or description.lower().removeprefix("mesh_") in ("dp", "fsdp"):
        return parsed.axes[0]
    return None


def _parse_parallel(text: str) -> GroupName:
    """Parses a name such as tensor_and_data_parallel_with_cp."""
    if text in _ENDS or _HYBRID.match(text):
        return GroupName(_ENDS.get(text, ("dp_replicate", "cp")), whole=False)
    base = text.removesuffix("_with_cp")
    kind = base.removesuffix("_parallel")
    if kind == base:
        return GroupName(("ep",), whole=True, experts=True) if _EP_SIZE.match(text) else GroupName()
    if kind in _EXPERT_PARALLEL:
        return GroupName(_EXPERT_PARALLEL[kind], whole=True, experts=True)
    axes = _PARALLEL.get(kind, ())
    return GroupName((*axes, "cp") if axes and base != text else axes, whole=bool(axes))


def _parse_dims(text: str) -> GroupName:
    """Parses a DeviceMesh dim; flattened dims are joined by underscores."""
    if text in _PARTS:
        return GroupName(_PARTS[text], whole=False)
    axes: list[str] = []
    experts, rest = False, text
    while rest:
        dim = next((d for d in _BY_LENGTH if rest == d or rest.startswith(f"{d}_")), None)
        if dim is None:
            return GroupName()
        axes += _DIMS[dim] if dim in _DIMS else _EXPERT_DIMS[dim]
        experts |= dim in _EXPERT_DIMS or "ep" in axes
        rest = rest[len(dim) + 1 :]
    return GroupName(tuple(dict.fromkeys(axes)), whole=bool(axes), experts=experts)


_BY_LENGTH = sorted((*_DIMS, *_EXPERT_DIMS), key=len, reverse=True)


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
