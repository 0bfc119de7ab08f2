"""Equality checks: published formulas and counts that the model must reproduce."""

from __future__ import annotations

from dataclasses import replace

from stepsplit.analyzer.model.comm_volume import list_comm_ops
from stepsplit.analyzer.model.config import (
    JobConfig,
    ParallelConfig,
    Recompute,
    StoredDtype,
    TrainingConfig,
)
from stepsplit.analyzer.model.hardware_config import load_hardware
from stepsplit.analyzer.model.memory_states import (
    States,
    compute_input_bytes,
    compute_layer_activations,
    compute_parameter_bytes,
    count_chunks_in_flight,
    shard_states,
)
from stepsplit.analyzer.model.model_table import load_model
from stepsplit.analyzer.model.offload import apply_offload, estimate_deepspeed_host_bytes
from stepsplit.analyzer.model.parameters import (
    compute_mfu,
    compute_sc21_flops,
    compute_training_days,
    count_active_parameters,
    count_attention_weights,
    count_hardware_flops,
    count_mlp_weights,
    count_model_flops,
    count_parameters,
)
from stepsplit.analyzer.model.schedule_names import Schedule
from stepsplit.analyzer.model.schedule_time import compute_bubble_rate
from stepsplit.analyzer.ops import compute_busbw_factor
from stepsplit.analyzer.validation.published_runs import (
    PEAK_FLOPS_PER_S,
    build_ccl_bench,
    build_gpt,
    build_korthikanti,
    build_llm_foundry,
    build_mpt,
    build_mt_nlg,
    build_sc21_table1,
    is_dense,
)
from stepsplit.analyzer.validation.tables import (
    Check,
    Published,
    PublishedRow,
    ValidationRow,
    check_equality,
    compute_half_digit,
    evaluate,
    parse_count,
    round_as_printed,
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


def check_activations(published: Published) -> tuple[Check, ...]:
    table2 = published.read_records("korthikanti_table2_activation_formulas")
    figure = published.read_records("korthikanti_fig1_memory_formula_values")
    return (
        check_equality("Korthikanti table 2, layer activations", table2, _compare_layers),
        check_equality("Korthikanti figure 1, memory of a GPU", figure, _compare_figure1),
    )


def _compare_layers(row: PublishedRow) -> tuple[ValidationRow, ...]:
    """The table's formulas of one layer's bytes, each for four models."""
    if row.read_text("configuration") not in CONFIGURATIONS:
        return ()
    layout, recompute = CONFIGURATIONS[row.read_text("configuration")]
    rows = []
    for name in SIZES:
        job = _build_job(name, layout)
        job = replace(job, training=replace(job.training, recompute=recompute))
        predicted = (
            compute_input_bytes(job)
            if recompute == "full"
            else compute_layer_activations(job).total_bytes
        )
        symbols = {
            "s": SEQ_LEN, "b": job.training.micro_batch, "h": job.model.hidden,
            "a": job.model.heads, "t": layout.tp,
        }  # fmt: skip
        published = evaluate(row.read_text("bytes_per_layer"), symbols)
        rows.append(
            row.compare(
                "bytes of a layer",
                published,
                float(predicted),
                "bytes",
                tolerance=1e-6 * published,
                case=f"{row.id} {name}",
            )
        )
    return tuple(rows)


def _compare_figure1(row: PublishedRow) -> tuple[ValidationRow, ...]:
    """The figure counts only weight matrices of layers, and the first stage's microbatches."""
    row.read_choice("model", SIZES)
    name = row.read_text("model")
    plain, sequence = (
        _build_job(name, _build_pipeline(name)),
        _build_job(name, _build_pipeline(name, sequence=True)),
    )
    sequence = replace(sequence, training=replace(sequence.training, recompute="selective"))
    model, each = plain.model, compute_parameter_bytes(plain.training)
    weights = count_attention_weights(model).total + count_mlp_weights(model, model.ffn).total
    total_bytes = each.weights + each.gradients + each.optimizer
    values = (
        (
            "params_opt_GiB",
            total_bytes * weights * model.layers / (plain.parallel.tp * plain.parallel.pp),
        ),
        ("act_GiB_no_recompute_TP8", _compute_activation_bytes(plain)),
        ("act_GiB_selective_SP", _compute_activation_bytes(sequence)),
    )
    return tuple(
        row.compare(
            column,
            row.read_number(column),
            found / 2**30,
            "GiB",
            tolerance=1e-6 * row.read_number(column),
        )
        for column, found in values
    )


def _compute_activation_bytes(job: JobConfig) -> float:
    layers = job.model.layers / (job.parallel.pp * job.parallel.chunks)
    return count_chunks_in_flight(job, 0) * layers * compute_layer_activations(job).total_bytes


def _build_pipeline(name: str, sequence: bool = False) -> ParallelConfig:
    pp, chunks = SIZES[name][3:5]
    schedule: Schedule = "interleaved" if chunks > 1 else "1f1b"
    return ParallelConfig(
        tp=TP, pp=pp, schedule=schedule, chunks=chunks, sequence_parallel=sequence
    )


def _build_job(name: str, layout: ParallelConfig) -> JobConfig:
    layers, hidden, heads, _, _, micro_batch = SIZES[name]
    training = TrainingConfig(
        SEQ_LEN, micro_batch, 512 * micro_batch, dtype="fp16", activation_dtype="fp16",
        flash_attention=False, dropout=True,
    )  # fmt: skip
    return JobConfig(
        build_gpt(layers, hidden, heads, VOCAB, SEQ_LEN),
        layout,
        training,
        load_hardware("a100-sxm-80gb"),
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


def check_bubbles(published: Published) -> tuple[Check, ...]:
    records = published.read_records("zero_bubble_table5_9_bubble_rates")
    return (check_equality("Zero Bubble table 5, bubble rates", records, _compare_rates),)


def _compare_rates(row: PublishedRow) -> tuple[ValidationRow, ...]:
    times = (
        row.read_number("TF_ms") * 1e6,
        row.read_number("TB_ms") * 1e6,
        row.read_number("TW_ms") * 1e6,
    )
    rows = []
    for column, schedule in COLUMNS.items():
        chunks = row.read_count("vpp_max_chunks") if schedule == "interleaved" else 1
        predicted = compute_bubble_rate(
            schedule, row.read_count("pp"), row.read_count("num_microbatches"), times, chunks,
            row.read_number("Tcomm_ms") * 1e6,
        )  # fmt: skip
        assert predicted is not None, f"{row.id}: no closed form of {schedule}"
        published = row.read_number(column)
        rows.append(row.compare(column, published, predicted, "ratio", tolerance=BUBBLE_TOLERANCE))
    return tuple(rows)


# Numbers of parameters.

QUANTITIES = ("params_total", "params_active")

PRESETS = {"DeepSeek-V3": "deepseek-v3"}


def check_counts(published: Published) -> tuple[Check, ...]:
    sc21 = published.read_records("megatron_sc21_table1")
    foundry = published.read_records("llm_foundry_mpt_throughput")
    return (
        check_equality("SC'21 table 1, parameters", sc21, _compare_sc21_parameters),
        check_equality("llm-foundry, parameters", foundry, _compare_mpt_parameters),
        check_equality(
            "DeepSeek-V3, parameters", published.read_records("published_scalars"), _compare_scalar
        ),
    )


def _compare_sc21_parameters(row: PublishedRow) -> tuple[ValidationRow, ...]:
    printed = row.read_text("params_B")
    predicted = count_parameters(build_sc21_table1(row)[0].job.model) / 1e9
    tolerance = compute_half_digit(printed)
    return (row.compare("parameters", float(printed), predicted, "billion", tolerance=tolerance),)


def _compare_mpt_parameters(row: PublishedRow) -> tuple[ValidationRow, ...]:
    published, predicted = row.read_number("num_params"), float(count_parameters(build_mpt(row)))
    return (row.compare("parameters", published, predicted, "parameters"),)


def _compare_scalar(row: PublishedRow) -> tuple[ValidationRow, ...]:
    """Printed as 671B and 37B; the active parameters exclude the embedding table."""
    what = row.read_text("quantity")
    if what not in QUANTITIES:
        return ()
    published = row.read_number("value")
    model = load_model(row.read_choice("model", PRESETS))
    predicted = count_parameters(model)
    if what == "params_active":
        predicted = count_active_parameters(model) - model.vocab * model.hidden
    return (row.compare(what, published, float(predicted), "parameters", tolerance=0.5e9),)


# DeepSpeed's own memory estimators: their formulas and their printed results.

PARAMETERS, LARGEST, DEEPSPEED_RANKS = 10**12, 10**9, 64


def check_deepspeed(published: Published) -> tuple[Check, ...]:
    formulas = published.read_records("deepspeed_estimator_formulas")
    outputs = published.read_records("deepspeed_estimator_outputs")
    return (
        check_equality("DeepSpeed estimators, formulas", formulas, _compare_formula),
        check_equality("DeepSpeed estimators, as printed", outputs, _compare_outputs),
    )


def _compare_formula(row: PublishedRow) -> tuple[ValidationRow, ...]:
    """Bytes on a GPU for PARAMETERS parameters, LARGEST of them in the largest layer."""
    symbols = {"P": PARAMETERS, "N": DEEPSPEED_RANKS, "largest": LARGEST}
    published = evaluate(row.read_text("gpu_bytes"), symbols)
    offloaded = _parse_offload(row.read_text("offload"))
    predicted = _compute_gpu_bytes(
        row.read_text("stage"), offloaded, PARAMETERS, LARGEST, DEEPSPEED_RANKS
    )
    return (row.compare("bytes on a GPU", published, float(predicted), "bytes", tolerance=1.0),)


def _compare_outputs(row: PublishedRow) -> tuple[ValidationRow, ...]:
    # The estimator prints GiB as "GB".
    ranks_per_node, nodes = row.read_count("gpus_per_node"), row.read_count("nodes")
    offloaded, stage = _parse_offload(row.read_text("options")), row.read_text("stage")
    count, largest = row.read_count("total_params"), row.read_count("largest_layer_params")
    on_gpu = _compute_gpu_bytes(stage, offloaded, count, largest, ranks_per_node * nodes)
    of_layer = largest if row.values.get("zero_init") == "1" else None
    on_host = estimate_deepspeed_host_bytes(
        count, ranks_per_node, nodes, int(stage[-1]), offloaded, of_layer
    )
    return (
        _compare_printed(row, "per_gpu_GB_as_printed", "on a GPU", on_gpu),
        _compare_printed(row, "per_cpu_GB_as_printed", "on the host", on_host),
    )


def _compare_printed(
    row: PublishedRow, column: str, what: str, predicted_bytes: int
) -> ValidationRow:
    """The parameters are rounded to a million: tolerance 0.1 % plus half of the last digit."""
    published = row.read_number(column)
    tolerance = compute_half_digit(row.read_text(column)) + 1e-3 * published
    return row.compare(what, published, predicted_bytes / 2**30, "GiB", tolerance=tolerance)


def _parse_offload(options: str) -> frozenset[str]:
    offloaded = {"optimizer"} if "optimizer=cpu" in options else set()
    return frozenset(offloaded | ({"parameters"} if "param" in options else set()))


def _compute_gpu_bytes(
    stage: str, offloaded: frozenset[str], count: int, largest: int, ranks: int
) -> int:
    training = TrainingConfig(
        seq_len=1, micro_batch=1, global_batch=1, dtype="fp16", gradient_dtype="fp16",
        framework="deepspeed", offload=offloaded,
    )  # fmt: skip
    zero = int(stage[-1])
    states: States = shard_states(count, ranks, compute_parameter_bytes(training), training, zero)
    gathered = 4 * largest if zero >= 3 else 0
    return apply_offload(states, training).states.total_bytes + gathered


# FLOP/s, utilization and days in papers, computed from their published times.

FOUNDRY_PEAKS = {
    ("h100_80gb", "amp_bf16"): 989.5e12, ("h100_80gb", "bf16"): 989.5e12,
    ("h100_80gb", "amp_fp8"): 1979e12,
}  # fmt: skip
"""Peak FLOP/s in the benchmark's script; its A100 rows use 312e12."""

TOKENS, H100_TFLOPS = 300e9, 989.0


def check_rates(published: Published) -> tuple[Check, ...]:
    table1 = published.read_records("megatron_sc21_table1")
    table2 = published.read_records("megatron_sc21_table2_zero3_vs_ptd")
    table5 = published.read_records("korthikanti_table5_end_to_end")
    hundred = [
        *published.read_records("megatron_h100_weak_scaling"),
        *published.read_records("llama3_405b_table4"),
    ]
    foundry = published.read_records("llm_foundry_mpt_throughput")
    return (
        check_equality("SC'21 table 1, percent and aggregate", table1, _compare_table1),
        check_equality("SC'21 table 2, days of training", table2, _compare_days),
        check_equality("Korthikanti, MFU and HFU", table5, _compare_korthikanti),
        check_equality("MT-NLG, FLOP/s", published.read_records("mtnlg_530b"), _compare_mt_nlg),
        check_equality("llm-foundry, MFU", foundry, _compare_foundry),
        check_equality("H100, MFU", hundred, _compare_h100),
    )


def _compare_table1(row: PublishedRow) -> tuple[ValidationRow, ...]:
    percent = _compare_percent(row, "pct_peak")
    rate, gpus = row.read_text("tflops_per_gpu"), row.read_count("gpus")
    printed = row.read_text("aggregate_pflops")
    tolerance = compute_half_digit(printed) + compute_half_digit(rate) * gpus / 1000
    aggregate = row.compare(
        "aggregate", float(printed), float(rate) * gpus / 1000, "PFLOP/s", tolerance=tolerance
    )
    return percent, aggregate


def _compare_percent(
    row: PublishedRow, column: str, peak: float = PEAK_FLOPS_PER_S / 1e12
) -> ValidationRow:
    """The tolerance includes the rounding of the published rate to whole TFLOP/s."""
    rate, printed = row.read_text("tflops_per_gpu"), row.read_text(column)
    tolerance = compute_half_digit(printed) + 100 * compute_half_digit(rate) / peak
    return row.compare(column, float(printed), 100 * float(rate) / peak, "%", tolerance=tolerance)


def _compare_days(row: PublishedRow) -> tuple[ValidationRow, ...]:
    seq_len = row.read_count("seq")
    step = compute_sc21_flops(
        row.read_count("layers"), row.read_count("hidden"), seq_len, row.read_count("vocab"), 1
    )
    predicted = compute_training_days(
        TOKENS, step / seq_len, row.read_count("gpus"), row.read_number("tflops_per_gpu") * 1e12
    )
    published = row.read_number("days_for_300B_tokens")
    return (row.compare("300 B tokens", published, predicted, "days", tolerance=1.0),)


def _compare_korthikanti(row: PublishedRow) -> tuple[ValidationRow, ...]:
    """From the time with selective recomputation; tolerance 0.3 points."""
    case = build_korthikanti(row)[1]
    world = case.job.parallel.world_size
    return tuple(
        row.compare(
            what,
            row.read_number(f"{what}_pct_present"),
            100
            * (compute_mfu(count(case.job, "C1"), case.step_ns, world, PEAK_FLOPS_PER_S) or 0.0),
            "%",
            tolerance=0.3,
        )
        for what, count in (("mfu", count_model_flops), ("hfu", count_hardware_flops))
    )


def _compare_mt_nlg(row: PublishedRow) -> tuple[ValidationRow, ...]:
    """Printed as whole TFLOP/s, from a time in tenths of a second."""
    (case,) = build_mt_nlg(row)
    predicted = (
        count_model_flops(case.job, "C3")
        / row.read_number("iter_s")
        / row.read_count("gpus")
        / 1e12
    )
    published = row.read_number("tflops_per_gpu")
    return (row.compare("FLOP/s of a GPU", published, predicted, "TFLOP/s", tolerance=1.0),)


def _compare_foundry(row: PublishedRow) -> tuple[ValidationRow, ...]:
    """Convention C4; the throughput is printed in whole tokens/s, MFU in 0.01 %."""
    case = build_llm_foundry(row)
    peak = FOUNDRY_PEAKS.get((row.read_text("gpu"), row.read_text("precision")), PEAK_FLOPS_PER_S)
    predicted = compute_mfu(
        count_model_flops(case.job, "C4"), case.step_ns, row.read_count("gpus"), peak
    )
    published = row.read_number("mfu_pct")
    percent = 100 * (predicted or 0.0)
    tolerance = 0.01 + 0.5 / row.read_number("tokens_per_s") * published
    return (row.compare("mfu", published, percent, "%", tolerance=tolerance),)


def _compare_h100(row: PublishedRow) -> tuple[ValidationRow, ...]:
    column = "mfu_pct" if row.has_value("mfu_pct") else "bf16_mfu_pct"
    peak = row.read_number("peak_tflops") if row.has_value("peak_tflops") else H100_TFLOPS
    return (_compare_percent(row, column, peak),)


# Bytes of weights, gradients and optimizer states against the tables of their authors.

PAPER = TrainingConfig(
    seq_len=1, micro_batch=1, global_batch=1, dtype="fp16", gradient_dtype="fp16",
    framework="zero-paper",
)  # fmt: skip

STAGES = {"baseline": 0, "zero1": 1, "zero2": 2, "zero3": 3}

DTYPES: dict[str, StoredDtype] = {"fp16": "fp16", "bf16": "bf16", "fp32": "fp32"}

MANY = 10**12
"""Enough parameters to make the rounding to whole bytes negligible."""


def check_states(published: Published) -> tuple[Check, ...]:
    states = published.read_records("zero_table1_model_states")
    largest = published.read_records("zero_table2_max_model")
    megatron = published.read_records("megatron_dist_optimizer_bytes")
    return (
        check_equality("ZeRO table 1, model states", states, _compare_zero_table1),
        check_equality("ZeRO table 2, largest model", largest, _compare_zero_table2),
        check_equality("Megatron-LM, bytes a parameter", megatron, _compare_megatron),
    )


def _compare_zero_table1(row: PublishedRow) -> tuple[ValidationRow, ...]:
    """Decimal GB on each of the dp ranks."""
    count, ranks = row.read_count("params"), row.read_count("dp")
    zero = row.read_choice("stage", STAGES)
    states_gb = (
        shard_states(count, ranks, compute_parameter_bytes(PAPER), PAPER, zero).total_bytes / 1e9
    )
    printed = row.read_text("GB_decimal")
    predicted = round_as_printed(states_gb, printed)
    return (row.compare("model states", float(printed), predicted, "GB"),)


def _compare_zero_table2(row: PublishedRow) -> tuple[ValidationRow, ...]:
    """The largest model whose states, sharded over gpus / mp ranks, fill a GPU, times mp.

    The paper rounds to a tenth of a billion before the multiplication.
    """
    ranks, mp = row.read_count("gpus") // row.read_count("mp"), row.read_count("mp")
    rows = []
    for scheme, zero in STAGES.items():
        states = shard_states(MANY, ranks, compute_parameter_bytes(PAPER), PAPER, zero)
        bytes_each = states.total_bytes / MANY
        parameters_per_shard = round(row.read_number("gpu_mem_GB") / bytes_each, 1) * 1e9
        printed = row.read_text(f"max_theory_{scheme}")
        unit = parse_count(f"1{printed[-1]}")
        predicted = round_as_printed(parameters_per_shard * mp / unit, printed[:-1]) * unit
        published = parse_count(printed)
        rows.append(row.compare(scheme, published, predicted, "parameters"))
    return tuple(rows)


def _compare_megatron(row: PublishedRow) -> tuple[ValidationRow, ...]:
    """Both columns, the distributed one for 2 and 64 ranks (d)."""
    training = TrainingConfig(
        seq_len=1,
        micro_batch=1,
        global_batch=1,
        framework="megatron",
        dtype=row.read_choice("param_dtype", DTYPES),
        gradient_dtype=row.read_choice("grad_dtype", DTYPES),
    )
    known, cases = compute_parameter_bytes(training), [("non_distributed", 1, 0)]
    # The table counts the copy of gradients, which exists in the optimizer step alone.
    per_parameter = replace(known, optimizer=known.optimizer + known.gradient_copy)
    cases += [("distributed", ranks, 1) for ranks in (2, 64)]
    return tuple(
        row.compare(
            column,
            evaluate(row.read_text(column), {"d": ranks}),
            shard_states(MANY, ranks, per_parameter, training, zero).total_bytes / MANY,
            "bytes a parameter",
            case=f"{row.id}_d{ranks}",
        )
        for column, ranks, zero in cases
    )


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


def check_volumes(published: Published) -> tuple[Check, ...]:
    factors = published.read_records("nccl_busbw_definitions")
    traces = [row for row in published.read_records("ccl_bench_training_traces") if is_dense(row)]
    return (
        check_equality("nccl-tests, busbw factors", factors, _compare_factors),
        check_equality("CCL-Bench, dense message volumes", traces, _compare_volumes),
    )


def _compare_factors(row: PublishedRow) -> tuple[ValidationRow, ...]:
    rows = []
    for ranks in WIRE_RANKS:
        published = evaluate(row.read_text("busbw_factor"), {"n": ranks})
        predicted = compute_busbw_factor(row.read_choice("collective", OPS), ranks)
        rows.append(
            row.compare(
                "busbw / algbw",
                published,
                predicted,
                "ratio",
                tolerance=1e-12,
                case=f"{row.id}_{ranks}",
            )
        )
    return tuple(rows)


def _compare_volumes(row: PublishedRow) -> tuple[ValidationRow, ...]:
    """Input bytes of a rank of the first stage per step, as in the traces; tolerance 0.1 %."""
    sums = dict.fromkeys(VOLUMES, 0)
    for message in list_comm_ops(build_ccl_bench(row)):
        if message.stage == 0 and message.op in sums:
            sums[message.op] += message.count * message.input_bytes
    return tuple(
        row.compare(
            op,
            row.read_number(column),
            sums[op] / 1e9,
            "GB",
            tolerance=WIRE_TOLERANCE * row.read_number(column),
        )
        for op, column in VOLUMES.items()
        if row.has_value(column) and row.read_number(column) > LEAST_GB
    )
