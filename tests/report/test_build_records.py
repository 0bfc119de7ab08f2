"""Records of the ranks in the report: memory and profiling overhead."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from builders import GpuTrace
from cases import for_each

from stepsplit.analyzer import MemoryRow, Report, analyze
from stepsplit.collectors.rank_record import MemoryState, RankRecord, StepTimes, write_record
from stepsplit.collectors.run_spec import GroupInfo, RankInfo

RANK = RankRecord("exp", RankInfo(0, 0, "a", 7, "cpu"), 2, "gloo")
SAMPLE = Path(__file__).parents[2] / "sample_traces" / "dp4"


def report_of_records(folder: Path, *records: RankRecord) -> Report:
    """The report of ranks with one step and these records."""
    for rank, record in enumerate(records):
        GpuTrace(rank, len(records)).step(1, 0, 100).kernel("gemm", 0, 100).write(folder)
        where = RankInfo(rank, rank, "a", 7, "cpu")
        write_record(folder, replace(record, rank=where, world_size=len(records)))
    return analyze(folder)


def timed(before: tuple[int, ...], profiled: tuple[int, ...], after: tuple[int, ...]) -> RankRecord:
    return replace(RANK, steps=StepTimes(before, profiled, after))


def test_the_profilers_cost_is_the_median_rank_s_of_medians(tmp_path: Path) -> None:
    records = [
        timed((100, 100), (150, 130, 140), (100, 900)),
        timed((100,), (120,), (100, 100)),
        timed((200, 200), (220, 220), (200,)),
    ]

    report = report_of_records(tmp_path, *records)
    assert report.run.profiling_slowdown == pytest.approx(0.2)


@for_each(
    "record",
    [RANK, timed((100,), (120, 120), (100,)), timed((100, 100, 100), (), ())],
    ids=["no times", "too few without the profiler", "none under it"],
)
def test_too_few_steps_tell_nothing_of_the_profilers_cost(
    record: RankRecord, tmp_path: Path
) -> None:
    assert report_of_records(tmp_path, record).run.profiling_slowdown is None


def test_memory_rows_are_of_the_ranks_that_measured_it(tmp_path: Path) -> None:
    second = replace(RANK, memory=MemoryState(8, 8, 16, 5, 50, 64))

    assert report_of_records(tmp_path, RANK, RANK).memory is None
    assert report_of_records(tmp_path, RANK, second).memory == (
        MemoryRow(1, 50, 64, 8, 8, 16, 5, None, None),
    )


def test_the_records_make_up_for_a_run_json_that_is_missing(tmp_path: Path) -> None:
    for path in SAMPLE.iterdir():
        if path.name.startswith("rank"):
            shutil.copy(path, tmp_path)
    for rank in range(4):
        record = replace(RANK, rank=RankInfo(rank, rank, "a", 7, "cpu"), world_size=4)
        write_record(
            tmp_path, replace(record, groups=(GroupInfo("0", "default_pg", (0, 1, 2, 3)),))
        )

    report = analyze(tmp_path)

    assert (report.run.name, report.run.world_size) == ("exp", 4)
    assert report.steps == analyze(SAMPLE).steps


def test_a_record_that_was_cut_off_is_left_out_with_a_warning(tmp_path: Path) -> None:
    shutil.copytree(SAMPLE, tmp_path / "run")
    path = write_record(tmp_path / "run", replace(RANK, memory=MemoryState(8)))
    path.write_text(path.read_text()[:-30])

    report = analyze(tmp_path / "run")

    assert report.memory is None
    (warning,) = (row for row in report.warnings if row.code == "file_skipped")
    assert warning.rank == 0 and "rank0_record.json: invalid rank record" in warning.message


def test_a_field_of_a_newer_version_is_passed_over(tmp_path: Path) -> None:
    shutil.copytree(SAMPLE, tmp_path / "run")
    path = write_record(tmp_path / "run", replace(RANK, memory=MemoryState(8)))
    body = json.loads(path.read_text())
    body["memory"]["novel_bytes"] = 1
    path.write_text(json.dumps(body))

    assert analyze(tmp_path / "run").memory == (MemoryRow(0, *[None] * 2, 8, *[None] * 5),)
