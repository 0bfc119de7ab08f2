"""Published runs of training recipes (NeMo, Megatron-Bridge, DGX Cloud, MaxText) -> jobs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.model.config import (
    AttentionKernel,
    CudaGraph,
    Dispatcher,
    Dtype,
    Experts,
    HardwareConfig,
    JobConfig,
    ModelConfig,
    ParallelConfig,
    TrainingConfig,
)
from stepsplit.analyzer.model.config_file import load_hardware, load_model
from stepsplit.analyzer.validation.tables import Case, Family, PublishedRow

RECIPES_TABLE, BRIDGE_TABLE = "training_runs", "megatron_bridge_performance"

_HINT = "give rows of dense or mixture-of-experts decoders with a whole layout"

GROK = ModelConfig(
    layers=64, hidden=6144, heads=48, kv_heads=8, head_size=128, ffn=32768, vocab=131072,
    gated=True, tied=True, norm="rms", biases=False, experts=Experts(8, 2, 32768), name="grok-1",
)  # fmt: skip
"""config of xai-org/grok-1."""


def _scale_gpt3(layers: int, hidden: int) -> ModelConfig:
    """The sizes in between that NeMo trains, with heads of 128."""
    heads = hidden // 128
    return replace(
        load_model("gpt3-175b"), layers=layers, hidden=hidden, heads=heads, kv_heads=heads,
        ffn=4 * hidden, name="gpt3",
    )  # fmt: skip


MODELS: tuple[tuple[str, Callable[[], ModelConfig]], ...] = (
    ("Llama 3.1 405B", lambda: load_model("llama-3.1-405b")),
    ("Llama 3 70B", lambda: load_model("llama-3-70b")),
    ("LLAMA3_70B", lambda: load_model("llama-3-70b")),
    ("LLAMA3-70B", lambda: load_model("llama-3-70b")),
    ("Llama 3 8B", lambda: load_model("llama-3-8b")),
    ("LLAMA3-8B", lambda: load_model("llama-3-8b")),
    ("Llama 2 70B", lambda: load_model("llama-2-70b")),
    ("Llama 2 13B", lambda: load_model("llama-2-13b")),
    ("Nemotron-4 340B", lambda: load_model("nemotron-4-340b")),
    ("GPT-3 175B", lambda: load_model("gpt3-175b")),
    ("GPT-3 20B", lambda: _scale_gpt3(44, 6144)),
    ("GPT-3 5B", lambda: _scale_gpt3(24, 4096)),
    ("Grok-1 314B", lambda: GROK),
    ("Qwen3 235B", lambda: load_model("qwen3-235b-a22b")),
    ("Qwen3_30B", lambda: load_model("qwen3-30b-a3b")),
)
"""First words of a model's name -> its shape."""

GPUS: tuple[tuple[str, tuple[str, str]], ...] = (
    ("GB300", ("gb300", "ib-xdr-800")),
    ("GB200", ("gb200", "ib-ndr-400")),
    ("B300", ("b300-sxm", "ib-xdr-800")),
    ("B200", ("b200-sxm", "ib-ndr-400")),
    ("H100", ("h100-sxm", "ib-ndr-400")),
)
"""Word in a system's name -> its GPU and the network of DGX systems."""


def build_recipe(row: PublishedRow) -> Case:
    """A run with a step time or tokens/s; the columns of both tables.

    Recipes overlap data- and tensor-parallel communication and shard optimizer states. Raises
    DataError if the row does not say what ran, or ran something that has no model.
    """
    software = find_software(row)
    job = JobConfig(
        _find_model(row),
        _build_layout(row, software),
        _build_training(row, software),
        _find_hardware(row),
    )
    job = replace(job, parallel=_place_layers(job))
    family = _name_family(job)
    return Case(row.table, row.id, family, job, _read_step_ns(row, job), _name_source(row))


def _refuse(row: PublishedRow, problem: str) -> DataError:
    return DataError(f"{row.table}.csv", f"{row.id}: {problem}", _HINT)


def _find_model(row: PublishedRow) -> ModelConfig:
    name = row.read_text("model")
    if "LoRA" in name or "LoRA" in row.read_text("kind"):
        raise _refuse(row, "LoRA is not modelled")
    for words, load in MODELS:
        if name.startswith(words):
            model = load()
            return replace(model, layers=_read_size(row, "layers", model.layers))
    raise _refuse(row, f"no preset of {name}")


def _find_hardware(row: PublishedRow) -> HardwareConfig:
    system = _read_system(row)
    for word, (name, link) in GPUS:
        if word in system:
            return load_hardware(name, link)
    raise _refuse(row, f"no preset of {system}")


def _read_system(row: PublishedRow) -> str:
    return row.read_text("gpu" if row.has_value("gpu") else "system")


def _read_size(row: PublishedRow, column: str, default: int) -> int:
    """A count; the default where the table leaves it out or prints n/a or 0."""
    if not row.has_value(column) or row.read_text(column) in ("n/a", "NA"):
        return default
    return row.read_count(column) or default


def _build_layout(row: PublishedRow, software: Software) -> ParallelConfig:
    tp, pp, cp = (_read_size(row, axis, 1) for axis in ("tp", "pp", "cp"))
    gpus = row.read_count("gpus")
    if gpus % (tp * pp * cp):
        raise _refuse(row, f"tp {tp} x pp {pp} x cp {cp} does not divide {gpus} GPUs")
    common = ParallelConfig(
        tp=tp, pp=pp, cp=cp, ep=_read_size(row, "ep", 1), sequence_parallel=tp > 1,
        expert_tp=tp if software.shards_experts else 1, dispatcher=software.dispatcher,
    )  # fmt: skip
    dp = gpus // (tp * pp * cp)
    shard = max(_read_size(row, "fsdp", 1), _read_size(row, "fsdp_group", 1))
    if shard > 1:
        if dp % shard:
            raise _refuse(row, f"groups of {shard} do not divide {dp} data-parallel ranks")
        return replace(
            common, dp_shard=shard, dp_replicate=dp // shard, zero=3, overlap=frozenset({"dp"})
        )
    chunks = _read_size(row, "vp", 1) if pp > 1 else 1
    if "VP printed NA" in row.values.get("other", ""):
        chunks = NEMOTRON_CHUNKS
    overlap = {"dp", "tp", "ep"} if software.overlaps_experts else {"dp", "tp"}
    return replace(
        common, dp_replicate=dp, zero=1, overlap=frozenset(overlap), chunks=chunks,
        schedule="interleaved" if chunks > 1 else "1f1b",
    )  # fmt: skip


NEMOTRON_CHUNKS = 12
"""Virtual stages of Nemotron-4 340B in all other versions of the recipe."""


def _place_layers(job: JobConfig) -> ParallelConfig:
    """An even split, or one with a layer less at both ends, or the first stages one more."""
    stages = job.parallel.pp * job.parallel.chunks
    layers, rest = divmod(job.model.layers, stages)
    if not rest:
        return job.parallel
    if rest == stages - 2:
        sizes = [layers, *[layers + 1] * rest, layers]
    else:
        sizes = [layers + (1 <= stage <= rest) for stage in range(stages)]
    return replace(job.parallel, layers_per_stage=tuple(sizes))


def _build_training(row: PublishedRow, software: Software) -> TrainingConfig:
    for column in ("seq", "global_batch", "tp"):
        if not row.has_value(column):
            raise _refuse(row, f"no {column}")
    recompute = row.values.get("recompute", "")
    if recompute not in ("", "none"):
        raise _refuse(row, f"recomputation of {recompute} is not modelled")
    if "MaxText" in row.read_text("model"):
        raise _refuse(row, "MaxText's compiled kernels and remat policy are not modelled")
    return TrainingConfig(
        seq_len=row.read_count("seq"),
        micro_batch=_read_size(row, "micro_batch", 1),
        global_batch=row.read_count("global_batch"),
        dtype=_read_dtype(row),
        gradient_dtype="fp32" if _name_source(row) == "megatron-lm" else "bf16",
        attention_kernel=software.attention_kernel,
        cuda_graph=software.cuda_graph,
        document_tokens=DOCUMENT_TOKENS if "SFT" in row.read_text("kind") else 0,
    )


# What each release ran beside the columns of its table, from its scripts.

DOCUMENT_TOKENS = 200
"""SFT recipes pack SQuAD: paragraphs of about 120 words with a question (Rajpurkar et al.,
arXiv:1606.05250)."""


@dataclass(frozen=True, slots=True)
class Software:
    """Settings of a run with experts that its table leaves out."""

    dispatcher: Dispatcher = "all-to-all"
    overlaps_experts: bool = False
    cuda_graph: CudaGraph = "none"
    attention_kernel: AttentionKernel = ""
    shards_experts: bool = False


FULL_GRAPH = Software("hybridep", True, "step", "cudnn-fp8")

QWEN3: tuple[tuple[str, str, Software], ...] = (
    ("25.09", "GB200", Software(cuda_graph="layers")),
    ("25.09", "H100", Software("deepep", overlaps_experts=True)),
    ("25.11", "GB", Software("hybridep", cuda_graph="layers")),
    ("25.11", "H100", Software(overlaps_experts=True)),
    ("26.02.01", "H100", Software("deepep", overlaps_experts=True)),
    ("26.02.01", "", Software("hybridep", cuda_graph="layers")),
    ("26.02", "B200", Software(cuda_graph="layers")),
    ("26.02", "H100", Software(overlaps_experts=True)),
    ("26.02", "", Software("hybridep", cuda_graph="layers")),
    ("26.0", "H100", Software("hybridep")),
    ("26.04", "", Software("hybridep", cuda_graph="layers")),
    ("26.0", "", FULL_GRAPH),
)  # fmt: skip
"""Release, GPU -> settings of Qwen3 in Megatron-Bridge's scripts/performance, tags v0.1.0rc4 to
v0.6.0; the first match counts. 26.06 has one CUDA graph of the step, fused experts and fp8
attention (pull request 4211); 26.02 had no DeepEP (known issues)."""


def find_software(row: PublishedRow) -> Software:
    """Settings of the release in a row."""
    name, system = row.read_text("model"), _read_system(row)
    release = row.read_text("release" if row.has_value("release") else "framework")
    if name.startswith("Grok"):
        # DGX Cloud's grok1: the NeMo 1 recipe of v25.02 shards experts over tp by default; ET of
        # launch.sh in v25.05 is 4 on GB200 and 1 on H100.
        shards = "v25.02" in release or "GB200" in system
        return Software(shards_experts=shards, cuda_graph="step" if "GB200" in system else "none")
    if name.startswith("Qwen3"):
        for version, word, software in QWEN3:
            if version in release and word in system.replace("DGX-", ""):
                is_b200 = word != "B200" or "GB200" not in system
                if is_b200:
                    return software
    return Software()


def _read_dtype(row: PublishedRow) -> Dtype:
    precision = row.read_text("precision").lower()
    if "fp8" in precision:
        return "fp8"
    if "bf16" in precision:
        return "bf16"
    raise _refuse(row, f"{precision} is not modelled")


def _read_step_ns(row: PublishedRow, job: JobConfig) -> float:
    if row.has_value("step_s"):
        return row.read_number("step_s") * 1e9
    tokens = job.training.global_batch * job.training.seq_len
    rate = row.read_number("tokens_per_s_per_gpu") * row.read_count("gpus")
    return tokens / rate * 1e9


def _name_family(job: JobConfig) -> Family:
    if job.model.experts is not None:
        return "recipes with experts"
    if job.hardware.family == "hopper":
        return "H100 recipes, fp8" if job.training.dtype == "fp8" else "H100 recipes, bf16"
    return "Blackwell recipes, fp8" if job.training.dtype == "fp8" else "Blackwell recipes, bf16"


def _name_source(row: PublishedRow) -> str:
    """The publisher: versions of one recipe and releases of one program are not independent."""
    if row.table == BRIDGE_TABLE:
        return "megatron-lm" if "Megatron-LM" in row.read_text("release") else "megatron-bridge"
    source = row.read_text("source")
    for word, name in (
        ("dgxc", "dgx-cloud"), ("Megatron-Bridge", "megatron-bridge"), ("NeMo", "nemo"),
    ):  # fmt: skip
        if word in source:
            return name
    return source
