"""What a framework does where a RUN.toml does not say."""

from __future__ import annotations

from dataclasses import dataclass

from stepsplit.analyzer.model.spec.hardware import Hardware
from stepsplit.analyzer.model.spec.layout import Layout
from stepsplit.analyzer.model.spec.recipe import Dtype, Framework
from stepsplit.analyzer.model.spec.transformer import Transformer

GPT_TRAINERS: tuple[Framework, ...] = ("megatron", "deepspeed", "zero-paper")
BEFORE_HOPPER = ("volta", "ampere")
SUMS_IN_FP32: tuple[Framework, ...] = ("megatron", "fsdp2", "ddp", "nanotron", "huggingface")
"""Frameworks that sum gradients in fp32; the others in the weights' dtype. Megatron-LM does so for
bf16 alone (accumulate_allreduce_grads_in_fp32)."""


@dataclass(frozen=True, slots=True)
class Habits:
    """Defaults of Recipe's fields."""

    flash_attention: bool
    dropout: bool
    fused_loss: bool
    gradient_dtype: Dtype
    activation_dtype: Dtype


def habits_of(
    framework: Framework, dtype: Dtype, layout: Layout, model: Transformer, hardware: Hardware
) -> Habits:
    """The framework's defaults for such a job.

    GPT on V100 or A100 with Megatron-LM or DeepSpeed means what those papers ran: attention that
    stores its matrix of scores, dropout, a loss that is not fused.
    """
    stored = framework in GPT_TRAINERS and hardware.family in BEFORE_HOPPER and _is_gpt(model)
    return Habits(
        flash_attention=not stored,
        dropout=stored,
        fused_loss=framework == "megatron" and not stored,
        gradient_dtype=_gradients(framework, dtype),
        activation_dtype=_activations(framework, dtype, layout),
    )


def _is_gpt(model: Transformer) -> bool:
    return model.norm == "layer" and model.biases and not model.gated


def _gradients(framework: Framework, dtype: Dtype) -> Dtype:
    plain = framework == "megatron" and dtype == "fp16"
    return "fp32" if framework in SUMS_IN_FP32 and not plain else _weights(dtype)


def _activations(framework: Framework, dtype: Dtype, layout: Layout) -> Dtype:
    """torchtitan's mixed precision is FSDP's: without it activations stay in fp32."""
    if framework == "fsdp2" and layout.zero != 3 and layout.dp == 1:
        return "fp32"
    return _weights(dtype)


def _weights(dtype: Dtype) -> Dtype:
    """Weights and activations of fp8 training stay in bf16."""
    return "bf16" if dtype == "fp8" else dtype
