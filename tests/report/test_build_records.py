"""Records of the ranks in the report: memory and profiling overhead."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from support.builders import GpuTrace

from stepsplit.analyzer import MemoryRow, Report, analyze
from stepsplit.collectors.formats.rank_record import (
    MemoryState,
    RankRecord,
    StepTimes,
    write_record,
)
from stepsplit.collectors.formats.run_spec import GroupInfo, RankInfo

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


def test_the_profilers_cost_is_the_median_rank_s_of_medians_against_the_steps_before(
    tmp_path: Path,
) -> None:
    records = [
        timed((100, 100, 900), (150, 130, 140), (130, 130, 130)),
        timed((100, 100, 100), (120,), (110, 110, 110)),
        timed((200, 200, 200), (220, 220), (200, 200, 200)),
    ]

    run = report_of_records(tmp_path, *records).run

    assert run.profiling_slowdown == pytest.approx(0.2)
    # The steps after the profiler are slower too, and hid a part of its cost when they counted.
    assert run.slowdown_after_profiling == pytest.approx(0.1)


def test_the_steps_after_the_profiler_count_where_too_few_before_it_are_known(
    tmp_path: Path,
) -> None:
    run = report_of_records(tmp_path, timed((90, 90), (150, 150), (100, 100, 100))).run

    assert run.profiling_slowdown == pytest.approx(0.5)
    assert run.slowdown_after_profiling is None


def test_times_on_the_gpu_count_instead_of_the_hosts(tmp_path: Path) -> None:
    """The host was steps ahead before the profiler, and waited in the profiled steps."""
    record = timed((10,) * 6, (150,) * 2, (10,) * 20)
    on_gpu = {"before": (100,) * 6, "profiled": (110,) * 2, "after": (100,) * 20}
    times = {f"gpu_{kind}_ns": times for kind, times in on_gpu.items()}

    run = report_of_records(tmp_path, replace(record, steps=replace(record.steps, **times))).run

    assert run.profiling_slowdown == pytest.approx(0.1)
    assert run.slowdown_after_profiling == pytest.approx(0.0)


@pytest.mark.parametrize(("after", "warned"), [(112, True), (101, False)])
def test_steps_that_stay_slower_on_a_gpu_are_a_warning(
    after: int, warned: bool, tmp_path: Path
) -> None:
    report = report_of_records(tmp_path, timed((100,) * 6, (150,) * 5, (after,) * 20))

    texts = [row.message for row in report.warnings if row.code == "profiler_lasting"]
    assert bool(texts) == warned
    assert not warned or "12.0 % longer than before it: CUPTI stays attached" in texts[0]


@pytest.mark.parametrize(
    "record",
    [RANK, timed((100,), (120, 120), (100,)), timed((100, 100, 100), (), ())],
    ids=["no times", "too few without the profiler", "none under it"],
)
def test_too_few_steps_tell_nothing_of_the_profilers_cost(
    record: RankRecord, tmp_path: Path
) -> None:
    run = report_of_records(tmp_path, record).run

    assert (run.profiling_slowdown, run.slowdown_after_profiling) == (None, None)


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


def test_steps_from_the_one_in_which_kineto_stopped_are_partial(tmp_path: Path) -> None:
    for rank in range(2):
        trace = GpuTrace(rank, 2)
        for step in range(1, 5):
            trace.step(step, 100 * step, 100 * step + 100)
            # On rank 1 the kernels of the last two steps are cut off, their launches are not.
            end = 100 * step + (100 if rank == 0 or step < 3 else 40)
            trace.kernel("gemm", 100 * step, end)
        trace.write(tmp_path)
        where = RankInfo(rank, rank, "a", 7, "cuda:0")
        stopped = 3 if rank == 1 else None
        write_record(tmp_path, replace(RANK, rank=where, device_stopped_step=stopped))

    report = analyze(tmp_path)

    kinds = {(row.rank, row.step): row.kind for row in report.steps}
    assert [kinds[0, step] for step in range(1, 5)] == ["full"] * 4
    assert [kinds[1, step] for step in range(1, 5)] == ["full", "full", "partial", "partial"]
    (warning,) = (row for row in report.warnings if row.code == "device_stopped")
    assert warning.rank == 1 and "GPU buffers were full in step 3" in warning.message


def test_a_step_that_the_recorder_did_not_end_is_partial(tmp_path: Path) -> None:
    """Two marks are too few to see by their optimizer steps that the job ended in the second."""
    for rank in range(2):
        trace = GpuTrace(rank, 2)
        for step in (10, 11):
            trace.step(step, 100 * step, 100 * step + 100)
            trace.kernel("gemm", 100 * step, 100 * step + 100)
        trace.write(tmp_path)
        where = RankInfo(rank, rank, "a", 7, "cuda:0")
        write_record(tmp_path, replace(RANK, rank=where, end_step=11))

    kinds = {(row.rank, row.step): row.kind for row in analyze(tmp_path).steps}

    assert kinds == {(0, 10): "full", (0, 11): "partial", (1, 10): "full", (1, 11): "partial"}
