"""Job configs in TOML: tables, presets and framework defaults to a Job."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from stepsplit.analyzer.errors import DataError, UsageError
from stepsplit.analyzer.model.config import (
    DTYPES,
    FRAMEWORKS,
    OPTIMIZERS,
    RANK_ORDER,
    RESHARDS,
    SCHEDULES,
    ContextKind,
    Dtype,
    Experts,
    Framework,
    HardwareConfig,
    JobConfig,
    LatentAttention,
    ModelConfig,
    Norm,
    ParallelConfig,
    Recompute,
    Schedule,
    Target,
    TrainingConfig,
)
from stepsplit.analyzer.model.config_checks import first_fault
from stepsplit.analyzer.model.config_table import TomlTable, either, near, read_table, table_of
from stepsplit.analyzer.model.hardware_config import (
    HARDWARE_KEYS,
    PRESETS,
    hardware_file,
    hardware_of,
    link,
)

# RUN.toml -> Job.

SAME_FRAMEWORKS = {
    "megatron-lm": "megatron", "megatron-core": "megatron", "torchtitan": "fsdp2", "fsdp": "fsdp2",
    "fsdp1": "fsdp2", "hf": "huggingface", "transformers": "huggingface",
}  # fmt: skip
"""Other words for what trains the same way here."""


def read_job(path: str | Path) -> JobConfig:
    """The job that the file states, checked. Raises DataError, which names the key and the mend;
    UsageError where no hardware is named."""
    return job_in(read_table(path))


def job_of(text: str, where: str = "RUN.toml") -> JobConfig:
    """The job of a RUN.toml's text, checked; where names it in errors. Raises as read_job."""
    return job_in(table_of(where, text.encode()))


def job_in(table: TomlTable) -> JobConfig:
    """The job that the tables state, checked. Raises as read_job."""
    table.knows("model", "parallel", "training", "hardware")
    table.needs("model", "training")
    if "hardware" not in table.values:
        raise UsageError(f'{table.where}: on what? write [hardware] preset = "h100-sxm" or another')
    nothing = TomlTable(table.where, "parallel", {})
    parallel, training = table.table("parallel", nothing), table.table("training", nothing)
    stated = training.same(SAME_FRAMEWORKS).one_of("framework", FRAMEWORKS, None)
    model = _model(table.table("model", nothing), training.count("seq_len", 0))
    layout = layout_of(parallel, stated, model.experts is not None)
    framework = stated or framework_of(parallel)
    hardware = _hardware(table.table("hardware", nothing))
    recipe = recipe_of(training, layout, framework, model, hardware)
    job = JobConfig(model, layout, recipe, hardware)
    fault = first_fault(job)
    if fault is not None:
        raise DataError(table.where, fault.problem, fault.mend)
    return job


def layout_in(table: TomlTable) -> ParallelConfig:
    """The layout that the tables state, whatever else they do. Raises DataError."""
    nothing = TomlTable(table.where, "parallel", {})
    training = table.table("training", nothing).same(SAME_FRAMEWORKS)
    return layout_of(
        table.table("parallel", nothing), training.one_of("framework", FRAMEWORKS, None)
    )


def _model(table: TomlTable, seq_len: int) -> ModelConfig:
    table.knows("preset", *MODEL_KEYS)
    preset = table.text("preset", None)
    try:
        base = None if preset is None else transformer(preset)
    except UsageError:
        raise _unknown(table, preset, model_names()) from None
    return transformer_of(table, base, seq_len)


def _hardware(table: TomlTable) -> HardwareConfig:
    file = hardware_file(table)
    if file is None:
        return _of_preset(table)
    table.knows(*HARDWARE_KEYS)
    if "file" in file.values:
        raise file.error("file", "names another in turn", "name that one in the RUN.toml")
    return hardware_of(table, _of_preset(file))


def _of_preset(table: TomlTable) -> HardwareConfig:
    table.knows("preset", *HARDWARE_KEYS)
    preset = table.text("preset", None)
    try:
        base = None if preset is None else hardware(preset)
    except UsageError:
        raise _unknown(table, preset, hardware_names()) from None
    return hardware_of(table, base)


def _unknown(table: TomlTable, preset: str | None, names: tuple[str, ...]) -> DataError:
    mend = f"write {either(near(str(preset), names))}"
    return table.error("preset", f"{preset!r} is unknown", mend)


# A [parallel] table -> Layout.

CONTEXTS: tuple[ContextKind, ...] = ("ring", "all-gather", "ulysses")

_LAYOUT_KEYS = (
    "tp", "pp", "dp", "dp_replicate", "dp_shard", "cp", "ep", "expert_tp", "rank_order",
    "layers_per_stage", "overlap", "sequence_parallel", "zero", "schedule", "chunks", "context",
    "reshard_after_forward", "scatter_gather", "split_vocab", "root_unit", "sum_once",
    "bucket_bytes", "world_size", "gpus",
)  # fmt: skip

_SAME_SCHEDULE = {
    "zb1p": "zb-h1", "zb-1p": "zb-h1", "zb2p": "zb-h2", "zb-2p": "zb-h2", "zbv": "zb-v",
    "dualpipev": "dualpipe-v", "interleaved-1f1b": "interleaved", "f-then-b": "gpipe",
}  # fmt: skip
"""Other names of the same schedule."""

_OVERLAPPED: tuple[Framework, ...] = ("fsdp2", "ddp", "deepspeed", "huggingface")
"""Frameworks that sum gradients behind the backward pass unless told not to."""


def layout_of(
    table: TomlTable, framework: Framework | None, experts: bool = False
) -> ParallelConfig:
    """The layout that the table states; an axis that it leaves out has one rank.

    dp is short for dp_shard where zero is 3, which fsdp2 and any dp_shard imply, else for
    dp_replicate. Without either it is what world_size (or gpus) leaves. experts: the model has
    some. Raises DataError.
    """
    table.knows(*_LAYOUT_KEYS)
    zero = _zero(table, framework)
    replicate, shard = _data_parallel(table, zero)
    chunks = table.count("chunks", 1)
    layout = ParallelConfig(
        tp=table.count("tp", 1),
        pp=table.count("pp", 1),
        dp_replicate=replicate,
        dp_shard=shard,
        cp=table.count("cp", 1),
        ep=table.count("ep", 1),
        expert_tp=table.count(
            "expert_tp", _expert_tp(table, framework, replicate * shard) if experts else 1
        ),
        order=_order(table),
        sequence_parallel=table.flag("sequence_parallel", False),
        zero=zero,
        schedule=table.same(_SAME_SCHEDULE).one_of("schedule", SCHEDULES, _schedule(chunks)),
        chunks=chunks,
        layers_per_stage=table.counts("layers_per_stage", None),
        overlap=_overlap(table, framework),
        context_kind=table.one_of("context", CONTEXTS, CONTEXTS[0]),
        scatter_gather=table.flag("scatter_gather", False),
        split_vocab=table.flag("split_vocab", True),
        root_unit=table.flag("root_unit", False),
        sum_once=table.flag("sum_once", False),
        bucket_bytes=table.count("bucket_bytes", 0),
        reshard_after_forward=table.one_of("reshard_after_forward", RESHARDS, RESHARDS[0]),
    )
    _check_world_size(table, layout)
    return layout


def _expert_tp(table: TomlTable, framework: Framework | None, dp: int) -> int:
    """Megatron-LM cuts experts as it cuts the rest, where the ranks of a stage allow it."""
    tp, ep, cp = (table.count(key, 1) for key in ("tp", "ep", "cp"))
    cuts = framework in (None, "megatron") and tp * cp * dp % (ep * tp) == 0
    return tp if cuts else 1


def framework_of(table: TomlTable) -> Framework:
    """The framework of a [parallel] table beside which none is named."""
    return "fsdp2" if _zero(table, None) == 3 else "megatron"


def _zero(table: TomlTable, framework: Framework | None) -> int:
    zero = table.count("zero", None, least=0)
    if zero is not None:
        if zero > 3:
            raise table.error("zero", f"{zero} is no ZeRO stage", "write 0, 1, 2 or 3")
        return zero
    shards = framework == "fsdp2" and "dp_replicate" not in table.values
    return 3 if shards or table.count("dp_shard", 1) > 1 else 0


def _data_parallel(table: TomlTable, zero: int) -> tuple[int, int]:
    """dp_replicate and dp_shard."""
    stated = [key for key in ("dp", "dp_replicate", "dp_shard") if key in table.values]
    if "dp" in stated and len(stated) > 1:
        raise table.error("dp", f"stated beside {stated[1]}", "give dp, or both of the others")
    if stated and "dp" not in stated:
        return table.count("dp_replicate", 1), table.count("dp_shard", 1)
    dp = table.count("dp", 1) if stated else _rest(table)
    return (1, dp) if zero == 3 else (dp, 1)


def _rest(table: TomlTable) -> int:
    """What world_size leaves for data parallelism; 1 where it is not stated."""
    key = _world_key(table)
    if key is None:
        return 1
    world, tp, pp, cp = (table.count(k, 1) for k in (key, "tp", "pp", "cp"))
    if world % (tp * pp * cp):
        problem = f"{world} / (tp {tp} x pp {pp} x cp {cp}) = {world / (tp * pp * cp):g}"
        raise table.error(key, problem, f"mend the axes or {key}")
    return world // (tp * pp * cp)


def _world_key(table: TomlTable) -> str | None:
    return next((key for key in ("world_size", "gpus") if key in table.values), None)


def _check_world_size(table: TomlTable, layout: ParallelConfig) -> None:
    for key in ("world_size", "gpus"):
        if table.count(key, layout.world_size) != layout.world_size:
            product = f"tp {layout.tp} x pp {layout.pp} x dp {layout.dp} x cp {layout.cp}"
            problem = f"{table.count(key, 0)}, but {product} = {layout.world_size}"
            raise table.error(key, problem, f"mend the axes or {key}")


def _order(table: TomlTable) -> tuple[str, ...]:
    """The axes of rank_order, the fastest first; ep may be left out."""
    order = tuple(table.text("rank_order", "-".join(RANK_ORDER)).split("-"))
    if sorted({*order, "ep"}) != sorted(RANK_ORDER) or len(set(order)) < len(order):
        mend = f'write "{"-".join(RANK_ORDER)}" in the order of the ranks, the fastest first'
        raise table.error("rank_order", f"{'-'.join(order)!r} is no order of the axes", mend)
    return order


def _schedule(chunks: int) -> Schedule:
    return "1f1b" if chunks == 1 else "interleaved"


def _overlap(table: TomlTable, framework: Framework | None) -> frozenset[str]:
    """The axes whose communication hides behind compute: all, none, or those listed."""
    if isinstance(table.values.get("overlap"), bool):
        return frozenset(RANK_ORDER) if table.flag("overlap", False) else frozenset()
    if isinstance(table.values.get("overlap"), str):
        return frozenset({table.one_of("overlap", RANK_ORDER, "dp")})
    usual = ("dp",) if (framework or framework_of(table)) in _OVERLAPPED else ()
    return frozenset(table.some_of("overlap", RANK_ORDER, usual))


# A [training] table -> Recipe.

RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full", "sqrt")

TARGETS: tuple[Target, ...] = ("cpu", "nvme")

STATES = ("optimizer", "parameters", "activations")

_USUAL: Dtype = "bf16"

_EVERY = "every-"

_RECIPE_KEYS = (
    "seq_len", "micro_batch", "global_batch", "microbatches", "dtype", "optimizer", "recompute",
    "framework", "offload", "offload_to", "flash_attention", "dropout", "fused_loss",
    "gradient_dtype", "activation_dtype",
)  # fmt: skip

_SAME_OPTIMIZER = {"adamw": "adam", "sgd_momentum": "sgd-momentum", "adam_8bit": "adam-8bit"}
"""Other words for the same optimizer."""


def recipe_of(
    table: TomlTable,
    layout: ParallelConfig,
    framework: Framework,
    model: ModelConfig,
    hardware: HardwareConfig,
) -> TrainingConfig:
    """The recipe that the table states, and the framework's habits elsewhere. Raises DataError."""
    table.knows(*_RECIPE_KEYS)
    table.needs("seq_len", "micro_batch")
    dtype = table.one_of("dtype", DTYPES, _USUAL)
    habits = habits_of(framework, dtype, layout, model, hardware)
    recompute, every = _recompute(table)
    offload, offload_to = _offload(table)
    return TrainingConfig(
        seq_len=table.count("seq_len", 0),
        micro_batch=table.count("micro_batch", 0),
        global_batch=_global_batch(table, layout.dp),
        dtype=dtype,
        optimizer=table.same(_SAME_OPTIMIZER).one_of("optimizer", OPTIMIZERS, "adam"),
        recompute=recompute,
        recompute_every=every,
        framework=framework,
        gradient_dtype=table.one_of("gradient_dtype", DTYPES, habits.gradient_dtype),
        activation_dtype=table.one_of("activation_dtype", DTYPES, habits.activation_dtype),
        flash_attention=table.flag("flash_attention", habits.flash_attention),
        dropout=table.flag("dropout", habits.dropout),
        fused_loss=table.flag("fused_loss", habits.fused_loss),
        offload=offload,
        offload_to=offload_to,
    )


def _global_batch(table: TomlTable, dp: int) -> int:
    """As stated, or microbatches x micro_batch x dp."""
    if "microbatches" not in table.values:
        table.needs("global_batch")
        return table.count("global_batch", 0)
    microbatches, micro_batch = table.count("microbatches", 0), table.count("micro_batch", 0)
    product = microbatches * micro_batch * dp
    if table.count("global_batch", product) != product:
        problem = (
            f"{table.count('global_batch', 0)}, but microbatches {microbatches} x micro_batch "
            f"{micro_batch} x dp {dp} = {product}"
        )
        raise table.error("global_batch", problem, "leave one of them out")
    return product


def _recompute(table: TomlTable) -> tuple[Recompute, int]:
    """What is recomputed, and of "every-4" the 4."""
    stated = table.text("recompute", "none")
    number = stated.removeprefix(_EVERY)
    if stated.startswith(_EVERY) and number.isdecimal() and int(number) > 0:
        return "every", int(number)
    if stated not in RECOMPUTES:
        mend = f"write {', '.join(RECOMPUTES)} or every-4"
        raise table.error("recompute", f"{stated!r} is unknown", mend)
    return table.one_of("recompute", RECOMPUTES, "none"), 1


def _offload(table: TomlTable) -> tuple[frozenset[str], Target]:
    """The states that leave the device and where to; "cpu" alone means the optimizer's."""
    if isinstance(table.values.get("offload"), str):
        return frozenset({"optimizer"}), table.one_of("offload", TARGETS, "cpu")
    states = table.some_of("offload", STATES, ())
    return frozenset(states), table.one_of("offload_to", TARGETS, "cpu")


# Models and hardware by name: the TOML files under presets/.

MODELS = PRESETS / "models"

HARDWARE = PRESETS / "hardware"


@lru_cache(maxsize=256)
def transformer(name: str) -> ModelConfig:
    """The model of that name. Raises UsageError, which lists the near names."""
    table = _preset(MODELS, "model", name)
    return replace(transformer_of(table, None, seq_len=0), name=name)


@lru_cache(maxsize=256)
def hardware(
    name: str, nodes_link: str | None = None, gpus_per_node: int | None = None
) -> HardwareConfig:
    """The accelerator of that name, in nodes of its usual size and link unless told.

    Raises UsageError, which lists the near names.
    """
    table = _preset(HARDWARE, "hardware", name)
    found = hardware_of(table, None)
    return replace(
        found,
        name=name,
        inter=found.inter if nodes_link is None else link(nodes_link),
        gpus_per_node=gpus_per_node or found.gpus_per_node,
    )


def published_parameters(name: str) -> int | None:
    """The model's parameters as its publishers count them, None where they do not."""
    return _preset(MODELS, "model", name).count("parameters", None)


@lru_cache(maxsize=1)
def model_names() -> tuple[str, ...]:
    return _names(MODELS)


@lru_cache(maxsize=1)
def hardware_names() -> tuple[str, ...]:
    return _names(HARDWARE)


def _names(folder: Path) -> tuple[str, ...]:
    return tuple(name for file in sorted(folder.glob("*.toml")) for name in _file(file).values)


def _preset(folder: Path, kind: str, name: str) -> TomlTable:
    """The table of a preset: it stands in the file whose name it begins with."""
    stems = [file.stem for file in folder.glob("*.toml") if name.startswith(file.stem)]
    if stems:
        found = _file(folder / f"{max(stems, key=len)}.toml").table(name, None)
        if found is not None:
            return found
    close = either(near(name, _names(folder)))
    raise UsageError(f"no {kind} preset {name!r}; write {close}")


@lru_cache(maxsize=64)
def _file(path: Path) -> TomlTable:
    return read_table(path)


# A [model] table -> Transformer.

NORMS: tuple[Norm, ...] = ("rms", "layer")

MODEL_KEYS = (
    "name", "layers", "hidden", "heads", "kv_heads", "head_size", "ffn", "vocab", "gated", "tied",
    "learned_positions", "norm", "biases", "qkv_biases", "experts", "top_k", "expert_ffn",
    "shared_ffn", "dense_layers", "latent",
)  # fmt: skip


def transformer_of(table: TomlTable, base: ModelConfig | None, seq_len: int) -> ModelConfig:
    """The transformer that the table states; what it leaves out is as in base.

    Without a base, layers, hidden, heads and vocab are needed, and ffn where gated. kv_heads is
    then heads, head_size hidden / heads, ffn 4 hidden; gated models have RMS norms, no biases and
    a head of their own, others layer norms, biases and a tied head. learned_positions = true means
    seq_len of them. Raises DataError.
    """
    known = base or _plain_model(table)
    return replace(
        known,
        layers=table.count("layers", known.layers),
        hidden=table.count("hidden", known.hidden),
        heads=table.count("heads", known.heads),
        kv_heads=table.count("kv_heads", known.kv_heads),
        head_size=table.count("head_size", known.head_size),
        ffn=table.count("ffn", known.ffn),
        vocab=table.count("vocab", known.vocab),
        gated=table.flag("gated", known.gated),
        tied=table.flag("tied", known.tied),
        positions=_positions(table, known.positions, seq_len),
        norm=table.one_of("norm", NORMS, known.norm),
        biases=table.flag("biases", known.biases),
        qkv_biases=table.flag("qkv_biases", known.qkv_biases),
        experts=_experts(table, known),
        latent=_latent(table, known.latent),
        name=table.text("name", known.name),
    )


def _plain_model(table: TomlTable) -> ModelConfig:
    """The transformer of a table that names no preset."""
    gated = table.flag("gated", False)
    table.needs("layers", "hidden", "heads", "vocab", *(["ffn"] if gated else []))
    hidden, heads = table.count("hidden", 1), table.count("heads", 1)
    return ModelConfig(
        layers=1,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_size=_head_size(table, hidden, heads),
        ffn=4 * hidden,
        vocab=1,
        tied=not gated,
        norm="rms" if gated else "layer",
        biases=not gated,
    )


def _head_size(table: TomlTable, hidden: int, heads: int) -> int:
    if hidden % heads and "head_size" not in table.values:
        problem = f"hidden {hidden} / heads {heads} = {hidden / heads:g} is no head size"
        raise table.error("heads", problem, "mend one of them or give head_size")
    return hidden // heads


def _positions(table: TomlTable, default: int, seq_len: int) -> int:
    if isinstance(table.values.get("learned_positions"), bool):
        return seq_len if table.flag("learned_positions", False) else 0
    return table.count("learned_positions", default, least=0)


def _experts(table: TomlTable, known: ModelConfig) -> Experts | None:
    """Of [model.experts], or of experts = 8 with top_k and the others beside it."""
    stated = table.values.get("experts")
    if isinstance(stated, dict):
        inner = table.table("experts", table)
        inner.knows("count", "top_k", "ffn", "shared_ffn", "dense_layers", "source")
        return _experts_of(inner, "count", "ffn", known)
    if stated is None and known.experts is None:
        for key in ("top_k", "expert_ffn", "shared_ffn", "dense_layers"):
            if key in table.values:
                raise table.error(key, "of a model without experts", "give experts")
        return None
    return _experts_of(table, "experts", "expert_ffn", known)


def _experts_of(table: TomlTable, count: str, ffn: str, known: ModelConfig) -> Experts | None:
    base = known.experts
    if base is None:
        table.needs(count, "top_k")
        base = Experts(count=1, top_k=1, ffn=table.count("ffn", known.ffn))
    return Experts(
        count=table.count(count, base.count),
        top_k=table.count("top_k", base.top_k),
        ffn=table.count(ffn, base.ffn),
        shared_ffn=table.count("shared_ffn", base.shared_ffn, least=0),
        dense_layers=table.count("dense_layers", base.dense_layers, least=0),
    )


def _latent(table: TomlTable, base: LatentAttention | None) -> LatentAttention | None:
    inner = table.table("latent", None)
    if inner is None:
        return base
    inner.knows("query_rank", "kv_rank", "nope", "rope", "value", "source")
    if base is None:
        inner.needs("kv_rank", "nope", "rope", "value")
        base = LatentAttention(0, 1, 1, 1, 1)
    return LatentAttention(
        query_rank=inner.count("query_rank", base.query_rank, least=0),
        kv_rank=inner.count("kv_rank", base.kv_rank),
        nope=inner.count("nope", base.nope),
        rope=inner.count("rope", base.rope),
        value=inner.count("value", base.value),
    )


# What a framework does where a RUN.toml does not say.

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
    framework: Framework,
    dtype: Dtype,
    layout: ParallelConfig,
    model: ModelConfig,
    hardware: HardwareConfig,
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


def _is_gpt(model: ModelConfig) -> bool:
    return model.norm == "layer" and model.biases and not model.gated


def _gradients(framework: Framework, dtype: Dtype) -> Dtype:
    plain = framework == "megatron" and dtype == "fp16"
    return "fp32" if framework in SUMS_IN_FP32 and not plain else _weights(dtype)


def _activations(framework: Framework, dtype: Dtype, layout: ParallelConfig) -> Dtype:
    """torchtitan's mixed precision is FSDP's: without it activations stay in fp32."""
    if framework == "fsdp2" and layout.zero != 3 and layout.dp == 1:
        return "fp32"
    return _weights(dtype)


def _weights(dtype: Dtype) -> Dtype:
    """Weights and activations of fp8 training stay in bf16."""
    return "bf16" if dtype == "fp8" else dtype
