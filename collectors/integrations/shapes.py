"""The shape of a model, as far as its configuration and its parameters tell."""

from __future__ import annotations

from typing import Any

from stepsplit.collectors.run_spec import ModelSpec

_FFN = ("intermediate_size", "ffn_dim", "n_inner")
"""What the configurations of transformers call the width of the MLP."""


def model_spec(model: Any) -> ModelSpec | None:
    """The shape of a torch module, whoever wraps it; None of none. Only what is beyond doubt."""
    if model is None:
        return None
    inner = _unwrapped(model)
    config = getattr(getattr(inner, "config", None), "get_text_config", lambda: None)()
    return ModelSpec(
        layers=_number(config, "num_hidden_layers"),
        hidden=_number(config, "hidden_size"),
        heads=_number(config, "num_attention_heads"),
        kv_heads=_number(config, "num_key_value_heads") or _number(config, "num_attention_heads"),
        ffn=next((ffn for name in _FFN if (ffn := _number(config, name))), None),
        gated=_gated(inner) if config is not None else None,
        vocab=_number(config, "vocab_size"),
        tied=getattr(config, "tie_word_embeddings", None),
        parameters=parameters(inner),
    )


def parameters(model: Any) -> int | None:
    """How many the whole model has; None where a rank holds a part of them and can't tell."""
    held = list(model.parameters())
    if any(type(each).__name__ == "FlatParameter" for each in held):
        return None
    # ZeRO-3 leaves the whole's count on the empty shell; a DTensor's own count is the whole's.
    return sum(int(getattr(each, "ds_numel", each.numel())) for each in held)


def _unwrapped(model: Any) -> Any:
    """The module below DistributedDataParallel, an engine or a compiler."""
    while True:
        below = getattr(model, "_orig_mod", getattr(model, "module", None))
        if below is None or not hasattr(below, "parameters"):
            return model
        model = below


def _gated(model: Any) -> bool | None:
    """Whether its MLPs have a gate beside their first matrix; None where no name tells."""
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    if names & {"gate_proj", "gate_up_proj"}:
        return True
    return False if names & {"c_fc", "fc1", "dense_h_to_4h"} else None


def _number(config: Any, name: str) -> int | None:
    value = getattr(config, name, None)
    return value if isinstance(value, int) else None
