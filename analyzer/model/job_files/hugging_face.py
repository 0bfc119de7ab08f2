"""config.json of a model on Hugging Face: the sizes of the model, and nothing of its training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stepsplit.analyzer.model.job_files.job_file import (
    JobFile,
    JobFileKind,
    JobTablesBuilder,
    find_flag,
    find_number,
    find_table,
    find_word,
)


@dataclass(frozen=True, slots=True)
class _Architecture:
    """What a model_type of transformers means beyond the sizes in its config.json.

    tied: whether head and embedding are one matrix if the file does not say: many files leave out
    what is the default of their class. qk_norm: norms of the heads of queries and keys. positions:
    key of the number of learned positions.
    """

    gated: bool = True
    norm: str = "rms"
    tied: bool = False
    biases: bool = False
    qkv_biases: bool = False
    qk_norm: bool = False
    positions: str = ""
    activation: str = ""
    parallel_block: bool = False
    every_window: int = 0
    """Every so many layers one has no window, if neither layer_types nor a pattern says."""


_GPT = _Architecture(gated=False, norm="layer", biases=True, tied=True)

ARCHITECTURES: Mapping[str, _Architecture] = {
    "llama": _Architecture(),
    "llama4_text": _Architecture(),
    "mistral": _Architecture(),
    "mixtral": _Architecture(),
    "qwen2": _Architecture(qkv_biases=True),
    "qwen2_moe": _Architecture(qkv_biases=True),
    "qwen3": _Architecture(qk_norm=True),
    "qwen3_moe": _Architecture(qk_norm=True),
    "gemma": _Architecture(tied=True),
    "gemma2": _Architecture(tied=True, every_window=2),
    "gemma3_text": _Architecture(tied=True, qk_norm=True, every_window=6),
    "olmo2": _Architecture(qk_norm=True),
    "olmo3": _Architecture(qk_norm=True, every_window=4),
    "smollm3": _Architecture(tied=True),
    "glm4": _Architecture(qkv_biases=True),
    "glm4_moe": _Architecture(),
    "deepseek_v2": _Architecture(),
    "deepseek_v3": _Architecture(),
    "kimi_k2": _Architecture(),
    "gpt_oss": _Architecture(biases=True, activation="swiglu-clamped", every_window=2),
    "phi3": _Architecture(),
    "seed_oss": _Architecture(qkv_biases=True),
    "gpt2": _Architecture(
        gated=False, norm="layer", biases=True, tied=True, positions="n_positions",
        activation="gelu_new",
    ),
    "gpt_neox": _Architecture(gated=False, norm="layer", biases=True, parallel_block=True),
    "opt": _Architecture(
        gated=False, norm="layer", biases=True, tied=True, positions="max_position_embeddings",
        activation="relu",
    ),
    "bloom": _GPT,
}  # fmt: skip
"""By model_type: as transformers' configuration and modeling files of each build it."""

_UNMODELLED = {
    "linear_attention": "layers of linear attention",
    "mamba": "Mamba layers",
    "index_topk": "sparse attention with an indexer",
    "layers_block_type": "layers of several kinds",
    "hybrid_override_pattern": "layers of several kinds",
}
"""What the model has no formulas for, by the key or the layer type that says it."""


def _recognize(file: JobFile) -> bool:
    tables = file.tables
    return file.suffix != ".toml" and ("model_type" in tables or "architectures" in tables)


def _read(file: JobFile, job: JobTablesBuilder) -> None:
    outer = file.tables
    # Models of text and images have the sizes of their language model in a table of its own.
    values = find_table(outer, "text_config") or outer
    kind = find_word(values, "model_type") or find_word(outer, "model_type")
    kind = {"gemma3": "gemma3_text", "llama4": "llama4_text"}.get(kind, kind)
    for key, words in _UNMODELLED.items():
        if key in values or key in values.get("layer_types", ()) or key in kind:
            raise file.build_error(
                f"model_type {kind!r} has {words}, which is not modelled",
                "use a model of attention and MLPs alone",
            )
    known = ARCHITECTURES.get(kind)
    if known is None:
        raise file.build_error(
            f"model_type {kind!r} is unknown",
            f"write [model] by hand; known: {', '.join(ARCHITECTURES)}",
        )
    hidden = find_number(values, "hidden_size", "n_embd", "d_model")
    heads = find_number(values, "num_attention_heads", "n_head", "num_heads")
    width = find_number(values, "intermediate_size", "n_inner", "ffn_dim")
    # A model of text and images may state it outside of its language model.
    tied = find_flag(values, "tie_word_embeddings")
    tied = find_flag(outer, "tie_word_embeddings") if tied is None else tied
    sizes: dict[str, object] = {
        "layers": find_number(values, "num_hidden_layers", "n_layer", "num_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": find_number(values, "num_key_value_heads"),
        "head_size": find_number(values, "head_dim"),
        "ffn": width or (4 * hidden if hidden and not known.gated else None),
        "vocab": find_number(values, "vocab_size"),
        "gated": known.gated,
        "norm": known.norm,
        "tied": known.tied if tied is None else tied,
        "biases": known.biases,
        "activation": known.activation or None,
        "parallel_block": known.parallel_block or None,
        "mtp_layers": find_number(values, "num_nextn_predict_layers"),
    }
    if known.positions:
        sizes["learned_positions"] = find_number(values, known.positions)
    has_biases = known.qkv_biases or find_flag(values, "attention_bias") is True
    sizes["qkv_biases"] = True if has_biases and not known.biases else None
    is_normed = known.qk_norm or find_flag(values, "use_qk_norm") is True
    sizes["qk_norm"] = True if is_normed and kind != "llama4_text" else None
    for key, value in sizes.items():
        job.put("model", key, value)
    _put_window(values, known, job)
    _put_experts(kind, values, job)
    _put_latent(values, heads, job)


def _put_window(values: Mapping[str, Any], known: _Architecture, job: JobTablesBuilder) -> None:
    """Sliding windows: of all layers, or of those that layer_types or a pattern name."""
    window = find_number(values, "sliding_window")
    types = values.get("layer_types")
    if window is None or find_flag(values, "use_sliding_window") is False:
        return
    if isinstance(types, Sequence) and types:
        full = sum(one == "full_attention" for one in types)
        if full == len(types):
            return
        every = round(len(types) / full) if full else 0
    else:
        every = find_number(values, "sliding_window_pattern") or known.every_window
    job.put("model", "window", window)
    job.put("model", "full_every", every or None)


def _put_experts(kind: str, values: Mapping[str, Any], job: JobTablesBuilder) -> None:
    count = find_number(values, "n_routed_experts", "num_local_experts", "num_experts")
    if not count or count < 2:
        return
    layers = find_number(values, "num_hidden_layers", "n_layer") or 0
    width = find_number(values, "moe_intermediate_size", "intermediate_size")
    shared = find_number(values, "shared_expert_intermediate_size")
    if not shared and (experts := find_number(values, "n_shared_experts")):
        shared = experts * (width or 0)
    dense = find_number(values, "first_k_dense_replace") or 0
    if kind == "llama4_text":
        # A shared expert as wide as the others; layers without experts have a width of their own.
        shared, step = width, find_number(values, "interleave_moe_layer_step") or 1
        job.put("model", "ffn", find_number(values, "intermediate_size_mlp"))
        dense = layers - layers // step
    elif step := find_number(values, "decoder_sparse_step") or 0:
        dense = layers - layers // step
    if dense and not find_number(values, "first_k_dense_replace"):
        job.omitted.append("where the layers without experts are: taken as the first ones")
    experts_table = {
        "count": count,
        "top_k": find_number(values, "num_experts_per_tok", "num_experts_per_token"),
        "ffn": width,
        "shared_ffn": shared or 0,
        "dense_layers": dense,
    }
    stated = {key: value for key, value in experts_table.items() if value is not None}
    job.put("model", "experts", stated)


def _put_latent(values: Mapping[str, Any], heads: int | None, job: JobTablesBuilder) -> None:
    """Multi-head latent attention, whose head size is that of the values."""
    if not (rank := find_number(values, "kv_lora_rank")):
        return
    sizes = {
        "query_rank": find_number(values, "q_lora_rank") or 0,
        "kv_rank": rank,
        "nope": find_number(values, "qk_nope_head_dim"),
        "rope": find_number(values, "qk_rope_head_dim"),
        "value": find_number(values, "v_head_dim"),
    }
    job.put("model", "latent", {key: value for key, value in sizes.items() if value is not None})
    job.put("model", "head_size", sizes["value"])
    job.put("model", "kv_heads", heads)


KIND = JobFileKind(
    "hugging-face",
    "Hugging Face config.json",
    _recognize,
    _read,
    frozenset({"training.recompute"}),
    of_transformers=True,
)
