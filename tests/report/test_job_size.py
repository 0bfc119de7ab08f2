"""How many ranks a job has, where the headers of its traces do not say it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.builders import GpuTrace
from support.samples import SAMPLES

from stepsplit.analyzer import UsageError, analyze
from stepsplit.analyzer.gap.gap import check_layout
from stepsplit.analyzer.model.config import ParallelConfig
from stepsplit.analyzer.readers.recording import read_recording
from stepsplit.analyzer.regression.metrics import extract_metrics
from stepsplit.analyzer.report.report import Report, find_world_size, format_world_size
from stepsplit.analyzer.split_recording import split_recording
from stepsplit.collectors.formats import run_spec
from stepsplit.collectors.formats.run_spec import Mesh
from stepsplit.dashboard.reporters.terminal import build_report_screen
from stepsplit.dashboard.store.metrics import build_headline, compute_job_fingerprint

_GROUP = ("Process Group Ranks", "Process Group Name", "Process Group Description")


def write(
    folder: Path,
    *ranks: int,
    group: tuple[str, Sequence[int]] | None = None,
    group_size: int | None = None,
    header: Mapping[str, Any] | None = None,
) -> None:
    """A trace of each rank whose number is in the name of its file alone, unless a header has it.

    group: the description and the ranks of the group of its calls. group_size: the size of that
    group, where the calls name nothing else of it.
    """
    for rank in ranks:
        described, members = group or ("default_pg", range(group_size or 1))
        trace = GpuTrace(rank=rank, groups=(("1", described, tuple(members)),))
        for step in (1, 2, 3):
            at, late = 100 * step, 10 * (rank % 2)
            trace.step(step, at, at + 60).kernel("gemm", at, at + 20 + late)
            if group or group_size:
                trace.all_reduce(at + 20 + late, at + 60, group="1")
        body = trace.body()
        del body["distributedInfo"]
        if header:
            body["distributedInfo"] = {"rank": rank, **header}
        for args in (event["args"] for event in body["traceEvents"]):
            if "Group size" in args:
                args["Process Group Description"] = described
            for name in _GROUP if group_size else ():
                args.pop(name, None)
        (folder / f"rank-{rank}.json").write_text(json.dumps(body))


def write_run_json(folder: Path, world_size: int) -> None:
    spec = {"schema": run_spec.SCHEMA, "name": "run", "world_size": world_size, "backend": "nccl"}
    (folder / "run.json").write_text(json.dumps(spec))


def said(report: Report, code: str) -> list[str]:
    return [row.message for row in report.warnings if row.code == code]


def lacking(report: Report) -> list[tuple[str, tuple[int, ...]]]:
    return [(row.lack, row.ranks) for row in report.summary.lacks] if report.summary else []


def show(report: Report) -> str:
    console = Console(width=120, record=True, file=None, quiet=False)
    with console.capture() as shown:
        console.print(build_report_screen(report))
    return shown.get()


def test_the_name_of_a_single_file_is_no_size_of_a_job(tmp_path: Path) -> None:
    write(tmp_path, 70)
    report = analyze(tmp_path)
    assert find_world_size(report) is None
    assert said(report, "world_size_unknown") == [
        "the recording does not say how many ranks the job has: whether some are missing is unknown"
    ]
    assert said(report, "ranks_missing") == [] and lacking(report) == []


def test_nothing_that_is_shown_of_it_has_the_number_in_the_name(tmp_path: Path) -> None:
    write(tmp_path, 70)
    report = analyze(tmp_path)
    screen = show(report)
    assert "1 of an unknown number of ranks" in screen and "1 x Test GPU" in screen
    assert "1 of an unknown number of ranks" in report._repr_html_()
    assert extract_metrics(report, "run").setup.world_size == 1
    assert build_headline(report).world_size == 1
    assert compute_job_fingerprint(report).label == "1 x Test GPU"


@pytest.mark.parametrize("ranks", [(3,), (2, 3)])
def test_the_size_in_run_json_counts_for_traces_that_say_none(
    ranks: tuple[int, ...], tmp_path: Path
) -> None:
    write(tmp_path, *ranks)
    write_run_json(tmp_path, 4)
    report = analyze(tmp_path)
    missing = tuple(sorted({0, 1, 2, 3} - {*ranks}))
    assert format_world_size(report) == "4"
    assert lacking(report) == [("ranks missing", missing)]
    assert said(report, "ranks_missing")[0].startswith(f"{len(missing)} of 4 ranks are missing")
    assert said(report, "world_size_unknown") == []


def test_a_stated_mesh_counts_for_traces_that_say_none(tmp_path: Path) -> None:
    write(tmp_path, 70)
    report = analyze(tmp_path, mesh=Mesh.of({"dp_replicate": 72}))
    assert (report.run.world_size, format_world_size(report)) == (72, "72")
    assert lacking(report) == [("ranks missing", (*range(70), 71))]
    assert "1 of 72 ranks" in show(report)


def test_a_stated_mesh_without_a_recorded_number_says_how_to_name_the_file(tmp_path: Path) -> None:
    write(tmp_path, 70)
    with pytest.raises(UsageError, match=r"need 71; state a mesh of at least 71, or name the file"):
        analyze(tmp_path, mesh=Mesh.of({"dp_replicate": 4}))


@pytest.mark.parametrize(
    ("ranks", "missing"),
    [
        (range(4, 8), (0, 1, 2, 3)),
        (range(8, 16), tuple(range(8))),
        ((0, 3), (1, 2)),
        ((0, 1, 3), (2,)),
    ],
    ids=["upper half", "second node", "ends", "gap"],
)
def test_numbers_that_several_files_leave_out_are_missing(
    ranks: Sequence[int], missing: tuple[int, ...], tmp_path: Path
) -> None:
    write(tmp_path, *ranks)
    report = analyze(tmp_path)
    assert lacking(report) == [("ranks missing", missing)]
    assert said(report, "ranks_missing")[0].startswith(f"at least {len(missing)} ranks are missing")
    assert len(said(report, "world_size_unknown")) == 1
    assert format_world_size(report) == f"at least {ranks[-1] + 1}"


def test_files_of_all_numbers_are_all_ranks(tmp_path: Path) -> None:
    write(tmp_path, 0, 1, 2)
    report = analyze(tmp_path)
    assert format_world_size(report) == "3" and lacking(report) == []
    assert said(report, "world_size_unknown") == []


def test_the_size_of_a_group_is_the_least_size_of_the_job(tmp_path: Path) -> None:
    write(tmp_path, 2, 3, group_size=8)
    report = analyze(tmp_path)
    assert said(report, "ranks_missing") == [
        "at least 6 ranks are missing from the recording: 0, 1, 4, 5, 6, 7"
    ]
    assert "at least 8" in said(report, "world_size_unknown")[0]
    settles = {one.code: one.basis.would_settle for one in report.findings if one.basis}
    assert "missing_ranks" in settles["host_stall"] and "missing_ranks" in settles["uneven_ranks"]


def test_more_ranks_would_settle_a_finding_of_a_single_file(tmp_path: Path) -> None:
    sample = SAMPLES / "built_tp_pp_dp_slow_rank" / "rank1_trace.json.gz"
    body = json.loads(gzip.decompress(sample.read_bytes()))
    del body["distributedInfo"]
    (tmp_path / "rank-1.json").write_text(json.dumps(body))
    findings = analyze(tmp_path).findings
    assert any(one.basis and "missing_ranks" in one.basis.would_settle for one in findings)


@pytest.mark.parametrize(("rank", "group", "least"), [(70, (70, 71), "at least 72"), (3, (3,), "")])
def test_a_group_of_some_ranks_is_not_the_size_of_the_job(
    rank: int, group: tuple[int, ...], least: str, tmp_path: Path
) -> None:
    write(tmp_path, rank, group=("tp", group))
    report = analyze(tmp_path)
    assert find_world_size(report) is None and said(report, "ranks_missing") == []
    (text,) = said(report, "world_size_unknown")
    assert least in text and ("at least" in text) == bool(least)


@pytest.mark.parametrize(
    "known",
    [{"group": ("default_pg", range(8))}, {"header": {"world_size": 8}}],
    ids=["group of all", "header"],
)
def test_the_group_of_all_ranks_and_the_header_say_the_size(
    known: Mapping[str, Any], tmp_path: Path
) -> None:
    write(tmp_path, 3, **known)
    report = analyze(tmp_path)
    assert format_world_size(report) == "8"
    assert said(report, "ranks_missing")[0].startswith("7 of 8 ranks are missing")


@pytest.mark.parametrize("size", [72, 4])
def test_a_job_file_may_be_of_more_ranks_than_are_known(size: int, tmp_path: Path) -> None:
    write(tmp_path, 70)
    split = split_recording(read_recording([tmp_path]))
    layout = ParallelConfig(dp_replicate=size)
    if size == 72:
        assert check_layout(layout, None, split, "job.toml") == ()
        return
    with pytest.raises(UsageError, match=r"describes 4 ranks \(dp 4\) but .* has at least 71;"):
        check_layout(layout, None, split, "job.toml")
