"""The sample recordings: each gives its golden report, and its known answers hold."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from generate.samples import BUILT
from support.ground_truth import first_blamed
from support.reading import rounded

from stepsplit.analyzer import BUCKETS, Report, analyze
from stepsplit.analyzer.report.io import REPORT_NAME, read_report, to_json
from stepsplit.collectors.safe_io.atomic_file import write_whole

SAMPLES = Path(__file__).parents[2] / "sample_traces"
NAMES = ("dp4", "fsdp4", "pp2_m2", "pp2_m8", "tp2_pp2", "tp2_pp2_dp2")
ON_GPU = ("h100_fsdp2", "h100_pp2")
PIPELINES = tuple(name for name in NAMES if "pp" in name)
TRUE = tuple(BUILT)


def golden(name: str) -> Report:
    return read_report(SAMPLES / name)


def test_every_sample_is_known_here() -> None:
    assert sorted(path.name for path in SAMPLES.iterdir() if path.is_dir()) == sorted(
        (*NAMES, *ON_GPU, *TRUE)
    )


@pytest.mark.parametrize("name", (*NAMES, *ON_GPU, *TRUE))
def test_a_sample_gives_its_golden_report(name: str, request: pytest.FixtureRequest) -> None:
    report = analyze(SAMPLES / name)
    if request.config.getoption("--update-golden"):
        write_whole(SAMPLES / name / REPORT_NAME, to_json(report))
    assert rounded(to_json(report)) == rounded((SAMPLES / name / REPORT_NAME).read_bytes())
    assert all(sum(row.split.buckets_ns) == row.step_ns for row in report.steps)


@pytest.mark.parametrize("name", (*NAMES, *ON_GPU, *TRUE))
def test_a_sample_is_small_and_names_its_origin(name: str) -> None:
    recorded = [path for path in (SAMPLES / name).iterdir() if path.name != REPORT_NAME]
    assert sum(path.stat().st_size for path in recorded) < 1_000_000
    assert "torch" in (SAMPLES / name / "SOURCE.txt").read_text()


@pytest.mark.parametrize("name", (*NAMES, *ON_GPU))
def test_without_its_mesh_a_sample_splits_the_same(name: str, tmp_path: Path) -> None:
    copy = tmp_path / name
    shutil.copytree(SAMPLES / name, copy)
    run = json.loads((copy / "run.json").read_text())
    (copy / "run.json").write_text(json.dumps(run | {"mesh": None}))
    report = analyze(copy)
    assert report.steps == golden(name).steps
    assert {row.code for row in report.warnings} <= {"mesh_inferred", "mesh_unknown"}


@pytest.mark.parametrize("name", PIPELINES)
def test_the_first_and_the_last_stage_stand_in_the_bubble(name: str) -> None:
    report = golden(name)
    first, last = min(report.run.ranks), max(report.run.ranks)
    for rank in (first, last):
        assert all(row.bubble_ns > 0 for row in report.steps if row.rank == rank)


@pytest.mark.parametrize("name", ["pp2_m2", "pp2_m8", "tp2_pp2"])
def test_the_bubble_of_the_schedule_is_near_its_ideal(name: str) -> None:
    pipeline = golden(name).pipeline
    assert pipeline is not None
    assert len({row.step for row in golden(name).steps if row.kind == "full"}) >= 5
    ideal = (2 - 1) / (pipeline.microbatches + 2 - 1)
    assert pipeline.ideal_bubble_fraction == ideal
    assert abs(pipeline.bubble_fraction - ideal) <= 0.10


def test_from_two_to_eight_microbatches_the_bubble_at_least_halves() -> None:
    few, many = golden("pp2_m2").pipeline, golden("pp2_m8").pipeline
    assert few is not None
    assert many is not None
    assert (few.microbatches, many.microbatches) == (2, 8)
    assert many.bubble_fraction <= few.bubble_fraction / 2


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("dp4", {"dp_replicate"}),
        ("fsdp4", {"dp_shard"}),
        ("tp2_pp2", {"tp", "pp"}),
        ("tp2_pp2_dp2", {"tp", "pp", "dp_replicate"}),
    ],
)
def test_exposed_time_lies_on_the_axes_of_the_layout(name: str, axes: set[str]) -> None:
    assert {row.axis for row in golden(name).exposed} == axes


def test_fsdp_on_gloo_hides_nothing_and_has_no_bubble() -> None:
    steps = golden("fsdp4").steps
    assert {row.bubble_ns + row.p2p_ns for row in steps} == {0}
    assert {row.op for row in golden("fsdp4").collectives} == {"all_gather", "reduce_scatter"}


def test_a_pipeline_alone_has_messages_and_no_collective() -> None:
    for name in ("pp2_m2", "pp2_m8"):
        assert {row.collective_ns + row.skew_ns for row in golden(name).steps} == {0}


def test_a_recording_of_gpus_begins_with_work_of_the_step_before() -> None:
    """Some ranks had none in flight; where they had, the first step is partial and warns of
    nothing."""
    kinds = {name: [(row.step, row.kind) for row in golden(name).steps] for name in ON_GPU}
    assert {kind for _, kind in kinds["h100_pp2"]} == {"full"}
    assert kinds["h100_fsdp2"].count((3, "partial")) >= 1
    assert [row.code for name in ON_GPU for row in golden(name).warnings] == []


def test_the_pipeline_of_gpus_has_its_schedule_and_all_messages() -> None:
    """Its backwards are launched by autograd's threads, and its traces name no host."""
    report = golden("h100_pp2")
    assert report.pipeline is not None
    assert (report.pipeline.schedule, report.pipeline.microbatches) == ("1f1b", 4)
    assert {(row.op, row.calls) for row in report.step_calls} == {("send", 8), ("recv", 8)}
    assert [host.ranks for host in report.run.hosts] == [(0, 1)]


@pytest.mark.parametrize("name", TRUE)
def test_a_built_sample_includes_its_ground_truth(name: str) -> None:
    truth = json.loads((SAMPLES / name / "truth.json").read_text())
    rows = {(row.rank, row.step): row for row in golden(name).steps if row.kind == "full"}
    for true in truth["steps"]:
        row, step_ns = rows[true["rank"], true["step"]], true["end_ns"] - true["start_ns"]
        for bucket in BUCKETS:
            off_ns = getattr(row, f"{bucket}_ns") - true[f"{bucket}_ns"]
            assert abs(off_ns) <= 0.005 * step_ns, (row.rank, row.step, bucket, off_ns)


def test_a_built_sample_blames_what_was_planted() -> None:
    for name in TRUE:
        cause = json.loads((SAMPLES / name / "truth.json").read_text())["cause"]
        if cause is not None:
            assert first_blamed(golden(name)) == (cause["rank"], cause["cause"])
