"""stepsplit compare: two recordings or reports in, the screen or JSON out."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from support.builders import GpuTrace
from support.report_builders import analysis
from support.screens import print_lines

from stepsplit.analyzer import compare_runs, units
from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.regression.compare import RunComparison, from_json, to_json
from stepsplit.analyzer.report.io import REPORT_NAME, to_json as report_to_json
from stepsplit.dashboard import cli
from stepsplit.dashboard.reporters.compare import build_comparison_screen, format_headline

SAMPLES = Path(__file__).parents[2] / "sample_traces"
TWO, EIGHT = SAMPLES / "pp2_m2", SAMPLES / "pp2_m8"


@pytest.fixture(scope="module")
def found() -> RunComparison:
    return compare_runs(TWO, EIGHT)


def lines(found: RunComparison, width: int) -> list[str]:
    return print_lines(build_comparison_screen(found), width=width)


def test_more_microbatches_take_longer_with_a_smaller_bubble(found: RunComparison) -> None:
    screen = lines(found, 120)
    assert screen[0] == (
        "candidate takes 48.0 ms per microbatch, 22.4 % less (its step is 260 ms longer): compute"
        " +229 ms, bubble +14.9 ms, idle"
    )
    for line in (
        "median step       124 ms      384 ms",
        "per microbatch    61.8 ms     48.0 ms",
        "bubble fraction   35.1 %      16.2 %",
        "microbatches               2         8",
        "different microbatch count: a step may do more or less work",
        "step                   125 ms     381 ms     +256 ms  +204.9 %",
        "  524 kB float32  candidate         8   0.17 ms  0.01 ms  3.03 GB/s",
        "gemm               64.6 ms     257 ms     +192 ms     54 -> 216",
        "and 7 more families",
    ):
        assert line in screen


def test_the_page_of_the_docs_shows_this_screen(found: RunComparison) -> None:
    page = (SAMPLES.parent / "docs" / "compare.md").read_text()
    assert "\n".join(("```", *lines(found, 80), "```")) in page


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("pair", [("pp2_m2", "pp2_m8"), ("dp4", "fsdp4"), ("tp2_pp2", "dp4")])
def test_no_line_is_wider_than_the_terminal_and_no_number_is_cut(
    pair: tuple[str, str], width: int
) -> None:
    screen = lines(compare_runs(*(SAMPLES / name for name in pair)), width)
    assert max(map(len, screen)) <= width
    assert not [line for line in screen if "…" in line]


def test_a_different_layout_has_a_caveat_and_rows_that_name_the_axes_of_both() -> None:
    screen = lines(compare_runs(SAMPLES / "dp4", SAMPLES / "fsdp4"), 120)
    assert "mesh                       dp_replicate 4         dp_shard 4" in screen
    assert [line for line in screen if line.startswith("different layout: ")]
    assert [line for line in screen if line.startswith("the meshes differ: each run has its own")]
    assert [line for line in screen if line.startswith("dp repl -> dp shard skew ")]
    assert [line for line in screen if line.startswith("dp shard all_gather ")]


def test_the_same_run_twice_has_no_differences(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["compare", str(TWO), str(TWO)]) == 0
    screen = capsys.readouterr().out.splitlines()
    assert screen[0] == "no differences: same settings, steps, buckets, calls and kernels"
    assert len(screen) == 9


def test_the_headline_mentions_noise_and_its_absence(found: RunComparison) -> None:
    one = found.baseline
    later = replace(one, median_ns=one.median_ns + 1_500_000)
    quiet = replace(found, candidate=later)
    assert format_headline(quiet).plain == (
        "candidate is 1.50 ms (1.2 %) slower, within noise: no large change in any bucket"
    )
    alone = replace(found, baseline=replace(later, steps=1), candidate=replace(one, steps=1))
    assert format_headline(alone).plain == (
        "candidate is 1.50 ms (1.2 %) faster (noise unknown: a single step): "
        "no large change in any bucket"
    )


def test_the_headline_has_the_mean_step_where_single_steps_lengthen_it(
    found: RunComparison,
) -> None:
    one = found.baseline
    longer = replace(one.mean, idle_ns=one.mean.idle_ns + one.mean.step_ns)
    text = format_headline(replace(found, baseline=one, candidate=replace(one, mean=longer))).plain
    mean = units.format_milliseconds(one.mean.step_ns)
    assert text.startswith(
        f"candidate is equally fast, within noise; its mean step is {mean} (100.0 %) longer: "
    )


def test_a_recording_compares_like_its_report(tmp_path: Path, found: RunComparison) -> None:
    recording, report = tmp_path / "pp2_m2", tmp_path / "named.json"
    shutil.copytree(TWO, recording, ignore=shutil.ignore_patterns(REPORT_NAME))
    shutil.copy(EIGHT / REPORT_NAME, report)
    assert compare_runs(recording, report) == found


def test_a_comparison_round_trips_through_json(found: RunComparison) -> None:
    assert from_json(to_json(found)) == found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"[", "not a stepsplit comparison"),
        (b"{}", "not a stepsplit comparison"),
        (b'{"schema": "stepsplit.report/1"}', "schema stepsplit.report/1"),
        (b'{"schema": "stepsplit.compare/1"}', "not a stepsplit comparison"),
    ],
)
def test_an_invalid_comparison_is_rejected(text: bytes, words: str) -> None:
    with pytest.raises(DataError, match=words):
        from_json(text)


def test_json_on_standard_output_is_json_alone(
    found: RunComparison, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["compare", str(TWO), str(EIGHT), "--json", "-"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert list(body) == ["schema", "baseline", "candidate", "step", "settings", "buckets",
                          "exposed", "collectives", "kernels", "findings",
                          "meshes_differ", "parts"]  # fmt: skip
    assert body["schema"] == "stepsplit.compare/1"
    assert body["step"] == {
        "difference_ns": found.difference_ns, "ratio": found.ratio, "within_noise": False
    }  # fmt: skip
    whole_ns = found.candidate.mean.step_ns - found.baseline.mean.step_ns
    assert sum(row["difference_ns"] for row in body["buckets"]) == whole_ns


def test_json_in_a_file_leaves_the_screen(
    found: RunComparison, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out" / "compare.json"
    assert cli.run(["compare", str(TWO), str(EIGHT), "--json", str(file)]) == 0
    assert capsys.readouterr().out.startswith("candidate takes ")
    assert from_json(file.read_bytes()) == found


RULES = '[[kernel]]\nmatch = "gemm"\nis = "communication"\nop = "all_reduce"\n'


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return GpuTrace().step(1, 0, 10).kernel("gemm", 0, 5).kernel("fill", 6, 10).write(tmp_path)


def test_rules_are_those_of_analyze(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text(RULES)
    arguments = ["compare", str(trace), str(trace), "--json", "-"]
    assert cli.run(arguments) == 0
    assert from_json(capsys.readouterr().out.encode()).baseline.mean.compute_ns == 9_000
    assert cli.run([*arguments, "--rules", str(rules)]) == 0
    assert from_json(capsys.readouterr().out.encode()).baseline.mean.compute_ns == 4_000


def test_rules_are_rejected_for_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rules, report = tmp_path / "rules.toml", tmp_path / "any.json"
    rules.write_text(RULES)
    report.write_bytes(report_to_json(analysis().report))
    assert cli.run(["compare", str(report), str(report), "--rules", str(rules)]) == 2
    assert "any.json: rules do not apply to an existing report; name its recording" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.json", str(TWO)], ["nowhere.json", "check the path"]),
        ([str(TWO), "nowhere.json"], ["nowhere.json", "check the path"]),
        ([str(TWO)], ["a baseline and a candidate"]),
        ([str(TWO), "torn.json"], ["torn.json", "not a stepsplit report", "analyze the run again"]),
        ([str(TWO), "empty.json"], ["nothing", "no step to compare", "record at least one"]),
    ],
    ids=["no baseline", "no candidate", "one run", "torn report", "no step"],
)
def test_bad_input_is_one_line_and_exit_2(
    arguments: list[str],
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("torn.json").write_text('{\n "schema": "stepsplit.report/1",\n "run"')
    report = json.loads((TWO / REPORT_NAME).read_text())
    report |= {"run": report["run"] | {"name": "nothing"}, "steps": []}
    Path("empty.json").write_text(json.dumps(report))
    assert cli.run(["compare", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert all(word in output.err for word in words)
