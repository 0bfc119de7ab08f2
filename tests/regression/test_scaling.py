"""Several runs of one job: efficiency per GPU and the buckets that cost it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.builders import GpuTrace

from stepsplit.analyzer import Scaling, compare_scaling
from stepsplit.analyzer.errors import UsageError
from stepsplit.dashboard import cli

SAMPLES = Path(__file__).parents[2] / "sample_traces"
SIZES = ("pp2_m2", "tp2_pp2", "dp4", "tp2_pp2_dp2")


JOB = """
[model]
layers = 2
hidden = 64
heads = 2
vocab = 256
[parallel]
dp = {gpus}
[training]
seq_len = 128
micro_batch = 1
global_batch = {batch}
[hardware]
preset = "h100-sxm"
"""


def write_run(folder: Path, gpus: int, compute_us: int, reduce_us: int) -> Path:
    """A data-parallel run of one step, whose all_reduce all ranks enter at once."""
    folder.mkdir(parents=True)
    end = compute_us + reduce_us
    for rank in range(gpus):
        groups = [("0", "default_pg", tuple(range(gpus)))]
        trace = GpuTrace(rank, gpus, groups=groups).step(1, 0, end)
        trace.kernel("gemm", 0, compute_us - 100).kernel("adam", end - 100, end)
        if reduce_us:
            trace.all_reduce(compute_us - 100, end - 100)
        trace.write(folder)
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> Sequence[Path]:
    return (
        write_run(tmp_path / "four", 4, 600, 150),
        write_run(tmp_path / "two", 2, 600, 0),
    )


def test_with_the_same_work_for_each_gpu_all_added_time_is_lost(runs: Sequence[Path]) -> None:
    scaling = compare_scaling(runs, "gpu")
    two, four = scaling.runs
    assert (scaling.reference, two.gpus, four.gpus) == ("two", 2, 4)
    assert (two.efficiency, four.efficiency) == (1, pytest.approx(600 / 750))
    assert costs(scaling)["four"] == {"collective": pytest.approx(0.25)}


def test_with_the_same_work_in_total_the_step_should_have_halved(runs: Sequence[Path]) -> None:
    scaling = compare_scaling(runs, "step")
    assert scaling.runs[1].efficiency == pytest.approx(600 * 2 / (750 * 4))
    assert costs(scaling)["four"] == {
        "compute": pytest.approx(1.0), "collective": pytest.approx(0.5),
    }  # fmt: skip


def test_without_a_job_the_work_is_unknown_and_so_is_the_efficiency(runs: Sequence[Path]) -> None:
    scaling = compare_scaling(runs)
    assert scaling.work is None
    assert [run.efficiency for run in scaling.runs] == [None, None]
    assert [run.step.step_ns for run in scaling.runs] == [600_000, 750_000]
    with pytest.raises(UsageError, match="two: no job, so the tokens of its step are unknown"):
        compare_scaling(runs, "tokens")


@pytest.mark.parametrize("work", ["gpu", "step"])
def test_the_buckets_account_for_all_that_is_lost(work: str) -> None:
    scaling = compare_scaling([SAMPLES / name for name in SIZES], work)  # type: ignore[arg-type]
    for run in scaling.runs:
        assert run.efficiency is not None
        assert 1 / run.efficiency - 1 == pytest.approx(sum(cost.share for cost in run.costs))
        assert sum(run.step.buckets_ns) == run.step.step_ns


def test_with_a_job_the_work_is_its_tokens(runs: Sequence[Path], tmp_path: Path) -> None:
    """Twice the GPUs with three times the sequences in 1.25 times the step: 1.2 as efficient."""
    reports = []
    for run, gpus, batch in zip(runs, (4, 2), (12, 4), strict=True):
        job = tmp_path / f"job{gpus}.toml"
        job.write_text(JOB.format(gpus=gpus, batch=batch))
        reports.append(tmp_path / f"report{gpus}")
        options = ["--job", str(job), "--out", str(reports[-1])]
        assert cli.run(["analyze", str(run), *options]) == 0
    scaling = compare_scaling(reports)
    two, four = scaling.runs
    assert scaling.work == "tokens"
    assert two.tokens_per_s_per_gpu == pytest.approx(2 * 128 / 600e-6, rel=1e-3)
    assert four.tokens_per_s_per_gpu == pytest.approx(3 * 128 / 750e-6, rel=1e-3)
    assert four.efficiency == pytest.approx(1.2, rel=1e-3)
    assert None not in (two.predicted_ns, four.predicted_ns)


def test_the_command_shows_more_than_two_runs_by_size(capsys: pytest.CaptureFixture[str]) -> None:
    places = [str(SAMPLES / name) for name in SIZES]
    assert cli.run(["compare", *places, "--work", "gpu"]) == 0
    screen = capsys.readouterr().out
    assert "4 runs, 2 to 8 ranks: tp2_pp2_dp2 has 50.3 % of the efficiency of pp2_m2" in screen
    assert "tp2_pp2: +42.6 % rank time over pp2_m2: collective +23.6 %" in screen
    assert cli.run(["compare", *places, "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "stepsplit.scaling/1" and found["work"] is None
    assert [run["gpus"] for run in found["runs"]] == [2, 4, 4, 8]


def test_one_run_alone_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["compare", str(SAMPLES / "dp4")]) == 2
    assert "give a baseline and a candidate" in capsys.readouterr().err


def costs(scaling: Scaling) -> dict[str, dict[str, float]]:
    """The buckets that cost something, by run."""
    return {
        run.name: {cost.bucket: cost.share for cost in run.costs if abs(cost.share) > 1e-9}
        for run in scaling.runs
    }
