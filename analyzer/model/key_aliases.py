"""Keys of a job.toml as other programs name them: one table, and what each becomes.

`key_passes.py` applies it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping

from stepsplit.analyzer.model.job_files.megatron_names import RECOMPUTE_MODULES
from stepsplit.analyzer.model.preset_names import (
    list_hardware_names,
    list_model_names,
    normalize_device_name,
    normalize_model_name,
)
from stepsplit.analyzer.model.schedule_names import SCHEDULES

Convert = Callable[[object], Mapping[str, object]]
"""A value -> the keys of the same table that say the same; itself under its own name if there are
none, so that it is refused as an unknown key or an invalid value."""

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

TABLE_NAMES = {
    "parallelism": "parallel", "train": "training", "trainer": "training",
    "training_args": "training", "training_arguments": "training", "distributed": "parallel",
    "cluster": "hardware", "system": "hardware",
}  # fmt: skip
"""Tables as other programs name them."""

LOCAL_BATCHES = (
    "local_batch_size", "device_batch_size", "batch_size_per_gpu", "batch_size_per_device",
    "per_gpu_batch_size",
)  # fmt: skip
"""Sequences of a rank at once, if no pipeline splits them into microbatches: torchtitan's
local_batch_size is of a forward without a pipeline, of all its microbatches with one."""

ACCUMULATIONS = (
    "gradient_accumulation_steps", "gas", "grad_accum", "grad_accum_steps", "gradient_accumulation",
    "accumulate_grad_batches", "grad_acc_steps", "accumulation_steps",
)  # fmt: skip
"""Microbatches of a step."""

_RENAMED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "model": {
        "layers": ("num_layers", "num_hidden_layers", "n_layers", "n_layer", "depth"),
        "hidden": ("hidden_size", "n_embd", "d_model", "dim", "model_dim"),
        "heads": ("num_attention_heads", "num_heads", "n_heads", "n_head"),
        "kv_heads": (
            "num_kv_heads", "num_key_value_heads", "n_kv_heads", "n_kv_head", "num_query_groups",
        ),
        "head_size": ("head_dim",),
        "ffn": ("intermediate_size", "ffn_hidden_size", "d_ff", "ffn_dim", "mlp_dim"),
        "vocab": ("vocab_size",),
        "biases": ("bias", "add_bias_linear"),
        "gated": ("swiglu",),
        "tied": ("tie_word_embeddings",),
        "experts": ("num_experts", "num_local_experts", "n_experts", "num_moe_experts"),
        "top_k": ("num_experts_per_tok", "moe_router_topk", "experts_per_token", "topk"),
        "expert_ffn": ("moe_ffn_hidden_size", "moe_intermediate_size"),
    },
    "parallel": {
        # Axes also have _size or _degree behind.
        axis: (
            f"{axis}_size",
            *(f"{name}{end}" for name in names for end in ("", "_size", "_degree")),
        )
        for axis, names in {
            "tp": ("tensor_parallel", "tensor_model_parallel"),
            "pp": ("pipeline_parallel", "pipeline_model_parallel"),
            "cp": ("context_parallel",),
            "ep": ("expert_parallel", "expert_model_parallel"),
            "dp": ("data_parallel",),
        }.items()
    } | {
        "dp_replicate": (
            "ddp", "data_parallel_replicate", "data_parallel_replicate_size",
            "data_parallel_replicate_degree",
        ),
        "chunks": ("vpp", "virtual_pipeline_model_parallel_size", "virtual_pipeline_stages"),
        "zero": ("zero_stage",),
        "gpus": ("num_gpus", "n_gpus", "ngpus", "ngpu"),
        "nodes": ("num_nodes", "n_nodes", "nnodes"),
        "sequence_parallel": ("sp",),
    },
    "training": {
        "micro_batch": (
            "mbs", "micro_batch_size", "per_device_train_batch_size",
            "train_micro_batch_size_per_gpu", *LOCAL_BATCHES,
        ),
        "global_batch": ("gbs", "global_batch_size", "train_batch_size"),
        "microbatches": (*ACCUMULATIONS, "num_microbatches"),
        "seq_len": (
            "seq_length", "sequence_length", "max_seq_length", "max_seq_len", "max_length",
            "block_size", "sequence_len", "seqlen", "context_length",
        ),
        "dtype": ("precision", "mixed_precision", "torch_dtype"),
        "compile": ("torch_compile",),
        "flash_attention": ("flash_attn", "use_flash_attention"),
    },
    "hardware": {
        "gpus_per_node": ("nproc_per_node", "num_gpus_per_node"),
        "power_watts": ("power_limit",),
    },
}  # fmt: skip
"""By table: a key of ours and those of other programs that take the same values."""

_IGNORED: Mapping[str, tuple[str, ...]] = {
    # Where the sizes of a model are stated.
    "model": (
        "type", "model_type", "architecture", "size", "max_position_embeddings", "rope_theta",
        "rope_scaling", "rotary_base", "rotary_percent", "position_embedding_type", "norm_eps",
        "rms_norm_eps", "layernorm_epsilon",
    ),
    # Part of overlap_grad_reduce here.
    "parallel": ("overlap_param_gather",),
    "training": (
        "lr", "learning_rate", "min_lr", "weight_decay", "warmup_steps", "warmup_ratio",
        "lr_scheduler_type", "adam_beta1", "adam_beta2", "steps", "max_steps", "train_steps",
        "train_iters", "epochs", "num_train_epochs", "logging_steps", "save_steps", "seed",
        "lora_alpha", "beta1", "beta2", "eps", "lr_scheduler", "warmup",
        "dataloader_num_workers", "num_workers", "ddp_find_unused_parameters", "output_dir",
        "log_interval", "save_interval", "moe_router_load_balancing_type", "moe_aux_loss_coeff",
    ),
}  # fmt: skip
"""By table: keys that are no part of the time or memory of a step, and are read as nothing."""

_TAKEN: Mapping[str, Mapping[str, object]] = {
    "training": {
        **dict.fromkeys(("moe_grouped_gemm", "moe_permute_fusion"), True),
        **dict.fromkeys(("bias_swiglu_fusion", "masked_softmax_fusion"), True),
        "transformer_impl": "transformer_engine",
    },
    # That it has one: which one is the preset's.
    "hardware": {"nvlink": True},
}
"""By table: keys that name what is taken for every job, and that value; another is not ours."""

FIXED = frozenset({*_IGNORED["training"], *_TAKEN["training"], *_TAKEN["hardware"]})
"""Keys that are read as nothing where they are known, and may mean something else elsewhere."""

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


# What a value becomes, where that is not the same value.


def squash(value: object) -> str:
    """The letters and digits of a word, in small letters; "" of anything else."""
    return re.sub(r"[^a-z0-9]", "", value.lower()) if isinstance(value, str) else ""


def _rename(key: str) -> Convert:
    return lambda value: {key: value}


def _read_taken(key: str, taken: object) -> Convert:
    return lambda value: {} if value == taken and type(value) is type(taken) else {key: value}


def _read_flag(key: str, of_true: object, of_false: object) -> Convert:
    """A flag that is a value of ours: what true and what false stand for."""
    words = {True: of_true, False: of_false}
    return lambda value: {key: words[value] if isinstance(value, bool) else value}


def _read_word(key: str, words: Mapping[str, object]) -> Convert:
    """A word, in any letters, for a value of ours."""
    return lambda value: {key: words.get(value.lower(), value) if isinstance(value, str) else value}


def _read_dtype_flag(dtype: str) -> Convert:
    """bf16 = true, DeepSpeed's {enabled = true}, or a format of 8 bits; false says nothing of which
    one it is."""

    def read(value: object) -> Mapping[str, object]:
        if isinstance(value, Mapping) and value.keys() == {"enabled"}:
            value = value["enabled"]
        if dtype == "fp8" and value in ("hybrid", "e4m3"):
            value = True
        if isinstance(value, bool):
            return {"dtype": dtype} if value else {}
        return {"dtype": value}

    return read


def _read_scheduler(value: object) -> Mapping[str, object]:
    """Leaves out a schedule of the learning rate, not one of a pipeline."""
    word = squash(value)
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


_STRATEGIES = {"fsdp": 3, "fsdp2": 3, "hsdp": 3, "ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}
"""Stages of ZeRO by the names of strategies, without signs."""


def _read_strategy(value: object) -> Mapping[str, object]:
    word = squash(value)
    return {"zero": _STRATEGIES[word]} if word in _STRATEGIES else {"strategy": value}


def _read_optimizer(value: object) -> Mapping[str, object]:
    """An optimizer in capitals, as DeepSpeed's JSON has it, or one of those of transformers."""
    if not isinstance(value, str):
        return {"optimizer": value}
    word = value.lower().removeprefix("paged_")
    if not word.startswith("adamw_"):
        return {"optimizer": word}
    fused = {"fused_optimizer": True} if "fused" in word else {}
    return {"optimizer": "adam-8bit" if "8bit" in word else "adam", **fused}


def _read_model_preset(value: object) -> Mapping[str, object]:
    return {"preset": normalize_model_name(value) or value if isinstance(value, str) else value}


def _read_gpu(value: object) -> Mapping[str, object]:
    return {"preset": normalize_device_name(value) if isinstance(value, str) else value}


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


def _read_positive(key: str, most: float) -> Convert:
    """A probability or a norm from 0 to most, of which our key says whether there is any."""

    def read(value: object) -> Mapping[str, object]:
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= most:
            value = value > 0
        return {key: value}

    return read


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


_CONVERTED: Mapping[str, Mapping[str, Convert]] = {
    "model": {
        "disable_bias_linear": _read_flag("biases", of_true=False, of_false=True),
        "untie_embeddings_and_output_weights": _read_flag("tied", of_true=False, of_false=True),
        "normalization": _read_word("norm", {"rmsnorm": "rms", "layernorm": "layer"}),
        **dict.fromkeys(
            ("name_or_path", "model_name_or_path", "model_name", "hf_name", "hf_model"),
            _read_model_preset,
        ),
    },
    "parallel": {
        **dict.fromkeys(("fsdp", "sharding_strategy"), _read_fsdp),
        **dict.fromkeys(("strategy", "dp_type"), _read_strategy),
        **dict.fromkeys(("shard_degree", "data_parallel_shard_degree"), _read_shard_degree),
        "distributed_optimizer": _read_flag("zero", of_true=1, of_false=0),
        "overlap_comm": _read_flag("overlap", of_true=["dp"], of_false=[]),
    },
    "training": {
        **{dtype: _read_dtype_flag(dtype) for dtype in ("bf16", "fp16", "fp8")},
        # What shares a scale by the words of torchao and of Transformer Engine.
        "fp8_recipe": _read_word(
            "fp8_scaling",
            {"rowwise": "row", "tensorwise": "tensor", "delayed": "tensor", "current": "tensor"},
        ),
        **dict.fromkeys(
            (
                "activation_checkpointing", "activation_checkpoint", "gradient_checkpointing",
                "checkpoint_activations",
            ),
            _read_flag("recompute", of_true="full", of_false="none"),
        ),
        "dropout": _read_positive("dropout", most=1),
        # The largest norm of the gradients, 0 without a limit.
        **dict.fromkeys(
            ("max_grad_norm", "grad_clip", "clip_grad", "gradient_clipping"),
            _read_positive("clip_gradients", most=math.inf),
        ),
        # The implementations of transformers; torch's own is fused, too.
        "attn_implementation": _read_word(
            "flash_attention",
            {
                "flash_attention": True, "flash_attention_2": True, "flash_attention_3": True,
                "sdpa": True, "eager": False,
            },
        ),
        "optim": _read_optimizer,
        **dict.fromkeys(("offload_optimizer", "optimizer_offload"), _read_offload),
        "scheduler": _read_scheduler,
    },
    "hardware": {
        **dict.fromkeys(
            ("gpu", "device", "gpu_type", "gpu_name", "gpu_model", "accelerator"), _read_gpu
        ),
        **dict.fromkeys(("network", "interconnect", "nic"), _read_link),
        **dict.fromkeys(("ib", "infiniband"), _read_infiniband),
    },
}  # fmt: skip
"""By table: keys of other programs whose values are not ours."""

ALIASES: Mapping[str, Mapping[str, Convert]] = {
    table: {
        **{key: _rename(ours) for ours, names in renamed.items() for key in names},
        **{key: lambda value: {} for key in _IGNORED.get(table, ())},
        **{key: _read_taken(key, taken) for key, taken in _TAKEN.get(table, {}).items()},
        **_CONVERTED[table],
    }
    for table, renamed in _RENAMED.items()
}
"""By table of a job.toml: a key of other programs, and what it is here."""

OWN_WORDS: Mapping[str, Mapping[str, Convert]] = {
    "model": {"preset": _read_model_preset},
    "hardware": {"preset": _read_gpu, "nodes_link": _read_link},
    "parallel": {"reshard_after_forward": _read_flag("reshard_after_forward", "always", "never")},
    "training": {"optimizer": _read_optimizer, "recompute": _read_recompute},
}
"""By table: keys of ours whose words other programs write in another way."""


def list_preset_tables(value: object) -> list[str]:
    """The tables that have a preset of this name, in our words or in those of other programs."""
    names = {"model": list_model_names(), "hardware": list_hardware_names()}
    return [one for one, own in names.items() if OWN_WORDS[one]["preset"](value)["preset"] in own]


def is_same_value(key: str, first: object, second: object) -> bool:
    """Whether both values of a key of ours are one, such as bf16 and bfloat16."""
    words = VALUE_ALIASES.get(key, {})
    return words.get(str(first), first) == words.get(str(second), second)
