"""The table [parallel] of a job.toml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.model.config import RANK_ORDER, Axis, Framework, ParallelConfig
from stepsplit.analyzer.model.config_decode import (
    Mistakes,
    TomlTable,
    collect_kinds,
    decode_keys,
    replace_aliases,
    select_fields,
)
from stepsplit.analyzer.model.key_aliases import VALUE_ALIASES
from stepsplit.analyzer.model.profile import infer_framework as infer_unnamed, load_framework

_PARALLEL_KINDS: Mapping[str, Any] = {
    **collect_kinds(ParallelConfig),
    "rank_order": str,
    "overlap": bool | Axis | frozenset[Axis],
    **dict.fromkeys(("dp", "world_size", "gpus", "nodes"), int),
}

PARALLEL_KEYS = tuple(_PARALLEL_KINDS)


def decode_parallel(table: TomlTable, mistakes: Mistakes) -> TomlTable:
    """Decodes the table's values; rank_order as a tuple of axes."""
    stated = decode_keys(replace_aliases(table, VALUE_ALIASES), _PARALLEL_KINDS, mistakes)
    axes = [key for key in ("dp", "dp_replicate", "dp_shard") if key in stated]
    if "dp" in axes and len(axes) > 1:
        hint = "give either dp, or dp_replicate and dp_shard"
        mistakes.append(table.build_error("dp", f"cannot be combined with {axes[1]}", hint))
    order = tuple(stated.get("rank_order", "-".join(RANK_ORDER)).split("-"))
    if sorted({*order, "ep"}) != sorted(RANK_ORDER) or len(set(order)) < len(order):
        hint = f'write "{"-".join(RANK_ORDER)}" in the order of the ranks, fastest-varying first'
        problem = f"{'-'.join(order)!r} is not a valid order of the axes"
        mistakes.append(table.build_error("rank_order", problem, hint))
    return replace(table, values={**stated, "rank_order": order})


def build_layout(
    table: TomlTable, framework: Framework | None, experts: bool = False
) -> ParallelConfig:
    """Builds the layout of the decoded table; an axis without a key has one rank.

    dp stands for dp_shard if zero is 3 (implied by fsdp2 and by dp_shard > 1), else for
    dp_replicate. Without any of them, dp is inferred from world_size (or gpus). experts: whether
    the model has experts. Raises DataError.
    """
    stated = table.values
    zero = _infer_zero(stated, framework)
    replicate, shard = _infer_data_parallel(table, zero)
    # Without a framework experts are those of the one without ZeRO-3, whatever zero is.
    usual = load_framework(framework or infer_unnamed("replicated")).defaults
    tp, ep, cp = (stated.get(key, 1) for key in ("tp", "ep", "cp"))
    is_divisible = tp * cp * replicate * shard % (ep * tp) == 0
    defaults = {
        "schedule": "1f1b" if stated.get("chunks", 1) == 1 else "interleaved",
        "expert_tp": tp if experts and usual.expert_tp and is_divisible else 1,
    }
    resolved = {
        "zero": zero,
        "dp_replicate": replicate,
        "dp_shard": shard,
        "overlap": _infer_overlap(stated, framework or infer_framework(table)),
    }
    layout = ParallelConfig(**{**defaults, **select_fields(ParallelConfig, stated), **resolved})
    for key in ("world_size", "gpus"):
        if stated.get(key, layout.world_size) != layout.world_size:
            sizes = f"tp ({layout.tp}) x pp ({layout.pp}) x dp ({layout.dp}) x cp ({layout.cp})"
            problem = f"does not match {sizes} = {layout.world_size}"
            raise _build_size_error(table, key, problem)
    return layout


def infer_framework(table: TomlTable) -> Framework:
    """Infers the framework of a job that names none."""
    return infer_unnamed("sharded" if _infer_zero(table.values, None) == 3 else "replicated")


def list_framework_keys(table: TomlTable, framework: Framework) -> dict[str, str]:
    """The keys of [training] that a job of this framework must state: its name, unless a job with
    the decoded [parallel] would be taken to run it anyway."""
    is_inferred = load_framework(infer_framework(table)) is load_framework(framework)
    return {} if is_inferred else {"framework": framework}


def _infer_zero(stated: Mapping[str, Any], framework: Framework | None) -> int:
    default = 0 if framework is None else load_framework(framework).defaults.zero
    if "dp_replicate" in stated:
        default = 0
    return int(stated.get("zero", 3 if stated.get("dp_shard", 1) > 1 else default))


def _infer_data_parallel(table: TomlTable, zero: int) -> tuple[int, int]:
    """Infers dp_replicate and dp_shard."""
    stated = table.values
    replicas, has_world = stated.get("dp_replicate", 1), {"world_size", "gpus"} & stated.keys()
    if zero == 3 and "dp_shard" not in stated and replicas > 1 and has_world:
        # The ranks of each replica are those that are left.
        return replicas, max(1, _count_remaining_ranks(table) // replicas)
    if "dp_replicate" in stated or "dp_shard" in stated:
        return stated.get("dp_replicate", 1), stated.get("dp_shard", 1)
    dp = stated["dp"] if "dp" in stated else _count_remaining_ranks(table)
    return (1, dp) if zero == 3 else (dp, 1)


def _count_remaining_ranks(table: TomlTable) -> int:
    """Data-parallel ranks by world_size and the other axes; 1 without world_size."""
    stated = table.values
    key = next((key for key in ("world_size", "gpus") if key in stated), None)
    if key is None:
        return 1
    world, tp, pp, cp = (stated.get(k, 1) for k in (key, "tp", "pp", "cp"))
    if world % (tp * pp * cp):
        product = f"tp ({tp}) x pp ({pp}) x cp ({cp})"
        raise _build_size_error(table, key, f"is not divisible by {product}")
    return int(world // (tp * pp * cp))


def _build_size_error(table: TomlTable, key: str, problem: str) -> DataError:
    """Names the key that was typed: gpus may be those of nodes."""
    count = table.values[key]
    if key == "gpus" and "nodes" in table.values:
        key, count = "nodes", f"as gpus = {count}"
    return table.build_error(key, f"{count} {problem}", f"fix the axes or {key}")


def _infer_overlap(stated: Mapping[str, Any], framework: Framework) -> frozenset[str]:
    """The axes whose communication overlaps with compute: all, none, or those listed."""
    overlap = stated.get("overlap", ["dp"] if load_framework(framework).defaults.overlap else [])
    if isinstance(overlap, bool):
        return frozenset(RANK_ORDER if overlap else ())
    return frozenset({overlap} if isinstance(overlap, str) else overlap)
