"""A rules file applies to every command that reads a recording, and to the HTA bridge.

The story is a synchronization kernel of one's own: compute for the built-in rules, a collective for
the user's.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.builders import GpuTrace
from support.perfetto_file import read
from support.report_builders import analysis
from support.required import absent

from stepsplit.analyzer import analyze, check_runs, read_rules
from stepsplit.analyzer.readers.kineto import reader
from stepsplit.analyzer.report.io import to_json
from stepsplit.dashboard import cli

SYNC = "my_sync_kernel"
RULES = f"""
[[kernel]]
match = "{SYNC}"
is = "communication"
op = "all_reduce"

[[family]]
match = "adam"
family = "mine"
"""
RUN = """
[model]
layers = 4
hidden = 512
heads = 8
vocab = 1000
tied = false
[training]
seq_len = 128
micro_batch = 4
global_batch = 4
dtype = "fp32"
[hardware]
preset = "h100-sxm"
"""
STEP_US, STEPS = 10, 4


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Each step 4 us of gemm, 4 us of the synchronization, 2 us of adam."""
    return write_trace(tmp_path / "recording")


def write_trace(folder: Path, scale: int = 1) -> str:
    """The trace, with steps so many times as long."""
    rank = GpuTrace()
    for step in range(STEPS):
        begin = scale * STEP_US * step
        gemm, sync, adam, end = (begin + scale * at for at in (0, 4, 8, STEP_US))
        rank.step(step + 1, begin, end).kernel("gemm", gemm, sync)
        rank.kernel(SYNC, sync, adam).kernel("adam", adam, end)
    folder.mkdir()
    return str(rank.write(folder))


@pytest.fixture
def rules(tmp_path: Path) -> str:
    file = tmp_path / "rules.toml"
    file.write_text(RULES)
    return str(file)


def json_of(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    """What the command prints with --json -."""
    capsys.readouterr()
    assert cli.run([*words, "--json", "-"]) in (0, 3)
    return json.loads(capsys.readouterr().out)


def times(row: Any) -> tuple[int, int]:
    """(compute_ns, collective_ns)."""
    return row["compute_ns"], row["collective_ns"]


BUILT_IN, OWN = (10_000, 0), (6_000, 4_000)


def test_analyze_splits_by_the_rules(
    trace: str, rules: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = json_of(capsys, "analyze", trace)
    ruled = json_of(capsys, "analyze", trace, "--rules", rules)
    families = {("gemm", STEPS), ("mine", STEPS)}
    assert {times(row) for row in plain["steps"]} == {BUILT_IN}
    assert {times(row) for row in ruled["steps"]} == {OWN}
    assert {(row["family"], row["count"]) for row in ruled["kernels"]} == families
    assert [(row["op"], row["count"]) for row in ruled["collectives"]] == [("all_reduce", STEPS)]
    rows = analyze(trace, rules=read_rules(rules)).steps
    assert {(row.compute_ns, row.collective_ns) for row in rows} == {OWN}


def test_compare_splits_both_runs_by_the_rules(
    trace: str, rules: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = json_of(capsys, "compare", trace, trace)
    ruled = json_of(capsys, "compare", trace, trace, "--rules", rules)
    assert [times(plain[side]["mean"]) for side in ("baseline", "candidate")] == [BUILT_IN] * 2
    assert [times(ruled[side]["mean"]) for side in ("baseline", "candidate")] == [OWN] * 2


def test_rules_apply_to_a_baseline_and_to_the_check_against_it(
    trace: str, rules: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "baseline.json"
    assert cli.run(["baseline", trace, "--out", str(file), "--rules", rules]) == 0
    [kept] = json.loads(file.read_text())["runs"]
    shares = {row["metric"]: row["value"] for row in kept["values"]}
    assert (shares["compute"], shares["collective"], shares["calls"]) == (0.6, 0.4, 1)
    check = ("check", trace, "--baseline", str(file))
    assert exposed(json_of(capsys, *check)) == (0.4, 0.0)
    assert exposed(json_of(capsys, *check, "--rules", rules)) == (0.4, 0.4)
    [row] = [
        row
        for row in check_runs([trace], [file], rules=read_rules(rules)).gated
        if row.metric == "exposed_comm"
    ]
    assert (row.baseline, row.candidate) == (0.4, 0.4)


def exposed(verdict: Any) -> tuple[float, float]:
    """The baseline's and the candidate's exposed communication."""
    [row] = [row for row in verdict["gated"] if row["metric"] == "exposed_comm"]
    return row["baseline"], row["candidate"]


def test_both_sides_of_a_check_are_split_by_the_rules(
    trace: str, rules: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("check", trace, "--baseline", trace)
    assert exposed(json_of(capsys, *words)) == (0.0, 0.0)
    assert exposed(json_of(capsys, *words, "--rules", rules)) == (0.4, 0.4)


def test_calibrate_fits_the_compute_of_the_rules(
    rules: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, scale = tmp_path / "job.toml", 500
    job.write_text(RUN)
    words = ("calibrate", write_trace(tmp_path / "slow", scale), "--job", str(job))
    [plain], [ruled] = (
        json_of(capsys, *words, *more)["stages"] for more in ((), ("--rules", rules))
    )
    assert times(plain["measured"]) == tuple(scale * ns for ns in BUILT_IN)
    assert times(ruled["measured"]) == tuple(scale * ns for ns in OWN)


def test_what_if_replays_the_communication_of_the_rules(
    trace: str, rules: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A link twice as fast halves the 4 us of the synchronization, where it is one."""
    words = ("what-if", trace, "--change", "link:all=2")
    plain, ruled = (json_of(capsys, *words, *more) for more in ((), ("--rules", rules)))
    assert (plain["changes"][0]["step_ns"], ruled["changes"][0]["step_ns"]) == (10_000, 8_000)


def test_export_draws_the_buckets_of_the_rules(trace: str, rules: str, tmp_path: Path) -> None:
    file, first = tmp_path / "run.perfetto", STEP_US * 1_000
    assert cli.run(["export", trace, "--perfetto", str(file), "--rules", rules]) == 0
    slices = [one for one in read(file.read_bytes()).slices if one.track == "buckets"]
    assert [(one.name, one.start_ns, one.end_ns) for one in slices if one.end_ns <= first] == [
        ("compute", 0, 4_000),
        ("collective", 4_000, 8_000),
        ("compute", 8_000, 10_000),
    ]


def test_export_of_an_analyzed_folder_reads_its_recording_anew(
    trace: str, rules: str, tmp_path: Path
) -> None:
    folder, file = Path(trace).parent, tmp_path / "run.perfetto"
    assert cli.run(["analyze", trace, "--out", str(folder), "--json", str(tmp_path / "x")]) == 0
    names = []
    for more in ((), ("--rules", rules)):
        assert cli.run(["export", str(folder), "--perfetto", str(file), *more]) == 0
        names.append({s.name for s in read(file.read_bytes()).slices if s.track == "buckets"})
    assert names == [{"compute"}, {"compute", "collective"}]


@pytest.mark.filterwarnings("ignore:The inplace keyword")  # HTA's own, for pandas 3
def test_hta_classifies_kernels_by_the_rules(trace: str, rules: str, tmp_path: Path) -> None:
    """HTA drops the last of the steps. What begins with nccl communicates for it."""
    if find_spec("hta") is None:
        absent("hta", "HolisticTraceAnalysis is not installed")
    local = tmp_path / "local.toml"
    local.write_text('[[kernel]]\nmatch = "ncclDevKernel_LocalSum"\nis = "compute"\n')
    other = GpuTrace().step(1, 0, 10).kernel("ncclDevKernel_LocalSum", 0, 10).step(2, 10, 20)
    place = str(other.write(tmp_path))
    assert broken_down(trace, None) == (30, 0)
    assert broken_down(trace, rules) == (18, 12)
    assert broken_down(place, None) == (0, 10)
    assert broken_down(place, str(local)) == (10, 0)


def broken_down(place: str, rules: str | None) -> tuple[float, float]:
    """(us of compute, us of anything else) of the first rank, by HTA."""
    from stepsplit.analyzer.hta import open_in_hta

    analysis = open_in_hta(place) if rules is None else open_in_hta(place, rules=read_rules(rules))
    row = analysis.get_temporal_breakdown(visualize=False).iloc[0]
    return row["compute_time(us)"], row["non_compute_time(us)"]


def test_other_rules_apply_to_cached_recordings(
    trace: str, rules: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "LEAST_CACHED_BYTES", 0)
    found = [
        times(json_of(capsys, "analyze", trace, *more)["steps"][0])
        for more in ((), ("--rules", rules), ("--rules", rules), ())
    ]
    assert found == [BUILT_IN, OWN, OWN, BUILT_IN]


@pytest.mark.parametrize(
    "words", [("check", "PLACE", "--baseline", "PLACE"), ("baseline", "PLACE", "--out", "b")]
)
def test_rules_are_rejected_for_analyzed_runs(
    words: tuple[str, ...],
    rules: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("any.json").write_bytes(to_json(analysis().report))
    for place, problem in (
        ("any.json", "any.json: rules do not apply to an existing report; name its recording"),
        ("store:branch=main", "store:branch=main: already analyzed; with --rules give"),
    ):
        named = [place if word == "PLACE" else word for word in words]
        assert cli.run([*named, "--rules", rules]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert problem in line
    assert not Path(".stepsplit").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("analyze", "PLACE"),
        ("compare", "PLACE", "PLACE"),
        ("check", "PLACE", "--baseline", "PLACE"),
        ("baseline", "PLACE", "--out", "out"),
        ("calibrate", "PLACE"),
        ("what-if", "PLACE"),
        ("export", "PLACE", "--perfetto", "out"),
    ],
)
def test_wrong_rules_are_one_line_and_exit_2(
    words: tuple[str, ...],
    trace: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("wrong.toml").write_text("rule = 1")
    named = [trace if word == "PLACE" else word for word in words]
    assert cli.run([*named, "--rules", "wrong.toml"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "wrong.toml: rule: unknown key" in line
    assert not Path("out").exists()
