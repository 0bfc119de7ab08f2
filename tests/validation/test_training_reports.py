"""Published training runs as rows whose columns are keys of job.toml, and the bands they make."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from stepsplit.analyzer.errors import DataError, UsageError
from stepsplit.analyzer.model.confidence import (
    RUN_CONFIDENCES,
    RunConfidence,
    RunKind,
    StepBand,
    find_error_band,
    find_run_kind,
)
from stepsplit.analyzer.model.features import KEY_FEATURES
from stepsplit.analyzer.model.parameters import count_model_flops
from stepsplit.analyzer.model.predict import predict
from stepsplit.analyzer.validation.predictions import (
    UnseenRun,
    check_layout_choices,
    check_repeats,
    compute_bands,
    find_proven_kinds,
    predict_unseen,
    settle_confidence,
)
from stepsplit.analyzer.validation.published_runs import (
    REPORTS_TABLE,
    build_stated_job,
    build_training_report,
    list_cases,
    list_published_cases,
)
from stepsplit.analyzer.validation.tables import Case, Published, PublishedRow

REPORT = {
    "case": "ours",
    "publisher": "us",
    "model.preset": "llama-3.1-8b",
    "parallel.dp": "16",
    "parallel.overlap": '["dp"]',
    "training.seq_len": "8192",
    "training.micro_batch": "1",
    "training.global_batch": "64",
    "training.framework": "megatron",
    "training.program": "ours",
    "training.unfused": "",
    "hardware.preset": "h100-sxm",
    "hardware.nodes_link": '{ bytes_per_s = 12.5e9, ring = 0.9, latency_ns = 20000, name = "w" }',
}


def report(**speed: str) -> PublishedRow:
    return PublishedRow("training_reports", "report/ours", {**REPORT, **speed})


def test_other_values_of_a_guessed_key_are_plausible() -> None:
    def find_unstated(**columns: str) -> set[str]:
        return {one.key for one in predict(build_stated_job(report(**columns))).unstated}

    assert "parallel.overlap" not in find_unstated()
    assert "parallel.overlap" in find_unstated(guessed="parallel.overlap training.micro_batch")
    with pytest.raises(DataError, match=r"no value of parallel\.tp, which it calls guessed"):
        build_stated_job(report(guessed="parallel.tp"))


def test_columns_are_keys_of_a_job_file_and_empty_ones_left_out() -> None:
    job = build_stated_job(report())
    assert (job.model.hidden, job.parallel.dp, job.training.unfused) == (4096, 16, None)
    assert job.parallel.overlap == {"dp"}
    assert (job.hardware.inter.name, job.hardware.inter.bytes_per_s) == ("w", 12.5e9)


def test_a_speed_is_a_time_or_a_throughput() -> None:
    tokens = 64 * 8192
    (timed,) = build_training_report(report(step_s="2.5"))
    assert (timed.step_ns, timed.source, timed.family) == (2.5e9, "us", "H100 reports")
    (by_tokens,) = build_training_report(report(tokens_per_s_per_gpu="10000"))
    assert by_tokens.step_ns == pytest.approx(1e9 * tokens / (16 * 10_000))
    (by_flops,) = build_training_report(report(tflops_per_gpu="400", flops="C5"))
    flops = count_model_flops(by_flops.job, "C5")
    assert by_flops.step_ns == pytest.approx(1e9 * flops / (16 * 400e12))


def test_a_report_without_a_speed_is_named() -> None:
    for row in (report(), report(step_s="0")):
        with pytest.raises(DataError, match=r"ours has no speed above 0; give one of step_s, tok"):
            build_training_report(row)


def test_a_report_of_a_gpu_without_published_runs_is_named() -> None:
    volta = {"hardware.preset": "v100-sxm-32gb", "training.dtype": "fp16"}
    row = report(**{"step_s": "1", "hardware.nodes_link": "", **volta})
    with pytest.raises(UsageError, match=r"reports are of ampere, hopper, .*, cdna4, not volta"):
        build_training_report(row)


def test_flops_are_of_a_known_convention() -> None:
    with pytest.raises(DataError, match="flops of report/ours is 'C9'"):
        build_training_report(report(tflops_per_gpu="400", flops="C9"))


def test_another_program_is_timed_as_its_framework_and_says_so() -> None:
    other = build_stated_job(report())
    same = replace(other, training=replace(other.training, program=""))
    found, itself = predict(other), predict(same)
    assert found.split.step_ns == itself.split.step_ns
    assert "ours is timed as megatron, whose runs set the efficiencies" in found.notes


def test_a_job_is_anyone_else_s_unless_it_names_a_recipe() -> None:
    """The recipe changes no time, only whose error the band is of."""
    report_job = build_stated_job(report())
    named = build_stated_job(report(**{"training.recipe": "Megatron-Bridge 26.02"}))
    assert find_run_kind(report_job) == RunKind("report", "hopper", "megatron", "dense")
    assert find_run_kind(named) == replace(find_run_kind(report_job), population="recipe")
    found, tuned = predict(report_job), predict(named)
    assert found.split.step_ns == tuned.split.step_ns
    assert (found.low_ns, found.high_ns) != (tuned.low_ns, tuned.high_ns)


def test_reports_never_borrow_the_band_of_recipes() -> None:
    kind = RunKind("report", "hopper", "megatron", "dense")
    recipe = StepBand(0.05, 90, 9, replace(kind, population="recipe"))
    widest = StepBand(0.2, 20, 4, RunKind("report"))
    bands: dict[tuple[RunKind, RunConfidence], StepBand] = {
        (recipe.kind, "medium"): recipe,
        (widest.kind, "medium"): widest,
    }
    assert find_error_band(kind, "medium", bands) == widest
    assert find_error_band(recipe.kind, "medium", bands) == recipe
    assert str(kind) == "hopper megatron dense report"


def test_bands_are_by_the_confidence_in_the_runs() -> None:
    """Runs like the fitted ones are 5 % off, farther ones 5 % off from a step that is 25 % longer
    than predicted; doubted ones are predicted 20 % too long, which is no reason to expect it."""
    (case,) = build_training_report(report(step_s="1"))
    around = (*4 * [1 / 1.05], 1.0, *4 * [1.05])
    runs = [
        *(predicted(case, each, "high") for each in around),
        *(predicted(case, 0.8 * each, "medium") for each in around),
        *9 * [predicted(case, 1.2, "low")],
    ]
    bands = compute_bands(runs)
    near, far, off = (bands[runs[0].kind, confidence] for confidence in RUN_CONFIDENCES)
    assert (near.error, near.middle, near.runs) == pytest.approx((0.05, 1.0, 9))
    assert (far.error, far.middle, far.runs) == pytest.approx((0.05, 1.25, 9))
    assert (off.error, off.middle, off.runs) == pytest.approx((0.20, 1.0, 9))


def test_runs_are_high_only_where_others_of_their_kind_and_gpus_are() -> None:
    """Nine runs of four publishers are enough, eight or three publishers are not; those of other
    GPUs do not count."""
    (case,) = build_training_report(report(step_s="1"))
    runs = [predicted(replace(case, source="abcd"[i % 4]), 1.0, "high") for i in range(9)]
    others = [replace(run, kind=replace(run.kind, family="volta")) for run in runs]
    one = predicted(replace(case, source="mine"), 1.0, "high")
    for known, expected in (
        (runs, "high"),
        (runs[:8], "medium"),
        ([run for run in runs if run.case.source != "a"] * 2, "medium"),
        (others, "medium"),
    ):
        settled = settle_confidence(one, find_proven_kinds(known))
        assert settled == replace(one, confidence=expected)
    low = replace(one, confidence="low")
    assert settle_confidence(low, find_proven_kinds([])) == low


def test_a_recipe_does_not_state_the_speed_of_its_host() -> None:
    recipes = [case for case in list_published_cases().cases if case.table != REPORTS_TABLE]
    for case in recipes:
        left_open = [feature.key for feature in KEY_FEATURES if not feature.is_stated(case.job)]
        assert left_open == ["hardware.efficiency.host_ns"], case.id


def test_each_publisher_counts_as_much_for_the_middle() -> None:
    """Nine runs of one publisher take as predicted, one each of two others 20 % longer."""
    (case,) = build_training_report(report(step_s="1"))
    others = [replace(case, source=name) for name in ("them", "those")]
    runs = [
        *9 * [predicted(case, 1.0, "medium")],
        *(predicted(o, 1 / 1.2, "medium") for o in others),
    ]
    band = compute_bands(runs)[runs[0].kind, "medium"]
    assert (band.middle, band.error) == pytest.approx((1.2, 0.2))


def test_the_prediction_is_inside_of_its_band() -> None:
    assert StepBand(0.25, 30, 4, middle=1.1).find_limits(100) == pytest.approx((88, 137.5))
    assert StepBand(0.05, 30, 4, middle=1.1).find_limits(100) == pytest.approx((100, 115.5))


def test_too_few_runs_of_high_confidence_borrow_the_band_of_medium() -> None:
    kind = RunKind("report", "hopper", "megatron", "dense")
    bands: dict[tuple[RunKind, RunConfidence], StepBand] = {
        (kind, "high"): StepBand(0.05, 8, 4, kind),
        (RunKind("report"), "high"): StepBand(0.05, 20, 3, RunKind("report")),
        (kind, "medium"): StepBand(0.2, 30, 6, kind, middle=1.1),
    }
    assert find_error_band(kind, "high", bands) == bands[kind, "medium"]


def test_what_a_run_does_not_state_is_no_error_of_the_model() -> None:
    """19 runs took 20 % longer than predicted, which a key that they do not state explains; one
    and three of them state all keys."""
    (case,) = build_training_report(report(step_s="1.2"))
    runs = [
        UnseenRun(replace(case, source=str(i)), 10**9, find_run_kind(case.job), "low", 1.0, 1.3)
        for i in range(19)
    ]
    closed = replace(runs[0], high=1.0)
    assert compute_bands(runs)[runs[0].kind, "low"].error == 0.0
    assert compute_bands([closed, *runs[1:]])[runs[0].kind, "low"].error == 0.0
    assert compute_bands([closed] * 3 + runs[3:])[runs[0].kind, "low"].error == pytest.approx(0.2)
    band = StepBand(0.0, 19, 19)
    assert runs[0].is_inside(band) and not closed.is_inside(band)


def write_reports(folder: Path, *rows: dict[str, str]) -> Published:
    with (folder / "training_reports.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)
    return Published(folder)


def read_runs(folder: Path, *rows: dict[str, str]) -> tuple[UnseenRun, ...]:
    return predict_unseen(list_cases(write_reports(folder, *rows)).cases)


def test_the_layout_predicted_fastest_is_compared_with_the_best_measured(tmp_path: Path) -> None:
    """Of tp 1, 2, 4 and 8 the model picks tp 1, whose step was 10 % longer than that of tp 2; a
    layout of another batch is no choice."""
    steps = {1: "1.1", 2: "1.0", 4: "1.2", 8: "1.5"}
    rows = [
        {**REPORT, "case": f"tp{tp}", "parallel.tp": str(tp), "parallel.dp": str(16 // tp),
         "parallel.zero": "1", "step_s": step}
        for tp, step in steps.items()
    ]  # fmt: skip
    other = {**rows[0], "case": "other", "training.global_batch": "32", "step_s": "0.1"}
    found = check_layout_choices(read_runs(tmp_path, *rows, other))
    (choice,) = found.rows
    assert (choice.case, choice.published, choice.predicted) == (
        "us/32x4096_8192_16_of 4",
        1e9,
        1.1e9,
    )
    assert found.result == pytest.approx((0.1, 0.1))


def test_three_layouts_are_no_choice(tmp_path: Path) -> None:
    rows = [{**REPORT, "case": str(tp), "step_s": "1"} for tp in range(3)]
    found = check_layout_choices(read_runs(tmp_path, *rows))
    assert found.skipped


def test_runs_of_one_job_show_what_no_model_of_it_can_tell_apart(tmp_path: Path) -> None:
    """Three runs took 1.0, 1.2 and 1.5 s: each against the median of the others, 1.35, 1.25 and
    1.1 s. A job that ran once is not compared."""
    steps = {"first": "1.0", "second": "1.2", "third": "1.5"}
    rows = [{**REPORT, "case": case, "step_s": step} for case, step in steps.items()]
    once = {**REPORT, "case": "once", "training.global_batch": "32", "step_s": "9"}
    found = check_repeats(list_cases(write_reports(tmp_path, *rows, once)).cases)
    assert {row.case.partition("/")[2]: (row.published, row.predicted) for row in found.rows} == {
        "first": (1.0e9, 1.35e9),
        "second": (1.2e9, 1.25e9),
        "third": (1.5e9, 1.1e9),
    }
    assert (found.bar, found.result[0]) == ((), pytest.approx((0.35 + 0.05 / 1.2 + 0.4 / 1.5) / 3))


def test_a_report_whose_kernel_has_no_rate_is_left_out_by_name(tmp_path: Path) -> None:
    kernel = {"training.attention_kernel": "cudnn-fp8"}
    found = list_cases(write_reports(tmp_path, {**REPORT, **kernel, "step_s": "1"}))
    (left_out,) = found.left_out
    assert found.cases == ()
    assert left_out.startswith("report/ours: no published rate of cudnn-fp8 on hopper")


def predicted(case: Case, step_s: float, confidence: RunConfidence) -> UnseenRun:
    return UnseenRun(case, round(step_s * 1e9), find_run_kind(case.job), confidence)
