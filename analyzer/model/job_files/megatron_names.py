"""Settings of Megatron-LM by name, as its arguments and Megatron-Bridge's recipes have them, and
what each is in a job.toml."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stepsplit.analyzer.model.job_files.job_file import JobTablesBuilder

MAX_LAYERS = 4096
"""Most layers of a pattern that is written out."""


@dataclass(frozen=True)
class MegatronSettings:
    """Values by name, in lower case with underscores; True for a flag without a value. read: the
    names that were asked for."""

    values: Mapping[str, Any]
    read: set[str] = field(default_factory=set)

    def find(self, *names: str) -> Any:
        """The value of the first of these names; None without any."""
        self.read.update(names)
        for name in names:
            if (value := self.values.get(name)) is not None and value != "None":
                return value
        return None

    def find_int(self, *names: str) -> int | None:
        value = self.find(*names)
        if isinstance(value, bool) or value is None:
            return None
        text = str(value).replace("_", "")
        return int(text) if re.fullmatch(r"-?\d{1,18}", text) else None

    def find_float(self, name: str) -> float | None:
        try:
            return float(str(self.find(name)))
        except ValueError:
            return None

    def find_word(self, *names: str) -> str:
        value = self.find(*names)
        return "" if value is None or isinstance(value, bool) else str(value).strip("'\"").lower()

    def find_flag(self, *names: str) -> bool | None:
        """Whether a flag is given, or what value it has."""
        value = self.find(*names)
        if value is None or isinstance(value, bool):
            return value
        return {"true": True, "1": True, "false": False, "0": False}.get(str(value).lower(), True)


_SIZES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "layers": ("model", ("num_layers",)),
    "hidden": ("model", ("hidden_size",)),
    "heads": ("model", ("num_attention_heads",)),
    "ffn": ("model", ("ffn_hidden_size",)),
    "head_size": ("model", ("kv_channels",)),
    "vocab": ("model", ("vocab_size", "padded_vocab_size")),
    "mtp_layers": ("model", ("mtp_num_layers",)),
    "tp": ("parallel", ("tensor_model_parallel_size", "model_parallel_size")),
    "pp": ("parallel", ("pipeline_model_parallel_size",)),
    "cp": ("parallel", ("context_parallel_size",)),
    "ep": ("parallel", ("expert_model_parallel_size",)),
    "expert_tp": ("parallel", ("expert_tensor_parallel_size",)),
    "gpus": ("parallel", ("world_size",)),
    "seq_len": ("training", ("seq_length", "encoder_seq_length")),
    "micro_batch": ("training", ("micro_batch_size",)),
    "global_batch": ("training", ("global_batch_size",)),
}
"""Keys of job.toml whose value is that of a setting: its table and the names of the setting."""

RECOMPUTE_MODULES = {
    "core_attn": "core-attention", "mla_up_proj": "mla-up", "layernorm": "norms",
    "moe_act": "activation", "mlp": "mlp", "moe": "experts",
}  # fmt: skip
"""Parts of a layer by the words of its recompute_modules."""

GPT2_VOCABULARY = 50257
"""Vocabulary of GPT-2's byte pairs, which merges.txt and vocab.json are nearly always of."""

VOCABULARIES = {"gpt2bpetokenizer": GPT2_VOCABULARY, "llama2tokenizer": 32000}
"""Vocabulary of a tokenizer_type; the second is that of Llama 2, Mistral 7B and Mixtral."""


def put_sizes(settings: MegatronSettings, job: JobTablesBuilder) -> None:
    """The keys that are numbers in both."""
    for key, (section, names) in _SIZES.items():
        job.put(section, key, settings.find_int(*names))
    vocab = VOCABULARIES.get(settings.find_word("tokenizer_type"))
    if vocab is None and settings.find("merge_file"):
        vocab = GPT2_VOCABULARY
    if "vocab" not in job.sections["model"]:
        job.put("model", "vocab", vocab)


def put_attention(settings: MegatronSettings, job: JobTablesBuilder) -> None:
    groups = settings.find_int("num_query_groups")
    if settings.find_flag("group_query_attention") is not False:
        job.put("model", "kv_heads", groups)
    if settings.find_flag("qk_layernorm"):
        job.put("model", "qk_norm", settings.find_flag("multi_latent_attention") is not True)
    job.put("model", "qkv_biases", settings.find_flag("add_qkv_bias"))
    window = re.match(r"\(?\[?\s*(\d+)", settings.find_word("window_size"))
    if window:
        job.put("model", "window", int(window[1]) + 1)
        job.put("model", "full_every", settings.find_int("window_attn_skip_freq"))
    rank = settings.find_int("kv_lora_rank")
    if settings.find_flag("multi_latent_attention") or rank:
        # Sizes that are left out are those of megatron/core/transformer's MLATransformerConfig.
        value = settings.find_int("v_head_dim") or 128
        latent = {
            "query_rank": settings.find_int("q_lora_rank") or 0,
            "kv_rank": rank or 512,
            "nope": settings.find_int("qk_head_dim") or 128,
            "rope": settings.find_int("qk_pos_emb_head_dim") or 64,
            "value": value,
        }
        job.put("model", "latent", latent)
        job.put("model", "head_size", value)
    backend = settings.find_word("attention_backend").removeprefix("attnbackend.")
    if backend in ("unfused", "local"):
        job.put("training", "flash_attention", False)
    elif backend == "flash" or settings.find_flag("use_flash_attn"):
        job.put("training", "flash_attention", True)
    elif backend == "fused":
        job.put("training", "flash_attention", True)
        job.put("training", "attention_kernel", "cudnn")


def put_experts(settings: MegatronSettings, job: JobTablesBuilder) -> None:
    count = settings.find_int("num_experts", "num_moe_experts")
    if not count:
        return
    ffn = job.sections["model"].get("ffn")
    experts: dict[str, object] = {
        "count": count,
        "top_k": settings.find_int("moe_router_topk") or 2,
        "ffn": settings.find_int("moe_ffn_hidden_size") or ffn,
        "shared_ffn": settings.find_int("moe_shared_expert_intermediate_size") or 0,
    }
    layers = job.sections["model"].get("layers")
    pattern = read_layer_pattern(settings.find("moe_layer_freq"), layers)
    if pattern is None and settings.find("moe_layer_freq"):
        job.omitted.append("moe_layer_freq: all layers are taken to have experts")
    if pattern is not None:
        experts["dense_layers"] = pattern.count(0)
        if sorted(pattern) != pattern:
            job.omitted.append("where the layers without experts are: taken as the first ones")
    job.put("model", "experts", {k: v for k, v in experts.items() if v is not None})
    backend = settings.find_word("moe_flex_dispatcher_backend")
    if settings.find_flag("moe_enable_deepep") or backend == "deepep":
        job.put("parallel", "dispatcher", "deepep")
    elif backend == "hybridep":
        job.put("parallel", "dispatcher", "hybridep")
    elif settings.find_word("moe_token_dispatcher_type") == "alltoall":
        job.put("parallel", "dispatcher", "all-to-all")


def read_layer_pattern(value: object, layers: object) -> list[int] | None:
    """Which layers have experts: every so many, or a list such as ([0]*3+[1]*58).

    None if it is none of these.
    """
    text = re.sub(r"[\s'\"()]", "", str(value))
    if re.fullmatch(r"\d{1,4}", text) and isinstance(layers, int) and 0 < layers <= MAX_LAYERS:
        step = max(1, int(text))
        return [int(layer % step == 0) for layer in range(layers)]
    pattern: list[int] = []
    for part in text.split("+"):
        found = re.fullmatch(r"\[([01](?:,[01])*)\](?:\*(\d{1,4}))?", part)
        if found is None or len(pattern) > MAX_LAYERS:
            return None
        pattern += [int(one) for one in found[1].split(",")] * int(found[2] or 1)
    return pattern


def put_layout(settings: MegatronSettings, job: JobTablesBuilder) -> None:
    parallel = job.sections["parallel"]
    job.put("parallel", "sequence_parallel", settings.find_flag("sequence_parallel"))
    shards = settings.find_flag("use_distributed_optimizer")
    strategy = settings.find_word("data_parallel_sharding_strategy")
    if settings.find_flag("use_torch_fsdp2", "use_megatron_fsdp", "use_custom_fsdp"):
        stages = {"no_shard": 0, "optim": 1, "optim_grads": 2}
        job.put("parallel", "zero", stages.get(strategy, 3))
    else:
        job.put("parallel", "zero", None if shards is None else int(shards))
    overlaps = []
    if settings.find_flag("overlap_grad_reduce"):
        overlaps.append("dp")
    if settings.find_flag("tp_comm_overlap"):
        overlaps.append("tp")
    if settings.find_flag("overlap_moe_expert_parallel_comm"):
        overlaps.append("ep")
    if overlaps or settings.find_flag("overlap_grad_reduce") is False:
        job.put("parallel", "overlap", overlaps)
    _put_stages(settings, job)
    kind = settings.find_word("cp_comm_type").strip("[]")
    words = {"p2p": "ring", "all_gather": "all-gather", "a2a": "ulysses"}
    if (parallel.get("cp") or 1) > 1:
        job.put("parallel", "context", words.get(kind))


def _put_stages(settings: MegatronSettings, job: JobTablesBuilder) -> None:
    """Virtual stages, and first and last stages with layers of their own."""
    pp, layers = job.sections["parallel"].get("pp") or 1, job.sections["model"].get("layers")
    chunks = settings.find_int(
        "virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank"
    )
    each = settings.find_int("num_layers_per_virtual_pipeline_stage")
    if chunks is None and each and layers and pp > 1 and layers % (pp * each) == 0:
        chunks = layers // (pp * each)
    if chunks and chunks > 1 and pp > 1:
        job.put("parallel", "chunks", chunks)
    first = settings.find_int(
        "decoder_first_pipeline_num_layers", "num_layers_in_first_pipeline_stage"
    )
    last = settings.find_int(
        "decoder_last_pipeline_num_layers", "num_layers_in_last_pipeline_stage"
    )
    if (first or last) and layers and 1 < pp <= layers <= MAX_LAYERS and (chunks or 1) == 1:
        middle = pp - sum(one is not None for one in (first, last))
        rest = layers - (first or 0) - (last or 0)
        if middle > 0 and rest > 0 and rest % middle == 0:
            stages = [first] if first else []
            stages += [rest // middle] * middle + ([last] if last else [])
            job.put("parallel", "layers_per_stage", stages)
    elif settings.find("pipeline_model_parallel_layout"):
        job.omitted.append("pipeline_model_parallel_layout: stages taken as equal")


def put_training(settings: MegatronSettings, job: JobTablesBuilder) -> None:
    fp8, fp4 = settings.find("fp8", "fp8_format"), settings.find("fp4", "fp4_format")
    if fp4:
        job.put("training", "dtype", "nvfp4")
    elif fp8:
        job.put("training", "dtype", "fp8")
    elif settings.find_flag("fp16"):
        job.put("training", "dtype", "fp16")
    elif settings.find_flag("bf16"):
        job.put("training", "dtype", "bf16")
    recipe = settings.find_word("fp8_recipe")
    if recipe in ("blockwise", "mxfp8"):
        job.omitted.append(f"fp8 recipe {recipe}: taken as one scale a tensor")
    reduces_in_fp32 = settings.find_flag(
        "accumulate_allreduce_grads_in_fp32", "grad_reduce_in_fp32"
    )
    if settings.find_flag("grad_reduce_in_bf16") or reduces_in_fp32 is False:
        job.put("training", "gradient_dtype", "bf16")
    elif reduces_in_fp32:
        job.put("training", "gradient_dtype", "fp32")
    word = settings.find_word("optimizer")
    if word in ("adam", "sgd", "muon", "lion"):
        job.put("training", "optimizer", word)
    if settings.find_word("exp_avg_dtype") in ("bf16", "bfloat16", "torch.bfloat16"):
        job.put("training", "moments_dtype", "bf16")
    fuses = settings.find_flag("cross_entropy_loss_fusion")
    job.put("training", "fused_loss", fuses)
    rates = [settings.find_float(name) for name in ("hidden_dropout", "attention_dropout")]
    if any(rate is not None for rate in rates):
        job.put("training", "dropout", any(rates))
    graph = settings.find_word("cuda_graph_impl")
    scope = settings.find_word("cuda_graph_scope")
    if settings.find_flag("enable_cuda_graph", "external_cuda_graph") or graph not in ("", "none"):
        job.put("training", "cuda_graph", "step" if "full_iteration" in scope else "layers")
    elif graph == "none":
        job.put("training", "cuda_graph", "none")
    if settings.find_flag("optimizer_cpu_offload"):
        job.put("training", "offload", ["optimizer"])
    if settings.find_flag("reset_attention_mask"):
        job.omitted.append("the length of documents (--reset-attention-mask): one a sequence")
    _put_recomputation(settings, job)


def _put_recomputation(settings: MegatronSettings, job: JobTablesBuilder) -> None:
    granularity = settings.find_word("recompute_granularity")
    if granularity == "full":
        job.put("training", "recompute", "full")
        count = settings.find_int("recompute_num_layers")
        if settings.find_word("recompute_method") == "block":
            job.put("training", "recompute_layers", count)
        elif count and count > 1:
            job.put("training", "recompute", f"every-{count}")
        return
    # A list of the modules in YAML, one text of them on a command line.
    modules = settings.find("recompute_modules")
    if modules is None or isinstance(modules, bool):
        modules = []
    texts = map(str, modules) if isinstance(modules, list) else (str(modules),)
    words = re.findall(r"[a-z_]+", " ".join(texts).lower())
    if granularity == "selective" and words and words != ["core_attn"]:
        parts = sorted({RECOMPUTE_MODULES[word] for word in words if word in RECOMPUTE_MODULES})
        job.put("training", "recompute", parts or "selective")
        return
    if granularity == "selective" or settings.find_flag("recompute_activations"):
        job.put("training", "recompute", "selective")


def put_all(settings: MegatronSettings, job: JobTablesBuilder) -> None:
    """Puts what these settings say into the tables of the job. The order counts: virtual stages
    depend on the sizes."""
    put_sizes(settings, job)
    put_attention(settings, job)
    put_experts(settings, job)
    put_layout(settings, job)
    put_training(settings, job)
