"""torchtitan's TOML: the model by name and flavor, parallelism, batch and checkpointing."""

from __future__ import annotations

from collections.abc import Mapping

from stepsplit.analyzer.model.job_files.job_file import (
    JobFile,
    JobFileKind,
    JobTablesBuilder,
    find_flag,
    find_number,
    find_table,
    find_word,
)

_OWN_TABLES = frozenset({"activation_checkpoint", "lr_scheduler", "job", "metrics"})

MODELS: Mapping[tuple[str, str], str] = {
    ("llama2", "7B"): "llama-2-7b",
    ("llama2", "13B"): "llama-2-13b",
    ("llama2", "70B"): "llama-2-70b",
    ("llama3", "8B"): "llama-3.1-8b",
    ("llama3", "70B"): "llama-3.1-70b",
    ("llama3", "405B"): "llama-3.1-405b",
    ("llama4", "17bx16e"): "llama-4-scout",
    ("llama4", "17bx128e"): "llama-4-maverick",
    ("deepseek_v3", "16B"): "deepseek-v3-16b",
    ("deepseek_v3", "671B"): "deepseek-v3",
    ("qwen3", "0.6B"): "qwen3-0.6b",
    ("qwen3", "1.7B"): "qwen3-1.7b",
    ("qwen3", "4B"): "qwen3-4b",
    ("qwen3", "8B"): "qwen3-8b",
    ("qwen3", "14B"): "qwen3-14b",
    ("qwen3", "32B"): "qwen3-32b",
    ("qwen3", "30B-A3B"): "qwen3-30b-a3b",
    ("qwen3", "235B-A22B"): "qwen3-235b-a22b",
    ("gpt_oss", "20b"): "gpt-oss-20b",
    ("gpt_oss", "120b"): "gpt-oss-120b",
}
"""Presets by name and flavor in [model]."""

_SCHEDULES = {
    "1f1b": "1f1b", "gpipe": "gpipe", "interleaved1f1b": "interleaved",
    "zbvzerobubble": "zb-v", "dualpipev": "dualpipe-v",
}  # fmt: skip

_AXES = {
    "tensor_parallel_degree": "tp", "pipeline_parallel_degree": "pp",
    "context_parallel_degree": "cp", "expert_parallel_degree": "ep",
    "expert_tensor_parallel_degree": "expert_tp",
}  # fmt: skip


def _recognize(file: JobFile) -> bool:
    """By tables that no job.toml has, or by sizes of the mesh that are called degrees; sizes of the
    model are in none of its files."""
    degrees = [key for key in find_table(file.tables, "parallelism") if key.endswith("_degree")]
    has_sizes = any(type(value) is int for value in find_table(file.tables, "model").values())
    is_mesh = bool(degrees) and not has_sizes
    return file.suffix == ".toml" and bool(is_mesh or _OWN_TABLES & file.tables.keys())


def _read(file: JobFile, job: JobTablesBuilder) -> None:
    values = file.tables
    model, training = find_table(values, "model"), find_table(values, "training")
    parallel = find_table(values, "parallelism") or training
    name, flavor = find_word(model, "name"), find_word(model, "flavor")
    preset = MODELS.get((name, flavor))
    job.put("model", "preset", preset)
    if preset is None and name:
        job.omitted.append(f"model {name} {flavor}: no preset; state [model]")
    job.put("training", "framework", "fsdp2")
    job.put("training", "seq_len", find_number(training, "seq_len"))
    micro_batch = find_number(training, "local_batch_size", "batch_size")
    pipelined = find_number(parallel, "pipeline_parallel_microbatch_size")
    pp = find_number(parallel, "pipeline_parallel_degree") or 1
    if pp > 1 and micro_batch:
        # The local batch goes through a pipeline in microbatches.
        job.put("training", "microbatches", micro_batch // (pipelined or 1))
        micro_batch = pipelined or 1
    job.put("training", "micro_batch", micro_batch)
    global_batch = find_number(training, "global_batch_size")
    if global_batch is not None and global_batch > 0:
        job.sections["training"].pop("microbatches", None)
        job.put("training", "global_batch", global_batch)
    elif pp == 1:
        # -1 or none: one local batch on each rank.
        job.put("training", "microbatches", 1)
    for key, ours in _AXES.items():
        job.put("parallel", ours, find_number(parallel, key))
    _put_data_parallel(parallel, job)
    if pp > 1:
        word = find_word(parallel, "pipeline_parallel_schedule").lower()
        job.put("parallel", "schedule", _SCHEDULES.get(word))
        if word and word not in _SCHEDULES:
            job.omitted.append(f"schedule {word}: taken as 1f1b")
        if _SCHEDULES.get(word) == "interleaved":
            job.put("parallel", "chunks", 2)
    reshard = find_word(parallel, "fsdp_reshard_after_forward")
    job.put("parallel", "reshard_after_forward", reshard or None)
    if find_flag(parallel, "enable_async_tensor_parallel"):
        job.put("parallel", "overlap", ["dp", "tp"])
    if (job.sections["parallel"].get("tp") or 1) > 1:
        # Its tensor parallelism always splits the sequence outside of the linear layers.
        job.put("parallel", "sequence_parallel", True)
    _put_training(values, job)


def _put_data_parallel(parallel: Mapping[str, object], job: JobTablesBuilder) -> None:
    """A shard degree of -1, the default, is that of all ranks that are left."""
    replicate = find_number(parallel, "data_parallel_replicate_degree") or 1
    shard = find_number(parallel, "data_parallel_shard_degree") or -1
    job.put("parallel", "zero", 0 if shard == 1 else 3)
    if shard > 0:
        job.put("parallel", "dp_shard", shard)
        job.put("parallel", "dp_replicate", replicate)
    elif replicate > 1:
        job.put("parallel", "dp_replicate", replicate)


def _put_training(values: Mapping[str, object], job: JobTablesBuilder) -> None:
    training, model = find_table(values, "training"), find_table(values, "model")
    compiles = find_table(values, "compile")
    is_compiled = find_flag(compiles, "enable") or find_flag(training, "compile") or False
    components = compiles.get("components", ["model", "loss"])
    is_compiled = is_compiled and isinstance(components, list) and "model" in components
    job.put("training", "compile", is_compiled)
    checkpoint = find_table(values, "activation_checkpoint")
    mode = find_word(checkpoint, "mode")
    option = str(checkpoint.get("selective_ac_option", ""))
    if mode == "selective" and option.isdigit() and int(option) > 1:
        job.put("training", "recompute", f"every-{int(option)}")
    elif mode in ("none", "full", "selective"):
        job.put("training", "recompute", mode)
    converters = model.get("converters", [])
    float8 = find_table(values, "float8") or find_table(values, "quantize", "linear", "float8")
    if isinstance(converters, list) and any("float8" in str(one) for one in converters):
        job.put("training", "dtype", "fp8")
        if find_word(float8, "recipe_name").startswith("rowwise"):
            job.put("training", "fp8_scaling", "row")
    optimizer = find_table(values, "optimizer")
    name = find_word(optimizer, "name").lower()
    if name and name not in ("adam", "adamw"):
        job.omitted.append(f"optimizer {name}: taken as adam")
    implementation = find_word(optimizer, "implementation")
    if implementation:
        job.put("training", "fused_optimizer", implementation == "fused")


KIND = JobFileKind("torchtitan", "torchtitan TOML", _recognize, _read)
