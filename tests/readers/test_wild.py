"""Files that people have published, each of a kind that was once split wrongly."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.required import SHARED_TRACES, absent

from stepsplit.analyzer import DataError, Sweeps, analyze, read_files

REPRO = SHARED_TRACES.parent / "repro"


def folder(name: str) -> Path:
    places = list(REPRO.glob(name))
    if not places:
        absent("traces", f"{name} is not beside the project")
    return places[0]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("wild/zoology", "device activity was not recorded: none of 268 launches"),
        ("wild/gpu_practice", "device activity was not recorded: none of 4 launches"),
        ("wild/gpu_practice/default_trace.json", "not recorded: none of 20 launches"),
        ("wild/flow_matching", "no op and no device event with a duration was recorded"),
        ("wild/mlserving", "only 2,000 asynchronous events"),
        ("only_steps", "no op and no device event with a duration was recorded"),
        ("what_if_main_of", "no op and no device event with a duration was recorded"),
        ("html_ideal_grid", 'training.microbatches: "0" is not an integer'),
    ],
)
def test_what_cannot_be_split_is_one_line(name: str, problem: str) -> None:
    with pytest.raises(DataError, match=problem) as error:
        analyze(folder(name))
    assert "\n" not in str(error.value)


def test_an_ascend_trace_agrees_with_its_own_overlap_analysis() -> None:
    """Computing is 1.788 of 14.09 ms there."""
    report = analyze(folder("wild/npu_mstt"))
    [row] = report.steps
    assert row.compute_ns == pytest.approx(1_788_000, rel=1e-3)
    assert row.compute_ns + row.copy_ns + row.idle_ns == row.step_ns
    assert 13_800_000 < row.step_ns < 14_092_000


@pytest.mark.parametrize(("name", "average"), [("nccl", 178.078), ("nccl-fault", 28.2632)])
def test_torn_tables_have_the_mean_that_the_test_printed(name: str, average: float) -> None:
    reads = read_files(folder("wild/nccl_log_timez") / f"{name}.log")
    [sweeps] = [one.content for one in reads if isinstance(one.content, Sweeps)]
    [sweep] = sweeps.sweeps
    halves = [half for row in sweep.rows for half in (row.out_of_place, row.in_place)]
    assert (sweep.op, len(sweep.rows), None in halves) == ("all_reduce", 11, False)
    busbw = [half.busbw_bytes_per_s / 1e9 for half in halves if half is not None]
    assert sum(busbw) / len(busbw) == pytest.approx(average, abs=0.01)


FOUR, OPEN = ["full"] * 4, ["full", "full", "full", "partial"]
Expected = dict[int, list[str]]


@pytest.mark.parametrize(
    ("name", "kinds", "code"),
    [
        ("no_steps_t*_apart", {0: OPEN[1:], 1: OPEN[1:]}, "steps_open"),
        ("steps_dur0_on_one_rank", {0: FOUR, 1: OPEN, 2: FOUR, 3: FOUR}, "steps_open"),
        ("steps_elsewhere_on_one_rank", {0: FOUR, 2: FOUR, 3: FOUR}, "no_steps_on_rank"),
        ("rank_without_slices", {0: FOUR[1:]}, "no_device_data"),
        ("one_empty_step", {0: ["partial"]}, "steps_open"),
        ("no_steps_no_work", {0: ["full"]}, "no_steps"),
        ("html_rank_tracks", {0: ["partial"]}, "few_ops"),
    ],
)
def test_odd_marks_are_split_with_a_warning(name: str, kinds: Expected, code: str) -> None:
    report = analyze(folder(name))
    found: Expected = {}
    for row in report.steps:
        found.setdefault(row.rank, []).append(row.kind)
    assert found == kinds
    assert code in {warning.code for warning in report.warnings}


def list_run_jsons() -> list[Path]:
    return sorted((REPRO / "run_json").glob("*.json"))


@pytest.mark.parametrize("file", list_run_jsons(), ids=lambda path: path.stem)
def test_a_wrong_run_json_is_refused(tmp_path: Path, file: Path) -> None:
    sample = Path(__file__).parents[2] / "sample_traces" / "pp2_m8"
    (tmp_path / "rank0_trace.json.gz").symlink_to(sample / "rank0_trace.json.gz")
    (tmp_path / "run.json").symlink_to(file)
    with pytest.raises(DataError) as error:
        analyze(tmp_path)
    assert (error.value.where, error.value.hint) == (
        str(tmp_path / "run.json"),
        "fix it or leave it out",
    )
