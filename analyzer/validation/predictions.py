"""Checks of predictions: step times, peak memory, collective times, and runs that are held out."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import fmean, median
from typing import Any, cast, get_args

from stepsplit.analyzer.model.comm_measured import Rates, TransferSweep
from stepsplit.analyzer.model.comm_time import TIMED_OPS, time_of
from stepsplit.analyzer.model.confidence import (
    FEW_RUNS,
    LEVEL,
    MIN_RUNS,
    MIN_SOURCES,
    RUN_CONFIDENCES,
    BandIndex,
    RunConfidence,
    RunKind,
    StepBand,
    find_error_band,
    find_run_kind,
)
from stepsplit.analyzer.model.config import (
    HardwareConfig,
    JobConfig,
    ModelConfig,
    ParallelConfig,
    TrainingConfig,
)
from stepsplit.analyzer.model.config_decode import read_table
from stepsplit.analyzer.model.hardware_config import load_hardware
from stepsplit.analyzer.model.memory import (
    calibrate_memory,
    compute_memory,
    estimate_reserved_bytes,
    find_reserved_ratios,
)
from stepsplit.analyzer.model.memory_states import compute_layer_activations
from stepsplit.analyzer.model.model_table import load_model
from stepsplit.analyzer.model.parameters import count_hardware_flops
from stepsplit.analyzer.model.predict import predict, predict_step
from stepsplit.analyzer.model.preset_names import PRESETS
from stepsplit.analyzer.model.rank_layout import GroupPlacement
from stepsplit.analyzer.model.unstated import join_spread
from stepsplit.analyzer.ops import compute_busbw_factor
from stepsplit.analyzer.significance import compute_weighted_bound, compute_weighted_median
from stepsplit.analyzer.validation.published_runs import (
    REPORTS_TABLE,
    SCHEDULES,
    SIMUMAX_TABLE,
    TORCHTITAN_TABLE,
    build_nanotron,
    build_simumax,
    build_stated_job,
    build_torchtitan_job,
    build_zero_bubble,
    list_cases,
    list_fitted_collectives,
    list_fitted_memory,
    list_published_cases,
)
from stepsplit.analyzer.validation.tables import (
    Build,
    Case,
    Check,
    Family,
    Published,
    PublishedRow,
    ValidationRow,
    check,
    check_records,
    compute_measure,
    mark_fitted,
)

# Predicted step times against published ones, and against a constant-utilization baseline.

BARS: dict[Family, tuple[float, float]] = {
    "A100 Megatron": (0.04, 0.09),
    "llm-foundry": (0.06, 0.15),
    "H100 recipes, bf16": (0.04, 0.08),
    "H100 recipes, fp8": (0.10, 0.20),
    "Blackwell recipes, fp8": (0.10, 0.20),
}
"""Mean and 90th percentile of the absolute errors; other families have no bar."""


def check_step_times(published: Published) -> tuple[Check, ...]:
    """One check per family, the choice of layouts, and how far runs of one job differ.

    Each publisher's runs are predicted by constants, bands and baseline of the other publishers'
    runs; the baseline, as the constants, without the reports. The bands of a user's runs are those
    of the published runs, as in a prediction.
    """
    is_own = published == Published()
    cases = list_published_cases() if is_own else list_cases(published)
    unseen = predict_published() if is_own else predict_unseen(cases.cases)
    banded = find_unseen_bands(unseen, predict_published() if unseen else ())
    fitted = [case for case in list_published_cases().cases if case.table != REPORTS_TABLE]
    baseline = build_baseline_rows(cases.cases, fitted)
    checks = []
    for family in get_args(Family):
        rows = [build_step_row(run, band) for run, band in banded if run.case.family == family]
        names = {row.case for row in rows}
        alike = [row for row in baseline if row.case in names]
        constant = compute_measure("mean/p90", alike) if alike else None
        result = check(f"{family}, step time", rows, "mean/p90", BARS.get(family, ()), constant)
        if not result.skipped and constant is not None and result.result[0] > constant[0]:
            note = "a constant utilization is more accurate on these rows"
            result = replace(result, note=note)
        left_out = tuple(each for each in cases.left_out if _infer_family(each) == family)
        checks.append(replace(result, left_out=left_out))
    return (
        *checks,
        *check_populations(banded),
        check_layout_choices(unseen),
        check_repeats(cases.cases),
    )


POPULATIONS = {"recipe": "tuned recipes", "report": "reports of others"}


def check_populations(banded: Sequence[tuple[UnseenRun, StepBand]]) -> tuple[Check, ...]:
    """The same step times by population and confidence, with the number of publishers."""
    checks = []
    for population, words in POPULATIONS.items():
        for confidence in RUN_CONFIDENCES:
            alike = [
                (run, band)
                for run, band in banded
                if (run.kind.population, run.confidence) == (population, confidence)
            ]
            if not alike:
                continue
            rows = [build_step_row(run, band) for run, band in alike]
            result = check(f"{words}, confidence {confidence}", rows, "mean/p90", ())
            sources = {run.case.source for run, _ in alike}
            checks.append(replace(result, sources=len(sources)))
    return tuple(checks)


def build_step_row(run: UnseenRun, band: StepBand) -> ValidationRow:
    """The step of a run with its band."""
    case, (low_ns, high_ns) = run.case, run.find_limits(band)
    row = ValidationRow(
        case.table, case.id, "step time", case.step_ns, float(run.predicted_ns), "ns"
    )
    return replace(row, low=low_ns, high=high_ns)


def _infer_family(left_out: str) -> Family:
    """Guess the family of a skipped row from its id."""
    match left_out.partition("/")[0]:
        case "simumax":
            return "B200 dense"
        case "llm-foundry":
            return "llm-foundry"
        case "torchtitan":
            return "torchtitan"
        case "recipe" | "bridge":
            return "recipes with experts" if "Qwen3" in left_out else "H100 recipes, fp8"
        case "report":
            return "A100 reports" if "a100" in left_out else "H100 reports"
    return "A100 Megatron"


# The layout predicted fastest, among those that one publisher measured for the same job.

MIN_LAYOUTS = 4
"""A set of fewer layouts says little about the choice."""

CHOICE_BAR = (0.05, 0.15)
"""Mean and 90th percentile of what the chosen layout takes longer than the best."""


def check_layout_choices(runs: Iterable[UnseenRun]) -> Check:
    """Sets of reported layouts of one model, sequence and batch on the same GPUs: the step that was
    measured with the layout predicted fastest (predicted), against the shortest (published)."""
    sets: dict[tuple[object, ...], list[UnseenRun]] = {}
    for run in runs:
        case, job, training = run.case, run.case.job, run.case.job.training
        if case.table == REPORTS_TABLE:
            # What the layouts of a set have in common.
            key = (
                case.source, job.model, job.hardware, job.parallel.world_size, training.dtype,
                training.seq_len, training.global_batch,
            )  # fmt: skip
            sets.setdefault(key, []).append(run)
    rows = []
    for alike in sets.values():
        if len(alike) >= MIN_LAYOUTS:
            chosen = min(alike, key=lambda run: run.predicted_ns).case
            best_ns = min(run.case.step_ns for run in alike)
            model, training = chosen.job.model, chosen.job.training
            name = (
                f"{chosen.source}/{model.layers}x{model.hidden}_{training.seq_len}"
                f"_{chosen.job.parallel.world_size}_of {len(alike)}"
            )
            rows.append(
                ValidationRow(chosen.table, name, "measured step", best_ns, chosen.step_ns, "ns")
            )
    return check("choice of a layout, measured step", rows, "mean/p90", CHOICE_BAR)


# Runs of one job that were published more than once: what no model of the job can tell apart.


def check_repeats(cases: Iterable[Case]) -> Check:
    """Steps of runs with equal jobs: the median of the others (predicted) against each."""
    alike: dict[JobConfig, list[Case]] = {}
    for case in cases:
        # Whether it is a recipe's or anyone else's.
        job = replace(case.job, training=replace(case.job.training, recipe=""))
        alike.setdefault(job, []).append(case)
    rows = []
    for runs in (runs for runs in alike.values() if len(runs) > 1):
        for case in runs:
            others_ns = median(other.step_ns for other in runs if other is not case)
            rows.append(
                ValidationRow(case.table, case.id, "measured step", case.step_ns, others_ns, "ns")
            )
    return check(
        "the same job published again, measured step",
        rows,
        "mean/p90",
        (),
        note="predicted is the median of the other runs of that job",
    )


# Predicted peaks of allocated memory against measured ones.

DENSE_BAR = (0.02, 0.035)

EXPERTS_BAR = (0.10, 0.10)
"""Mean and maximum of the absolute errors."""


def check_memory(published: Published) -> tuple[Check, ...]:
    rows, fitted = published.read_records(SIMUMAX_TABLE), list_fitted_memory()
    dense = [row for row in rows if not row.has_value("experts")]
    mixtures = [row for row in rows if row.has_value("experts")]
    kinds: tuple[tuple[str, list[PublishedRow], Build, tuple[float, float]], ...] = (
        ("B200 dense, peak memory", dense, _compare_fullest, DENSE_BAR),
        ("B200 dense, peak memory by stage", dense, _compare_stages, DENSE_BAR),
        ("B200 experts, peak memory", mixtures, _compare_fullest, EXPERTS_BAR),
    )
    checks = tuple(
        check_records(name, records, build, "mean/max", bar, fitted)
        for name, records, build, bar in kinds
    )
    titan = [
        row for row in published.read_records(TORCHTITAN_TABLE) if row.has_value("peak_memory_GiB")
    ]
    reserved = check_records(
        "torchtitan, peak memory", titan, _compare_reserved, "mean/max", (), frozenset()
    )
    if not reserved.skipped:
        note = "reserved memory; no constant is fitted on these rows"
        reserved = replace(reserved, note=note)
    return (*checks, reserved)


def _compare_reserved(row: PublishedRow) -> tuple[ValidationRow, ...]:
    job = build_torchtitan_job(row)
    peak_bytes = max(stage.total_bytes for stage in compute_memory(job))
    predicted = estimate_reserved_bytes(peak_bytes, find_reserved_ratios(job)).bytes / 2**30
    return (row.compare("reserved", row.read_number("peak_memory_GiB"), predicted, "GiB"),)


def _compare_fullest(row: PublishedRow) -> tuple[ValidationRow, ...]:
    """The largest stage; the table has the maximum over all ranks."""
    predicted_bytes = max(stage.total_bytes for stage in compute_memory(build_simumax(row).job))
    published = row.read_number("real_max_allocated_GiB")
    return (row.compare("allocated", published, predicted_bytes / 2**30, "GiB"),)


def _compare_stages(row: PublishedRow) -> tuple[ValidationRow, ...]:
    """The largest rank of every stage; ranks are listed stage by stage."""
    if not row.has_value("rank_max_allocated_MiB"):
        return ()
    ranks = [float(each) for each in row.read_text("rank_max_allocated_MiB").split(";")]
    memory = compute_memory(build_simumax(row).job)
    ranks_per_stage = len(ranks) // len(memory)
    return tuple(
        row.compare(
            f"stage {stage.stage}",
            max(ranks[stage.stage * ranks_per_stage : (stage.stage + 1) * ranks_per_stage]) / 1024,
            stage.total_bytes / 2**30,
            "GiB",
        )
        for stage in memory
    )


# The baseline: all runs of a kind reach the same share of the peak FLOP/s.


def build_baseline_rows(
    cases: Iterable[Case], known: Collection[Case]
) -> tuple[ValidationRow, ...]:
    """Step times of the cases from one hardware FLOPs utilization per kind of run.

    A kind is a GPU, a dtype, and whether the model has experts. Its utilization is the mean of the
    known cases of other publishers; a kind without any uses the mean of all of them. Without known
    cases there are no rows.
    """
    utilization = [(case.source, get_kind(case), compute_utilization(case)) for case in known]
    rows = []
    for case in cases:
        others = [each for each in utilization if each[0] != case.source]
        alike = [each for each in others if each[1] == get_kind(case)] or others
        if not alike:
            continue
        mean = fmean(share for _, _, share in alike)
        predicted = compute_utilization(case) / mean * case.step_ns
        rows.append(ValidationRow(case.table, case.id, "step time", case.step_ns, predicted, "ns"))
    return tuple(rows)


def get_kind(case: Case) -> tuple[str, str, bool]:
    job = case.job
    return job.hardware.name, job.training.dtype, job.model.experts is not None


def compute_utilization(case: Case) -> float:
    """Hardware FLOPs (C1) of the published step over the peak, a ratio."""
    peak = case.job.hardware.peak_flops_per_s(case.job.training.dtype)
    assert peak, f"{case.id}: no peak of {case.job.hardware.name} at {case.job.training.dtype}"
    allowed = peak * case.job.parallel.world_size * case.step_ns * 1e-9
    return count_hardware_flops(case.job, "C1") / allowed


# Peak memory of other programs, calibrated on one run of each model.

BAR = (0.10, 0.10)
"""Mean and maximum of the absolute errors."""

TABLE4, NANOTRON = "zero_bubble_table4_throughput_memory", "nanotron_best_configs_h100"


def check_calibrated_memory(published: Published) -> tuple[Check, ...]:
    pipelines = [
        row for row in published.read_records(TABLE4) if row.read_text("schedule") in SCHEDULES
    ]
    plain = sorted(pipelines, key=lambda row: row.read_text("schedule") != "1F1B")
    grid = published.read_records(NANOTRON)
    first, later = _find_first_rows(plain, "model"), _find_first_rows(grid, "params_B")
    return (
        check_records(
            "Zero Bubble table 4, peak memory",
            plain,
            lambda row: _compare_peak(
                row, first[row.read_text("model")], "memory_GB", build_zero_bubble
            ),
            "mean/max",
            BAR,
            {row.id for row in first.values()},
            note="calibrated on the first 1F1B run of each model",
        ),
        check_records(
            "nanotron, peak memory",
            grid,
            lambda row: _compare_peak(
                row, later[row.read_text("params_B")], "memory_GB_as_printed", build_nanotron
            ),
            "mean/max",
            (),
            {row.id for row in later.values()},
            note="calibrated on the first run of each model; allocated or reserved is unknown",
        ),
    )


def _find_first_rows(records: Iterable[PublishedRow], column: str) -> dict[str, PublishedRow]:
    """The first record of each model, used for calibration and therefore not reported."""
    first_rows: dict[str, PublishedRow] = {}
    for row in records:
        first_rows.setdefault(row.read_text(column), row)
    return first_rows


def _compare_peak(
    row: PublishedRow,
    first: PublishedRow,
    column: str,
    build_job: Callable[[PublishedRow], JobConfig],
) -> tuple[ValidationRow, ...]:
    measured = (round(first.read_number(column) * 2**30),)
    calibration = calibrate_memory(compute_memory(build_job(first)), measured, first.id)
    stages = compute_memory(build_job(row), calibration)
    predicted = max(stage.total_bytes for stage in stages) / 2**30
    return (row.compare("peak", row.read_number(column), predicted, "GiB"),)


# A row of measured_jobs.csv: a job by its keys, and what it took.

JOBS_TABLE = "measured_jobs"

JOBS_MEMORY_BAR = (0.01, 0.03)
"""Mean and maximum of the absolute errors."""

JOBS_STEP_BAR = (0.08, 0.15)
"""Mean and 90th percentile."""


def check_measured_jobs(published: Published) -> tuple[Check, ...]:
    """Peak memory and step time of each job that is measured.

    Those of the package ran transformers on one GPU; formulas and constants were derived from the
    ones on H200, and the others predicted afterwards.
    """
    records = published.read_records(JOBS_TABLE)
    fitted = frozenset(row.id for row in records if row.values.get("fitted") == "true")
    peaks, steps = (
        [row for row in records if row.has_value(column)]
        for column in ("peak_allocated_bytes", "step_ms")
    )
    return (
        check_records(
            "measured jobs, peak memory",
            peaks,
            _compare_job_peak,
            "mean/max",
            JOBS_MEMORY_BAR,
            fitted,
        ),
        check_records(
            "measured jobs, step time", steps, _compare_job_step, "mean/p90", JOBS_STEP_BAR, fitted
        ),
    )


def _compare_job_peak(row: PublishedRow) -> tuple[ValidationRow, ...]:
    peak_bytes = max(stage.total_bytes for stage in compute_memory(build_stated_job(row)))
    measured = row.read_number("peak_allocated_bytes")
    return (row.compare("allocated", measured / 2**30, peak_bytes / 2**30, "GiB"),)


def _compare_job_step(row: PublishedRow) -> tuple[ValidationRow, ...]:
    found, measured = predict(build_stated_job(row)), row.read_number("step_ms")
    compared = row.compare("step", measured, found.split.step_ns / 1e6, "ms")
    return (replace(compared, low=found.low_ns / 1e6, high=found.high_ns / 1e6),)


# Saved activations of a layer in eager transformers, against measured coefficients.

EAGER_TABLE = "activation_coefficient_measured"

EAGER_BAR = (0.10,)

GEMMA = ModelConfig(
    layers=18, hidden=2048, heads=8, kv_heads=1, head_size=256, ffn=16384, vocab=256000,
    gated=True, norm="rms", biases=False,
)  # fmt: skip
"""config.json of google/gemma-1.1-2b-it."""

EAGER_MODELS = {
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "mistralai/Mistral-7B-Instruct-v0.3": "mistral-7b",
    "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B": "qwen3-8b",
}


def check_eager_activations(published: Published) -> tuple[Check, ...]:
    records, name = published.read_records(EAGER_TABLE), "transformers, activations of a layer"
    return (
        check_records(name, records, _compare_coefficient, "mean", EAGER_BAR, list_fitted_memory()),
    )


def _compare_coefficient(row: PublishedRow) -> tuple[ValidationRow, ...]:
    """Bytes of one decoder layer over 2 b s h."""
    training = TrainingConfig(
        row.read_count("seq"), micro_batch=1, global_batch=1, framework="huggingface"
    )
    is_gemma = row.read_text("model").startswith("google/gemma-1.1-2b")
    model = GEMMA if is_gemma else load_model(row.read_choice("model", EAGER_MODELS))
    job = JobConfig(model, ParallelConfig(), training, load_hardware("h100-sxm"))
    predicted = compute_layer_activations(job).total_bytes / (2 * job.tokens * job.model.hidden)
    return (row.compare("coefficient", row.read_number("coefficient"), predicted, "x 2bsh"),)


# Predicted times of collectives against measured sweeps.

ALPS, SWEEPS = "nccl_allreduce_alps_gh200", "nccl_allreduce_sweeps"

CLUSTERS = {
    "A100": ("a100-sxm-80gb", "ib-hdr-200"),
    "H100": ("h100-sxm", "efa-p5"),
    "H200": ("h200-sxm", "efa-p5"),
    "B200": ("b200-sxm", "efa-p6-b200"),
    "B300": ("b300-sxm", "ib-xdr-800"),
    "GB200": ("gb200", "ib-ndr-400"),
    "GB300": ("gb300", "ib-xdr-800"),
    "GH200": ("gh200", "slingshot-11"),
    "MI355X": ("mi355x", "roce-400"),
}
"""Word in a system's name -> its GPU and network (AWS instances but for Grace, B300 and MI355X)."""

LARGE_BYTES = 64 * 2**20


def check_collectives(published: Published) -> tuple[Check, ...]:
    rows = [
        row
        for row in (*published.read_records(SWEEPS), *published.read_records(ALPS))
        if _is_valid(row)
    ]
    large = [row for row in rows if row.read_count("size_bytes") >= LARGE_BYTES]
    inside = [row for row in large if row.read_count("nodes") == 1]
    between = [row for row in large if row.read_count("nodes") > 1]
    # The rows of each sweep inside a node.
    sweeps: dict[tuple[str, str], list[PublishedRow]] = {}
    for row in rows:
        if row.read_count("nodes") == 1:
            sweeps.setdefault((row.read_text("system"), row.read_text("tool")), []).append(row)
    left_out = [each for sweep in sweeps.values() for each in _compare_left_out(sweep)]
    return (
        check("all_reduce in a node, from 64 MiB", _compare_closed_form(inside), "mean", (0.05,)),
        check(
            "all_reduce over nodes, from 64 MiB", _compare_closed_form(between), "median", (0.10,)
        ),
        check("all_reduce in a node, interpolated", left_out, "mean", (0.08,)),
    )


OVER_NODES = "nccl_sweeps_over_nodes"


def check_sweeps_over_nodes(published: Published) -> tuple[Check, ...]:
    """Other collectives than all_reduce, and that over EFA; a node of NVL72 is a rack."""
    rows = [row for row in published.read_records(OVER_NODES) if _find_cluster(row)]
    by_op = {op: [row for row in rows if row.read_text("collective") == op] for op in TIMED_OPS}
    return (
        check("all_to_all, from 32 MiB", _compare_closed_form(by_op["all_to_all"]), "mean", (0.1,)),
        check(
            "all_gather over nodes, from 32 MiB",
            _compare_closed_form(by_op["all_gather"]), "mean", (0.1,),
        ),
        check(
            "all_reduce over EFA, from 32 MiB",
            _compare_closed_form(by_op["all_reduce"]), "mean", (),
        ),
    )  # fmt: skip


def _is_valid(row: PublishedRow) -> bool:
    """Whether the row is an all_reduce with correct results on a system that has a preset."""
    wrong = row.has_value("wrong_oop") and row.read_number("wrong_oop") != 0
    return not wrong and row.read_text("collective") == "all_reduce" and bool(_find_cluster(row))


def _find_cluster(row: PublishedRow) -> str:
    words = [word for word in CLUSTERS if word in row.read_text("system")]
    return max(words, key=len, default="")


def _compare_closed_form(rows: Iterable[PublishedRow]) -> tuple[ValidationRow, ...]:
    """Times of the closed form; odd powers of two of a sweep were used in the fit."""
    compared = []
    for row in rows:
        op, message_bytes = row.read_text("collective"), row.read_count("size_bytes")
        span = _build_span(row)
        name, link = CLUSTERS[_find_cluster(row)]
        cluster = load_hardware(name, link, span.ranks_per_node)
        ns = time_of(op, message_bytes, span, cluster).ns
        compared.append(row.compare("time", _read_time_ns(row), ns, "ns"))
    return mark_fitted(compared, list_fitted_collectives())


def _build_span(row: PublishedRow) -> GroupPlacement:
    return GroupPlacement(
        row.read_count("ranks"), row.read_count("ranks") // row.read_count("nodes")
    )


def _read_time_ns(row: PublishedRow) -> float:
    return row.read_number("time_us_oop" if row.table == ALPS else "time_us") * 1e3


def _compare_left_out(rows: list[PublishedRow]) -> list[ValidationRow]:
    """Predict each inner point of a sweep from the others (leave-one-out)."""
    rows = sorted(rows, key=lambda row: row.read_count("size_bytes"))
    points = [(row.read_count("size_bytes"), _read_time_ns(row)) for row in rows]
    results = []
    for i, row in enumerate(rows[1:-1], start=1):
        sizes, times = zip(*points[:i], *points[i + 1 :], strict=True)
        span = _build_span(row)
        sweep = TransferSweep("all_reduce", span.ranks, span.ranks_per_node, sizes, times)
        predicted = sweep.interpolate_ns(points[i][0])
        results.append(row.compare("time", points[i][1], predicted, "ns"))
    return results


# Bus bandwidth of large collectives in a node, by ranks and algorithm.

BUSBW_TABLE = "nccl_busbw_by_ranks_and_algo"

GPUS = {"A100": "a100-sxm-80gb", "H100": "h100-sxm", "H200": "h200-sxm", "B200": "b200-sxm",
        "MI300X": "mi300x"}  # fmt: skip


def check_busbw(published: Published) -> tuple[Check, ...]:
    records = [row for row in published.read_records(BUSBW_TABLE) if _find_gpu(row) in GPUS]
    name, fitted = "busbw in a node, from 4 GiB", list_fitted_collectives()
    return (check_records(name, records, _compare_busbw, "mean", (0.05,), fitted),)


def _compare_busbw(row: PublishedRow) -> tuple[ValidationRow, ...]:
    """With NCCL's choice of algorithm and, where measured, without NVLS."""
    cluster = load_hardware(GPUS[_find_gpu(row)])
    rings = replace(cluster, nvls=0.0)
    chosen = rings if "NVLS=0" in row.read_text("collective") else cluster
    results = [_build_busbw_row(row, row.id, "busbw_default", chosen)]
    if row.has_value("busbw_nvls_off"):
        results.append(_build_busbw_row(row, f"{row.id}_rings", "busbw_nvls_off", rings))
    return tuple(results)


def _build_busbw_row(
    row: PublishedRow, case: str, column: str, cluster: HardwareConfig
) -> ValidationRow:
    op, ranks = row.read_text("collective").split()[0], row.read_count("ranks")
    message_bytes = int(row.read_text("system").split()[1].removesuffix("GiB")) * 2**30
    span = GroupPlacement(ranks, min(ranks, cluster.gpus_per_node))
    bytes_per_s = message_bytes / (time_of(op, message_bytes, span, cluster).ns * 1e-9)
    predicted = compute_busbw_factor(op, ranks) * bytes_per_s / 1e9
    return row.compare("busbw", row.read_number(column), predicted, "GB/s", case=case)


def _find_gpu(row: PublishedRow) -> str:
    """The GPU of a system such as 8xH200 8GiB."""
    return row.read_text("system").split()[0].partition("x")[2]


# Predictions of each publisher's runs by constants and bands that know none of its runs.


@dataclass(frozen=True, slots=True)
class UnseenRun:
    """A run as predicted without its publisher's runs, and the confidence in that.

    low and high are the shortest and the longest step over the predicted one by what the run does
    not state.
    """

    case: Case
    predicted_ns: int
    kind: RunKind
    confidence: RunConfidence
    low: float = 1.0
    high: float = 1.0

    @property
    def ratio(self) -> float:
        """The measured step over the predicted one."""
        return self.case.step_ns / self.predicted_ns

    def find_limits(self, band: StepBand) -> tuple[float, float]:
        """The ends of its band, in ns."""
        return band.find_limits(self.predicted_ns, self.low, self.high)

    def is_inside(self, band: StepBand) -> bool:
        low_ns, high_ns = self.find_limits(band)
        return low_ns <= self.case.step_ns <= high_ns


def predict_unseen(cases: Iterable[Case]) -> tuple[UnseenRun, ...]:
    """Predict each run by the constants that were fitted without its publisher."""
    runs = []
    for case in cases:
        job = build_unseen_job(case)
        prediction = predict_step(job, Rates())
        # The confidence in the run itself; settle_confidence asks for others of its kind.
        notes = (one.text for one in prediction.caveats)
        others = [note for note in notes if not note.startswith(FEW_RUNS)]
        confidence: RunConfidence = "medium" if others else "high"
        if prediction.confidence == "low":
            confidence = "low"
        spread = join_spread(prediction.unstated)
        runs.append(
            UnseenRun(case, prediction.step.split.step_ns, find_run_kind(job), confidence, *spread)
        )
    return tuple(runs)


def build_unseen_job(case: Case) -> JobConfig:
    """The job with the constants that were fitted without its publisher."""
    hardware = case.job.hardware
    constants = load_left_out().get((hardware.family, case.source), {})
    efficiency = replace(hardware.efficiency, **cast(dict[str, Any], constants))
    return replace(case.job, hardware=replace(hardware, efficiency=efficiency))


@lru_cache(maxsize=1)
def predict_published() -> tuple[UnseenRun, ...]:
    """Predict the runs of the package's tables."""
    return predict_unseen(list_published_cases().cases)


@lru_cache(maxsize=1)
def load_left_out() -> Mapping[tuple[str, str], Mapping[str, float]]:
    """The constants of left_out.toml, by family and publisher. Raises DataError."""
    families = read_table(PRESETS / "left_out.toml").values
    return {
        (family, source): constants
        for family, sources in families.items()
        if isinstance(sources, dict)
        for source, constants in sources.items()
    }


SOURCE_POWER = 0.5
"""A run counts by its publisher's number of runs to this power less: halfway between a vote for
each run, of which one publisher has a third, and one for each publisher."""

FURTHER_SOURCE = 0.1
"""The weight of the run to be predicted over that of a publisher. Runs of one publisher are alike,
so that a further one is further off than a further run. Chosen with SOURCE_POWER so that the bands
of each population and confidence hold for 9 of 10 unseen runs, as far as chance goes, which they do
with 0.05 to 0.15; with 0.2 those of recipes with high confidence hold too often, and with 0 those
of reports with medium confidence too rarely. Both were chosen on the runs whose shares they set:
that these are right says nothing of the two numbers."""


def find_proven_kinds(runs: Iterable[UnseenRun]) -> frozenset[RunKind]:
    """The kinds on GPUs of one family of which the runs with a high confidence make a band."""
    sources: defaultdict[RunKind, list[str]] = defaultdict(list)
    for run in runs:
        if run.confidence == "high":
            for kind in run.kind.list_wider():
                sources[kind].append(run.case.source)
    return frozenset(
        kind
        for kind, names in sources.items()
        if kind.family and len(names) >= MIN_RUNS and len(set(names)) >= MIN_SOURCES
    )


def settle_confidence(run: UnseenRun, proven: frozenset[RunKind]) -> UnseenRun:
    """The run with the confidence that `model` prints: without others of its kind that are high it
    is medium, and gets the band of those."""
    if run.confidence != "high" or proven.intersection(run.kind.list_wider()):
        return run
    return replace(run, confidence="medium")


def compute_bands(runs: Iterable[UnseenRun]) -> BandIndex:
    """The error that LEVEL of the runs stay below, by kind and each wider kind, and confidence.

    Errors are distances from the median run of the population, for reports take longer than
    predicted more often than not; from the prediction itself with low confidence, whose runs are
    off for reasons of their own. They count beyond the steps that the unstated settings explain.
    0.25 is 25 % more, or 20 % less.
    """
    groups: defaultdict[tuple[RunKind, RunConfidence], list[UnseenRun]] = defaultdict(list)
    wider_kinds: dict[RunKind, tuple[RunKind, ...]] = {}
    for run in runs:
        if run.kind not in wider_kinds:
            wider_kinds[run.kind] = run.kind.list_wider()
        for wider in wider_kinds[run.kind]:
            groups[wider, run.confidence].append(run)
    middles = {
        (kind.population, confidence): 1.0 if confidence == "low" else _compute_middle(group)
        for (kind, confidence), group in groups.items()
        if kind == RunKind(kind.population)
    }
    bands = {}
    for (kind, confidence), group in groups.items():
        middle = middles[kind.population, confidence]
        counts = Counter(run.case.source for run in group)
        weights = [counts[run.case.source] ** -SOURCE_POWER for run in group]
        distances = []
        for run in group:
            low, high = math.log(run.low * middle), math.log(run.high * middle)
            ratio = math.log(run.ratio)
            distances.append(math.expm1(max(low - ratio, ratio - high, 0.0)))
        further = FURTHER_SOURCE * sum(weights) / len(counts)
        error = compute_weighted_bound(distances, weights, further, LEVEL)
        bands[kind, confidence] = StepBand(error, len(group), len(counts), kind, middle)
    return bands


def _compute_middle(runs: Sequence[UnseenRun]) -> float:
    """The median of measured over predicted steps, for which each publisher counts as much."""
    counts = Counter(run.case.source for run in runs)
    weights = [1 / counts[run.case.source] for run in runs]
    return compute_weighted_median([run.ratio for run in runs], weights)


def find_unseen_bands(
    runs: Sequence[UnseenRun], known: Sequence[UnseenRun]
) -> tuple[tuple[UnseenRun, StepBand], ...]:
    """The runs with the confidence and the band that known runs of the other publishers give."""
    by_source = {}
    for source in {run.case.source for run in runs}:
        others = [run for run in known if run.case.source != source]
        proven = find_proven_kinds(others)
        by_source[source] = proven, compute_bands(settle_confidence(run, proven) for run in others)
    banded = []
    for run in runs:
        proven, bands = by_source[run.case.source]
        settled = settle_confidence(run, proven)
        banded.append((settled, find_error_band(run.kind, settled.confidence, bands)))
    return tuple(banded)
