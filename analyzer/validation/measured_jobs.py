"""Checks of measured jobs: a table whose columns are the keys of job.toml, and eager models."""

from __future__ import annotations

from stepsplit.analyzer.model.config import JobConfig, ModelConfig, ParallelConfig, TrainingConfig
from stepsplit.analyzer.model.config_file import load_hardware, load_model
from stepsplit.analyzer.model.memory import compute_memory
from stepsplit.analyzer.model.memory_states import compute_layer_activations
from stepsplit.analyzer.model.predict import predict
from stepsplit.analyzer.validation.published_runs import build_stated_job, list_fitted_memory
from stepsplit.analyzer.validation.tables import (
    Check,
    Published,
    PublishedRow,
    ValidationRow,
    check_records,
)

# A row of measured_jobs.csv: a job by its keys, and what it took.

JOBS_TABLE = "measured_jobs"

MEMORY_BAR = (0.01, 0.03)
"""Mean and maximum of the absolute errors."""

STEP_BAR = (0.08, 0.15)
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
            "measured jobs, peak memory", peaks, _compare_peak, "mean/max", MEMORY_BAR, fitted
        ),
        check_records(
            "measured jobs, step time", steps, _compare_step, "mean/p90", STEP_BAR, fitted
        ),
    )


def _compare_peak(row: PublishedRow) -> tuple[ValidationRow, ...]:
    peak_bytes = max(stage.total_bytes for stage in compute_memory(build_stated_job(row)))
    measured = row.read_number("peak_allocated_bytes")
    return (
        ValidationRow(row.table, row.id, "allocated", measured / 2**30, peak_bytes / 2**30, "GiB"),
    )


def _compare_step(row: PublishedRow) -> tuple[ValidationRow, ...]:
    found, measured = predict(build_stated_job(row)), row.read_number("step_ms")
    low, high = found.low_ns / 1e6, found.high_ns / 1e6
    return (
        ValidationRow(
            row.table, row.id, "step", measured, found.split.step_ns / 1e6, "ms", low=low, high=high
        ),
    )


# Saved activations of a layer in eager transformers, against measured coefficients.

EAGER_TABLE = "activation_coefficient_measured"

EAGER_BAR = (0.10,)

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
    job = JobConfig(_find_model(row), ParallelConfig(), training, load_hardware("h100-sxm"))
    predicted = compute_layer_activations(job).total_bytes / (2 * job.tokens * job.model.hidden)
    return (
        ValidationRow(
            row.table, row.id, "coefficient", row.read_number("coefficient"), predicted, "x 2bsh"
        ),
    )


def _find_model(row: PublishedRow) -> ModelConfig:
    if row.read_text("model").startswith("google/gemma-1.1-2b"):
        return GEMMA
    return load_model(row.read_choice("model", PRESETS))
