"""FLOP/s, utilization and days that papers print, from their own times."""

from __future__ import annotations

from stepsplit.analyzer.model.validate.arithmetic import half_digit
from stepsplit.analyzer.model.validate.gather import equality
from stepsplit.analyzer.model.validate.jobs.llm_foundry import llm_foundry
from stepsplit.analyzer.model.validate.jobs.megatron import (
    PEAK_FLOPS_PER_S,
    korthikanti,
    mt_nlg,
)
from stepsplit.analyzer.model.validate.records import Published, Record
from stepsplit.analyzer.model.validate.tables import Check, Row
from stepsplit.analyzer.model.work.conventions import sc21_flops, training_days
from stepsplit.analyzer.model.work.flops import hardware_flops, model_flops
from stepsplit.analyzer.model.work.mfu import mfu

FOUNDRY_PEAKS = {
    ("h100_80gb", "amp_bf16"): 989.5e12, ("h100_80gb", "bf16"): 989.5e12,
    ("h100_80gb", "amp_fp8"): 1979e12,
}  # fmt: skip
"""Of the benchmark's script; its A100 rows take 312e12."""
TOKENS, H100_TFLOPS = 300e9, 989.0


def rate_checks(published: Published) -> tuple[Check, ...]:
    table1 = published.records("megatron_sc21_table1")
    table2 = published.records("megatron_sc21_table2_zero3_vs_ptd")
    table5 = published.records("korthikanti_table5_end_to_end")
    hundred = [
        *published.records("megatron_h100_weak_scaling"),
        *published.records("llama3_405b_table4"),
    ]
    foundry = published.records("llm_foundry_mpt_throughput")
    return (
        equality("SC'21 table 1, percent and aggregate", table1, _table1),
        equality("SC'21 table 2, days of training", table2, _days),
        equality("Korthikanti, MFU and HFU", table5, _korthikanti),
        equality("MT-NLG, FLOP/s", published.records("mtnlg_530b"), _mt_nlg),
        equality("llm-foundry, MFU", foundry, _foundry),
        equality("H100, MFU", hundred, _hundred),
    )


def _table1(row: Record) -> tuple[Row, ...]:
    return _percent(row, "pct_peak"), _aggregate(row)


def _percent(row: Record, column: str, peak: float = PEAK_FLOPS_PER_S / 1e12) -> Row:
    """The printed FLOP/s are whole TFLOP/s: what that leaves open is open here too."""
    rate, printed = row.text("tflops_per_gpu"), row.text(column)
    open_ = half_digit(printed) + 100 * half_digit(rate) / peak
    return Row(
        row.table, row.id, column, float(printed), 100 * float(rate) / peak, "%", tolerance=open_
    )


def _aggregate(row: Record) -> Row:
    rate, gpus = row.text("tflops_per_gpu"), row.count("gpus")
    printed = row.text("aggregate_pflops")
    open_ = half_digit(printed) + half_digit(rate) * gpus / 1000
    return Row(
        row.table, row.id, "aggregate", float(printed), float(rate) * gpus / 1000, "PFLOP/s",
        tolerance=open_,
    )  # fmt: skip


def _days(row: Record) -> tuple[Row, ...]:
    seq_len = row.count("seq")
    step = sc21_flops(row.count("layers"), row.count("hidden"), seq_len, row.count("vocab"), 1)
    found = training_days(
        TOKENS, step / seq_len, row.count("gpus"), row.number("tflops_per_gpu") * 1e12
    )
    said = row.number("days_for_300B_tokens")
    return (Row(row.table, row.id, "300 B tokens", said, found, "days", tolerance=1.0),)


def _korthikanti(row: Record) -> tuple[Row, ...]:
    """From the time with selective recomputation; 0.3 points."""
    case = korthikanti(row)[1]
    world = case.job.layout.world_size
    return tuple(
        Row(
            row.table, row.id, what, row.number(f"{what}_pct_present"),
            100 * (mfu(count(case.job, "C1"), case.step_ns, world, PEAK_FLOPS_PER_S) or 0.0),
            "%", tolerance=0.3,
        )
        for what, count in (("mfu", model_flops), ("hfu", hardware_flops))
    )  # fmt: skip


def _mt_nlg(row: Record) -> tuple[Row, ...]:
    """Whole TFLOP/s, from a time that is printed to a tenth of a second."""
    (case,) = mt_nlg(row)
    found = model_flops(case.job, "C3") / row.number("iter_s") / row.count("gpus") / 1e12
    said = row.number("tflops_per_gpu")
    return (Row(row.table, row.id, "FLOP/s of a GPU", said, found, "TFLOP/s", tolerance=1.0),)


def _foundry(row: Record) -> tuple[Row, ...]:
    """C4; the throughput is printed to whole tokens a second, MFU to a hundredth of a percent."""
    case = llm_foundry(row)
    peak = FOUNDRY_PEAKS.get((row.text("gpu"), row.text("precision")), PEAK_FLOPS_PER_S)
    found = mfu(model_flops(case.job, "C4"), case.step_ns, row.count("gpus"), peak)
    said = row.number("mfu_pct")
    return (Row(
        row.table, row.id, "mfu", said, 100 * (found or 0.0), "%",
        tolerance=0.01 + 0.5 / row.number("tokens_per_s") * said,
    ),)  # fmt: skip


def _hundred(row: Record) -> tuple[Row, ...]:
    column = "mfu_pct" if row.known("mfu_pct") else "bf16_mfu_pct"
    peak = row.number("peak_tflops") if row.known("peak_tflops") else H100_TFLOPS
    return (_percent(row, column, peak),)
