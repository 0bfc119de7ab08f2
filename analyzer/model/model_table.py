"""The table [model] of a job.toml, and presets of models by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

from stepsplit.analyzer import units
from stepsplit.analyzer.model.config import Experts, LatentAttention, ModelConfig
from stepsplit.analyzer.model.config_decode import (
    Mistakes,
    TomlTable,
    collect_kinds,
    decode_keys,
    decode_section,
    format_toml_keys,
    select_fields,
)
from stepsplit.analyzer.model.config_limits import KEY, Natural
from stepsplit.analyzer.model.parameters import count_parameters
from stepsplit.analyzer.model.preset_names import (
    MODELS,
    list_model_names,
    normalize_model_name,
    read_preset,
)


@lru_cache(maxsize=256)
def load_model(name: str) -> ModelConfig:
    """Loads a model preset by name. Raises UsageError, which suggests similar names."""
    table, mistakes = read_preset(MODELS, "model", name), Mistakes()
    extra_kinds = {"source": str, "parameters": int}
    model = decode_model(table, None, 0, mistakes, extra_kinds)
    mistakes.raise_all()
    return replace(model, name=name)


_SAME_SIZE = 0.02
"""Largest difference in parameters from those of the preset of the same name."""


def find_model_of_name(table: TomlTable, seq_len: int) -> ModelConfig | None:
    """The preset of the model's name if the model states all that one by numbers must, all that it
    states is so in the preset, and what makes layers of another kind is not left to the preset."""
    name, mistakes = table.values.get("name"), Mistakes()
    preset = normalize_model_name(name) if isinstance(name, str) else ""
    if preset not in list_model_names() or not {*_REQUIRED_MODEL_KEYS} <= table.values.keys():
        return None
    known = load_model(preset)
    plain = replace(known, experts=None, latent=None, mtp_layers=0)
    model = decode_model(table, plain, seq_len, mistakes, {})
    return plain if not mistakes and replace(model, name=known.name) == known else None


def describe_assumed(
    table: TomlTable, model: ModelConfig, base: ModelConfig | None
) -> tuple[str, ...]:
    """What is taken for keys that a model by numbers leaves out and that change its parameters, and
    whether it has others than the preset of its name. base: what the rest is taken from."""
    if "preset" in table.values:
        return ()
    named = {one.metadata.get(KEY, one.name): one.name for one in fields(ModelConfig)}
    keys = ["gated", "tied"]
    if base is not None:
        usual = decode_model(table, None, 0, Mistakes(), {})
        keys += ["kv_heads", "ffn"]
        keys += [k for k, one in named.items() if getattr(usual, one) != getattr(model, one)]
    left_out = [key for key in dict.fromkeys(keys) if key not in table.values]
    taken = format_toml_keys({key: getattr(model, named[key]) for key in left_out})
    if base is not None:
        return (f"model: {taken} as in {base.name}, which has its sizes",) if left_out else ()
    preset, count = normalize_model_name(model.name), count_parameters(model)
    known = count_parameters(load_model(preset)) if preset in list_model_names() else count
    if abs(count / known - 1) <= _SAME_SIZE:
        return (f"model: {taken} (not stated)",) if left_out else ()
    counts = f"{units.format_count(count)} parameters, but {preset} has {units.format_count(known)}"
    if not left_out:
        return (f'model as {counts}; write preset = "{preset}" or another name',)
    verb = "are" if len(left_out) > 1 else "is"
    return (
        f"model as {counts}: {', '.join(left_out)} {verb} not stated (taken: {taken}); "
        f'write preset = "{preset}" or state {"them" if len(left_out) > 1 else "it"}',
    )


_EXPERT_KEYS = {
    field.name: {"count": "experts", "ffn": "expert_ffn"}.get(field.name, field.name)
    for field in fields(Experts)
}
"""Keys of the experts in [model], for files without [model.experts], by field."""

MODEL_KINDS: dict[str, Any] = {
    **collect_kinds(ModelConfig),
    **{key: collect_kinds(Experts)[name] for name, key in _EXPERT_KEYS.items()},
    "experts": dict[str, object] | int,
    "learned_positions": bool | Natural,
}

MODEL_KEYS = tuple(MODEL_KINDS)

_REQUIRED_MODEL_KEYS = ("layers", "hidden", "heads", "vocab")


def decode_model(
    table: TomlTable,
    base: ModelConfig | None,
    seq_len: int,
    mistakes: Mistakes,
    extra_kinds: Mapping[str, Any],
) -> ModelConfig:
    """Decodes the model of the table; missing or invalid keys are taken from base.

    Without a base, layers, hidden, heads and vocab are required, and ffn for a gated model. The
    defaults are then kv_heads = heads, head_size = hidden / heads, ffn = 4 hidden; gated models
    have RMS norms, no biases and an untied head, others layer norms, biases and a tied head.
    learned_positions = true means seq_len positions. extra_kinds are the types of further keys.
    """
    gated = table.values.get("gated") is True
    required = (
        (*_REQUIRED_MODEL_KEYS, *(("ffn",) if gated else ()))
        if "preset" not in table.values
        else ()
    )
    required = required if base is None else ()
    stated = decode_keys(table, {**MODEL_KINDS, **extra_kinds}, mistakes, required)
    if isinstance(positions := stated.get("learned_positions"), bool):
        stated["learned_positions"] = seq_len if positions else 0
    known = base or _build_default_model(table, stated, mistakes)
    sizes = {k: v for k, v in stated.items() if k not in ("experts", "latent")}
    model = replace(known, **select_fields(ModelConfig, sizes))
    if base is None and "preset" in table.values:
        return model
    rank = {"query_rank": 0} if known.latent is None else {}
    latent = decode_section(table, "latent", LatentAttention, known.latent, mistakes, **rank)
    return replace(
        model, experts=_decode_experts(table, stated, model, known.ffn, mistakes), latent=latent
    )


def _build_default_model(
    table: TomlTable, stated: Mapping[str, Any], mistakes: Mistakes
) -> ModelConfig:
    """Builds the default model of a table without a preset."""
    hidden, heads, gated = stated.get("hidden", 1), stated.get("heads", 1), stated.get("gated")
    # A size that is missing is said once, without what follows from it.
    if hidden % heads and {"hidden", "heads"} <= stated.keys() and "head_size" not in stated:
        problem = f"hidden ({hidden}) must be divisible by heads ({heads})"
        mistakes.append(table.build_error("heads", problem, "fix one of them or give head_size"))
    return ModelConfig(
        layers=1,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_size=hidden // heads,
        ffn=4 * hidden,
        vocab=1,
        tied=not gated,
        norm="rms" if gated else "layer",
        biases=not gated,
    )


def _decode_experts(
    table: TomlTable, stated: Mapping[str, Any], model: ModelConfig, ffn: int, mistakes: Mistakes
) -> Experts | None:
    """Decodes [model.experts], or experts = 8 with top_k and the other keys in [model].

    The default width of an expert is that of the model's MLP.
    """
    base = model.experts
    if isinstance(stated.get("experts"), dict):
        width = {"ffn": ffn} if base is None else {}
        return decode_section(table, "experts", Experts, base, mistakes, **width)
    sizes = {name: stated[key] for name, key in _EXPERT_KEYS.items() if key in stated}
    if base is not None:
        return replace(base, **sizes)
    if "experts" not in table.values:
        for name in sizes:
            problem = "needs a model with experts"
            mistakes.append(table.build_error(_EXPERT_KEYS[name], problem, "give experts"))
        return None
    if "top_k" not in table.values:
        mistakes.append(table.build_error("top_k", "missing", "give top_k"))
    return Experts(**{"count": 1, "top_k": 1, "ffn": model.ffn, **sizes})
