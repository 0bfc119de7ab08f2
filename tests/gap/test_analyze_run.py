"""stepsplit analyze PATH --job: recorded runs compared with the model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.samples import analyze_recording
from support.screens import print_lines

from stepsplit.analyzer import BUCKETS, DataError, Report, analyze, predict
from stepsplit.analyzer.gap.calibrate import calibrate, format_hardware
from stepsplit.analyzer.report.headline import compute_mean_step_ns
from stepsplit.analyzer.report.io import extract_job, extract_prediction, from_json, to_json
from stepsplit.dashboard import cli
from stepsplit.dashboard.reporters.gap import build_gap_section

PAGE = Path(__file__).parents[2] / "docs" / "gap.md"
SAMPLES = Path(__file__).parents[2] / "sample_traces"
CPU = '[hardware]\npreset = "cpu"\n'


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    file = tmp_path / "job.toml"
    file.write_text(CPU)
    return file


def conserved(report: Report) -> None:
    """Every row is counted once, and a CPU with uncalibrated peak has no MFU."""
    predicted = extract_prediction(report)
    assert report.gap is not None
    assert predicted is not None
    difference = report.gap.shown.measured - report.gap.shown.predicted
    for bucket, whole in zip(BUCKETS, difference.buckets_ns, strict=True):
        assert sum(row.ns for row in report.gap.rows if row.bucket == bucket) == whole
    assert report.gap.shown.predicted == predicted.splits[report.gap.stage]
    assert (report.mfu, report.hfu) == (None, None)
    job = extract_job(report)
    assert job is not None
    assert predict(job).split == predicted.split


def test_mfu_is_the_models_flops_in_the_measured_time(run_file: Path) -> None:
    run_file.write_text('[hardware]\npreset = "a100-sxm-80gb"\n')
    report = analyze(SAMPLES / "dp4", job=run_file)
    predicted = extract_prediction(report)
    assert predicted is not None
    assert predicted.mfu is not None
    mfu = predicted.mfu * predicted.split.step_ns / compute_mean_step_ns(report.steps)
    assert report.mfu == pytest.approx(mfu)


@pytest.mark.parametrize(
    ("sample", "stages", "estimates"), [("tp2_pp2", [0, 1], 3), ("dp4", [0], 4)]
)
def test_inferred_keys_need_not_be_configured(
    run_file: Path, sample: str, stages: list[int], estimates: int
) -> None:
    report = analyze(SAMPLES / sample, job=run_file)
    conserved(report)
    assert report.gap is not None
    assert [one.stage for one in report.gap.stages] == stages
    assert report.gap.notes == (
        f"waits of {estimates} of 20 steps are estimates (ranks or ends of calls missing)",
        "cpu: efficiencies are not calibrated",
    )


def test_auto_takes_all_from_the_recording(run_file: Path) -> None:
    """Its device is a CPU, and run.json states model, mesh and batch."""
    assert analyze_recording(SAMPLES / "tp2_pp2", "auto") == analyze(
        SAMPLES / "tp2_pp2", job=run_file
    )


def test_what_the_model_finds_stands_before_the_time_of_a_cpu_between_ops(run_file: Path) -> None:
    """Constants of the run itself, but for all-reduces of 0.6 of the time: the idle time is larger
    than what they cost, and no saving to expect."""
    hardware = format_hardware(calibrate(SAMPLES / "tp2_pp2"))
    faster, made = re.subn(r"(?<=times_ns = \[)19\d{5}(?=\])", "1200000", hardware)
    assert made == 1
    run_file.with_name("own.toml").write_text(faster)
    run_file.write_text('[hardware]\nfile = "own.toml"\n')
    report = analyze(SAMPLES / "tp2_pp2", job=run_file)
    gains = {one.code: one.gain_ns for one in report.findings}
    assert list(gains) == ["slower_calls", "few_microbatches", "host_bound"]
    assert gains["few_microbatches"] < gains["slower_calls"] < gains["host_bound"]
    assert [one.gain_kind for one in report.findings] == ["alone", "alone", "upper_limit"]


def test_tp2_pp2_calls_match_the_model_and_all_reduces_are_slow() -> None:
    report = analyze_recording(SAMPLES / "tp2_pp2", "auto")
    assert report.gap is not None
    assert all(one.equal for one in report.gap.calls)
    large = [
        row for row in report.gap.rows if abs(row.ns) > 0.01 * report.gap.shown.measured.step_ns
    ]
    assert [(row.cause, row.axis) for row in large if row.bucket == "collective"] == [
        ("link", "tp")
    ]
    # With uncalibrated hardware a difference is a gap, not a finding.
    assert report.findings == analyze_recording(SAMPLES / "tp2_pp2").findings
    (bubble,) = (row for row in report.gap.rows if row.bucket == "bubble")
    assert "measured bubble 26.2 %, ideal 25.0 % (1F1B), predicted 26.3 %" in bubble.message


def test_dp4_sums_the_predicted_bytes_in_buckets_of_its_own() -> None:
    """Four calls for two cost latency alone, and compute hides as much of them as predicted."""
    report = analyze_recording(SAMPLES / "dp4", "auto")
    assert report.gap is not None
    (calls,) = report.gap.calls
    assert (calls.count, calls.predicted_count, calls.equal) == (4, 2, False)
    least = 0.01 * report.gap.shown.measured.step_ns
    assert all(abs(row.ns) < least for row in report.gap.rows if row.bucket == "collective")


def test_without_a_job_there_is_no_model_comparison() -> None:
    report = analyze_recording(SAMPLES / "tp2_pp2")
    assert (report.prediction, report.gap, report.mfu, report.hfu) == (None, None, None, None)


def test_json_on_standard_output_is_the_whole_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["analyze", str(SAMPLES / "tp2_pp2"), "--job", "auto", "--json", "-"]) == 0
    out = capsys.readouterr().out
    report = from_json(out.encode())
    conserved(report)
    assert to_json(report).decode() == out
    assert json.loads(out)["prediction"]["schema"] == "stepsplit.prediction/1"


def test_the_screen_has_a_section(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["analyze", str(SAMPLES / "tp2_pp2"), "--job", str(run_file)]) == 0
    printed = capsys.readouterr().out
    assert "MODEL COMPARISON, stage 1" in printed
    assert "calls: counts and bytes as predicted" in printed


def test_a_job_without_tables_is_read_as_the_model_reads_it(
    tmp_path: Path, run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stated = run_file.read_text()
    flat = tmp_path / "flat.toml"
    flat.write_text("".join(f"{line}\n" for line in stated.splitlines() if line[:1] != "["))
    written = []
    for job in (run_file, flat):
        assert cli.run(["analyze", str(SAMPLES / "tp2_pp2"), "--job", str(job), "--json", "-"]) == 0
        written.append(from_json(capsys.readouterr().out.encode()).gap)
    assert written[0] == written[1]


@pytest.mark.parametrize(
    ("sample", "text", "words"),
    [
        (
            "built_ddp_host_stall",
            CPU,
            "cannot infer [model] layers, hidden, heads, vocab and [training] seq_len, "
            "micro_batch from the recording; add them to",
        ),
        ("dp4", "[parallel]\ndp = 8\n", "describes 8 ranks (dp 8) but the recording has 4; fix"),
        ("dp4", "[parallel]\ndp = 2\npp = 2\n", "has 2 stages but the recording has no pipeline"),
        ("dp4", "[parallel]\ndq = 4\n", "parallel.dq: unknown key"),
        ("dp4", "[modell]\n", "modell: unknown key"),
        ("dp4", "parallel = [", "not valid TOML"),
        ("dp4", '[hardware]\npreset = "cqu"\n', "'cqu' is unknown"),
    ],
)
def test_a_run_file_that_cannot_be_is_one_line_and_exit_2(
    run_file: Path, sample: str, text: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file.write_text(text)
    assert cli.run(["analyze", str(SAMPLES / sample), "--job", str(run_file)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert words in captured.err
    assert str(run_file) in captured.err


def test_auto_lists_the_keys_that_cannot_be_inferred(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["analyze", str(SAMPLES / "built_ddp_host_stall"), "--job", "auto"]) == 2
    assert capsys.readouterr().err == (
        "stepsplit: cannot infer [model] layers, hidden, heads, vocab, [training] seq_len,"
        " micro_batch and [hardware] preset from the recording; analyze --write-job job.toml writes"
        " the rest; add them and pass it with --job\n"
    )


def test_a_missing_job_file_is_reported_before_anything_is_read() -> None:
    with pytest.raises(DataError, match=r"nowhere\.toml: No such file"):
        analyze("no recording either", job="nowhere.toml")


def test_a_different_mesh_is_a_caveat(run_file: Path) -> None:
    run_file.write_text("[parallel]\ntp = 1\ndp = 2\n[training]\nglobal_batch = 48\n")
    report = analyze(SAMPLES / "tp2_pp2", job=run_file)
    conserved(report)
    assert report.gap is not None
    assert report.gap.notes[0] == (
        f"layout mismatch: {run_file} has tp 1 dp 2, the recording has tp 2 dp 1 (from run.json)"
    )


def test_the_page_shows_what_is_printed() -> None:
    gap = analyze_recording(SAMPLES / "tp2_pp2", "auto").gap
    assert gap is not None
    printed = "\n".join(print_lines(*build_gap_section(gap), width=80))
    assert f"```\n{printed}\n```" in PAGE.read_text()
