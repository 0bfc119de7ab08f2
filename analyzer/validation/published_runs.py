"""Published training runs as job configs."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from stepsplit.analyzer.errors import DataError, StepsplitError, UsageError
from stepsplit.analyzer.model.comm_time import (
    H200,
    H200_LARGE,
    MI300X,
    ROWS,
    list_busbw_rows,
    list_fitted_rows,
)
from stepsplit.analyzer.model.config import (
    Dtype,
    HardwareConfig,
    JobConfig,
    ModelConfig,
    ParallelConfig,
    TrainingConfig,
)
from stepsplit.analyzer.model.config_checks import check
from stepsplit.analyzer.model.config_decode import TomlTable
from stepsplit.analyzer.model.config_file import decode_job
from stepsplit.analyzer.model.device_speed import compute_device_speed
from stepsplit.analyzer.model.features import KEY_FEATURES
from stepsplit.analyzer.model.hardware_config import load_hardware
from stepsplit.analyzer.model.model_table import load_model
from stepsplit.analyzer.model.parameters import CONVENTIONS, compute_sc21_flops, count_model_flops
from stepsplit.analyzer.model.profile import load_frameworks
from stepsplit.analyzer.model.schedule_names import Schedule
from stepsplit.analyzer.validation.tables import (
    BRIDGE_TABLE,
    RECIPES_TABLE,
    Case,
    Family,
    Published,
    PublishedRow,
    build_recipe,
)

# Rows whose columns are the keys of job.toml.

JOB_TABLES = ("model", "parallel", "training", "hardware")


def build_stated_job(row: PublishedRow) -> JobConfig:
    """The job of a row: columns such as model.layers are keys of job.toml, empty ones left out.

    Keys in the column guessed have a value that the publisher did not state: the job takes it as
    it takes a default, so that other values are plausible too. Raises DataError or UsageError as
    read_job, and DataError for a guessed key without a value.
    """
    tables: dict[str, dict[str, Any]] = {name: {} for name in JOB_TABLES}
    for column in row.values:
        table, _, key = column.partition(".")
        if key and row.has_value(column):
            tables[table][key] = _parse_value(row.read_text(column))
    job = decode_job(TomlTable(f"{row.table}.csv, {row.id}", "", tables))
    guessed = row.read_text("guessed").split() if row.has_value("guessed") else []
    if unknown := [key for key in guessed if not row.has_value(key)]:
        problem = f"{row.id} has no value of {unknown[0]}, which it calls guessed"
        raise DataError(f"{row.table}.csv", problem, "name columns of the row")
    return replace(job, stated=job.stated.difference(guessed) if job.stated else None)


@lru_cache(maxsize=4096)
def _parse_value(text: str) -> object:
    """A number, a boolean, a list or an inline table, or else the text itself.

    Cached: the tables have 25,000 values, most of them alike.
    """
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


# Training runs that others reported; no constant is fitted on them.

REPORTS_TABLE = "training_reports"

SPEEDS = ("step_s", "tokens_per_s_per_gpu", "tflops_per_gpu")
"""The columns of which a report has one."""

REPORT_FAMILIES: dict[str, Family] = {
    "ampere": "A100 reports",
    "hopper": "H100 reports",
    "blackwell": "Blackwell reports",
    "cdna2": "AMD reports",
    "cdna3": "AMD reports",
    "cdna4": "AMD reports",
}


def build_training_report(row: PublishedRow) -> tuple[Case, ...]:
    """The job of a row, and its step by its time or its throughput.

    TFLOP/s count FLOPs by the convention in the column flops.
    """
    job = build_stated_job(row)
    step_ns = _compute_step_s(row, job) * 1e9
    return (Case(row.table, row.id, _find_family(job), job, step_ns, row.read_text("publisher")),)


def _compute_step_s(row: PublishedRow, job: JobConfig) -> float:
    column = next(filter(row.has_value, SPEEDS), "")
    speed = row.read_number(column) if column else 0.0
    if speed <= 0:
        problem = f"{row.id} has no speed above 0"
        raise DataError(f"{row.table}.csv", problem, f"give one of {', '.join(SPEEDS)}")
    ranks = job.parallel.world_size
    if column == "step_s":
        return speed
    if column == "tokens_per_s_per_gpu":
        return job.training.global_batch * job.training.seq_len / (speed * ranks)
    convention = row.read_choice("flops", {name: name for name in CONVENTIONS})
    return count_model_flops(job, convention) / (speed * 1e12 * ranks)


def _find_family(job: JobConfig) -> Family:
    if job.model.experts is not None:
        return "reports with experts"
    family = job.hardware.family
    if family not in REPORT_FAMILIES:
        known = ", ".join(REPORT_FAMILIES)
        raise UsageError(f"reports are of {known}, not {family}; use measured_jobs.csv")
    return REPORT_FAMILIES[family]


# Rows of each publication's own columns, as jobs.

MEGATRON_FAMILY: Family = "A100 Megatron"

ZERO_FAMILY: Family = "A100 ZeRO-3"


def build_sc21_table1(row: PublishedRow) -> tuple[Case, ...]:
    """Narayanan et al., SC'21, table 1: full recomputation, interleaved if there are chunks.

    Pipeline messages are scattered and gathered (section 4.1).
    """
    layout = replace(_build_megatron_layout(row, row.read_count("vpp_chunks")), scatter_gather=True)
    job = _build_megatron_job(
        row, layout, _build_megatron_training(row, row.read_count("micro_batch"))
    )
    return (Case(row.table, row.id, MEGATRON_FAMILY, job, _compute_sc21_step_ns(row), "sc21"),)


DEEPSPEED_OF_2021 = "DeepSpeed of 2021"
"""Its ZeRO-3 gathered one parameter after the other into a list of N tensors, each after a
synchronization of the device (_allgather_param of partition_parameters.py until v0.5); since v0.6
those of a module are one call, which overlaps, as the model has it."""


def build_sc21_table2(row: PublishedRow) -> tuple[Case, ...]:
    """Table 2: PTD-P with 1F1B, because throughput drops with GPUs as (p-1)/m predicts, and ZeRO-3
    of DeepSpeed, which gathers the parameters in 16 bits."""
    training = _build_megatron_training(row, row.read_count("micro_batch"))
    gpus, family = row.read_count("gpus"), MEGATRON_FAMILY
    if row.read_text("scheme") == "ZeRO-3":
        layout = ParallelConfig(dp_shard=gpus, zero=3, overlap=frozenset({"dp"}))
        training = replace(training, framework="deepspeed", program=DEEPSPEED_OF_2021)
        family = ZERO_FAMILY
    else:
        tp, pp = row.read_count("tp"), row.read_count("pp")
        layout = ParallelConfig(tp=tp, pp=pp, dp_replicate=gpus // (tp * pp), scatter_gather=True)
    job = _build_megatron_job(row, layout, training)
    return (Case(row.table, row.id, family, job, _compute_sc21_step_ns(row), "sc21"),)


def build_korthikanti(row: PublishedRow) -> tuple[Case, ...]:
    """Korthikanti et al., table 5: full recomputation, and selective with sequence parallelism.

    Gradients are fp32: the paper's figure 1 counts 18 bytes a parameter.
    """
    layout = replace(_build_megatron_layout(row, row.read_count("vpp_chunks")), scatter_gather=True)
    training = replace(
        _build_megatron_training(row, row.read_count("micro_batch")), gradient_dtype="fp32"
    )
    full = _build_megatron_job(row, layout, training)
    selective = _build_megatron_job(
        row, replace(layout, sequence_parallel=True), replace(training, recompute="selective")
    )
    return tuple(
        Case(
            row.table,
            f"{row.id}_{name}",
            MEGATRON_FAMILY,
            job,
            row.read_number(column) * 1e9,
            "korthikanti",
        )
        for name, job, column in (
            ("full", full, "iter_s_full_recompute_noSP"),
            ("selective", selective, "iter_s_selective_SP"),
        )
    )


def build_mt_nlg(row: PublishedRow) -> tuple[Case, ...]:
    """Smith et al., section 2.4: bf16, 1F1B of DeepSpeed, microbatches of one sequence.

    DeepSpeed accumulates bf16 gradients in fp32.
    """
    training = replace(
        _build_megatron_training(row, 1),
        dtype="bf16",
        gradient_dtype="fp32",
        activation_dtype="bf16",
        framework="deepspeed",
    )
    job = _build_megatron_job(row, _build_megatron_layout(row, 1), training)
    return (
        Case(row.table, row.id, MEGATRON_FAMILY, job, row.read_number("iter_s") * 1e9, "mt-nlg"),
    )


def build_megascale(row: PublishedRow) -> tuple[Case, ...]:
    """Jiang et al., table 2 and figure 9, the rows of Megatron-LM.

    The paper does not name the recomputation. Full recomputation is implausible at an MFU of 53 %
    (an HFU of 71 %), and flash attention is listed as a gain of MegaScale. Assumed: selective
    recomputation, sequence parallelism and a distributed optimizer.
    """
    if row.read_text("system") != "Megatron-LM":
        return ()
    layout = replace(
        _build_megatron_layout(row, row.read_count("vpp_chunks")), sequence_parallel=True, zero=1
    )
    training = replace(
        _build_megatron_training(row, 1),
        dtype="bf16",
        gradient_dtype="fp32",
        activation_dtype="bf16",
        recompute="selective",
    )
    job = _build_megatron_job(row, layout, training)
    # The published time, or from the MFU (figure 9), which excludes recomputation.
    if row.has_value("iter_s"):
        step_ns = row.read_number("iter_s") * 1e9
    else:
        rate = row.read_number("mfu_pct") / 100 * PEAK_FLOPS_PER_S * row.read_count("gpus")
        step_ns = count_model_flops(job, "C1") / rate * 1e9
    return (Case(row.table, row.id, MEGATRON_FAMILY, job, step_ns, "megascale"),)


def build_tensor_2020(row: PublishedRow) -> tuple[Case, ...]:
    """Megatron-LM's README of 2020: tensor and data parallelism, one microbatch per replica.

    Its kernels were not fused yet (Narayanan et al., SC'21, section 4.2). Gradient reduction must
    overlap: for the 8B model 2.2 GB over one adapter take 0.17 s, but 128 replicas take only 0.04 s
    longer than one.
    """
    layout = ParallelConfig(
        tp=row.read_count("tp"), dp_replicate=row.read_count("dp"), overlap=frozenset({"dp"})
    )
    training = _build_megatron_training(row, row.read_count("global_batch") // row.read_count("dp"))
    training = replace(training, framework="ddp")
    job = _build_megatron_job(row, layout, training, vocab=51200)
    step_ns = row.read_number("iter_ms") * 1e6
    return (Case(row.table, row.id, MEGATRON_FAMILY, job, step_ns, "megatron-2020"),)


SIMUMAX_TABLE = "simumax_b200_measured"

LLM_FOUNDRY_TABLE = "llm_foundry_mpt_throughput"

TORCHTITAN_TABLE = "torchtitan_throughput_memory"


# All published runs with a step time.

CaseTable = tuple[str, Callable[[PublishedRow], tuple[Case, ...]]]
"""A table, and what builds the cases of one of its rows."""

TABLES: tuple[CaseTable, ...] = (
    ("megatron_sc21_table1", build_sc21_table1),
    ("megatron_sc21_table2_zero3_vs_ptd", build_sc21_table2),
    ("korthikanti_table5_end_to_end", build_korthikanti),
    ("mtnlg_530b", build_mt_nlg),
    ("megascale_table2", build_megascale),
    ("megatron_2020_tp_weak_scaling", build_tensor_2020),
    (SIMUMAX_TABLE, lambda row: (build_simumax(row),)),
    (LLM_FOUNDRY_TABLE, lambda row: (build_llm_foundry(row),)),
    (TORCHTITAN_TABLE, lambda row: (build_torchtitan(row),)),
    (RECIPES_TABLE, lambda row: (build_recipe(row),)),
    (BRIDGE_TABLE, lambda row: (build_recipe(row),)),
    (REPORTS_TABLE, build_training_report),
)


@dataclass(frozen=True, slots=True)
class CaseList:
    """The cases of the tables' rows; left_out lists the skipped rows with their errors."""

    cases: tuple[Case, ...]
    left_out: tuple[str, ...]


def list_cases(published: Published) -> CaseList:
    """All cases, and the rows skipped for an unknown model, an invalid job or one without rates."""
    built: list[Case] = []
    left_out: list[str] = []
    for table, build in TABLES:
        for row in published.read_records(table):
            try:
                cases = build(row)
                for case in cases:
                    check(case.job)
                    compute_device_speed(case.job)
            except StepsplitError as error:
                left_out.append(f"{row.id}: {error}")
            else:
                if table != REPORTS_TABLE:
                    cases = tuple(map(_name_recipe, cases))
                built.extend(cases)
    return CaseList(tuple(built), tuple(left_out))


@lru_cache(maxsize=1)
def list_published_cases() -> CaseList:
    """All cases of the package's tables. Cached: there are hundreds, each a job to decode."""
    return list_cases(Published())


OF_RECIPES = frozenset(feature.key for feature in KEY_FEATURES) - {"hardware.efficiency.host_ns"}
"""What a tuned recipe states: all but the speed of the host it ran on, which none does."""


def _name_recipe(case: Case) -> Case:
    """A run of the authors of the program or the GPU, who tuned and published it."""
    training = replace(case.job.training, recipe=case.table)
    return replace(case, job=replace(case.job, training=training, stated=OF_RECIPES))


# Traces of CCL-Bench -> jobs.

MODELS = {
    "llama-3.1-8b": "llama-3.1-8b",
    "deepseek_v3_16b": "deepseek-v2-lite",
    "deepseek-v3-16b": "deepseek-v2-lite",
}


def build_ccl_bench(row: PublishedRow) -> JobConfig:
    """The job of a trace.

    Short runs on four GPUs and mixture-of-experts runs give the batch of a data-parallel rank and
    free all weights after the forward pass. Without FSDP torchtitan's activations stay fp32.
    """
    megatron = row.read_text("framework").startswith("megatron")
    ranks = row.read_count("dp_shard") * row.read_count("dp_replicate")
    batch = row.read_count("batch") * (ranks if is_short(row) else 1)
    rounds = row.read_count("pp_mb") if row.has_value("pp_mb") else 1
    training = TrainingConfig(
        seq_len=row.read_count("seq"),
        micro_batch=1 if megatron else batch // ranks // rounds,
        global_batch=batch,
        recompute="full" if megatron else "none",
        framework="megatron" if megatron else "fsdp2",
        activation_dtype="bf16" if megatron or row.read_count("dp_shard") > 1 else "fp32",
    )
    model = load_model(row.read_choice("model", MODELS))
    sharded = 3 if row.read_count("dp_shard") > 1 else 0
    frees = is_short(row) or not is_dense(row)
    return JobConfig(
        model,
        ParallelConfig(
            tp=row.read_count("tp"),
            pp=row.read_count("pp"),
            dp_shard=row.read_count("dp_shard"),
            dp_replicate=row.read_count("dp_replicate"),
            ep=row.read_count("ep") if row.has_value("ep") else 1,
            zero=1 if megatron else sharded,
            sequence_parallel=not megatron,
            reshard_after_forward="always" if frees else "default",
        ),
        training,
        load_hardware("a100-sxm-40gb", "slingshot-11", 4),
    )


def is_dense(row: PublishedRow) -> bool:
    return row.read_text("model").startswith("llama")


def is_short(row: PublishedRow) -> bool:
    return "4gpu" in row.read_text("trace")


# Training benchmarks of llm-foundry (FSDP) -> jobs.

GPUS = {
    "h100_80gb": ("h100-sxm", "roce-400"),
    "a100_80gb": ("a100-sxm-80gb", "roce-200"),
    "a100_40gb": ("a100-sxm-40gb", "roce-200"),
}
"""Nodes of 8 with 1,600 Gb/s (A100) or 3,200 Gb/s (H100) of RoCE."""

DTYPES: dict[str, Dtype] = {"bf16": "bf16", "amp_bf16": "bf16", "amp_fp8": "fp8"}


def build_llm_foundry(row: PublishedRow) -> Case:
    """MPT with flash attention and a fused loss, no dropout, sharded over all GPUs.

    Composer's mixed precision DEFAULT reduces gradients in fp32, PURE in bf16.
    """
    seconds = row.read_number("global_batch_tokens") / row.read_number("tokens_per_s")
    model, keeps = build_mpt(row), row.read_text("fsdp_strategy") == "SHARD_GRAD_OP"
    layout = ParallelConfig(
        dp_shard=row.read_count("gpus"),
        zero=3,
        overlap=frozenset({"dp"}),
        reshard_after_forward="never" if keeps else "default",
    )
    offload = row.read_text("act_cpu_offload") == "True"
    training = TrainingConfig(
        seq_len=row.read_count("seq"),
        micro_batch=row.read_count("micro_batch"),
        global_batch=row.read_count("micro_batch")
        * row.read_count("grad_accum")
        * row.read_count("gpus"),
        dtype=row.read_choice("precision", DTYPES),
        recompute="full" if row.read_text("activation_ckpt") == "True" else "none",
        framework="fsdp2",
        gradient_dtype="bf16" if row.read_text("mp_mode") == "PURE" else "fp32",
        offload=frozenset({"activations"}) if offload else frozenset(),
        attention_kernel="triton-2023",
        fused_loss=True,
    )
    name, link = row.read_choice("gpu", GPUS)
    job = JobConfig(model, layout, training, load_hardware(name, link, 8))
    return Case(row.table, row.id, "llm-foundry", job, seconds * 1e9, "llm-foundry")


def build_mpt(row: PublishedRow) -> ModelConfig:
    """The model has as many learned positions as its sequence has tokens."""
    return replace(load_model(f"mpt-{row.read_text('model')}"), positions=row.read_count("seq"))


# Published steps of Megatron-LM on A100 -> jobs.
#
# All: GPT, 16-bit, Adam, unfused attention, dropout, 8 GPUs per node with one HDR adapter each.
# Communication overlaps compute only if the publication says so.

PEAK_FLOPS_PER_S = 312e12


def _build_megatron_layout(row: PublishedRow, chunks: int) -> ParallelConfig:
    return ParallelConfig(
        tp=row.read_count("tp"),
        pp=row.read_count("pp"),
        dp_replicate=row.read_count("dp"),
        schedule="interleaved" if chunks > 1 else "1f1b",
        chunks=chunks,
    )


def _build_megatron_training(row: PublishedRow, micro_batch: int) -> TrainingConfig:
    return TrainingConfig(
        seq_len=row.read_count("seq"),
        micro_batch=micro_batch,
        global_batch=row.read_count("global_batch"),
        dtype="fp16",
        gradient_dtype="fp16",
        activation_dtype="fp16",
        recompute="full",
        flash_attention=False,
        dropout=True,
        fused_loss=False,
    )


def _build_megatron_job(
    row: PublishedRow, layout: ParallelConfig, training: TrainingConfig, vocab: int | None = None
) -> JobConfig:
    vocab_size = row.read_count("vocab") if vocab is None else vocab
    model = build_gpt(
        row.read_count("layers"),
        row.read_count("hidden"),
        row.read_count("heads"),
        vocab_size,
        training.seq_len,
    )
    # Raises DataError for another GPU than those of the published rows or V100.
    words = re.split(r"[^A-Za-z0-9]", row.read_text("gpu") or "A100")
    name = row.read_word("gpu", words[0], MEGATRON_GPUS)
    return JobConfig(
        model,
        layout,
        training,
        load_hardware(name, "ib-hdr-200" if name.startswith("a100") else "ib-edr-100", 8),
    )


MEGATRON_GPUS = {"A100": "a100-sxm-80gb", "Ampere": "a100-sxm-80gb", "V100": "v100-sxm-32gb"}
"""First word of a GPU's name -> its preset."""


def _compute_sc21_step_ns(row: PublishedRow) -> float:
    """Eq. 3 over the published FLOP/s, which include recomputation."""
    sizes = (row.read_count(name) for name in ("layers", "hidden", "seq", "vocab", "global_batch"))
    return (
        compute_sc21_flops(*sizes)
        / (row.read_count("gpus") * row.read_number("tflops_per_gpu") * 1e12)
        * 1e9
    )


# Nanotron's benchmark of best configurations -> jobs.


def build_nanotron(row: PublishedRow) -> JobConfig:
    """Llama shapes in bf16 on H100, sequence parallelism, 1F1B, no recomputation."""
    layout = ParallelConfig(
        tp=row.read_count("tp"),
        pp=row.read_count("pp"),
        dp_replicate=row.read_count("dp"),
        zero=row.read_count("zero_stage"),
        sequence_parallel=row.read_count("tp") > 1,
    )
    training = TrainingConfig(
        row.read_count("seq"), row.read_count("micro_batch"), row.read_count("global_batch"),
        framework="nanotron", fused_loss=False,
    )  # fmt: skip
    model = build_llama(row, row.read_text("tied_embeddings") == "1")
    return JobConfig(model, layout, training, load_hardware("h100-sxm", "efa-p5", 8))


# Measured steps and peaks of Megatron-LM on one node of B200 -> jobs.

MIXTURES = {"deepseekv2": "deepseek-v2", "deepseekv3": "deepseek-v3"}

DENSE_LAYERS = 1
"""The published launcher keeps the first layer dense in every model."""


def build_simumax(row: PublishedRow) -> Case:
    """SimuMax docs/b200: bf16, fp32 gradients, distributed optimizer, no recomputation.

    Sequence parallelism with tensor parallelism, no dropout, no overlap, fused loss; context
    parallelism by all-to-all, the only kind that SimuMax models.
    """
    if row.has_value("experts"):
        family: Family = "B200 experts"
        model = load_model(row.read_choice("model_family", MIXTURES))
        assert model.experts is not None, f"{model.name} has experts"
        experts = replace(model.experts, dense_layers=DENSE_LAYERS)
        model = replace(model, layers=row.read_count("layers"), experts=experts)
    else:
        family, model = "B200 dense", build_llama(row)
    layout = ParallelConfig(
        tp=row.read_count("tp"),
        pp=row.read_count("pp"),
        dp_replicate=row.read_count("dp"),
        cp=row.read_count("cp"),
        ep=row.read_count("ep"),
        sequence_parallel=row.read_count("tp") > 1,
        zero=1,
        context_kind="ulysses",
    )
    sequences = (
        row.read_count("micro_batch") * row.read_count("num_microbatches") * row.read_count("dp")
    )
    training = TrainingConfig(row.read_count("seq"), row.read_count("micro_batch"), sequences)
    job = JobConfig(model, layout, training, load_hardware("b200-sxm"))
    return Case(row.table, row.id, family, job, row.read_number("real_iter_ms") * 1e6, "simumax")


# Throughput and memory published by torchtitan -> jobs.


def build_torchtitan(row: PublishedRow) -> Case:
    """FSDP2 with the axis sizes in the row's config; no constant is fitted on these rows.

    The GPUs were H100 of 500 W with 94 or 96 GB of HBM2e, slower than the preset, and A100. A local
    batch is one microbatch, or in a pipeline one microbatch per sequence. The loss is not fused.
    """
    job = build_torchtitan_job(row)
    tokens = job.training.global_batch * job.training.seq_len
    seconds = tokens / (row.read_number("tokens_per_s_per_gpu") * row.read_count("gpus"))
    return Case(row.table, row.id, "torchtitan", job, seconds * 1e9, "torchtitan")


def build_torchtitan_job(row: PublishedRow) -> JobConfig:
    # The number after each axis in the config, such as "FSDP32 TP8 compile"; 1 by default.
    config = row.read_text("config")
    found = [re.search(rf"\b{axis}(\d+)", config) for axis in ("TP", "PP", "CP")]
    tp, pp, cp = (int(size[1]) if size else 1 for size in found)
    layout = ParallelConfig(
        tp=tp,
        pp=pp,
        cp=cp,
        dp_shard=row.read_count("gpus") // (tp * pp * cp),
        zero=3,
        sequence_parallel=tp > 1,
        overlap=frozenset({"dp", "tp"} if "asyncTP" in config else {"dp"}),
    )
    # llama3.1-8B -> llama-3.1-8b.
    model = load_model(re.sub("^llama(?=[23])", "llama-", row.read_text("model").lower()))
    local = row.read_count("local_batch")
    training = TrainingConfig(
        seq_len=row.read_count("seq"),
        micro_batch=1 if pp > 1 else local,
        global_batch=local * layout.dp,
        dtype="fp8" if "float8" in config else "bf16",
        recompute="full" if row.read_text("activation_ckpt") == "full" else "selective",
        framework="fsdp2",
        fused_loss=False,
        compile=any(word in config for word in COMPILED),
        early_stop=True,
        attention_kernel="flash-2",
        fp8_scaling="row" if "rowwise" in config else "tensor",
    )
    return JobConfig(model, layout, training, _find_torchtitan_hardware(row))


COMPILED = ("compile", "float8", "asyncTP")
"""Words for torch.compile in a config: asynchronous tensor parallelism needs it, and torchtitan's
docs/float8.md asks for it."""

TORCHTITAN_GPUS = {"A100": "a100-sxm-80gb", "H100": "h100-sxm", "H200": "h200-sxm"}


def _find_torchtitan_hardware(row: PublishedRow) -> HardwareConfig:
    """H100 of 500 instead of 700 W, whose clock falls about with the root of the power, and HBM2e
    of 2.4 TB/s; or another GPU."""
    word = row.read_text("gpu").partition("-")[0]
    name = row.read_word("gpu", word, TORCHTITAN_GPUS)
    if "HBM2e" not in row.read_text("gpu"):
        return load_hardware(name)
    clock = math.sqrt(500 / 700)
    return replace(load_hardware("h100-sxm"), clock=clock, memory_bytes_per_s=2.4e12)


# Pipelines of the Zero Bubble paper -> jobs.

SCHEDULES: dict[str, Schedule] = {"1F1B": "1f1b", "ZB-1p": "zb-h1", "ZB-2p": "zb-h2"}
"""Interleaved is left out: its 24 chunks have one layer each, and the ends none."""

VOCAB = 50257


def build_zero_bubble(row: PublishedRow) -> JobConfig:
    """Qi et al., tables 3 and 4: Megatron-LM of 2023 on A100, one rank per stage, no recomputation.

    The first and the last stage have one layer fewer. The vocabulary is not given; assumed: GPT-2.
    """
    stages, layers = row.read_count("pp"), row.read_count("layers")
    middle_layers = (layers + 2) // stages
    layout = ParallelConfig(
        pp=stages,
        schedule=row.read_choice("schedule", SCHEDULES),
        layers_per_stage=(middle_layers - 1, *[middle_layers] * (stages - 2), middle_layers - 1),
    )
    sequences = row.read_count("micro_batch") * row.read_count("num_microbatches")
    training = TrainingConfig(
        row.read_count("seq"), row.read_count("micro_batch"), sequences, dtype="fp16",
        activation_dtype="fp16", flash_attention=False, fused_loss=False, dropout=True,
    )  # fmt: skip
    model = build_gpt(
        layers, row.read_count("hidden"), row.read_count("heads"), VOCAB, row.read_count("seq")
    )
    return JobConfig(model, layout, training, load_hardware("a100-sxm-80gb", "roce-200", 8))


# Shapes of the published models.


def build_gpt(layers: int, hidden: int, heads: int, vocab: int, seq_len: int) -> ModelConfig:
    """GPT as Megatron-LM trains it: learned positions, layer norms, biases, tied embeddings."""
    return ModelConfig(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_size=hidden // heads,
        ffn=4 * hidden,
        vocab=vocab,
        positions=seq_len,
    )


def build_llama(row: PublishedRow, tied: bool = False) -> ModelConfig:
    """A Llama model with the sizes in the row."""
    return ModelConfig(
        layers=row.read_count("layers"),
        hidden=row.read_count("hidden"),
        heads=row.read_count("heads"),
        kv_heads=row.read_count("kv_heads"),
        head_size=row.read_count("hidden") // row.read_count("heads"),
        ffn=row.read_count("ffn"),
        vocab=row.read_count("vocab"),
        gated=True,
        tied=tied,
        norm="rms",
        biases=False,
    )


# Ids of the published rows on which the model's constants were fitted.

PRESET_ROWS = (
    *list_busbw_rows(H200, "all_reduce_8", "all_reduce_8_rings"),
    *list_busbw_rows(H200_LARGE, "all_reduce NVLS=1_8"),
    *list_busbw_rows(MI300X, "all_reduce_8"),
)
"""Rows behind the NVLS bandwidth (presets/hardware) and the efficiencies of rings on NVLink 4 and
xGMI (presets/links.toml); the other constants of both are fitted on rows of comm_time.py."""


def list_fitted_memory() -> frozenset[str]:
    """Rows named in presets/frameworks.toml."""
    return frozenset(row for one in load_frameworks().values() for row in one.rows)


def list_fitted_collectives() -> frozenset[str]:
    """Rows behind comm_time.py, presets/links.toml and presets/hardware."""
    return list_fitted_rows().union(ROWS, PRESET_ROWS)
