"""Values of the keys that a job.toml leaves out, by its framework."""

from __future__ import annotations

from typing import Any

from stepsplit.analyzer.model.config import (
    Framework,
    GemmDtype,
    HardwareConfig,
    ModelConfig,
    ParallelConfig,
    StoredDtype,
)
from stepsplit.analyzer.model.profile import FrameworkProfile, load_device, load_framework


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
