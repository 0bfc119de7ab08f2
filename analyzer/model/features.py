"""The features of a job: what its framework and its device do, each with the origin of its value
and the key of job.toml that would state it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from typing import Any

from stepsplit.analyzer.model.config import (
    Efficiency,
    Framework,
    GemmDtype,
    HardwareConfig,
    JobConfig,
    ModelConfig,
    ParallelConfig,
    StoredDtype,
    TrainingConfig,
)
from stepsplit.analyzer.model.config_decode import TomlTable
from stepsplit.analyzer.model.hardware_config import find_efficiency
from stepsplit.analyzer.model.profile import (
    SECTIONS,
    Feature,
    FrameworkProfile,
    Origin,
    load_device,
    load_framework,
)

# Values of the keys that a job.toml leaves out.


def framework_defaults(
    framework: Framework,
    dtype: GemmDtype,
    layout: ParallelConfig,
    model: ModelConfig,
    hardware: HardwareConfig,
) -> dict[str, Any]:
    """Returns the framework's defaults for the job, by field of TrainingConfig.

    GPT on V100 or A100 with Megatron-LM or DeepSpeed gets the setup of those papers: attention
    that stores its scores, dropout, and a loss that is not fused.
    """
    profile, device = load_framework(framework), load_device(hardware.family)
    usual = profile.defaults
    is_gpt = model.norm == "layer" and model.biases and not model.gated
    stores_scores = usual.stores_scores and device.stores_scores and is_gpt
    in_fp32 = usual.fp32_gradients
    is_fp32 = in_fp32 == "always" or (in_fp32 == "except-fp16" and dtype != "fp16")
    return {
        "flash_attention": not stores_scores,
        "dropout": stores_scores,
        "fused_loss": usual.fused_loss and not stores_scores,
        "early_stop": usual.early_stop,
        "fused_optimizer": usual.fused_optimizer or device.processor,
        "gradient_dtype": "fp32" if is_fp32 else choose_weight_dtype(dtype),
        "activation_dtype": choose_activation_dtype(profile, dtype, layout),
    }


def choose_activation_dtype(
    profile: FrameworkProfile, dtype: GemmDtype, layout: ParallelConfig
) -> StoredDtype:
    """torchtitan's mixed precision comes from FSDP: without FSDP activations stay in fp32."""
    if profile.model.casts == "fsdp" and layout.zero != 3 and layout.dp == 1:
        return "fp32"
    return choose_weight_dtype(dtype)


def choose_weight_dtype(dtype: GemmDtype) -> StoredDtype:
    """Weights and activations of training in 8 or 4 bits stay in bf16."""
    return "bf16" if dtype == "fp8" or dtype == "nvfp4" else dtype


# The record of all features of a job.

TRAINING_FEATURES = (
    "flash_attention", "dropout", "fused_loss", "early_stop", "fused_optimizer", "gradient_dtype",
    "activation_dtype", "moments_dtype", "master_weights", "attention_kernel", "unfused",
)  # fmt: skip
"""Fields of TrainingConfig whose values follow from the framework where a job leaves them out."""

PARALLEL_FEATURES = (
    "zero", "overlap", "expert_tp", "bucket_bytes", "reshard_after_forward", "sum_once",
    "root_unit",
)  # fmt: skip
"""The same of ParallelConfig."""

FRAMEWORK_KEY = "training.framework"
"""The key that states whatever has no key of its own: by the name of a framework that does it."""


def list_stated_keys(table: TomlTable) -> frozenset[str]:
    """The keys that the tables of a job state: "training.dtype"."""
    return frozenset(
        f"{section}.{key}"
        for section, values in table.values.items()
        if isinstance(values, Mapping)
        for key in values
    )


def list_features(job: JobConfig) -> tuple[Feature, ...]:
    """Lists the features of a job: those with a key of their own, those of its framework, and the
    constants of its device.

    What the framework does by default is assumed if the job does not name it.
    """
    by_key: list[tuple[str, TrainingConfig | ParallelConfig, str]]
    by_key = [("training", job.training, name) for name in TRAINING_FEATURES]
    by_key += [("parallel", job.parallel, name) for name in PARALLEL_FEATURES]
    features = []
    for section, config, name in by_key:
        key = f"{section}.{name}"
        origin = job.profile.find_origin(f"defaults.{name}")
        features.append(Feature(name, getattr(config, name), _find_origin(job, key, origin), key))
    for section in SECTIONS:
        part = getattr(job.profile, section)
        for each in fields(part):
            name = f"{section}.{each.name}"
            # Defaults of keys are listed with their keys.
            if section != "defaults":
                origin = _find_origin(job, "", job.profile.find_origin(name))
                features.append(Feature(name, getattr(part, each.name), origin, FRAMEWORK_KEY))
    origins = find_efficiency_origins(job.hardware.family, job.hardware.efficiency)
    for name, origin in origins.items():
        key = f"hardware.efficiency.{name}"
        features.append(Feature(name, getattr(job.hardware.efficiency, name), origin, key))
    return tuple(features)


def _find_origin(job: JobConfig, key: str, by_framework: Origin) -> Origin:
    """The origin of a feature with this key (or "") and, by the framework, that other origin."""
    if key and (job.stated is None or key in job.stated):
        return Origin.STATED
    is_named = job.stated is None or FRAMEWORK_KEY in job.stated
    return by_framework if is_named else Origin.ASSUMED


@lru_cache(maxsize=256)
def find_efficiency_origins(family: str, efficiency: Efficiency) -> Mapping[str, Origin]:
    """The origin of each constant of a device: fitted on published runs, assumed in a family
    without any, or stated.

    A file of `stepsplit calibrate` repeats the family's constants that it did not fit: a constant
    counts as stated if it differs from the family's.
    """
    own = find_efficiency(family) or efficiency
    usual = Origin.FITTED if efficiency.rows else Origin.ASSUMED
    return {
        each.name: usual
        if getattr(efficiency, each.name) == getattr(own, each.name)
        else Origin.STATED
        for each in fields(Efficiency)
        if isinstance(getattr(efficiency, each.name), float | None)
    }
