"""A [model] table -> Transformer."""

from __future__ import annotations

from dataclasses import replace

from stepsplit.analyzer.model.spec.table import Table
from stepsplit.analyzer.model.spec.transformer import Experts, LatentAttention, Norm, Transformer

NORMS: tuple[Norm, ...] = ("rms", "layer")
MODEL_KEYS = (
    "name", "layers", "hidden", "heads", "kv_heads", "head_size", "ffn", "vocab", "gated", "tied",
    "learned_positions", "norm", "biases", "qkv_biases", "experts", "top_k", "expert_ffn",
    "shared_ffn", "dense_layers", "latent",
)  # fmt: skip


def transformer_of(table: Table, base: Transformer | None, seq_len: int) -> Transformer:
    """The transformer that the table states; what it leaves out is as in base.

    Without a base, layers, hidden, heads and vocab are needed, and ffn where gated. kv_heads is
    then heads, head_size hidden / heads, ffn 4 hidden; gated models have RMS norms, no biases and
    a head of their own, others layer norms, biases and a tied head. learned_positions = true means
    seq_len of them. Raises DataError.
    """
    known = base or _plain(table)
    return replace(
        known,
        layers=table.count("layers", known.layers),
        hidden=table.count("hidden", known.hidden),
        heads=table.count("heads", known.heads),
        kv_heads=table.count("kv_heads", known.kv_heads),
        head_size=table.count("head_size", known.head_size),
        ffn=table.count("ffn", known.ffn),
        vocab=table.count("vocab", known.vocab),
        gated=table.flag("gated", known.gated),
        tied=table.flag("tied", known.tied),
        positions=_positions(table, known.positions, seq_len),
        norm=table.one_of("norm", NORMS, known.norm),
        biases=table.flag("biases", known.biases),
        qkv_biases=table.flag("qkv_biases", known.qkv_biases),
        experts=_experts(table, known),
        latent=_latent(table, known.latent),
        name=table.text("name", known.name),
    )


def _plain(table: Table) -> Transformer:
    """The transformer of a table that names no preset."""
    gated = table.flag("gated", False)
    table.needs("layers", "hidden", "heads", "vocab", *(["ffn"] if gated else []))
    hidden, heads = table.count("hidden", 1), table.count("heads", 1)
    return Transformer(
        layers=1,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_size=_head_size(table, hidden, heads),
        ffn=4 * hidden,
        vocab=1,
        tied=not gated,
        norm="rms" if gated else "layer",
        biases=not gated,
    )


def _head_size(table: Table, hidden: int, heads: int) -> int:
    if hidden % heads and "head_size" not in table.values:
        problem = f"hidden {hidden} / heads {heads} = {hidden / heads:g} is no head size"
        raise table.error("heads", problem, "mend one of them or give head_size")
    return hidden // heads


def _positions(table: Table, default: int, seq_len: int) -> int:
    if isinstance(table.values.get("learned_positions"), bool):
        return seq_len if table.flag("learned_positions", False) else 0
    return table.count("learned_positions", default, least=0)


def _experts(table: Table, known: Transformer) -> Experts | None:
    """Of [model.experts], or of experts = 8 with top_k and the others beside it."""
    stated = table.values.get("experts")
    if isinstance(stated, dict):
        inner = table.table("experts", table)
        inner.knows("count", "top_k", "ffn", "shared_ffn", "dense_layers", "source")
        return _experts_of(inner, "count", "ffn", known)
    if stated is None and known.experts is None:
        for key in ("top_k", "expert_ffn", "shared_ffn", "dense_layers"):
            if key in table.values:
                raise table.error(key, "of a model without experts", "give experts")
        return None
    return _experts_of(table, "experts", "expert_ffn", known)


def _experts_of(table: Table, count: str, ffn: str, known: Transformer) -> Experts | None:
    base = known.experts
    if base is None:
        table.needs(count, "top_k")
        base = Experts(count=1, top_k=1, ffn=table.count("ffn", known.ffn))
    return Experts(
        count=table.count(count, base.count),
        top_k=table.count("top_k", base.top_k),
        ffn=table.count(ffn, base.ffn),
        shared_ffn=table.count("shared_ffn", base.shared_ffn, least=0),
        dense_layers=table.count("dense_layers", base.dense_layers, least=0),
    )


def _latent(table: Table, base: LatentAttention | None) -> LatentAttention | None:
    inner = table.table("latent", None)
    if inner is None:
        return base
    inner.knows("query_rank", "kv_rank", "nope", "rope", "value", "source")
    if base is None:
        inner.needs("kv_rank", "nope", "rope", "value")
        base = LatentAttention(0, 1, 1, 1, 1)
    return LatentAttention(
        query_rank=inner.count("query_rank", base.query_rank, least=0),
        kv_rank=inner.count("kv_rank", base.kv_rank),
        nope=inner.count("nope", base.nope),
        rope=inner.count("rope", base.rope),
        value=inner.count("value", base.value),
    )
