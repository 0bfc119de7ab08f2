"""Keys of a job.toml as other programs name them: one table, and what each becomes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from stepsplit.analyzer.model.config_decode import Mistakes, TomlTable, format_toml_lines

Convert = Callable[[object], Mapping[str, object]]
"""A value -> the keys of the same table that say the same; itself under its own name if there are
none, so that it is refused as an unknown key or an invalid value."""


def _rename(key: str) -> Convert:
    return lambda value: {key: value}


def _read_checkpointing(value: object) -> Mapping[str, object]:
    """true and false of most programs, the modes of torchtitan."""
    if isinstance(value, bool):
        return {"recompute": "full" if value else "none"}
    return {"recompute": value}


def _read_dtype_flag(dtype: str) -> Convert:
    """bf16 = true; false says nothing of which one it is."""

    def read(value: object) -> Mapping[str, object]:
        if isinstance(value, bool):
            return {"dtype": dtype} if value else {}
        return {"dtype": value}

    return read


def _read_fsdp(value: object) -> Mapping[str, object]:
    """The ranks that shard the weights, or that they do."""
    if isinstance(value, bool):
        return {"zero": 3} if value else {}
    return {"dp_shard": value}


_STRATEGIES = {"fsdp": 3, "fsdp2": 3, "ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}


def _read_strategy(value: object) -> Mapping[str, object]:
    """The stage of ZeRO; of other words it says none."""
    word = re.sub(r"[^a-z0-9]", "", value.lower()) if isinstance(value, str) else ""
    return {"zero": _STRATEGIES[word]} if word in _STRATEGIES else {"strategy": value}


_VARIANT = re.compile(r"-(?:hf|instruct|chat|base|it|v\d+\.\d+)$")
"""What a hub's name of a model says beyond its sizes."""


def normalize_model_name(name: str) -> str:
    """The name of a preset that a hub's name stands for, if there is one.

    >>> normalize_model_name("meta-llama/Llama-3.1-8B-Instruct")
    'llama-3.1-8b'
    """
    word = name.rpartition("/")[2].lower().removeprefix("meta-")
    while (cut := _VARIANT.sub("", word)) != word:
        word = cut
    return word


def _read_model_preset(value: object) -> Mapping[str, object]:
    return {"preset": normalize_model_name(value) or value if isinstance(value, str) else value}


def _read_dropout(value: object) -> Mapping[str, object]:
    """The probability: whether there is any is what takes time and memory."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1:
        return {"dropout": value > 0}
    return {"dropout": value}


_GPUS = {
    "a100": "a100-sxm-80gb", "h100": "h100-sxm", "h200": "h200-sxm", "b200": "b200-sxm",
    "b300": "b300-sxm", "v100": "v100-sxm-32gb", "h20": "h20-sxm", "h800": "h800-sxm",
    "a800": "a800-sxm-80gb",
}  # fmt: skip
"""Presets of GPUs that are usually meant by these names."""


def _read_gpu(value: object) -> Mapping[str, object]:
    return {"preset": _GPUS.get(value.lower(), value.lower()) if isinstance(value, str) else value}


ALIASES: Mapping[str, Mapping[str, Convert]] = {
    "model": {
        "num_layers": _rename("layers"),
        "num_hidden_layers": _rename("layers"),
        "hidden_size": _rename("hidden"),
        "num_attention_heads": _rename("heads"),
        "num_heads": _rename("heads"),
        "n_heads": _rename("heads"),
        "num_kv_heads": _rename("kv_heads"),
        "n_layers": _rename("layers"),
        "num_key_value_heads": _rename("kv_heads"),
        "num_query_groups": _rename("kv_heads"),
        "intermediate_size": _rename("ffn"),
        "ffn_hidden_size": _rename("ffn"),
        "vocab_size": _rename("vocab"),
        "head_dim": _rename("head_size"),
        "tie_word_embeddings": _rename("tied"),
        "num_experts": _rename("experts"),
        "num_local_experts": _rename("experts"),
        "num_experts_per_tok": _rename("top_k"),
        "moe_router_topk": _rename("top_k"),
        "moe_intermediate_size": _rename("expert_ffn"),
    },
    "parallel": {
        "fsdp": _read_fsdp,
        "strategy": _read_strategy,
        "ddp": _rename("dp_replicate"),
        "tensor_parallel": _rename("tp"),
        "tensor_model_parallel_size": _rename("tp"),
        "pipeline_parallel": _rename("pp"),
        "pipeline_model_parallel_size": _rename("pp"),
        "context_parallel": _rename("cp"),
        "context_parallel_size": _rename("cp"),
        "expert_parallel": _rename("ep"),
        "expert_model_parallel_size": _rename("ep"),
        "data_parallel": _rename("dp"),
        "data_parallel_size": _rename("dp"),
        "vpp": _rename("chunks"),
        "virtual_pipeline_model_parallel_size": _rename("chunks"),
        "virtual_pipeline_stages": _rename("chunks"),
        "zero_stage": _rename("zero"),
        "num_gpus": _rename("gpus"),
        "num_nodes": _rename("nodes"),
        "sp": _rename("sequence_parallel"),
    },
    "training": {
        "mbs": _rename("micro_batch"),
        "micro_batch_size": _rename("micro_batch"),
        "per_device_train_batch_size": _rename("micro_batch"),
        "gbs": _rename("global_batch"),
        "global_batch_size": _rename("global_batch"),
        "gas": _rename("microbatches"),
        "gradient_accumulation_steps": _rename("microbatches"),
        "seq_length": _rename("seq_len"),
        "sequence_length": _rename("seq_len"),
        "precision": _rename("dtype"),
        "bf16": _read_dtype_flag("bf16"),
        "fp16": _read_dtype_flag("fp16"),
        "fp8": _read_dtype_flag("fp8"),
        "activation_checkpointing": _read_checkpointing,
        "gradient_checkpointing": _read_checkpointing,
        "dropout": _read_dropout,
        "flash_attn": _rename("flash_attention"),
    },
    "hardware": {"gpu": _read_gpu, "device": _read_gpu, "power_limit": _rename("power_watts")},
}
"""By table of a job.toml: a key of other programs, and what it is here."""

_PRESETS: Mapping[str, Mapping[str, Convert]] = {
    "model": {"preset": _read_model_preset}, "hardware": {"preset": _read_gpu},
}  # fmt: skip
"""Names of presets as other programs write them."""

_MOVED: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "model": dict.fromkeys(("seq_len", "seq_length", "sequence_length"), ("training", "seq_len")),
    "hardware": {
        "gpus": ("parallel", "gpus"), "num_gpus": ("parallel", "gpus"),
        "nodes": ("parallel", "nodes"), "num_nodes": ("parallel", "nodes"),
    },
}  # fmt: skip
"""By table: a key that is often put there, and the table and the key that it is here."""

HINTS: Mapping[str, str] = {
    "strategy": "write zero = 3 for FSDP, zero = 0 for DDP",
    "batch_size": "write micro_batch (sequences of a rank at once) or global_batch (of a step)",
    "distributed_optimizer": "write zero = 1",
}
"""The fix of a key that stands for several of ours, or for a value of one."""


@dataclass(frozen=True, slots=True)
class NormalizedTable:
    """A job's tables with our keys, and what of it was read as what: "training: mbs = 1 as
    micro_batch = 1"."""

    table: TomlTable
    notes: tuple[str, ...] = ()


def replace_key_aliases(table: TomlTable, mistakes: Mistakes) -> NormalizedTable:
    """Replaces the keys of other programs in the tables of a job with ours.

    A key stands for nothing but itself if what it stands for is in the table too: that is a
    mistake, as is every value that our key may not have.
    """
    sections: dict[str, Any] = dict(table.values)
    notes = list[str]()
    if "parallelism" in sections and "parallel" not in sections:
        sections["parallel"] = sections.pop("parallelism")
        table = replace(table, values=sections)
        notes.append("[parallelism] as [parallel]")
    _move_keys(table, sections, mistakes, notes)
    table = replace(table, values=sections)
    for name, known in ALIASES.items():
        aliases = {**known, **_PRESETS.get(name, {})}
        values = table.get_subtable(name).values
        converted: dict[str, object] = {}
        for key, value in values.items():
            ours = aliases[key](value) if key in aliases else {key: value}
            for other, read in ours.items():
                if other != key and (other in values or other in converted):
                    if converted.get(other, values.get(other)) == read:
                        continue
                    problem = f"says the same as {other}, with another value"
                    mistakes.append(
                        table.get_subtable(name).build_error(key, problem, "remove one of them")
                    )
                    continue
                converted[other] = read
            # 0.0 equals False, but is not what our key takes.
            if repr(ours) != repr({key: value}):
                (said,), read = format_toml_lines({key: value}), ", ".join(format_toml_lines(ours))
                notes.append(f"{name}: {said} as {read or 'nothing'}")
        if values:
            sections[name] = converted
    return NormalizedTable(replace(table, values=sections), tuple(notes))


def _move_keys(
    table: TomlTable, sections: dict[str, Any], mistakes: Mistakes, notes: list[str]
) -> None:
    """Moves keys that stand in another table than ours into that; one that ours has too is a
    mistake unless it says the same."""
    for name, moved in _MOVED.items():
        values = table.get_subtable(name).values
        for key in filter(moved.__contains__, values):
            section, ours = moved[key]
            own = sections.get(section, {})
            if not isinstance(own, Mapping):
                continue
            sections[name] = {k: v for k, v in sections[name].items() if k != key}
            if own.get(ours, values[key]) != values[key]:
                problem = f"says the same as {section}.{ours}, with another value"
                error = table.get_subtable(name).build_error(key, problem, "remove one of them")
                mistakes.append(error)
                continue
            sections[section] = {**own, ours: values[key]}
            (said,), (read,) = (format_toml_lines({k: values[key]}) for k in (key, ours))
            notes.append(f"{name}: {said} as {section}: {read}")
