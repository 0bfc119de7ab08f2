"""Published steps of Megatron-LM on A100 -> the jobs behind them.

All of them: GPT, 16-bit, Adam, attention that stores its matrix of scores, dropout, 8 GPUs a node
with one HDR adapter each. Communication overlaps compute only where that is said.
"""

from __future__ import annotations

from dataclasses import replace

from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.spec.layout import Layout
from stepsplit.analyzer.model.spec.presets import hardware
from stepsplit.analyzer.model.spec.recipe import Recipe
from stepsplit.analyzer.model.validate.jobs.case import Case, gpt
from stepsplit.analyzer.model.validate.records import Record
from stepsplit.analyzer.model.work.conventions import sc21_flops
from stepsplit.analyzer.model.work.flops import model_flops

PEAK_FLOPS_PER_S = 312e12


def sc21_table1(row: Record) -> tuple[Case, ...]:
    """Narayanan et al., SC'21, table 1: all layers recomputed, interleaved where chunks say so.

    Pipeline messages are scattered and gathered (section 4.1).
    """
    layout = replace(_layout(row, row.count("vpp_chunks")), scatter_gather=True)
    job = _job(row, layout, _recipe(row, row.count("micro_batch")))
    return (Case(row.table, row.id, "A100 Megatron", job, _sc21_step_ns(row)),)


def sc21_table2(row: Record) -> tuple[Case, ...]:
    """Table 2, rows of PTD-P: 1F1B, for throughput falls with the GPUs as (p-1)/m of one chunk."""
    if row.text("scheme") != "PTD-P":
        return ()
    dp = row.count("gpus") // (row.count("tp") * row.count("pp"))
    layout = Layout(tp=row.count("tp"), pp=row.count("pp"), dp_replicate=dp, scatter_gather=True)
    job = _job(row, layout, _recipe(row, row.count("micro_batch")))
    return (Case(row.table, row.id, "A100 Megatron", job, _sc21_step_ns(row)),)


def korthikanti(row: Record) -> tuple[Case, ...]:
    """Korthikanti et al., table 5: all recomputed, and attention alone with sequence parallelism.

    Gradients are fp32: the paper's figure 1 counts 18 bytes a parameter.
    """
    layout = replace(_layout(row, row.count("vpp_chunks")), scatter_gather=True)
    recipe = replace(_recipe(row, row.count("micro_batch")), gradient_dtype="fp32")
    full = _job(row, layout, recipe)
    selective = _job(
        row, replace(layout, sequence_parallel=True), replace(recipe, recompute="selective")
    )
    return tuple(
        Case(row.table, f"{row.id}_{name}", "A100 Megatron", job, row.number(column) * 1e9)
        for name, job, column in (
            ("full", full, "iter_s_full_recompute_noSP"),
            ("selective", selective, "iter_s_selective_SP"),
        )
    )


def mt_nlg(row: Record) -> tuple[Case, ...]:
    """Smith et al., section 2.4: bf16, 1F1B of DeepSpeed, microbatches of one sequence.

    DeepSpeed adds bf16 gradients up in fp32.
    """
    recipe = replace(
        _recipe(row, 1), dtype="bf16", gradient_dtype="fp32", activation_dtype="bf16",
        framework="deepspeed",
    )  # fmt: skip
    job = _job(row, _layout(row, 1), recipe)
    return (Case(row.table, row.id, "A100 Megatron", job, row.number("iter_s") * 1e9),)


def megascale(row: Record) -> tuple[Case, ...]:
    """Jiang et al., table 2 and figure 9, the rows of Megatron-LM.

    The paper does not say what is recomputed. 53 % of the peak as MFU leaves no room for all of
    it (71 % with it), and flash attention is named among MegaScale's own gains: so attention alone
    is, with sequence parallelism, and the optimizer is spread over data parallelism.
    """
    if row.text("system") != "Megatron-LM":
        return ()
    layout = replace(_layout(row, row.count("vpp_chunks")), sequence_parallel=True, zero=1)
    recipe = replace(
        _recipe(row, 1), dtype="bf16", gradient_dtype="fp32", activation_dtype="bf16",
        recompute="selective",
    )  # fmt: skip
    job = _job(row, layout, recipe)
    return (Case(row.table, row.id, "A100 Megatron", job, _megascale_step_ns(row, job)),)


def tensor_2020(row: Record) -> tuple[Case, ...]:
    """Megatron-LM's README of 2020: tensor and data parallelism; a replica's batch at once.

    Its kernels were not fused yet (Narayanan et al., SC'21, section 4.2, tells of that later), and
    the 8B model's gradients cannot but overlap: 2.2 GB over one adapter each take 0.17 s, and 128
    replicas cost 0.04 s more than one.
    """
    layout = Layout(tp=row.count("tp"), dp_replicate=row.count("dp"), overlap=frozenset({"dp"}))
    recipe = _recipe(row, row.count("global_batch") // row.count("dp"))
    recipe = replace(recipe, framework="ddp")
    job = _job(row, layout, recipe, vocab=51200)
    return (Case(row.table, row.id, "A100 Megatron", job, row.number("iter_ms") * 1e6),)


def _layout(row: Record, chunks: int) -> Layout:
    return Layout(
        tp=row.count("tp"),
        pp=row.count("pp"),
        dp_replicate=row.count("dp"),
        schedule="interleaved" if chunks > 1 else "1f1b",
        chunks=chunks,
    )


def _recipe(row: Record, micro_batch: int) -> Recipe:
    return Recipe(
        seq_len=row.count("seq"),
        micro_batch=micro_batch,
        global_batch=row.count("global_batch"),
        dtype="fp16",
        gradient_dtype="fp16",
        activation_dtype="fp16",
        recompute="full",
        flash_attention=False,
        dropout=True,
        fused_loss=False,
    )


def _job(row: Record, layout: Layout, recipe: Recipe, vocab: int | None = None) -> Job:
    words = row.count("vocab") if vocab is None else vocab
    model = gpt(row.count("layers"), row.count("hidden"), row.count("heads"), words, recipe.seq_len)
    return Job(model, layout, recipe, hardware("a100-sxm-80gb", "ib-hdr-200", 8))


def _sc21_step_ns(row: Record) -> float:
    """Eq. 3 over the published FLOP/s, which count the recomputation."""
    sizes = (row.count(name) for name in ("layers", "hidden", "seq", "vocab", "global_batch"))
    return sc21_flops(*sizes) / (row.count("gpus") * row.number("tflops_per_gpu") * 1e12) * 1e9


def _megascale_step_ns(row: Record, job: Job) -> float:
    """The printed time; figure 9 prints MFU alone, which counts no recomputation."""
    if row.known("iter_s"):
        return row.number("iter_s") * 1e9
    rate = row.number("mfu_pct") / 100 * PEAK_FLOPS_PER_S * row.count("gpus")
    return model_flops(job, "C1") / rate * 1e9
