"""The words of run.json for what frameworks call otherwise."""

from __future__ import annotations

_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float": "fp32", "no": "fp32"}
_OPTIMIZERS = ("adam", "sgd", "lion", "muon", "adafactor")


def dtype_word(name: object) -> str:
    """fp32, bf16, fp16 or fp8 for torch.bfloat16, "bf16-mixed", "no", ...; else the name itself."""
    plain = str(name).removeprefix("torch.").partition("-")[0]
    return _DTYPES.get(plain, {"16": "fp16", "32": "fp32"}.get(plain, plain))


def optimizer_word(name: object) -> str:
    """adam for adamw_torch_fused, AdamW, FusedAdam, ...; else the name in lower case."""
    plain = str(getattr(name, "value", name)).lower()
    if "adam" in plain and "8bit" in plain:
        return "adam-8bit"
    return next((word for word in _OPTIMIZERS if word in plain), plain)


def data_axis(zero_stage: int) -> str:
    """The axis of the ranks that read different data: under ZeRO-3 they shard the model."""
    return "dp_shard" if zero_stage == 3 else "dp_replicate"
