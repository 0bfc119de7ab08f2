"""Keys of a job.toml as other programs name them: one table, and what each becomes."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from stepsplit.analyzer.model.config_decode import Mistakes, TomlTable, format_toml_lines
from stepsplit.analyzer.model.job_files.deepspeed import OWN_FLAGS, OWN_KEYS, put_settings
from stepsplit.analyzer.model.job_files.job_file import JobTablesBuilder
from stepsplit.analyzer.model.job_files.megatron_names import (
    RECOMPUTE_MODULES,
    MegatronSettings,
    put_all,
)
from stepsplit.analyzer.model.preset_names import find_preset, list_hardware_names, list_model_names
from stepsplit.analyzer.model.schedule_names import SCHEDULES

Convert = Callable[[object], Mapping[str, object]]
"""A value -> the keys of the same table that say the same; itself under its own name if there are
none, so that it is refused as an unknown key or an invalid value."""


def _rename(key: str) -> Convert:
    return lambda value: {key: value}


_FP8_FORMATS = ("hybrid", "e4m3")


def _read_dtype_flag(dtype: str) -> Convert:
    """bf16 = true, DeepSpeed's {enabled = true}, or a format of 8 bits; false says nothing of which
    one it is."""

    def read(value: object) -> Mapping[str, object]:
        if isinstance(value, Mapping) and value.keys() == {"enabled"}:
            value = value["enabled"]
        if dtype == "fp8" and value in _FP8_FORMATS:
            value = True
        if isinstance(value, bool):
            return {"dtype": dtype} if value else {}
        return {"dtype": value}

    return read


_FP8_RECIPES = {
    "rowwise": "row", "tensorwise": "tensor", "delayed": "tensor", "current": "tensor",
}  # fmt: skip
"""What shares a scale by the words of torchao and of Transformer Engine."""


def _read_fp8_recipe(value: object) -> Mapping[str, object]:
    word = value.lower() if isinstance(value, str) else ""
    return {"fp8_scaling": _FP8_RECIPES.get(word, value)}


def _read_nothing(value: object) -> Mapping[str, object]:
    """Leaves out a key that says nothing of the time or memory of a step."""
    return {}


def _read_taken(key: str, taken: object) -> Convert:
    """Leaves out a key that names what is taken for every job; another value is not ours."""
    return lambda value: {} if value == taken and type(value) is type(taken) else {key: value}


def _read_scheduler(value: object) -> Mapping[str, object]:
    """Leaves out a schedule of the learning rate, not one of a pipeline."""
    word = re.sub(r"[^a-z0-9]", "", value.lower()) if isinstance(value, str) else ""
    pipelines = (*SCHEDULES, *VALUE_ALIASES["schedule"], "zero-bubble")
    is_pipeline = any(one.replace("-", "") in word for one in pipelines)
    return {} if word and not is_pipeline else {"scheduler": value}


_SHARDING = {"full_shard": 3, "shard_grad_op": 2, "no_shard": 0, "hybrid_shard": 3}
"""Stages of ZeRO by the words of torch's FSDP and of transformers."""


def _read_fsdp(value: object) -> Mapping[str, object]:
    """The ranks that shard the weights, that they do, or torch's word for what is sharded."""
    if isinstance(value, bool):
        return {"zero": 3} if value else {}
    word = value.lower().replace("auto_wrap", "").strip() if isinstance(value, str) else ""
    return {"zero": _SHARDING[word]} if word in _SHARDING else _read_shard_degree(value)


def _read_shard_degree(value: object) -> Mapping[str, object]:
    """The ranks that shard the weights; torchtitan's -1 is all that the other axes leave."""
    is_rest = value == -1 and type(value) is int
    return {"zero": 3} if is_rest else {"dp_shard": value}


def _read_flag_as(key: str, of_true: object, of_false: object) -> Convert:
    """A flag that is a value of ours: what true and what false stand for."""
    words = {True: of_true, False: of_false}
    return lambda value: {key: words[value] if isinstance(value, bool) else value}


def _negate(key: str) -> Convert:
    return _read_flag_as(key, of_true=False, of_false=True)


def _read_attention(value: object) -> Mapping[str, object]:
    """The implementations of transformers; torch's own is fused, too."""
    word = re.sub(r"_[23]$", "", value) if isinstance(value, str) else ""
    kinds = {"flash_attention": True, "sdpa": True, "eager": False}
    return {"flash_attention": kinds.get(word, value)}


def _read_norm(value: object) -> Mapping[str, object]:
    word = value.lower() if isinstance(value, str) else ""
    return {"norm": {"rmsnorm": "rms", "layernorm": "layer"}.get(word, value)}


def _read_optimizer(value: object) -> Mapping[str, object]:
    """An optimizer in capitals, as DeepSpeed's JSON has it, or one of those of transformers."""
    if not isinstance(value, str):
        return {"optimizer": value}
    word = value.lower().removeprefix("paged_")
    if not word.startswith("adamw_"):
        return {"optimizer": word}
    fused = {"fused_optimizer": True} if "fused" in word else {}
    return {"optimizer": "adam-8bit" if "8bit" in word else "adam", **fused}


_HYBRID = ("hsdp", "hybridshard")
"""Words, without signs, for shards with replicas of each, whose numbers are in other keys."""

_STRATEGIES = {"fsdp": 3, "fsdp2": 3, "hsdp": 3, "ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}


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
    >>> normalize_model_name("Llama2 70B")
    'llama-2-70b'
    """
    word = re.sub(r"[\s_]+", "-", name.rpartition("/")[2].strip().lower()).removeprefix("meta-")
    while (cut := _VARIANT.sub("", word)) != word:
        word = cut
    bare = word.replace("-", "")
    same = [known for known in list_model_names() if known.replace("-", "") == bare]
    return same[0] if len(same) == 1 else word


def _read_model_preset(value: object) -> Mapping[str, object]:
    return {"preset": normalize_model_name(value) or value if isinstance(value, str) else value}


_PARTS: Mapping[str, object] = {**RECOMPUTE_MODULES, "swiglu": "activation"}


def _read_recompute(value: object) -> Mapping[str, object]:
    """A mode, or parts of a layer."""
    if not isinstance(value, list):
        return {"recompute": value}
    return {"recompute": [_PARTS.get(one, one) if isinstance(one, str) else one for one in value]}


def _read_offload(value: object) -> Mapping[str, object]:
    """That optimizer states are offloaded, where to, or DeepSpeed's {device = "cpu"}."""
    if isinstance(value, Mapping) and "device" in value:
        value = value["device"]
    if isinstance(value, bool):
        return {"offload": "cpu"} if value else {}
    return {} if value == "none" else {"offload": value}


def _read_dropout(value: object) -> Mapping[str, object]:
    """The probability: whether there is any is what takes time and memory."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1:
        return {"dropout": value > 0}
    return {"dropout": value}


def _read_clipping(value: object) -> Mapping[str, object]:
    """The largest norm of the gradients, 0 without a limit."""
    is_norm = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
    return {"clip_gradients": bool(value) if is_norm else value}


_GPUS = {
    "a100": "a100-sxm-80gb", "h100": "h100-sxm", "h200": "h200-sxm", "b200": "b200-sxm",
    "b300": "b300-sxm", "v100": "v100-sxm-32gb", "h20": "h20-sxm", "h800": "h800-sxm",
    "a800": "a800-sxm-80gb", "a100-80gb": "a100-sxm-80gb", "a100-40gb": "a100-sxm-40gb",
    "h100-80gb": "h100-sxm", "h100-sxm-80gb": "h100-sxm", "v100-32gb": "v100-sxm-32gb",
    "v100-16gb": "v100-sxm-16gb", "h100-80gb-hbm2e": "h100-pcie",
}  # fmt: skip
"""Presets of GPUs that are usually meant by these names."""


LONGEST_NAME = 64
"""Characters of a device's name; drivers' names are shorter."""


def _read_gpu(value: object) -> Mapping[str, object]:
    """A short name, or that of the driver: "NVIDIA A100 80GB PCIe"."""
    if not isinstance(value, str):
        return {"preset": value}
    words = re.split(r"[\s_-]+", value.strip().lower())
    name = "-".join(words).removeprefix("nvidia-")
    if name in list_hardware_names() or name in _GPUS:
        return {"preset": _GPUS.get(name, name)}
    if len(value) <= LONGEST_NAME and (known := find_preset(" ".join(words))) is not None:
        return {"preset": known}
    # The kind of memory of a datasheet, and the socket of a driver, are in no preset's name.
    short = re.sub(r"-hbm\w*$", "", re.sub(r"-sxm\d\b", "-sxm", name))
    if short in list_hardware_names() or short in _GPUS:
        return {"preset": _GPUS.get(short, short)}
    return {"preset": name}


_INFINIBAND = {"100": "edr", "200": "hdr", "400": "ndr", "800": "xdr"}
"""InfiniBand's generations, by the Gb/s of a port."""


def _read_link(value: object) -> Mapping[str, object]:
    """A link by its kind and rate ("400G InfiniBand", "RoCE 200 Gb/s") or generation ("IB NDR"); of
    NDR200 the rate goes first, for its ports are half as fast."""
    if not isinstance(value, str):
        return {"nodes_link": value}
    # "8x400G" and "HDR200 x 8" say how many NICs a node has, too.
    rates = re.sub(r"\b\d{1,2} ?x(?= ?\w)|\bx ?\d{1,2}\b", " ", value.lower())
    words = re.findall(r"[a-z]+|\d{1,4}", rates)
    named = [rate for rate, generation in _INFINIBAND.items() if generation in words]
    rate = next(filter(str.isdigit, words), named[0] if named else "")
    if named or {"ib", "infiniband"} & {*words}:
        known = f"ib-{_INFINIBAND[rate]}-{rate}" if rate in _INFINIBAND else value
    else:
        kind = next((one for one in ("roce", "ethernet") if one in words), "")
        known = f"{kind}-{rate}" if kind and rate else value
    return {"nodes_link": known}


def _read_infiniband(value: object) -> Mapping[str, object]:
    """A link whose key says that it is InfiniBand: ib = "8x400G"."""
    return _read_link(f"ib {value}") if isinstance(value, str) else {"nodes_link": value}


SEQUENCE_LENGTHS = (
    "seq_length", "sequence_length", "max_seq_length", "max_seq_len", "max_length", "block_size",
    "sequence_len", "seqlen", "context_length",
)  # fmt: skip

LOCAL_BATCHES = (
    "local_batch_size", "device_batch_size", "batch_size_per_gpu", "batch_size_per_device",
    "per_gpu_batch_size",
)  # fmt: skip
"""Sequences of a rank at once, if no pipeline splits them into microbatches: torchtitan's
local_batch_size is of a forward without a pipeline, of all its microbatches with one."""

_ACCUMULATIONS = (
    "gradient_accumulation_steps", "gas", "grad_accum", "grad_accum_steps", "gradient_accumulation",
    "accumulate_grad_batches", "grad_acc_steps", "accumulation_steps",
)  # fmt: skip
"""Microbatches of a step."""

_CHECKPOINTING = (
    "activation_checkpointing", "activation_checkpoint", "gradient_checkpointing",
    "checkpoint_activations",
)  # fmt: skip

_NAMED_ALONE = (
    "type", "model_type", "architecture", "size", "max_position_embeddings", "rope_theta",
    "rope_scaling", "rotary_base", "rotary_percent", "position_embedding_type", "norm_eps",
    "rms_norm_eps", "layernorm_epsilon",
)  # fmt: skip
"""Keys of a model that are no part of the time or memory of a step, where its sizes are stated."""

_TIMELESS = (
    "lr", "learning_rate", "min_lr", "weight_decay", "warmup_steps", "warmup_ratio",
    "lr_scheduler_type", "adam_beta1", "adam_beta2", "steps", "max_steps", "train_steps",
    "train_iters", "epochs", "num_train_epochs", "logging_steps", "save_steps", "seed",
    "lora_alpha", "beta1", "beta2", "eps", "lr_scheduler", "warmup",
    "dataloader_num_workers", "num_workers", "ddp_find_unused_parameters", "output_dir",
    "log_interval", "save_interval", "moe_router_load_balancing_type", "moe_aux_loss_coeff",
)  # fmt: skip
"""Keys of a training that are no part of the time or memory of a step."""

_TAKEN: Mapping[str, object] = {
    **dict.fromkeys(("moe_grouped_gemm", "moe_permute_fusion"), True),
    **dict.fromkeys(("bias_swiglu_fusion", "masked_softmax_fusion"), True),
    "transformer_impl": "transformer_engine",
}
"""Keys of a training that name what is taken for every job, and that value."""

_AXES = {
    "tp": ("tensor_parallel", "tensor_model_parallel"),
    "pp": ("pipeline_parallel", "pipeline_model_parallel"),
    "cp": ("context_parallel",),
    "ep": ("expert_parallel", "expert_model_parallel"),
    "dp": ("data_parallel",),
    "dp_replicate": ("data_parallel_replicate",),
}
"""Axes as other programs name them, also with _size or _degree behind."""

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
        "depth": _rename("layers"),
        "n_layer": _rename("layers"),
        "n_head": _rename("heads"),
        **dict.fromkeys(("n_embd", "d_model", "dim", "model_dim"), _rename("hidden")),
        "bias": _rename("biases"),
        "add_bias_linear": _rename("biases"),
        "disable_bias_linear": _negate("biases"),
        "swiglu": _rename("gated"),
        "untie_embeddings_and_output_weights": _negate("tied"),
        "normalization": _read_norm,
        "moe_ffn_hidden_size": _rename("expert_ffn"),
        **dict.fromkeys(("num_key_value_heads", "n_kv_heads", "n_kv_head"), _rename("kv_heads")),
        "num_query_groups": _rename("kv_heads"),
        "intermediate_size": _rename("ffn"),
        "ffn_hidden_size": _rename("ffn"),
        **dict.fromkeys(("d_ff", "ffn_dim", "mlp_dim"), _rename("ffn")),
        "vocab_size": _rename("vocab"),
        "head_dim": _rename("head_size"),
        "tie_word_embeddings": _rename("tied"),
        **dict.fromkeys(
            ("num_experts", "num_local_experts", "n_experts", "num_moe_experts"), _rename("experts")
        ),
        **dict.fromkeys(
            ("num_experts_per_tok", "moe_router_topk", "experts_per_token", "topk"),
            _rename("top_k"),
        ),
        "moe_intermediate_size": _rename("expert_ffn"),
        **dict.fromkeys(
            ("name_or_path", "model_name_or_path", "model_name", "hf_name", "hf_model"),
            _read_model_preset,
        ),
        **dict.fromkeys(_NAMED_ALONE, _read_nothing),
    },
    "parallel": {
        "fsdp": _read_fsdp,
        "sharding_strategy": _read_fsdp,
        **dict.fromkeys(("strategy", "dp_type"), _read_strategy),
        **dict.fromkeys(("shard_degree", "data_parallel_shard_degree"), _read_shard_degree),
        "ddp": _rename("dp_replicate"),
        **{
            key: _rename(axis)
            for axis, names in _AXES.items()
            for name in names
            for key in (name, f"{name}_size", f"{name}_degree")
        },
        "vpp": _rename("chunks"),
        "virtual_pipeline_model_parallel_size": _rename("chunks"),
        "virtual_pipeline_stages": _rename("chunks"),
        "zero_stage": _rename("zero"),
        "distributed_optimizer": _read_flag_as("zero", 1, 0),
        "overlap_comm": _read_flag_as("overlap", ["dp"], []),
        **{f"{axis}_size": _rename(axis) for axis in ("tp", "pp", "cp", "ep", "dp")},
        **dict.fromkeys(("num_gpus", "n_gpus", "ngpus", "ngpu"), _rename("gpus")),
        **dict.fromkeys(("num_nodes", "n_nodes", "nnodes"), _rename("nodes")),
        # Part of overlap_grad_reduce here.
        "overlap_param_gather": lambda value: {},
        "sp": _rename("sequence_parallel"),
    },
    "training": {
        "mbs": _rename("micro_batch"),
        "micro_batch_size": _rename("micro_batch"),
        "per_device_train_batch_size": _rename("micro_batch"),
        **dict.fromkeys(LOCAL_BATCHES, _rename("micro_batch")),
        "train_micro_batch_size_per_gpu": _rename("micro_batch"),
        "train_batch_size": _rename("global_batch"),
        "gbs": _rename("global_batch"),
        "global_batch_size": _rename("global_batch"),
        **dict.fromkeys((*_ACCUMULATIONS, "num_microbatches"), _rename("microbatches")),
        **dict.fromkeys(SEQUENCE_LENGTHS, _rename("seq_len")),
        **dict.fromkeys(("precision", "mixed_precision"), _rename("dtype")),
        "torch_compile": _rename("compile"),
        "bf16": _read_dtype_flag("bf16"),
        "fp16": _read_dtype_flag("fp16"),
        "fp8": _read_dtype_flag("fp8"),
        "fp8_recipe": _read_fp8_recipe,
        "torch_dtype": _rename("dtype"),
        **dict.fromkeys(_CHECKPOINTING, _read_flag_as("recompute", "full", "none")),
        "dropout": _read_dropout,
        **dict.fromkeys(
            ("max_grad_norm", "grad_clip", "clip_grad", "gradient_clipping"), _read_clipping
        ),
        **dict.fromkeys(("flash_attn", "use_flash_attention"), _rename("flash_attention")),
        "attn_implementation": _read_attention,
        "optim": _read_optimizer,
        **dict.fromkeys(("offload_optimizer", "optimizer_offload"), _read_offload),
        **dict.fromkeys(_TIMELESS, _read_nothing),
        "scheduler": _read_scheduler,
        **{key: _read_taken(key, taken) for key, taken in _TAKEN.items()},
    },
    "hardware": {
        **dict.fromkeys(
            ("gpu", "device", "gpu_type", "gpu_name", "gpu_model", "accelerator"), _read_gpu
        ),
        **dict.fromkeys(("nproc_per_node", "num_gpus_per_node"), _rename("gpus_per_node")),
        "power_limit": _rename("power_watts"),
        **dict.fromkeys(("network", "interconnect", "nic"), _read_link),
        **dict.fromkeys(("ib", "infiniband"), _read_infiniband),
        # That it has one: which one is the preset's.
        "nvlink": _read_taken("nvlink", True),
    },
}
"""By table of a job.toml: a key of other programs, and what it is here."""

VALUE_ALIASES: Mapping[str, Mapping[str, str]] = {
    "dtype": {
        "bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float8": "fp8",
        # Lightning's words.
        "bf16-mixed": "bf16", "16-mixed": "fp16",
    },
    "dispatcher": {"alltoall": "all-to-all"},
    "optimizer": {"adamw": "adam", "sgd_momentum": "sgd-momentum", "adam_8bit": "adam-8bit"},
    "schedule": {
        "zb1p": "zb-h1", "zb-1p": "zb-h1", "zb2p": "zb-h2", "zb-2p": "zb-h2", "zbv": "zb-v",
        "dualpipev": "dualpipe-v", "interleaved-1f1b": "interleaved", "f-then-b": "gpipe",
    },
}  # fmt: skip
"""Aliases of values, by key; those of frameworks are in frameworks.toml."""

_PRESETS: Mapping[str, Mapping[str, Convert]] = {
    "model": {"preset": _read_model_preset},
    "hardware": {"preset": _read_gpu, "nodes_link": _read_link},
    "parallel": {
        "reshard_after_forward": _read_flag_as("reshard_after_forward", "always", "never"),
    },
    "training": {"optimizer": _read_optimizer, "recompute": _read_recompute},
}  # fmt: skip
"""Our keys whose words other programs write in another way."""


def list_preset_tables(value: object) -> list[str]:
    """The tables that have a preset of this name, in our words or in those of other programs."""
    names = {"model": list_model_names(), "hardware": list_hardware_names()}
    return [one for one, own in names.items() if _PRESETS[one]["preset"](value)["preset"] in own]


_TABLE_NAMES = {
    "parallelism": "parallel", "train": "training", "trainer": "training",
    "training_args": "training", "training_arguments": "training", "distributed": "parallel",
    "cluster": "hardware", "system": "hardware",
}  # fmt: skip
"""Tables as other programs name them."""

HINTS: Mapping[str, str] = {
    "strategy": "write zero = 3 for FSDP, zero = 0 for DDP",
    "hidden_dim": "write hidden (width of the model) or ffn (of an MLP)",
    "mlp_ratio": "write ffn (mlp_ratio times hidden)",
    "batch_size": "write micro_batch (sequences of a rank at once) or global_batch (of a step)",
    "total_batch_size": "write global_batch (sequences per step, of all ranks)",
    **dict.fromkeys(
        ("dim", "depth", "bias"),
        "write hidden, layers or biases in [model], if one of the model's is meant",
    ),
    **dict.fromkeys(
        ("type", "size"), "name the model or the GPU by its preset, and ranks by gpus in [parallel]"
    ),
    "eps": "leave it out: no part of the time or memory of a step",
    "device": "write the preset of the GPU in [hardware]",
    "family": "write the preset of the model or of the GPU",
    "scheduler": "write schedule in [parallel], if that of the pipeline is meant",
    "cpu_offload": 'write offload = ["optimizer"], with "parameters" for FSDP, or "activations"',
}
"""The fix of a key that stands for several of ours, for a value of one, or for something else in
another table."""


@dataclass(frozen=True, slots=True)
class NormalizedTable:
    """A job's tables with our keys, and with those stated, and what of it was read as what:
    "training: mbs = 1 as micro_batch = 1"."""

    table: TomlTable
    stated: TomlTable
    notes: tuple[str, ...] = ()


def check_relations(stated: TomlTable, read: Mapping[str, Any], mistakes: Mistakes) -> None:
    """Adds the keys that mean something else or nothing beside others of the job to the mistakes.

    Args:
        stated: tables of the job with the keys of other programs.
        read: all tables of the job with ours; what a later file says in another way is not judged.
        mistakes: where each such key is added.
    """
    training, layout = stated.get_subtable("training"), stated.get_subtable("parallel")
    sizes, batches = (read.get(name, {}) for name in ("parallel", "training"))
    if not isinstance(sizes, Mapping) or not isinstance(batches, Mapping):
        return
    pp = sizes.get("pp", 1)
    is_pipeline = (isinstance(pp, int) and pp > 1) or "layers_per_stage" in sizes
    for key in filter(training.values.__contains__, LOCAL_BATCHES if is_pipeline else ()):
        if training.values[key] == batches.get("micro_batch"):
            problem = "may be one microbatch or all of them, as there is a pipeline"
            hint = "write micro_batch and microbatches (or global_batch) instead"
            mistakes.append(training.build_error(key, problem, hint))
    if sizes.get("zero") == 3 and not {"dp_shard", "dp_replicate"} & sizes.keys():
        for key in ("strategy", "dp_type", "fsdp", "sharding_strategy"):
            value = layout.values.get(key)
            word = re.sub(r"[^a-z0-9]", "", value.lower()) if isinstance(value, str) else ""
            if word.replace("autowrap", "") in _HYBRID:
                problem = f"{value} does not say how many replicas there are"
                hint = "add dp_replicate (replicas), or dp_shard (ranks of each)"
                mistakes.append(layout.build_error(key, problem, hint))


def replace_key_aliases(
    table: TomlTable,
    mistakes: Mistakes,
    keys: Mapping[str, Collection[str]],
    is_whole: bool = True,
) -> NormalizedTable:
    """Replaces the keys of other programs in the tables of a job with ours.

    A key stands for nothing but itself if what it stands for is in the table too: that is a
    mistake, as is every value that our key may not have. keys: ours of each table. is_whole: no
    other file or setting belongs to the job, so that keys can be checked beside each other.
    """
    sections: dict[str, Any] = dict(table.values)
    notes = list[str]()
    for theirs, usual in _TABLE_NAMES.items():
        if theirs in sections and usual not in sections:
            sections[usual] = sections.pop(theirs)
            notes.append(f"[{theirs}] as [{usual}]")
    for name in ALIASES:
        stated = sections.get(name)
        if not isinstance(stated, Mapping):
            continue
        capitals = [key for key in stated if key.isupper()]
        if capitals and not {key.lower() for key in capitals} & stated.keys():
            small = {key: key.lower() if key in capitals else key for key in stated}
            sections[name] = {small[key]: value for key, value in stated.items()}
            notes.append(f"{name}: {', '.join(capitals)} in small letters")
    # First: what stands for something else beside others does so wherever it was typed.
    _move_keys(replace(table, values=dict(sections)), sections, keys, mistakes, notes)
    table = replace(table, values=dict(sections))
    _read_batch_size(table, sections, notes)
    _read_fp8_over_bf16(sections, notes)
    _find_trainer(sections, notes)
    table = replace(table, values=sections)
    read_from = {
        "Megatron-LM": _read_megatron(table, sections, notes),
        "DeepSpeed": _read_deepspeed(table, sections, mistakes, notes),
    }
    _name_preset(sections, notes)
    table = replace(table, values=dict(sections))
    for name, known in ALIASES.items():
        aliases = {**known, **_PRESETS.get(name, {})}
        values = table.get_subtable(name).values
        converted: dict[str, object] = {}
        for key, value in values.items():
            ours = aliases[key](value) if key in aliases else {key: value}
            for other, read in ours.items():
                if other != key and (other in values or other in converted):
                    if is_same_value(other, converted.get(other, values.get(other)), read):
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
        for writer, stated in read_from.items():
            for key, value in stated.get(name, {}).items():
                if not is_same_value(key, converted.setdefault(key, value), value):
                    problem = f"is said by settings of {writer}, too, with another value"
                    mistakes.append(
                        table.get_subtable(name).build_error(key, problem, "remove one of them")
                    )
        if values or converted:
            sections[name] = converted
    if is_whole:
        check_relations(table, sections, mistakes)
    return NormalizedTable(replace(table, values=sections), table, tuple(notes))


def is_same_value(key: str, first: object, second: object) -> bool:
    """Whether both values of a key of ours are one, such as bf16 and bfloat16."""
    words = VALUE_ALIASES.get(key, {})
    return words.get(str(first), first) == words.get(str(second), second)


def _move_keys(
    table: TomlTable,
    sections: dict[str, Any],
    keys: Mapping[str, Collection[str]],
    mistakes: Mistakes,
    notes: list[str],
) -> None:
    """Moves keys, as they are, that their own table does not know, and one other does, into that;
    one that it has with another value is a mistake. Neither a key of a model, which would override
    sizes, nor one that is read as nothing moves: either may mean something else where it stands."""
    known = {name: {*own, *ALIASES[name], *_PRESETS.get(name, ())} for name, own in keys.items()}
    unmoved = {*known["model"], *HINTS, *_TIMELESS, *_TAKEN, "nvlink"}
    for name in (*known, _DEEPSPEED):
        stated = table.get_subtable(name)
        for key, value in stated.values.items():
            others = [one for one in known if key in known[one]]
            if key in {*known.get(name, ()), *unmoved} or len(others) != 1:
                continue
            # Beside keys of DeepSpeed's JSON stand those that say of its training what ours do.
            is_own = key in OWN_KEYS | OWN_FLAGS or isinstance(value, Mapping)
            if name == _DEEPSPEED and (is_own or key not in ALIASES[others[0]]):
                continue
            (section,) = others
            target = sections.get(section, {})
            if not isinstance(target, Mapping):
                continue
            sections[name] = {k: v for k, v in sections[name].items() if k != key}
            # Two tables may have it that both are not its own.
            ours = {**ALIASES[section].get(key, _rename(key))(value), key: value}
            if differing := [one for one in ours if target.get(one, ours[one]) != ours[one]]:
                problem = f"says the same as {section}.{differing[0]}, with another value"
                mistakes.append(stated.build_error(key, problem, "remove one of them"))
                continue
            sections[section] = {**target, key: value}
            (said,) = format_toml_lines({key: value})
            notes.append(f"{name}: {said} as of [{section}]")


def _read_batch_size(table: TomlTable, sections: dict[str, Any], notes: list[str]) -> None:
    """Reads batch_size beside steps of accumulation as that of a microbatch. nanoGPT, which calls
    the length of a sequence block_size, counts the steps of all ranks (train.py divides them)."""
    training = dict(table.get_subtable("training").values)
    size = training.get("batch_size")
    accumulation = next((key for key in _ACCUMULATIONS if key in training), "")
    steps = training.get(accumulation)
    has_micro_batch = {"micro_batch", "mbs", "micro_batch_size"} & training.keys()
    if type(size) is not int or type(steps) is not int or has_micro_batch:
        return
    read: dict[str, object] = {"micro_batch": size}
    said = {"batch_size": training.pop("batch_size")}
    if "block_size" in {**training, **table.get_subtable("model").values}:
        said[accumulation] = training.pop(accumulation)
        read |= {"global_batch": size * steps, "framework": training.pop("framework", "ddp")}
    sections["training"] = {**training, **read}
    lines = (", ".join(format_toml_lines(one)) for one in (said, read))
    notes.append("training: {} as {}".format(*lines))


def _read_fp8_over_bf16(sections: dict[str, Any], notes: list[str]) -> None:
    """Leaves out bf16 = true beside a format of 8 bits: the dtype of what is not multiplied, as
    Megatron's --bf16 --fp8-format hybrid."""
    training = sections.get("training")
    if not isinstance(training, Mapping) or not {"bf16", "fp8"} <= training.keys():
        return
    says = {key: ALIASES["training"][key](training[key]) for key in ("bf16", "fp8")}
    if all(read == {"dtype": key} for key, read in says.items()):
        sections["training"] = {key: value for key, value in training.items() if key != "bf16"}
        (said,) = format_toml_lines({"bf16": training["bf16"]})
        notes.append(f"training: {said} as nothing, beside fp8")


def _find_trainer(sections: dict[str, Any], notes: list[str]) -> None:
    """A job in words of transformers' TrainingArguments, without a layout of ours, is of it."""
    training, layout = sections.get("training", {}), sections.get("parallel", {})
    if not isinstance(training, Mapping) or not isinstance(layout, Mapping):
        return
    ours = {
        one
        for key, value in layout.items()
        for one in ALIASES["parallel"].get(key, _rename(key))(value)
    }
    is_trainer = "per_device_train_batch_size" in training and ours <= {"gpus", "nodes"}
    # Whoever names what trains it needs no guess.
    named = {"framework"} & training.keys() | {_DEEPSPEED} & sections.keys()
    if is_trainer and not named:
        sections["training"] = {**training, "framework": "huggingface"}
        notes.append('training: per_device_train_batch_size as of framework = "huggingface"')


def _name_preset(sections: dict[str, Any], notes: list[str]) -> None:
    """A model by its name alone, or by its type and size, is the preset of that name; beside sizes
    of its own they are its name."""
    model = sections.get("model")
    if not isinstance(model, Mapping):
        return
    parts = [key for key in _NAMING if isinstance(model.get(key), str)]
    numbers = {key: value for key, value in model.items() if key not in parts}
    if parts not in (["name"], ["name", "size"], ["type", "size"], ["model_type", "size"]):
        return
    name = "-".join(model[key] for key in parts)
    if not numbers:
        sections["model"] = {"preset": normalize_model_name(name) or name}
    elif parts != ["name"]:
        sections["model"] = {"name": name, **numbers}
    else:
        return
    said, read = (
        ", ".join(format_toml_lines({k: v for k, v in one.items() if k not in numbers}))
        for one in (model, sections["model"])
    )
    notes.append(f"model: {said} as {read}")


_NAMING = ("name", "type", "model_type", "size")
"""Keys that name a model together: type = "llama", size = "7b"."""

_DEEPSPEED = "deepspeed"

_SHARED = frozenset({"sequence_parallel", "optimizer", "world_size"})
"""Keys that Megatron-LM's arguments and a job.toml have in common."""

_TABLES = ("model", "parallel", "training")

_MEGATRON_NAMES = {"layers": "num_layers", "pp": "pipeline_model_parallel_size"}
"""What Megatron-LM calls those of our keys that its own settings depend on."""


@lru_cache(maxsize=1)
def _list_megatron_names() -> frozenset[str]:
    """The names that Megatron-LM's arguments are asked for, whatever they are."""
    settings, job = MegatronSettings({}), JobTablesBuilder()
    put_all(settings, job)
    return frozenset(settings.read - _SHARED)


def _read_megatron(
    table: TomlTable, sections: dict[str, Any], notes: list[str]
) -> dict[str, Mapping[str, Any]]:
    """Removes the settings of Megatron-LM that depend on others, such as those of recomputation and
    of virtual stages, and returns what its arguments of these values are here, by table."""
    every: dict[str, Any] = {}
    unknown: dict[str, Any] = {}
    for name in _TABLES:
        values = table.get_subtable(name).values
        every |= values
        every |= {
            _MEGATRON_NAMES[key]: values[key] for key in values.keys() & _MEGATRON_NAMES.keys()
        }
        # Nor does a size of a model in another table override its own.
        known = {*ALIASES[name], *ALIASES["model"]}
        unknown |= {key: value for key, value in values.items() if key not in known}
    if not unknown.keys() & _list_megatron_names():
        return {}
    settings, job = MegatronSettings(every), JobTablesBuilder()
    put_all(settings, job)
    # Which layers have experts is a pattern that depends on keys of the experts.
    consumed = (unknown.keys() & settings.read) - _SHARED - {"moe_layer_freq"}
    for name in _TABLES:
        if isinstance(own := sections.get(name), Mapping):
            sections[name] = {key: value for key, value in own.items() if key not in consumed}
    without = MegatronSettings({k: v for k, v in every.items() if k not in consumed})
    before = JobTablesBuilder()
    put_all(without, before)
    added: dict[str, Mapping[str, Any]] = {
        name: {k: v for k, v in keys.items() if before.sections[name].get(k) != v}
        for name, keys in job.list_stated()
    }
    said = ", ".join(format_toml_lines({k: v for k, v in unknown.items() if k in consumed}))
    read = "; ".join(f"{k}: {', '.join(format_toml_lines(v))}" for k, v in added.items() if v)
    notes.append(f"{said} as Megatron-LM's: {read or 'nothing'}")
    return added


def _read_deepspeed(
    table: TomlTable, sections: dict[str, Any], mistakes: Mistakes, notes: list[str]
) -> dict[str, Mapping[str, Any]]:
    """Removes a table of DeepSpeed's keys and returns what they are here, by table."""
    if _DEEPSPEED not in sections:
        return {}
    values, job = sections.pop(_DEEPSPEED), JobTablesBuilder()
    if not isinstance(values, Mapping) or (values and not OWN_KEYS & values.keys()):
        hint = (
            "paste the keys of the JSON, such as train_micro_batch_size_per_gpu, or name the JSON"
            " behind the job.toml: stepsplit model job.toml ds_config.json"
        )
        mistakes.append(table.build_error(_DEEPSPEED, "has no key of DeepSpeed's JSON", hint))
        return {}
    put_settings(values, job)
    stated = dict(job.list_stated())
    read = "; ".join(f"{k}: {', '.join(format_toml_lines(v))}" for k, v in stated.items())
    notes.append(f"[{_DEEPSPEED}] as {read}")
    notes += [f"[{_DEEPSPEED}]: not read: {one}" for one in job.omitted]
    return stated
