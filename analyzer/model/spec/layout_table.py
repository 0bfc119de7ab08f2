"""A [parallel] table -> Layout."""

from __future__ import annotations

from stepsplit.analyzer.model.spec.layout import (
    RANK_ORDER,
    RESHARDS,
    SCHEDULES,
    ContextKind,
    Layout,
    Schedule,
)
from stepsplit.analyzer.model.spec.recipe import Framework
from stepsplit.analyzer.model.spec.table import Table

CONTEXTS: tuple[ContextKind, ...] = ("ring", "all-gather", "ulysses")
_KEYS = (
    "tp", "pp", "dp", "dp_replicate", "dp_shard", "cp", "ep", "expert_tp", "rank_order",
    "layers_per_stage", "overlap", "sequence_parallel", "zero", "schedule", "chunks", "context",
    "reshard_after_forward", "scatter_gather", "split_vocab", "root_unit", "sum_once",
    "bucket_bytes", "world_size", "gpus",
)  # fmt: skip
_SAME = {
    "zb1p": "zb-h1", "zb-1p": "zb-h1", "zb2p": "zb-h2", "zb-2p": "zb-h2", "zbv": "zb-v",
    "dualpipev": "dualpipe-v", "interleaved-1f1b": "interleaved", "f-then-b": "gpipe",
}  # fmt: skip
"""Other names of the same schedule."""
_OVERLAPPED: tuple[Framework, ...] = ("fsdp2", "ddp", "deepspeed", "huggingface")
"""Frameworks that sum gradients behind the backward pass unless told not to."""


def layout_of(table: Table, framework: Framework | None, experts: bool = False) -> Layout:
    """The layout that the table states; an axis that it leaves out has one rank.

    dp is short for dp_shard where zero is 3, which fsdp2 and any dp_shard imply, else for
    dp_replicate. Without either it is what world_size (or gpus) leaves. experts: the model has
    some. Raises DataError.
    """
    table.knows(*_KEYS)
    zero = _zero(table, framework)
    replicate, shard = _data_parallel(table, zero)
    chunks = table.count("chunks", 1)
    layout = Layout(
        tp=table.count("tp", 1),
        pp=table.count("pp", 1),
        dp_replicate=replicate,
        dp_shard=shard,
        cp=table.count("cp", 1),
        ep=table.count("ep", 1),
        expert_tp=table.count(
            "expert_tp", _expert_tp(table, framework, replicate * shard) if experts else 1
        ),
        order=_order(table),
        sequence_parallel=table.flag("sequence_parallel", False),
        zero=zero,
        schedule=table.same(_SAME).one_of("schedule", SCHEDULES, _schedule(chunks)),
        chunks=chunks,
        layers_per_stage=table.counts("layers_per_stage", None),
        overlap=_overlap(table, framework),
        context_kind=table.one_of("context", CONTEXTS, CONTEXTS[0]),
        scatter_gather=table.flag("scatter_gather", False),
        split_vocab=table.flag("split_vocab", True),
        root_unit=table.flag("root_unit", False),
        sum_once=table.flag("sum_once", False),
        bucket_bytes=table.count("bucket_bytes", 0),
        reshard_after_forward=table.one_of("reshard_after_forward", RESHARDS, RESHARDS[0]),
    )
    _check_world_size(table, layout)
    return layout


def _expert_tp(table: Table, framework: Framework | None, dp: int) -> int:
    """Megatron-LM cuts experts as it cuts the rest, where the ranks of a stage allow it."""
    tp, ep, cp = (table.count(key, 1) for key in ("tp", "ep", "cp"))
    cuts = framework in (None, "megatron") and tp * cp * dp % (ep * tp) == 0
    return tp if cuts else 1


def framework_of(table: Table) -> Framework:
    """The framework of a [parallel] table beside which none is named."""
    return "fsdp2" if _zero(table, None) == 3 else "megatron"


def _zero(table: Table, framework: Framework | None) -> int:
    zero = table.count("zero", None, least=0)
    if zero is not None:
        if zero > 3:
            raise table.error("zero", f"{zero} is no ZeRO stage", "write 0, 1, 2 or 3")
        return zero
    shards = framework == "fsdp2" and "dp_replicate" not in table.values
    return 3 if shards or table.count("dp_shard", 1) > 1 else 0


def _data_parallel(table: Table, zero: int) -> tuple[int, int]:
    """dp_replicate and dp_shard."""
    stated = [key for key in ("dp", "dp_replicate", "dp_shard") if key in table.values]
    if "dp" in stated and len(stated) > 1:
        raise table.error("dp", f"stated beside {stated[1]}", "give dp, or both of the others")
    if stated and "dp" not in stated:
        return table.count("dp_replicate", 1), table.count("dp_shard", 1)
    dp = table.count("dp", 1) if stated else _rest(table)
    return (1, dp) if zero == 3 else (dp, 1)


def _rest(table: Table) -> int:
    """What world_size leaves for data parallelism; 1 where it is not stated."""
    key = _world_key(table)
    if key is None:
        return 1
    world, tp, pp, cp = (table.count(k, 1) for k in (key, "tp", "pp", "cp"))
    if world % (tp * pp * cp):
        problem = f"{world} / (tp {tp} x pp {pp} x cp {cp}) = {world / (tp * pp * cp):g}"
        raise table.error(key, problem, f"mend the axes or {key}")
    return world // (tp * pp * cp)


def _world_key(table: Table) -> str | None:
    return next((key for key in ("world_size", "gpus") if key in table.values), None)


def _check_world_size(table: Table, layout: Layout) -> None:
    for key in ("world_size", "gpus"):
        if table.count(key, layout.world_size) != layout.world_size:
            product = f"tp {layout.tp} x pp {layout.pp} x dp {layout.dp} x cp {layout.cp}"
            problem = f"{table.count(key, 0)}, but {product} = {layout.world_size}"
            raise table.error(key, problem, f"mend the axes or {key}")


def _order(table: Table) -> tuple[str, ...]:
    """The axes of rank_order, the fastest first; ep may be left out."""
    order = tuple(table.text("rank_order", "-".join(RANK_ORDER)).split("-"))
    if sorted({*order, "ep"}) != sorted(RANK_ORDER) or len(set(order)) < len(order):
        mend = f'write "{"-".join(RANK_ORDER)}" in the order of the ranks, the fastest first'
        raise table.error("rank_order", f"{'-'.join(order)!r} is no order of the axes", mend)
    return order


def _schedule(chunks: int) -> Schedule:
    return "1f1b" if chunks == 1 else "interleaved"


def _overlap(table: Table, framework: Framework | None) -> frozenset[str]:
    """The axes whose communication hides behind compute: all, none, or those listed."""
    if isinstance(table.values.get("overlap"), bool):
        return frozenset(RANK_ORDER) if table.flag("overlap", False) else frozenset()
    if isinstance(table.values.get("overlap"), str):
        return frozenset({table.one_of("overlap", RANK_ORDER, "dp")})
    usual = ("dp",) if (framework or framework_of(table)) in _OVERLAPPED else ()
    return frozenset(table.some_of("overlap", RANK_ORDER, usual))
