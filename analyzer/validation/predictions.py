"""Checks of predicted step times, peak memory and collective times."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import get_args

from stepsplit.analyzer.model.comm_measured import TransferSweep
from stepsplit.analyzer.model.comm_time import time_of
from stepsplit.analyzer.model.config import (
    HardwareConfig,
    JobConfig,
    ModelConfig,
    ParallelConfig,
    Span,
    TrainingConfig,
)
from stepsplit.analyzer.model.config_file import hardware, transformer
from stepsplit.analyzer.model.flops import hardware_flops
from stepsplit.analyzer.model.memory import calibrate_memory, memory_of, reserved_bytes
from stepsplit.analyzer.model.memory_states import layer_activations
from stepsplit.analyzer.model.predict import predict
from stepsplit.analyzer.ops import busbw_factor
from stepsplit.analyzer.validation.published_runs import (
    SCHEDULES,
    SIMUMAX_TABLE,
    TORCHTITAN_TABLE,
    Case,
    Family,
    fitted_collectives,
    fitted_memory,
    fitted_step_times,
    nanotron,
    possible_cases,
    simumax,
    step_time_cases,
    torchtitan_job,
    zero_bubble,
)
from stepsplit.analyzer.validation.tables import (
    Build,
    Check,
    Published,
    PublishedRow,
    Row,
    check,
    gathered,
    marked,
    measured,
)

# Predicted step times against published ones, and against a constant-utilization baseline.

BARS: dict[Family, tuple[float, float]] = {
    "A100 Megatron": (0.04, 0.08),
    "B200 dense": (0.05, 0.09),
    "llm-foundry": (0.06, 0.15),
}
"""Mean and 90th percentile of the absolute errors; other families have no bar."""


def step_time_checks(published: Published) -> tuple[Check, ...]:
    """One check per family, with a baseline fitted on the same rows as the model."""
    cases, fitted = possible_cases(published), fitted_step_times()
    known = [case for case in step_time_cases(Published()) if case.id in fitted]
    return tuple(
        replace(
            _check(family, _of(family, cases.found), _of(family, known), fitted),
            left_out=tuple(each for each in cases.left_out if _whose(each) == family),
        )
        for family in get_args(Family)
    )


def _whose(left_out: str) -> Family:
    """Guess the family of a skipped row from its id."""
    match left_out.partition("/")[0]:
        case "simumax":
            return "B200 dense"
        case "llm-foundry":
            return "llm-foundry"
        case "torchtitan":
            return "torchtitan"
    return "A100 Megatron"


def _of(family: Family, cases: Iterable[Case]) -> list[Case]:
    return [case for case in cases if case.family == family]


def _check(
    family: Family, cases: Sequence[Case], known: Sequence[Case], fitted: Collection[str]
) -> Check:
    name, bar = f"{family}, step time", BARS.get(family, ())
    rows = [step_time_row(case, fitted) for case in cases]
    plain = baseline_rows([case for case in cases if case.id not in fitted], known)
    baseline = measured("mean/p90", plain) if plain else None
    found = check(name, rows, "mean/p90", bar, baseline)
    if found.skipped or baseline is None or found.result[0] <= baseline[0]:
        return found
    return replace(found, note="a constant utilization is more accurate on these rows")


def step_time_row(case: Case, fitted: Collection[str]) -> Row:
    """The predicted step time (slowest stage) and the published one."""
    predicted = predict(case.job).split.step_ns
    return Row(
        case.table, case.id, "step time", case.step_ns, float(predicted), "ns",
        fitted=case.id in fitted,
    )  # fmt: skip


# Predicted peaks of allocated memory against measured ones.

DENSE_BAR = (0.02, 0.035)

EXPERTS_BAR = (0.10, 0.10)
"""Mean and maximum of the absolute errors."""


def memory_checks(published: Published) -> tuple[Check, ...]:
    rows, fitted = published.records(SIMUMAX_TABLE), fitted_memory()
    dense = [row for row in rows if not row.known("experts")]
    mixtures = [row for row in rows if row.known("experts")]
    kinds: tuple[tuple[str, list[PublishedRow], Build, tuple[float, float]], ...] = (
        ("B200 dense, peak memory", dense, _fullest, DENSE_BAR),
        ("B200 dense, peak memory by stage", dense, _stages, DENSE_BAR),
        ("B200 experts, peak memory", mixtures, _fullest, EXPERTS_BAR),
    )
    checks = tuple(
        gathered(name, records, build, "mean/max", bar, fitted)
        for name, records, build, bar in kinds
    )
    return (*checks, _torchtitan(published))


def _torchtitan(published: Published) -> Check:
    rows = [row for row in published.records(TORCHTITAN_TABLE) if row.known("peak_memory_GiB")]
    found = gathered("torchtitan, peak memory", rows, _reserved, "mean/max", (), frozenset())
    if found.skipped:
        return found
    return replace(found, note="reserved memory; no constant is fitted on these rows")


def _reserved(row: PublishedRow) -> tuple[Row, ...]:
    job = torchtitan_job(row)
    most = max(stage.total_bytes for stage in memory_of(job))
    found = reserved_bytes(most).bytes / 2**30
    return (Row(row.table, row.id, "reserved", row.number("peak_memory_GiB"), found, "GiB"),)


def _fullest(row: PublishedRow) -> tuple[Row, ...]:
    """The largest stage; the table has the maximum over all ranks."""
    found = max(stage.total_bytes for stage in memory_of(simumax(row).job))
    said = row.number("real_max_allocated_GiB")
    return (Row(row.table, row.id, "allocated", said, found / 2**30, "GiB"),)


def _stages(row: PublishedRow) -> tuple[Row, ...]:
    """The largest rank of every stage; ranks are listed stage by stage."""
    if not row.known("rank_max_allocated_MiB"):
        return ()
    ranks = [float(each) for each in row.text("rank_max_allocated_MiB").split(";")]
    memory = memory_of(simumax(row).job)
    each = len(ranks) // len(memory)
    return tuple(
        Row(
            row.table, row.id, f"stage {stage.stage}",
            max(ranks[stage.stage * each : (stage.stage + 1) * each]) / 1024,
            stage.total_bytes / 2**30, "GiB",
        )
        for stage in memory
    )  # fmt: skip


# The baseline: all runs of a kind reach the same share of the peak FLOP/s.


def baseline_rows(cases: Iterable[Case], known: Collection[Case]) -> tuple[Row, ...]:
    """Step times of the cases from one hardware FLOPs utilization per kind of run.

    A kind is a GPU and a dtype. Its utilization is the mean of the known cases, those on which the
    model's constants were fitted. A kind without known cases uses the mean of all of them. Without
    any known case there are no rows.
    """
    if not known:
        return ()
    means = {kind: fmean(map(utilization, of_kind(known, kind))) for kind in map(kind_of, known)}
    everywhere = fmean(map(utilization, known))
    return tuple(
        Row(
            case.table, case.id, "step time", case.step_ns,
            utilization(case) / means.get(kind_of(case), everywhere) * case.step_ns, "ns",
        )
        for case in cases
    )  # fmt: skip


def of_kind(cases: Iterable[Case], kind: tuple[str, str]) -> list[Case]:
    return [case for case in cases if kind_of(case) == kind]


def kind_of(case: Case) -> tuple[str, str]:
    return case.job.hardware.name, case.job.training.dtype


def utilization(case: Case) -> float:
    """Hardware FLOPs (C1) of the published step over the peak, a ratio."""
    peak = case.job.hardware.peak_flops_per_s(case.job.training.dtype)
    assert peak, f"{case.id}: no peak of {case.job.hardware.name} at {case.job.training.dtype}"
    allowed = peak * case.job.parallel.world_size * case.step_ns * 1e-9
    return hardware_flops(case.job, "C1") / allowed


# Peak memory of other programs, calibrated on one run of each model.

BAR = (0.10, 0.10)
"""Mean and maximum of the absolute errors."""

TABLE4, NANOTRON = "zero_bubble_table4_throughput_memory", "nanotron_best_configs_h100"


def calibrated_checks(published: Published) -> tuple[Check, ...]:
    pipelines = [row for row in published.records(TABLE4) if row.text("schedule") in SCHEDULES]
    plain = sorted(pipelines, key=lambda row: row.text("schedule") != "1F1B")
    grid = published.records(NANOTRON)
    first, later = _firsts(plain, "model"), _firsts(grid, "params_B")
    return (
        gathered(
            "Zero Bubble table 4, peak memory", plain,
            lambda row: _peak(row, first[row.text("model")], "memory_GB", zero_bubble),
            "mean/max", BAR, {row.id for row in first.values()},
            note="calibrated on the first 1F1B run of each model",
        ),
        gathered(
            "nanotron, peak memory", grid,
            lambda row: _peak(row, later[row.text("params_B")], "memory_GB_as_printed", nanotron),
            "mean/max", (), {row.id for row in later.values()},
            note="calibrated on the first run of each model; allocated or reserved is unknown",
        ),
    )  # fmt: skip


def _firsts(records: Iterable[PublishedRow], column: str) -> dict[str, PublishedRow]:
    """The first record of each model, used for calibration and therefore not reported."""
    found: dict[str, PublishedRow] = {}
    for row in records:
        found.setdefault(row.text(column), row)
    return found


def _peak(
    row: PublishedRow, first: PublishedRow, column: str, job_of: Callable[[PublishedRow], JobConfig]
) -> tuple[Row, ...]:
    measured = (round(first.number(column) * 2**30),)
    calibration = calibrate_memory(memory_of(job_of(first)), measured, first.id)
    stages = memory_of(job_of(row), calibration)
    predicted = max(stage.total_bytes for stage in stages) / 2**30
    return (Row(row.table, row.id, "peak", row.number(column), predicted, "GiB"),)


# Predicted times of collectives against measured sweeps.

ALPS, SWEEPS = "nccl_allreduce_alps_gh200", "nccl_allreduce_sweeps"

CLUSTERS = {
    "A100": ("a100-sxm-80gb", "ib-hdr-200"),
    "H100": ("h100-sxm", "efa-p5"),
    "H200": ("h200-sxm", "efa-p5"),
    "B200": ("b200-sxm", "efa-p6-b200"),
    "GH200": ("gh200", "slingshot-11"),
}
"""Word in a system's name -> its GPU and network (AWS instances in ml-engineering)."""

LARGE_BYTES = 64 * 2**20


def collective_checks(published: Published) -> tuple[Check, ...]:
    rows = [row for row in (*published.records(SWEEPS), *published.records(ALPS)) if _valid(row)]
    large = [row for row in rows if row.count("size_bytes") >= LARGE_BYTES]
    inside = [row for row in large if row.count("nodes") == 1]
    between = [row for row in large if row.count("nodes") > 1]
    left_out = [each for sweep in _sweeps(rows) for each in _left_out(sweep)]
    return (
        check("all_reduce in a node, from 64 MiB", _closed(inside), "mean", (0.05,)),
        check("all_reduce over nodes, from 64 MiB", _closed(between), "median", (0.10,)),
        check("all_reduce in a node, interpolated", left_out, "mean", (0.08,)),
    )


def _valid(row: PublishedRow) -> bool:
    """Whether the row is an all_reduce with correct results on a system that has a preset."""
    wrong = row.known("wrong_oop") and row.number("wrong_oop") != 0
    return not wrong and row.text("collective") == "all_reduce" and bool(_word(row))


def _word(row: PublishedRow) -> str:
    words = [word for word in CLUSTERS if word in row.text("system")]
    return max(words, key=len, default="")


def _closed(rows: Iterable[PublishedRow]) -> tuple[Row, ...]:
    """Times of the closed form; odd powers of two of a sweep were used in the fit."""
    return marked([_time_row(row) for row in rows], fitted_collectives())


def _time_row(row: PublishedRow) -> Row:
    found = time_of("all_reduce", row.count("size_bytes"), _span(row), _cluster(row)).ns
    return Row(row.table, row.id, "time", _time_ns(row), found, "ns")


def _cluster(row: PublishedRow) -> HardwareConfig:
    name, link = CLUSTERS[_word(row)]
    return hardware(name, link, _span(row).ranks_per_node)


def _span(row: PublishedRow) -> Span:
    return Span(row.count("ranks"), row.count("ranks") // row.count("nodes"))


def _time_ns(row: PublishedRow) -> float:
    return row.number("time_us_oop" if row.table == ALPS else "time_us") * 1e3


def _sweeps(rows: Iterable[PublishedRow]) -> list[list[PublishedRow]]:
    """The rows of each sweep inside a node, sorted by size."""
    found: dict[tuple[str, str], list[PublishedRow]] = {}
    for row in rows:
        if row.count("nodes") == 1:
            found.setdefault((row.text("system"), row.text("tool")), []).append(row)
    return [sorted(each, key=lambda row: row.count("size_bytes")) for each in found.values()]


def _left_out(rows: list[PublishedRow]) -> list[Row]:
    """Predict each inner point of a sweep from the others (leave-one-out)."""
    points = [(row.count("size_bytes"), _time_ns(row)) for row in rows]
    found = []
    for i, row in enumerate(rows[1:-1], start=1):
        sizes, times = zip(*points[:i], *points[i + 1 :], strict=True)
        span = _span(row)
        sweep = TransferSweep("all_reduce", span.ranks, span.ranks_per_node, sizes, times)
        predicted = sweep.time_of(points[i][0])
        found.append(Row(row.table, row.id, "time", points[i][1], predicted, "ns"))
    return found


# Bus bandwidth of large collectives in a node, by ranks and algorithm.

BUSBW_TABLE = "nccl_busbw_by_ranks_and_algo"

GPUS = {"A100": "a100-sxm-80gb", "H100": "h100-sxm", "H200": "h200-sxm", "B200": "b200-sxm",
        "MI300X": "mi300x"}  # fmt: skip


def busbw_checks(published: Published) -> tuple[Check, ...]:
    records = [row for row in published.records(BUSBW_TABLE) if _gpu(row) in GPUS]
    name, fitted = "busbw in a node, from 4 GiB", fitted_collectives()
    return (gathered(name, records, _rows, "mean", (0.05,), fitted),)


def _rows(row: PublishedRow) -> tuple[Row, ...]:
    """With NCCL's choice of algorithm and, where measured, without NVLS."""
    cluster = hardware(GPUS[_gpu(row)])
    rings = replace(cluster, nvls=0.0)
    chosen = rings if "NVLS=0" in row.text("collective") else cluster
    found = [_busbw_row(row, row.id, "busbw_default", chosen)]
    if row.known("busbw_nvls_off"):
        found.append(_busbw_row(row, f"{row.id}_rings", "busbw_nvls_off", rings))
    return tuple(found)


def _busbw_row(row: PublishedRow, case: str, column: str, cluster: HardwareConfig) -> Row:
    op, ranks = row.text("collective").split()[0], row.count("ranks")
    message_bytes = int(row.text("system").split()[1].removesuffix("GiB")) * 2**30
    span = Span(ranks, min(ranks, cluster.gpus_per_node))
    bytes_per_s = message_bytes / (time_of(op, message_bytes, span, cluster).ns * 1e-9)
    predicted = busbw_factor(op, ranks) * bytes_per_s / 1e9
    return Row(row.table, case, "busbw", row.number(column), predicted, "GB/s")


def _gpu(row: PublishedRow) -> str:
    """The GPU of a system such as 8xH200 8GiB."""
    return row.text("system").split()[0].partition("x")[2]


# Saved activations of a layer in eager transformers, against measured coefficients.

EAGER_TABLE = "activation_coefficient_measured"

COLLECTIVE_BAR = (0.10,)

NOTE = "norms of queries and keys, which Qwen3 has, are not modelled"

GEMMA = ModelConfig(
    layers=18, hidden=2048, heads=8, kv_heads=1, head_size=256, ffn=16384, vocab=256000,
    gated=True, norm="rms", biases=False,
)  # fmt: skip
"""config.json of google/gemma-1.1-2b-it."""

PRESETS = {
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "mistralai/Mistral-7B-Instruct-v0.3": "mistral-7b",
    "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B": "qwen3-8b",
}


def eager_checks(published: Published) -> tuple[Check, ...]:
    records, name = published.records(EAGER_TABLE), "transformers, activations of a layer"
    return (gathered(name, records, _coefficient, "mean", COLLECTIVE_BAR, fitted_memory(), NOTE),)


def _coefficient(row: PublishedRow) -> tuple[Row, ...]:
    """Bytes of one decoder layer over 2 b s h."""
    recipe = TrainingConfig(
        row.count("seq"), micro_batch=1, global_batch=1, framework="huggingface"
    )
    job = JobConfig(_model(row), ParallelConfig(), recipe, hardware("h100-sxm"))
    found = layer_activations(job).total_bytes / (2 * job.tokens * job.model.hidden)
    return (Row(row.table, row.id, "coefficient", row.number("coefficient"), found, "x 2bsh"),)


def _model(row: PublishedRow) -> ModelConfig:
    if row.text("model").startswith("google/gemma-1.1-2b"):
        return GEMMA
    return transformer(row.choice("model", PRESETS))
