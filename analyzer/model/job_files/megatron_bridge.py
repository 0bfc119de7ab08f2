"""Overrides of a Megatron-Bridge recipe: YAML by sections, or model.KEY=VALUE of a command or of a
Python file that changes the recipe."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from stepsplit.analyzer.model.job_files.job_file import (
    JobFile,
    JobFileKind,
    JobTablesBuilder,
    find_table,
)
from stepsplit.analyzer.model.job_files.megatron_names import MegatronSettings, put_all

_SECTIONS = (
    "model", "train", "dataset", "ddp", "optimizer", "comm_overlap", "dist", "mixed_precision",
)  # fmt: skip

_SETTING = re.compile(
    r"(?:^|[\s\"'(\\])\+{0,2}(?:\w+\.)?(" + "|".join(_SECTIONS) + r")\.(\w+)\s*=\s*"
    r"(\"[^\"\n]*\"|'[^'\n]*'|\[[^\]\n]*\]|[^\s\\#,)]+)",
    re.MULTILINE,
)
"""model.tensor_model_parallel_size=4 of a command, cfg.model.pipeline_model_parallel_size = 2 of
Python."""

_RECIPE = re.compile(
    r"\b((?:llama|qwen|deepseek|gpt|mixtral|nemotron|moonlight|kimi|gemma|glm|olmo)[a-z0-9_]*?)"
    r"_(?:pretrain|finetune|sft|peft|lora)_config\b"
)

RECIPES: Mapping[str, str] = {
    "llama2_7b": "llama-2-7b",
    "llama3_8b": "llama-3-8b",
    "llama3_70b": "llama-3-70b",
    "llama31_8b": "llama-3.1-8b",
    "llama31_70b": "llama-3.1-70b",
    "llama31_405b": "llama-3.1-405b",
    "llama32_1b": "llama-3.2-1b",
    "llama32_3b": "llama-3.2-3b",
    "qwen3_600m": "qwen3-0.6b",
    "qwen3_1p7b": "qwen3-1.7b",
    "qwen3_4b": "qwen3-4b",
    "qwen3_8b": "qwen3-8b",
    "qwen3_14b": "qwen3-14b",
    "qwen3_32b": "qwen3-32b",
    "qwen3_30b_a3b": "qwen3-30b-a3b",
    "qwen3_235b_a22b": "qwen3-235b-a22b",
    "deepseek_v2_lite": "deepseek-v2-lite",
    "deepseek_v2": "deepseek-v2",
    "deepseek_v3": "deepseek-v3",
    "gpt_oss_20b": "gpt-oss-20b",
    "gpt_oss_120b": "gpt-oss-120b",
    "moonlight_16b": "moonlight-16b",
    "kimi_k2": "kimi-k2",
    "gemma3_1b": "gemma-3-1b",
}
"""Presets by the beginning of the recipe's function."""


def _recognize(file: JobFile) -> bool:
    if file.suffix in (".yaml", ".yml"):
        sections = [name for name in _SECTIONS if find_table(file.tables, name)]
        return "model" in sections and len(sections) > 1
    if file.suffix in (".toml", ".json"):
        return False
    return "megatron.bridge" in file.text or bool(_SETTING.search(file.text))


def _read(file: JobFile, job: JobTablesBuilder) -> None:
    values: dict[str, Any] = {}
    if file.suffix in (".yaml", ".yml"):
        for name in _SECTIONS:
            values |= {str(key): value for key, value in find_table(file.tables, name).items()}
        if isinstance(precision := file.tables.get("mixed_precision"), str):
            values["mixed_precision"] = precision
    else:
        text = re.sub(r"(?m)^\s*#.*$", "", file.text)
        for _, key, value in _SETTING.findall(text):
            word = value.strip("\"'")
            constants = {"true": True, "false": False, "null": None, "none": None}
            values[key] = constants.get(word.lower(), word)
        if named := re.search(r"\bmixed_precision\s*=\s*[\"']?([\w-]+)", text):
            values["mixed_precision"] = named[1]
        _put_recipe(text, job)
    settings = MegatronSettings(values)
    job.put("training", "framework", "megatron")
    put_all(settings, job)
    _put_architecture(settings, job)
    if "zero" not in job.sections["parallel"]:
        # Every recipe shards the optimizer: use_distributed_optimizer of its ddp section.
        job.put("parallel", "zero", 1)
    job.omitted.append("what the recipe itself sets: sizes that are not overridden are taken as 1")
    if "dtype" not in job.sections["training"]:
        # A word such as bf16_with_fp8_delayed_scaling_mixed.
        precision = settings.find_word("mixed_precision")
        stated = (dtype for dtype in ("nvfp4", "fp8", "bf16", "fp16") if dtype in precision)
        job.put("training", "dtype", next(stated, None))


def _put_recipe(text: str, job: JobTablesBuilder) -> None:
    """The model of the recipe that the file names, by the longest name that begins it."""
    if recipe := _RECIPE.search(text):
        known = [name for name in RECIPES if recipe[1].startswith(name)]
        if known:
            job.put("model", "preset", RECIPES[max(known, key=len)])
        else:
            job.omitted.append(f"recipe {recipe[1]}: no preset; state [model]")


def _put_architecture(settings: MegatronSettings, job: JobTablesBuilder) -> None:
    """What differs from the recipe's model; what is not there is the recipe's."""
    job.put("model", "gated", settings.find_flag("gated_linear_unit"))
    norm = settings.find_word("normalization")
    job.put("model", "norm", {"rmsnorm": "rms", "layernorm": "layer"}.get(norm))
    job.put("model", "biases", settings.find_flag("add_bias_linear"))
    job.put("model", "tied", settings.find_flag("share_embeddings_and_output_weights"))


KIND = JobFileKind("megatron-bridge", "Megatron-Bridge overrides", _recognize, _read)
