"""Equality checks: published formulas and counts that the model must reproduce."""

from __future__ import annotations

from dataclasses import replace

from stepsplit.analyzer.model.comm_volume import messages_of
from stepsplit.analyzer.model.config import (
    Dtype,
    JobConfig,
    ParallelConfig,
    Recompute,
    Schedule,
    TrainingConfig,
)
from stepsplit.analyzer.model.config_file import hardware, transformer
from stepsplit.analyzer.model.flops import (
    hardware_flops,
    mfu,
    model_flops,
    sc21_flops,
    training_days,
)
from stepsplit.analyzer.model.memory import deepspeed_host_bytes, offload
from stepsplit.analyzer.model.memory_states import (
    States,
    chunks_in_flight,
    input_bytes,
    layer_activations,
    parameter_bytes,
    share,
)
from stepsplit.analyzer.model.parameters import (
    active_parameters,
    attention_weights,
    mlp_weights,
    total_parameters,
)
from stepsplit.analyzer.model.schedule_time import bubble_rate
from stepsplit.analyzer.ops import busbw_factor
from stepsplit.analyzer.validation.published_runs import (
    PEAK_FLOPS_PER_S,
    ccl_bench,
    dense,
    gpt,
    korthikanti,
    llm_foundry,
    mpt,
    mt_nlg,
    sc21_table1,
)
from stepsplit.analyzer.validation.tables import (
    Check,
    Published,
    PublishedRow,
    Row,
    as_printed,
    equality,
    evaluate,
    half_digit,
    parameters,
)

# Activation formulas of Korthikanti et al.: the model's items against the printed closed forms.

SEQ_LEN, VOCAB, TP = 2048, 51200, 8

SIZES = {"22B": (48, 6144, 64, 1, 1, 4), "175B": (96, 12288, 96, 8, 3, 1),
         "530B": (105, 20480, 128, 35, 3, 1), "1T": (128, 25600, 160, 64, 1, 1)}  # fmt: skip
"""Table 3 of the paper: layers, hidden, heads, pp, chunks, micro_batch."""

ALONE, TENSOR = ParallelConfig(), ParallelConfig(tp=TP)

SEQUENCE = ParallelConfig(tp=TP, sequence_parallel=True)

CONFIGURATIONS: dict[str, tuple[ParallelConfig, Recompute]] = {
    "no parallelism": (ALONE, "none"),
    "tensor parallel (baseline)": (TENSOR, "none"),
    "tensor + sequence parallel": (SEQUENCE, "none"),
    "tensor parallel + selective recompute": (TENSOR, "selective"),
    "tensor + sequence parallel + selective recompute": (SEQUENCE, "selective"),
    "full recompute": (TENSOR, "full"),
}


def activation_checks(published: Published) -> tuple[Check, ...]:
    table2 = published.records("korthikanti_table2_activation_formulas")
    figure = published.records("korthikanti_fig1_memory_formula_values")
    return (
        equality("Korthikanti table 2, layer activations", table2, _layers),
        equality("Korthikanti figure 1, memory of a GPU", figure, _figure1),
    )


def _layers(row: PublishedRow) -> tuple[Row, ...]:
    """The table's formulas of one layer's bytes, each for four models."""
    known = row.text("configuration") in CONFIGURATIONS
    return tuple(_layer(row, name) for name in SIZES) if known else ()


def _layer(row: PublishedRow, name: str) -> Row:
    layout, recompute = CONFIGURATIONS[row.text("configuration")]
    job = _job(name, layout)
    job = replace(job, training=replace(job.training, recompute=recompute))
    found = input_bytes(job) if recompute == "full" else layer_activations(job).total_bytes
    symbols = {
        "s": SEQ_LEN, "b": job.training.micro_batch, "h": job.model.hidden, "a": job.model.heads,
        "t": layout.tp,
    }  # fmt: skip
    said = evaluate(row.text("bytes_per_layer"), symbols)
    return Row(
        row.table, f"{row.id} {name}", "bytes of a layer", said, float(found), "bytes",
        tolerance=1e-6 * said,
    )  # fmt: skip


def _figure1(row: PublishedRow) -> tuple[Row, ...]:
    """The figure counts only weight matrices of layers, and the first stage's microbatches."""
    row.choice("model", SIZES)
    name = row.text("model")
    plain, sequence = _job(name, _pipeline(name)), _job(name, _pipeline(name, sequence=True))
    sequence = replace(sequence, training=replace(sequence.training, recompute="selective"))
    values = (
        ("params_opt_GiB", _states_bytes(plain)),
        ("act_GiB_no_recompute_TP8", _held_bytes(plain)),
        ("act_GiB_selective_SP", _held_bytes(sequence)),
    )
    return tuple(
        Row(
            row.table, row.id, column, row.number(column), found / 2**30, "GiB",
            tolerance=1e-6 * row.number(column),
        )
        for column, found in values
    )  # fmt: skip


def _states_bytes(job: JobConfig) -> float:
    model, each = job.model, parameter_bytes(job.training)
    weights = attention_weights(model).total + mlp_weights(model, model.ffn).total
    whole = each.weights + each.gradients + each.optimizer
    return whole * weights * model.layers / (job.parallel.tp * job.parallel.pp)


def _held_bytes(job: JobConfig) -> float:
    layers = job.model.layers / (job.parallel.pp * job.parallel.chunks)
    return chunks_in_flight(job, 0) * layers * layer_activations(job).total_bytes


def _pipeline(name: str, sequence: bool = False) -> ParallelConfig:
    pp, chunks = SIZES[name][3:5]
    schedule: Schedule = "interleaved" if chunks > 1 else "1f1b"
    return ParallelConfig(
        tp=TP, pp=pp, schedule=schedule, chunks=chunks, sequence_parallel=sequence
    )


def _job(name: str, layout: ParallelConfig) -> JobConfig:
    layers, hidden, heads, _, _, micro_batch = SIZES[name]
    recipe = TrainingConfig(
        SEQ_LEN, micro_batch, 512 * micro_batch, dtype="fp16", activation_dtype="fp16",
        flash_attention=False, dropout=True,
    )  # fmt: skip
    return JobConfig(
        gpt(layers, hidden, heads, VOCAB, SEQ_LEN), layout, recipe, hardware("a100-sxm-80gb")
    )


# Bubble rates of schedules against those that Qi et al. computed from profiled times.

COLUMNS = {
    "bubble_1F1B": "1f1b",
    "bubble_1F1B_I": "interleaved",
    "bubble_ZB_H1": "zb-h1",
    "bubble_ZB_H2": "zb-h2",
    "bubble_ZB_1p": "zb-h1",
}
"""ZB-1p has the order of ZB-H1 here; ZB-2p is found by search and has no closed form."""

BUBBLE_TOLERANCE = 1e-4


def bubble_checks(published: Published) -> tuple[Check, ...]:
    records = published.records("zero_bubble_table5_9_bubble_rates")
    return (equality("Zero Bubble table 5, bubble rates", records, _rates),)


def _rates(row: PublishedRow) -> tuple[Row, ...]:
    return tuple(_rate(row, column) for column in COLUMNS)


def _rate(row: PublishedRow, column: str) -> Row:
    schedule = COLUMNS[column]
    chunks = row.count("vpp_max_chunks") if schedule == "interleaved" else 1
    times = row.number("TF_ms") * 1e6, row.number("TB_ms") * 1e6, row.number("TW_ms") * 1e6
    found = bubble_rate(
        schedule, row.count("pp"), row.count("num_microbatches"), times, chunks,
        row.number("Tcomm_ms") * 1e6,
    )  # fmt: skip
    assert found is not None, f"{row.id}: no closed form of {schedule}"
    said = row.number(column)
    return Row(row.table, row.id, column, said, found, "ratio", tolerance=BUBBLE_TOLERANCE)


# Numbers of parameters.

QUANTITIES = ("params_total", "params_active")

PRESETS = {"DeepSeek-V3": "deepseek-v3"}


def count_checks(published: Published) -> tuple[Check, ...]:
    sc21 = published.records("megatron_sc21_table1")
    foundry = published.records("llm_foundry_mpt_throughput")
    return (
        equality("SC'21 table 1, parameters", sc21, _sc21),
        equality("llm-foundry, parameters", foundry, _mpt),
        equality("DeepSeek-V3, parameters", published.records("published_scalars"), _scalar),
    )


def _sc21(row: PublishedRow) -> tuple[Row, ...]:
    printed, found = row.text("params_B"), total_parameters(sc21_table1(row)[0].job.model)
    return (Row(
        row.table, row.id, "parameters", float(printed), found / 1e9, "billion",
        tolerance=half_digit(printed),
    ),)  # fmt: skip


def _mpt(row: PublishedRow) -> tuple[Row, ...]:
    said, found = row.number("num_params"), float(total_parameters(mpt(row)))
    return (Row(row.table, row.id, "parameters", said, found, "parameters"),)


def _scalar(row: PublishedRow) -> tuple[Row, ...]:
    """Printed as 671B and 37B; the active parameters exclude the embedding table."""
    what = row.text("quantity")
    if what not in QUANTITIES:
        return ()
    said = row.number("value")
    model = transformer(row.choice("model", PRESETS))
    found = total_parameters(model)
    if what == "params_active":
        found = active_parameters(model) - model.vocab * model.hidden
    return (Row(row.table, row.id, what, said, float(found), "parameters", tolerance=0.5e9),)


# DeepSpeed's own memory estimators: their formulas and their printed results.

PARAMETERS, LARGEST, DEEPSPEED_RANKS = 10**12, 10**9, 64


def deepspeed_checks(published: Published) -> tuple[Check, ...]:
    formulas = published.records("deepspeed_estimator_formulas")
    outputs = published.records("deepspeed_estimator_outputs")
    return (
        equality("DeepSpeed estimators, formulas", formulas, _formula),
        equality("DeepSpeed estimators, as printed", outputs, _outputs),
    )


def _formula(row: PublishedRow) -> tuple[Row, ...]:
    """Bytes on a GPU for PARAMETERS parameters, LARGEST of them in the largest layer."""
    symbols = {"P": PARAMETERS, "N": DEEPSPEED_RANKS, "largest": LARGEST}
    said = evaluate(row.text("gpu_bytes"), symbols)
    moved = _moved(row.text("offload"))
    found = _gpu_bytes(row.text("stage"), moved, PARAMETERS, LARGEST, DEEPSPEED_RANKS)
    return (Row(row.table, row.id, "bytes on a GPU", said, float(found), "bytes", tolerance=1.0),)


def _outputs(row: PublishedRow) -> tuple[Row, ...]:
    return _gpu(row), _host(row)


def _gpu(row: PublishedRow) -> Row:
    """The estimator prints GiB as "GB"."""
    ranks = row.count("gpus_per_node") * row.count("nodes")
    found = _gpu_bytes(
        row.text("stage"), _moved(row.text("options")), row.count("total_params"),
        row.count("largest_layer_params"), ranks,
    )  # fmt: skip
    return _printed(row, "per_gpu_GB_as_printed", "on a GPU", found)


def _host(row: PublishedRow) -> Row:
    nodes, zero = row.count("nodes"), int(row.text("stage")[-1])
    largest = row.count("largest_layer_params") if row.known("zero_init") else None
    found = deepspeed_host_bytes(
        row.count("total_params"), row.count("gpus_per_node"), nodes, zero,
        _moved(row.text("options")), largest,
    )  # fmt: skip
    return _printed(row, "per_cpu_GB_as_printed", "on the host", found)


def _printed(row: PublishedRow, column: str, what: str, found: int) -> Row:
    """The parameters are rounded to a million: tolerance 0.1 % plus half of the last digit."""
    said = row.number(column)
    open_ = half_digit(row.text(column)) + 1e-3 * said
    return Row(row.table, row.id, what, said, found / 2**30, "GiB", tolerance=open_)


def _moved(options: str) -> frozenset[str]:
    found = {"optimizer"} if "optimizer=cpu" in options else set()
    return frozenset(found | ({"parameters"} if "param" in options else set()))


def _gpu_bytes(stage: str, moved: frozenset[str], count: int, largest: int, ranks: int) -> int:
    recipe = TrainingConfig(
        seq_len=1, micro_batch=1, global_batch=1, dtype="fp16", gradient_dtype="fp16",
        framework="deepspeed", offload=moved,
    )  # fmt: skip
    zero = int(stage[-1])
    states: States = share(count, ranks, parameter_bytes(recipe), recipe, zero)
    gathered = 4 * largest if zero >= 3 else 0
    return offload(states, recipe).states.total_bytes + gathered


# FLOP/s, utilization and days in papers, computed from their published times.

FOUNDRY_PEAKS = {
    ("h100_80gb", "amp_bf16"): 989.5e12, ("h100_80gb", "bf16"): 989.5e12,
    ("h100_80gb", "amp_fp8"): 1979e12,
}  # fmt: skip
"""Peak FLOP/s in the benchmark's script; its A100 rows use 312e12."""

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


def _table1(row: PublishedRow) -> tuple[Row, ...]:
    return _percent(row, "pct_peak"), _aggregate(row)


def _percent(row: PublishedRow, column: str, peak: float = PEAK_FLOPS_PER_S / 1e12) -> Row:
    """The tolerance includes the rounding of the published rate to whole TFLOP/s."""
    rate, printed = row.text("tflops_per_gpu"), row.text(column)
    open_ = half_digit(printed) + 100 * half_digit(rate) / peak
    return Row(
        row.table, row.id, column, float(printed), 100 * float(rate) / peak, "%", tolerance=open_
    )


def _aggregate(row: PublishedRow) -> Row:
    rate, gpus = row.text("tflops_per_gpu"), row.count("gpus")
    printed = row.text("aggregate_pflops")
    open_ = half_digit(printed) + half_digit(rate) * gpus / 1000
    return Row(
        row.table, row.id, "aggregate", float(printed), float(rate) * gpus / 1000, "PFLOP/s",
        tolerance=open_,
    )  # fmt: skip


def _days(row: PublishedRow) -> tuple[Row, ...]:
    seq_len = row.count("seq")
    step = sc21_flops(row.count("layers"), row.count("hidden"), seq_len, row.count("vocab"), 1)
    found = training_days(
        TOKENS, step / seq_len, row.count("gpus"), row.number("tflops_per_gpu") * 1e12
    )
    said = row.number("days_for_300B_tokens")
    return (Row(row.table, row.id, "300 B tokens", said, found, "days", tolerance=1.0),)


def _korthikanti(row: PublishedRow) -> tuple[Row, ...]:
    """From the time with selective recomputation; tolerance 0.3 points."""
    case = korthikanti(row)[1]
    world = case.job.parallel.world_size
    return tuple(
        Row(
            row.table, row.id, what, row.number(f"{what}_pct_present"),
            100 * (mfu(count(case.job, "C1"), case.step_ns, world, PEAK_FLOPS_PER_S) or 0.0),
            "%", tolerance=0.3,
        )
        for what, count in (("mfu", model_flops), ("hfu", hardware_flops))
    )  # fmt: skip


def _mt_nlg(row: PublishedRow) -> tuple[Row, ...]:
    """Printed as whole TFLOP/s, from a time in tenths of a second."""
    (case,) = mt_nlg(row)
    found = model_flops(case.job, "C3") / row.number("iter_s") / row.count("gpus") / 1e12
    said = row.number("tflops_per_gpu")
    return (Row(row.table, row.id, "FLOP/s of a GPU", said, found, "TFLOP/s", tolerance=1.0),)


def _foundry(row: PublishedRow) -> tuple[Row, ...]:
    """Convention C4; the throughput is printed in whole tokens/s, MFU in 0.01 %."""
    case = llm_foundry(row)
    peak = FOUNDRY_PEAKS.get((row.text("gpu"), row.text("precision")), PEAK_FLOPS_PER_S)
    found = mfu(model_flops(case.job, "C4"), case.step_ns, row.count("gpus"), peak)
    said = row.number("mfu_pct")
    return (Row(
        row.table, row.id, "mfu", said, 100 * (found or 0.0), "%",
        tolerance=0.01 + 0.5 / row.number("tokens_per_s") * said,
    ),)  # fmt: skip


def _hundred(row: PublishedRow) -> tuple[Row, ...]:
    column = "mfu_pct" if row.known("mfu_pct") else "bf16_mfu_pct"
    peak = row.number("peak_tflops") if row.known("peak_tflops") else H100_TFLOPS
    return (_percent(row, column, peak),)


# Bytes of weights, gradients and optimizer states against the tables of their authors.

PAPER = TrainingConfig(
    seq_len=1, micro_batch=1, global_batch=1, dtype="fp16", gradient_dtype="fp16",
    framework="zero-paper",
)  # fmt: skip

STAGES = {"baseline": 0, "zero1": 1, "zero2": 2, "zero3": 3}

DTYPES: dict[str, Dtype] = {"fp16": "fp16", "bf16": "bf16", "fp32": "fp32"}

MANY = 10**12
"""Enough parameters to make the rounding to whole bytes negligible."""


def states_checks(published: Published) -> tuple[Check, ...]:
    states = published.records("zero_table1_model_states")
    largest = published.records("zero_table2_max_model")
    megatron = published.records("megatron_dist_optimizer_bytes")
    return (
        equality("ZeRO table 1, model states", states, _zero_table1),
        equality("ZeRO table 2, largest model", largest, _zero_table2),
        equality("Megatron-LM, bytes a parameter", megatron, _megatron),
    )


def _zero_table1(row: PublishedRow) -> tuple[Row, ...]:
    """Decimal GB on each of the dp ranks."""
    count, ranks = row.count("params"), row.count("dp")
    zero = row.choice("stage", STAGES)
    found = share(count, ranks, parameter_bytes(PAPER), PAPER, zero).total_bytes / 1e9
    printed = row.text("GB_decimal")
    predicted = as_printed(found, printed)
    return (Row(row.table, row.id, "model states", float(printed), predicted, "GB"),)


def _zero_table2(row: PublishedRow) -> tuple[Row, ...]:
    return tuple(_largest(row, scheme) for scheme in STAGES)


def _largest(row: PublishedRow, scheme: str) -> Row:
    """The largest model whose states, sharded over gpus / mp ranks, fill a GPU, times mp.

    The paper rounds to a tenth of a billion before the multiplication.
    """
    ranks, mp = row.count("gpus") // row.count("mp"), row.count("mp")
    held = share(MANY, ranks, parameter_bytes(PAPER), PAPER, STAGES[scheme]).total_bytes
    alone = round(row.number("gpu_mem_GB") / (held / MANY), 1) * 1e9
    printed = row.text(f"max_theory_{scheme}")
    unit = parameters(f"1{printed[-1]}")
    predicted = as_printed(alone * mp / unit, printed[:-1]) * unit
    return Row(row.table, row.id, scheme, parameters(printed), predicted, "parameters")


def _megatron(row: PublishedRow) -> tuple[Row, ...]:
    """Both columns, the distributed one for 2 and 64 ranks (d)."""
    recipe = TrainingConfig(
        seq_len=1, micro_batch=1, global_batch=1, framework="megatron",
        dtype=row.choice("param_dtype", DTYPES), gradient_dtype=row.choice("grad_dtype", DTYPES),
    )  # fmt: skip
    each, cases = parameter_bytes(recipe), [("non_distributed", 1, 0)]
    cases += [("distributed", ranks, 1) for ranks in (2, 64)]
    return tuple(
        Row(
            row.table, f"{row.id}_d{ranks}", column, evaluate(row.text(column), {"d": ranks}),
            share(MANY, ranks, each, recipe, zero).total_bytes / MANY, "bytes a parameter",
        )
        for column, ranks, zero in cases
    )  # fmt: skip


# Bus bandwidth factors of nccl-tests, and message volumes in recorded traces.

OPS = {
    "AllReduce": "all_reduce", "ReduceScatter": "reduce_scatter", "AllGather": "all_gather",
    "Broadcast": "broadcast", "Reduce": "reduce", "AlltoAll": "all_to_all",
}  # fmt: skip

WIRE_RANKS = (2, 3, 8, 64, 1024)

VOLUMES = {
    "all_reduce": "vol_allreduce_GB",
    "all_gather": "vol_allgather_GB",
    "reduce_scatter": "vol_reducescatter_GB",
}

LEAST_GB = 0.01
"""Smaller volumes are skipped: norms and losses differ between versions of torchtitan."""

WIRE_TOLERANCE = 1e-3


def wire_checks(published: Published) -> tuple[Check, ...]:
    factors = published.records("nccl_busbw_definitions")
    traces = [row for row in published.records("ccl_bench_training_traces") if dense(row)]
    return (
        equality("nccl-tests, busbw factors", factors, _factors),
        equality("CCL-Bench, dense message volumes", traces, _volumes),
    )


def _factors(row: PublishedRow) -> tuple[Row, ...]:
    return tuple(_factor(row, ranks) for ranks in WIRE_RANKS)


def _factor(row: PublishedRow, ranks: int) -> Row:
    said = evaluate(row.text("busbw_factor"), {"n": ranks})
    found = busbw_factor(row.choice("collective", OPS), ranks)
    case = f"{row.id}_{ranks}"
    return Row(row.table, case, "busbw / algbw", said, found, "ratio", tolerance=1e-12)


def _volumes(row: PublishedRow) -> tuple[Row, ...]:
    """Input bytes of a rank of the first stage per step, as in the traces; tolerance 0.1 %."""
    sums = dict.fromkeys(VOLUMES, 0)
    for message in messages_of(ccl_bench(row)):
        if message.stage == 0 and message.op in sums:
            sums[message.op] += message.count * message.input_bytes
    return tuple(
        Row(
            row.table, row.id, op, row.number(column), sums[op] / 1e9, "GB",
            tolerance=WIRE_TOLERANCE * row.number(column),
        )
        for op, column in VOLUMES.items()
        if row.known(column) and row.number(column) > LEAST_GB
    )  # fmt: skip
