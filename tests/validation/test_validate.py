"""The model against published numbers: rows, skipped records and missed checks."""

from __future__ import annotations

import csv
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from scipy.stats import binom
from support.published_checks import validate_published
from support.screens import print_lines
from support.work_builders import job

from stepsplit.analyzer.errors import DataError, UsageError
from stepsplit.analyzer.model.confidence import LEVEL, RUN_CONFIDENCES, load_error_bands
from stepsplit.analyzer.model.config import ParallelConfig
from stepsplit.analyzer.model.config_file import parse_job
from stepsplit.analyzer.model.hardware_config import list_families, load_efficiency
from stepsplit.analyzer.model.predict import predict
from stepsplit.analyzer.significance import compute_weighted_bound
from stepsplit.analyzer.validation import validate
from stepsplit.analyzer.validation.predictions import (
    UnseenRun,
    build_baseline_rows,
    compute_bands,
    compute_utilization,
    find_proven_kinds,
    find_unseen_bands,
    load_left_out,
    predict_published,
    settle_confidence,
)
from stepsplit.analyzer.validation.published_runs import (
    REPORTS_TABLE,
    list_cases,
    list_fitted_collectives,
    list_fitted_memory,
    list_published_cases,
)
from stepsplit.analyzer.validation.tables import (
    IDS,
    PUBLISHED,
    Case,
    Check,
    Published,
    PublishedRow,
    ValidationRow,
    check,
    check_records,
    evaluate,
    mark_fitted,
    parse_count,
    round_as_printed,
)
from stepsplit.dashboard import cli
from stepsplit.dashboard.commands.model import validate_command
from stepsplit.dashboard.reporters.validation import build_validation_screen

STATES = "ZeRO table 1, model states"


@pytest.fixture(scope="module")
def checks() -> tuple[Check, ...]:
    return validate_published()


@pytest.fixture(scope="module")
def unseen() -> tuple[UnseenRun, ...]:
    return predict_published()


def row(case: str, published: float, predicted: float, fitted: bool = False) -> ValidationRow:
    return ValidationRow("table", case, "time", published, predicted, "s", fitted=fitted)


def copied(folder: Path, table: str, *changes: tuple[str, str]) -> Path:
    """A folder with one of the published tables, with one text replaced."""
    text = (PUBLISHED / f"{table}.csv").read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / f"{table}.csv").write_text(text)
    return folder


def shown(checks: tuple[Check, ...], every_row: bool = False, width: int = 120) -> list[str]:
    return print_lines(build_validation_screen(checks, every_row), width=width)


def test_every_check_on_the_published_rows_is_met(checks: tuple[Check, ...]) -> None:
    assert [(one.name, one.result) for one in checks if not one.met or one.skipped] == []


def test_no_row_of_the_own_tables_is_left_out(checks: tuple[Check, ...]) -> None:
    assert [one.left_out for one in checks if one.left_out] == []


def test_rows_that_were_fitted_on_exist_and_are_not_reported(checks: tuple[Check, ...]) -> None:
    own = {record.id for table in IDS for record in Published().read_records(table)}
    rows = {each.case for one in checks for each in one.rows}
    assert list_fitted_memory() <= own
    assert list_fitted_collectives() <= own | rows
    for one in checks:
        fitted = {each.case for each in one.rows if each.fitted}
        assert fitted.isdisjoint(each.case for each in one.reported)


def test_no_step_time_is_predicted_by_constants_that_know_its_publisher() -> None:
    """The constants of a family are fitted on its publishers; each has constants without it."""
    fitted = {
        (family, source) for family in list_families() for source in load_efficiency(family).rows
    }
    assert set(load_left_out()) == fitted
    cases = list_published_cases().cases
    known = {
        (case.job.hardware.family, case.source) for case in cases if case.table != REPORTS_TABLE
    }
    assert fitted <= known
    assert {source for _, source in known - fitted} == {"torchtitan"}


def test_no_constant_is_fitted_on_a_report() -> None:
    """Of the publishers of reports one has recipes too, whose constants are left out for both."""
    cases = list_published_cases().cases
    reports = {case.source for case in cases if case.table == REPORTS_TABLE}
    assert len(reports) > 30
    fitted = {source for _, source in load_left_out()}
    assert reports & fitted == {"megatron-bridge"}


def test_the_bands_hold_what_they_say(checks: tuple[Check, ...]) -> None:
    """9 of 10 runs of publishers that neither constants nor bands know, pooled."""
    banded = [one for one in checks if one.banded]
    runs = sum(len(one.banded) for one in banded)
    assert runs > 350
    assert 0.87 <= sum(one.inside for one in banded) / runs <= 0.93


def test_the_bands_hold_for_each_population_at_each_confidence(
    unseen: tuple[UnseenRun, ...],
) -> None:
    """Of publishers that the band does not know, as often as chance allows a band of 90 %."""
    inside: dict[tuple[str, str], list[bool]] = {}
    for run, band in find_unseen_bands(unseen, unseen):
        group = inside.setdefault((run.kind.population, run.confidence), [])
        group.append(run.is_inside(band))
    # Of reports none is high: too few leave nothing open.
    assert set(inside) == {
        *(("recipe", confidence) for confidence in RUN_CONFIDENCES),
        ("report", "medium"),
        ("report", "low"),
    }
    for group in inside.values():
        fewest, most = binom.interval(0.95, len(group), LEVEL)
        assert fewest <= sum(group) <= most


def test_the_bands_are_not_wider_than_needed(unseen: tuple[UnseenRun, ...]) -> None:
    """The median band of a group is at most 1.5 times the one that holds 9 of 10 of its runs."""
    groups: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for run, band in find_unseen_bands(unseen, unseen):
        low_ns, high_ns = run.find_limits(band)
        group = groups.setdefault((run.kind.population, run.confidence), [])
        group.append((math.log(run.ratio), math.log(high_ns / low_ns) / 2))
    for group in groups.values():
        middle = median(ratio for ratio, _ in group)
        distances = sorted(abs(ratio - middle) for ratio, _ in group)
        sufficient = distances[math.ceil(LEVEL * len(distances)) - 1]
        assert median(width for _, width in group) <= 1.5 * sufficient


def test_the_shipped_bands_are_those_of_all_unseen_runs(unseen: tuple[UnseenRun, ...]) -> None:
    proven = find_proven_kinds(unseen)
    found = compute_bands(settle_confidence(run, proven) for run in unseen)
    shipped = load_error_bands()
    assert set(found) == set(shipped)
    for key, band in found.items():
        known = shipped[key]
        assert (known.runs, known.sources) == (band.runs, band.sources)
        assert known.error == pytest.approx(band.error, abs=1e-4)
        assert known.middle == pytest.approx(band.middle, abs=1e-4)


def test_the_conformal_error_is_of_a_rank_beyond_nine_of_ten() -> None:
    assert compute_weighted_bound([i / 100 for i in range(1, 20)], [1.0] * 19, 1.0, LEVEL) == 0.18
    assert compute_weighted_bound([0.1, 0.3, 0.2], [1.0] * 3, 1.0, LEVEL) == 0.3


def test_a_run_by_an_unseen_publisher_is_inside_its_band_or_not() -> None:
    near = replace(row("a", 10, 11), low=9.5, high=12.1)
    far = replace(row("b", 10, 13), low=11.3, high=15)
    found = check("GPUs, step time", [near, far, row("c", 10, 10)], "mean", ())
    assert (len(found.banded), found.inside) == (2, 1)
    assert "step time  rows       result  limit  in band   verdict" in shown((found,))


def test_a_fitted_row_changes_no_result() -> None:
    found = check(
        "times", [row("a", 10, 11), row("b", 10, 8), row("c", 1, 9, True)], "mean/max", (0.2, 0.2)
    )
    assert found.result == pytest.approx((0.15, 0.2))
    assert found.met
    assert [each.case for each in found.worst] == ["b", "a"]


def test_a_case_cannot_be_fitted_on_and_reported() -> None:
    with pytest.raises(AssertionError, match=r"fitted on and reported: \['a'\]"):
        check("times", [row("a", 10, 11), row("a", 10, 11, True)], "mean", (0.2,))


def test_marking_goes_by_the_case() -> None:
    assert mark_fitted([row("a", 1, 1), row("b", 1, 1)], {"b"}) == (
        row("a", 1, 1),
        row("b", 1, 1, fitted=True),
    )


def test_the_ninetieth_percentile_lies_between_the_nearest_two() -> None:
    rows = [row(str(i), 100, 100 + i) for i in range(1, 6)]
    found = check("times", rows, "mean/p90", (0.03, 0.04))
    assert found.result == pytest.approx((0.03, 0.046))
    assert not found.met


def test_rows_are_equal_up_to_rounding() -> None:
    rows = [
        replace(row("a", 1.5, 1.54), tolerance=0.05),
        replace(row("b", 1.5, 1.56), tolerance=0.05),
    ]
    found = check("digits", rows, "equality", (1.0,))
    assert (found.result, found.met, [each.case for each in found.worst]) == ((0.5,), False, ["b"])


def test_a_wrong_published_number_fails_its_check(tmp_path: Path) -> None:
    folder = copied(tmp_path, "zero_table1_model_states", (",zero1,35.6,", ",zero1,36.6,"))
    found = {one.name: one for one in validate(folder)}
    assert not found[STATES].met
    assert [(each.case, each.published, each.predicted) for each in found[STATES].worst] == [
        ("zero-t1/7.5B_zero1_dp16", 36.6, 35.6)
    ]
    assert {name for name, one in found.items() if not one.skipped} == {STATES}


def test_a_check_without_its_table_is_skipped_with_a_note(tmp_path: Path) -> None:
    folder = copied(tmp_path, "zero_table1_model_states")
    skipped = [one for one in validate(folder) if one.skipped]
    assert len(skipped) > 20
    assert {one.note for one in skipped} == {"no rows in this folder"}


def test_more_columns_are_ignored(tmp_path: Path) -> None:
    folder = copied(tmp_path, "zero_table2_max_model", ("mp,gpus", "who,mp,gpus"), ("\n", "\nx,"))
    text = (folder / "zero_table2_max_model.csv").read_text()
    (folder / "zero_table2_max_model.csv").write_text(text.removesuffix("x,"))
    names = {one.name: one.met for one in validate(folder) if not one.skipped}
    assert names == {"ZeRO table 2, largest model": True}


def test_a_row_of_an_unknown_model_is_left_out_and_named(tmp_path: Path) -> None:
    copied(tmp_path, "llm_foundry_mpt_throughput", (",70b,", ",71b,"))
    left_out = list_cases(Published(tmp_path)).left_out
    assert len(left_out) == 8
    assert left_out[0].startswith("llm-foundry/71b_2048_512xh100_80gb")
    assert "unknown model preset 'mpt-71b'" in left_out[0]


def test_an_invalid_row_does_not_affect_the_others(tmp_path: Path) -> None:
    record = PublishedRow("table", "table/one", {"time": "fast"})
    good = PublishedRow("table", "table/two", {"time": "2"})

    def build(each: PublishedRow) -> tuple[ValidationRow, ...]:
        return (row(each.id, each.read_number("time"), 2.0),)

    found = check_records("times", [record, good], build, "mean", (0.1,))
    assert [each.case for each in found.rows] == ["table/two"]
    assert found.left_out == (
        "table/one: table.csv: time of table/one is 'fast', not a number;"
        " use the columns of stepsplit's published tables",
    )


def test_a_table_without_a_column_of_its_id_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "mtnlg_530b.csv").write_text("model,iter_s\nMT-NLG,60.1\n")
    with pytest.raises(DataError, match=r"mtnlg_530b.csv: no column 'gpus'"):
        validate(tmp_path)


def test_a_folder_without_tables_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="contains no published table"):
        validate(tmp_path)


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("megatron_sc21_table1", "tflops_per_gpu", "n/a"),
        ("zero_table2_max_model", "max_theory_baseline", "1,5"),
        ("simumax_b200_measured", "dp", "0"),
        ("nanotron_best_configs_h100", "tp", "0"),
    ],
)
def test_a_value_that_cannot_be_used_is_one_line_or_leaves_its_row_out(
    table: str, column: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (PUBLISHED / f"{table}.csv").open(newline="") as file:
        row = next(csv.DictReader(file))
    with (tmp_path / f"{table}.csv").open("w", newline="") as file:
        own = csv.DictWriter(file, row)
        own.writeheader()
        own.writerow(row | {column: value})
    assert cli.run(["validate", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("text", ["", "model,gpus,iter_s\n"])
def test_a_table_without_rows_is_named(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mtnlg_530b.csv").write_text(text)
    assert cli.run(["validate", str(tmp_path)]) == 2
    assert "mtnlg_530b.csv: has no rows" in capsys.readouterr().err


def test_the_baseline_gives_every_run_the_utilization_of_the_known_ones() -> None:
    """Two runs of one kind take 1 s and 4 s, the second with twice the batch."""
    short = Case(
        "table", "short", "llm-foundry", job(layout=ParallelConfig(), global_batch=4), 1e9, "a"
    )
    long = Case(
        "table", "long", "llm-foundry", job(layout=ParallelConfig(), global_batch=8), 4e9, "b"
    )
    assert compute_utilization(short) == pytest.approx(2 * compute_utilization(long))
    (found,) = build_baseline_rows([long], [short])
    assert (found.case, found.published, found.fitted) == ("long", 4e9, False)
    assert found.predicted == pytest.approx(2e9)
    assert build_baseline_rows([long], []) == ()
    assert build_baseline_rows([long], [replace(short, source="b")]) == ()


@pytest.mark.parametrize(
    ("formula", "value"),
    [("s*b*(10+24/t)", 52.0), ("max(4*b, s)", 8.0), ("1", 1.0)],
)
def test_a_formula_of_a_table_has_a_value(formula: str, value: float) -> None:
    assert evaluate(formula, {"s": 2, "b": 2, "t": 8}) == value


@pytest.mark.parametrize("formula", ["open('x')", "s**9", "q", "s*", "s/0"])
def test_only_arithmetic_is_a_formula(formula: str) -> None:
    with pytest.raises(DataError, match="not arithmetic"):
        evaluate(formula, {"s": 2})


def test_digits_may_be_rounded_or_truncated() -> None:
    assert round_as_printed(4046.875, "4046") == 4046
    assert round_as_printed(0.46875, "0.47") == 0.47
    assert round_as_printed(4046.875, "4050") == 4047
    assert parse_count("0.5T") == 5e11


def test_every_published_row_has_a_source_and_a_name_of_its_own() -> None:
    assert {path.stem for path in PUBLISHED.glob("*.csv")} == set(IDS)
    for table in IDS:
        records = Published().read_records(table)
        assert records and all(record.read_text("source") for record in records)
        assert not [record.id for record in records if "#" in record.id]


def test_the_screen_shows_each_check_and_the_largest_errors() -> None:
    times = check(
        "GPUs, step time", [row("a", 10, 12), row("b", 10, 10.04), row("c", 10, 10, True)],
        "mean/p90", (0.05, 0.1), (0.15, 0.2), "two runs",
    )  # fmt: skip
    states = check("states", [row("d", 4, 4)], "equality", (1.0,))
    nothing = check("volumes", [], "equality", (1.0,))
    assert shown((times, states, nothing)) == [
        "equalities  rows  equal  verdict",
        "states         1      1      met",
        "",
        "step time  rows                   result         limit           verdict",
        "GPUs          2  mean 10.2 %, p90 18.0 %  5.0 / 10.0 %  missed by 8.0 pt",
        "for comparison, one constant utilization per GPU, dtype, dense or experts, same rows:",
        "GPUs  mean 15.0 %, p90 20.0 %  worse than the model",
        "GPUs, step time: two runs",
        "",
        "GPUs, step time: largest errors",
        "row  published  predicted    error",
        "a         10 s       12 s  +20.0 %",
        "",
        "checks without rows in this folder: 1",
        "1 of 2 checks met; rows excluded because fitted: 1",
    ]


def test_a_more_accurate_constant_utilization_is_noted() -> None:
    times = check("GPUs, step time", [row("a", 10, 11)], "mean/p90", (), (0.05, 0.06))
    assert "GPUs  mean 5.0 %, p90 6.0 %  better than the model" in shown((times,))


def test_nothing_is_cut_at_eighty_columns(checks: tuple[Check, ...]) -> None:
    lines = shown(checks, every_row=True, width=80)
    ends = [line for line in lines if line.endswith("%") or line.endswith("yes")]
    # Checks by population have the rows of others.
    assert len(ends) == sum(len(one.rows) for one in checks if not one.sources)


def test_every_row_can_be_shown_with_those_that_were_fitted_on() -> None:
    times = check("times", [row("a", 10, 11), row("b", 10, 10, True)], "mean", (0.2,))
    assert shown((times,), every_row=True)[-5:-2] == [
        "row  published  predicted    error  fitted",
        "a         10 s       11 s  +10.0 %",
        "b         10 s       10 s   +0.0 %     yes",
    ]


def test_rows_of_one_run_have_distinct_quantities() -> None:
    first = replace(row("a", 10, 12), what="stage 0")
    found = check("memory", [first, replace(first, what="stage 1")], "mean", (0.1,))
    assert [line.split("  ")[0] for line in shown((found,))[-4:-2]] == ["a, stage 0", "a, stage 1"]


def test_the_command_exits_with_one_if_a_check_is_missed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copied(tmp_path, "zero_table1_model_states")
    assert not validate_command.main([str(folder)], standalone_mode=False)
    assert "1 of 1 checks met" in capsys.readouterr().out
    copied(tmp_path, "zero_table1_model_states", (",zero1,35.6,", ",zero1,36.6,"))
    assert validate_command.main([str(folder), "--json", "-"], standalone_mode=False) == 1
    written = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in written["checks"] if one["met"] is False] == [STATES]


def test_json_has_every_row(tmp_path: Path) -> None:
    copied(tmp_path, "zero_table2_max_model")
    file = tmp_path / "checks.json"
    validate_command.main([str(tmp_path), "--json", str(file)], standalone_mode=False)
    written = json.loads(file.read_text())
    (one,) = [each for each in written["checks"] if each["rows"]]
    assert (one["name"], one["met"], len(one["rows"])) == ("ZeRO table 2, largest model", True, 12)
    assert one["rows"][0] == {
        "table": "zero_table2_max_model",
        "case": "zero-t2/mp1",
        "what": "baseline",
        "published": 2e9,
        "predicted": 2e9,
        "unit": "parameters",
        "error": 0.0,
        "low": None,
        "high": None,
        "fitted": False,
    }


@pytest.mark.slow
@pytest.mark.in_turn("analyzer/validation", "analyzer/model")
def test_the_own_tables_can_be_validated_from_anywhere(
    checks: tuple[Check, ...], tmp_path: Path
) -> None:
    shutil.copytree(PUBLISHED, tmp_path / "copy")
    assert [one.result for one in validate(tmp_path / "copy")] == [one.result for one in checks]


def test_the_band_of_an_own_run_is_the_one_that_a_prediction_prints(tmp_path: Path) -> None:
    (tmp_path / "training_reports.csv").write_text(
        "case,publisher,step_s,model.preset,parallel.dp,parallel.tp,parallel.zero,"
        "training.seq_len,training.micro_batch,training.global_batch,hardware.preset\n"
        "mine,us,7.0,llama-3-8b,4,2,1,8192,1,64,h100-sxm\n"
    )
    (found,) = (one for one in validate(tmp_path) if one.name == "H100 reports, step time")
    (row,) = found.rows
    job = parse_job("""
    model = { preset = "llama-3-8b" }
    parallel = { dp = 4, tp = 2, zero = 1 }
    training = { seq_len = 8192, micro_batch = 1, global_batch = 64 }
    hardware = { preset = "h100-sxm" }
    """)
    printed = predict(job)
    assert (row.predicted, row.low, row.high) == pytest.approx(
        (printed.split.step_ns, printed.low_ns, printed.high_ns), rel=1e-4
    )
