"""DeepSpeed's JSON config: batch, precision, ZeRO stage and offloading; nothing of the model."""

from __future__ import annotations

from collections.abc import Mapping
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

OWN_KEYS = frozenset(
    {
        "zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps", "zero_allow_untested_optimizer",
    }
)  # fmt: skip

OWN_FLAGS = frozenset({"bf16", "fp16"})
"""Tables of the JSON that are flags where they are typed from memory."""

_OPTIMIZERS = {
    "adam": "adam", "adamw": "adam", "fusedadam": "adam", "sgd": "sgd", "lion": "lion",
    "muon": "muon",
}  # fmt: skip


def _recognize(file: JobFile) -> bool:
    return bool(OWN_KEYS & file.tables.keys()) and file.suffix not in (".toml", ".yaml", ".yml")


def put_settings(values: Mapping[str, Any], job: JobTablesBuilder) -> None:
    """States what a config says. Values of "auto", which transformers fills in, say nothing."""
    zero = find_table(values, "zero_optimization")
    job.put("training", "framework", "deepspeed")
    job.put("training", "micro_batch", find_number(values, "train_micro_batch_size_per_gpu"))
    job.put("training", "global_batch", find_number(values, "train_batch_size"))
    if "global_batch" not in job.sections["training"]:
        steps = find_number(values, "gradient_accumulation_steps")
        job.put("training", "microbatches", steps)
    flags = {
        dtype: find_flag({"enabled": values.get(dtype), **find_table(values, dtype)}, "enabled")
        for dtype in sorted(OWN_FLAGS)
    }
    job.put("training", "dtype", next((dtype for dtype, flag in flags.items() if flag), None))
    if flags["bf16"] is None and flags["fp16"] is None:
        job.omitted.append("the dtype: taken as bf16")
    word = find_word(find_table(values, "optimizer"), "type").lower()
    job.put("training", "optimizer", _OPTIMIZERS.get(word))
    if word and word not in (*_OPTIMIZERS, "auto"):
        job.omitted.append(f"optimizer {word}: taken as adam")
    if (clip := values.get("gradient_clipping")) == 0:
        job.put("training", "clip_gradients", bool(clip))
    job.put("parallel", "zero", find_number(zero, "stage"))
    if (overlaps := find_flag(zero, "overlap_comm")) is not None:
        job.put("parallel", "overlap", ["dp"] if overlaps else [])
    # Offloaded parameters of stage 3 come with the optimizer's states.
    devices = {
        "optimizer": find_word(find_table(zero, "offload_optimizer"), "device"),
        "parameters": find_word(find_table(zero, "offload_param"), "device"),
    }
    offloaded = [state for state, device in devices.items() if device not in ("", "none")]
    if find_flag(zero, "cpu_offload") is True:
        offloaded, devices["optimizer"] = ["optimizer"], "cpu"
    if offloaded:
        job.put("training", "offload", sorted(offloaded))
        job.put("training", "offload_to", devices[offloaded[0]])


KIND = JobFileKind(
    "deepspeed", "DeepSpeed JSON", _recognize, lambda file, job: put_settings(file.tables, job),
    frozenset({"training.recompute"}),
)  # fmt: skip
