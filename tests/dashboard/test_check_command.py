"""stepsplit check and stepsplit baseline: exit statuses, files, and errors for bad input."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace
from support.gate_builders import CALLS, run
from support.report_builders import analysis
from support.screens import print_lines
from support.store_builders import Serving

from stepsplit.analyzer.analysis import check_runs
from stepsplit.analyzer.regression.checks import from_json
from stepsplit.analyzer.regression.metrics import CallMetrics, read_baseline, to_json
from stepsplit.analyzer.report.report import Report
from stepsplit.analyzer.report.step_rows import StepRow
from stepsplit.dashboard import cli
from stepsplit.dashboard.reporters.verdict import build_verdict_screen
from stepsplit.dashboard.store.run_row import Tag
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.options import Access
from stepsplit.dashboard.web.server import create_server

SAMPLES = Path(__file__).parents[2] / "sample_traces"
ONE, OTHER = str(SAMPLES / "tp2_pp2"), str(SAMPLES / "tp2_pp2_dp2")
EXPOSED = ("--budget", "exposed_comm:5%")


@pytest.fixture
def base(tmp_path: Path) -> str:
    return side(tmp_path / "base.json", (0.100, 0.101, 0.099, 0.1005, 0.0995))


@pytest.fixture
def worse(tmp_path: Path) -> str:
    return side(tmp_path / "worse.json", (0.120, 0.121, 0.119, 0.1205, 0.1195))


def side(file: Path, exposed: tuple[float, ...], calls: tuple[CallMetrics, ...] = CALLS) -> str:
    runs = [run(f"{file.stem}{i}", {"exposed_comm": v, "bubble": 0.0}, calls=calls)
            for i, v in enumerate(exposed)]  # fmt: skip
    file.write_bytes(to_json(runs))
    return str(file)


def check(*words: str) -> int:
    return cli.run(["check", *words])


def test_the_three_results_have_three_exit_statuses(
    base: str, worse: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    noisy = side(tmp_path / "noisy.json", (0.10, 0.15, 0.07))
    assert check(base, "--baseline", base, *EXPOSED) == 0
    assert "PASS: within all budgets" in capsys.readouterr().out
    assert check(worse, "--baseline", base, *EXPOSED) == 1
    assert "REGRESSED: exposed_comm" in capsys.readouterr().out
    assert check(noisy, "--baseline", base, *EXPOSED) == 3
    assert "INCONCLUSIVE" in capsys.readouterr().out


def test_a_file_that_cannot_be_written_takes_no_verdict_away(
    base: str, worse: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for option in ("--summary", "--json", "--junit"):
        assert check(worse, "--baseline", base, *EXPOSED, option, "/dev/full/x") == 1
        shown = capsys.readouterr()
        assert "REGRESSED: exposed_comm" in shown.out
        assert shown.err.count("\n") == 1 and "choose a place that can be written" in shown.err
        assert check(base, "--baseline", base, *EXPOSED, option, "/dev/full/x") == 2
        capsys.readouterr()


def test_a_report_of_an_earlier_recording_is_not_checked(tmp_path: Path) -> None:
    """The traces of another run lie beside the report of the first."""
    folder = tmp_path / "run"
    shutil.copytree(SAMPLES / "pp2_m2", folder)
    same = ("--baseline", str(SAMPLES / "pp2_m2"), "--budget", "calls:exact")
    (folder / "trace.json").write_text("an export for another tool")
    os.utime(folder / "trace.json", (2e9, 2e9))
    assert check(str(folder), *same) == 0
    (folder / "trace.json").unlink()
    for trace in (SAMPLES / "pp2_m8").glob("rank*"):
        shutil.copy(trace, folder)
        os.utime(folder / trace.name, (2e9, 2e9))
    assert check(str(folder), *same) == 1


def test_an_incomplete_recording_is_named_by_check_and_baseline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The end of rank 1's trace was lost, with a part of its calls."""
    folder, made = tmp_path / "cut", tmp_path / "cut.json"
    shutil.copytree(SAMPLES / "pp2_m8", folder, ignore=shutil.ignore_patterns("report.json"))
    trace = folder / "rank1_trace.json.gz"
    trace.write_bytes(trace.read_bytes()[:10_000])
    whole = str(SAMPLES / "pp2_m8")
    assert check(str(folder), "--baseline", whole, "--budget", "calls:exact") == 3
    assert "rank 1: the file is truncated" in capsys.readouterr().out
    assert cli.run(["baseline", str(folder), "--out", str(made)]) == 0
    assert "rank 1: the file is truncated" in capsys.readouterr().err
    assert check(whole, "--baseline", str(made), "--budget", "calls:exact") == 3


def test_several_candidates_form_one_side(base: str, tmp_path: Path) -> None:
    one = side(tmp_path / "one.json", (0.1002,))
    two = side(tmp_path / "two.json", (0.1003, 0.0998))
    json_file = tmp_path / "verdict.json"
    assert check(one, two, "--baseline", base, *EXPOSED, "--json", str(json_file)) == 0
    verdict = from_json(json_file.read_bytes())
    assert verdict.candidate.runs == ("one0", "two0", "two1")
    assert not verdict.low_confidence


def test_every_file_is_written_and_standard_output_is_json_alone(
    base: str, worse: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("junit", "markdown", "codequality", "openmetrics", "bencher", "benchmark-action")
    files = [word for name in names for word in (f"--{name}", str(tmp_path / name))]
    summary = tmp_path / "summary.md"
    summary.write_text("# before\n")
    words = (*EXPOSED, *files, "--summary", str(summary), "--json", "-")
    assert check(worse, "--baseline", base, *words) == 1
    assert json.loads(capsys.readouterr().out)["answer"] == "regressed"
    assert all((tmp_path / name).stat().st_size for name in names)
    assert json.loads((tmp_path / "codequality").read_text())[0]["location"]["path"] == base
    assert summary.read_text().startswith("# before\n### stepsplit ✗ REGRESSED")


def test_annotations_are_printed_on_github_actions(
    base: str, worse: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    assert check(worse, "--baseline", base, *EXPOSED) == 1
    assert "\n::error title=stepsplit%3A regressed::exposed_comm" in capsys.readouterr().out


def test_by_default_calls_bytes_exposed_communication_and_bubble_are_gated(base: str) -> None:
    verdict = check_runs([base], [base])
    assert [one.metric for one in verdict.gated] == ["calls", "bytes", "exposed_comm", "bubble"]
    assert verdict.answer == "pass"


def test_an_added_call_fails_whatever_the_noise(base: str, tmp_path: Path) -> None:
    added = (*CALLS, CallMetrics("tp", "all_reduce", "float32", 8, 4, False, 30_000, 0))
    own = side(tmp_path / "own.json", (0.1, 0.2, 0.05), added)
    assert check(own, "--baseline", base) == 1


def test_a_side_may_be_a_recording_or_a_report(capsys: pytest.CaptureFixture[str]) -> None:
    rules = ("--budget", "calls:exact", "--budget", "bytes:exact")
    assert check(ONE, "--baseline", f"{ONE}/report.json", *rules) == 0
    assert check(ONE, "--budget", "step:<=1us", "--budget", "calls.tp:<=48") == 3
    capsys.readouterr()


@pytest.mark.parametrize("flag", ["--baseline {}", "--baseline={}"])
def test_all_runs_that_follow_the_baseline_are_of_the_baseline(
    flag: str, base: str, tmp_path: Path
) -> None:
    before = side(tmp_path / "before.json", (0.1002,))
    more = side(tmp_path / "more.json", (0.0998,))
    json_file = tmp_path / "verdict.json"
    options = ("--json", str(json_file), "--budget", "calls:exact")
    assert check(base, *flag.format(before).split(), more, *options) == 0
    verdict = from_json(json_file.read_bytes())
    assert verdict.candidate.runs == ("base0", "base1", "base2", "base3", "base4")
    assert verdict.baseline is not None
    assert verdict.baseline.runs == ("before0", "more0")


def test_a_candidate_may_follow_its_baseline(base: str, worse: str) -> None:
    assert check("--baseline", base, worse, *EXPOSED) == 1
    assert check("--baseline", base, *EXPOSED, worse) == 1
    assert check("--baseline", base, *EXPOSED, "--", worse) == 1


def test_a_run_is_compared_with_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--job", "auto", "--budget", "exposed_comm:model+20%")
    assert check(ONE, *words) == 3
    assert "noise unknown with one run per side" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((ONE,), "needs a baseline; pass --baseline"),
        ((ONE, "--baseline", OTHER), "world size is 8 in tp2_pp2_dp2, 4 in tp2_pp2"),
        ((ONE, "--baseline", OTHER), "or pass --across-setups"),
        (("--baseline", ONE, OTHER, ONE), "name the candidates before --baseline"),
        ((ONE, "--baseline", "no/such"), "no such file or folder; check the path"),
        ((ONE, "--baseline", ONE, "--budget", "speed:5%"), "unknown metric 'speed'"),
        ((ONE, "--baseline", ONE, "--budget", "budgets.toml"), "pass a TOML file or a rule"),
        ((ONE, "--baseline", ONE, "--budget", "mfu:5%"), "has no mfu"),
        ((ONE, ONE, "--baseline", ONE), "are the same recording; pass each run once per side"),
        ((ONE, "--baseline", "store:"), "is not a valid store query; write store:branch=main"),
        ((ONE, "--baseline", "store:a=b,last=0"), "last must be a number of runs"),
        ((ONE, "--baseline", "store:a=b"), "the store has no finished run for a=b"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    words: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert check(*words, "--junit", "junit.xml") == 2
    output = capsys.readouterr()
    assert message in output.err and output.err.count("\n") == 1 and not output.out
    assert not Path("junit.xml").exists()


def test_a_run_without_steps_and_one_with_nan_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = json.loads((SAMPLES / "tp2_pp2" / "report.json").read_text())
    bad = [({"steps": []}, "no step to check"), ({"mfu": float("nan")}, "not a stepsplit report")]
    for change, message in bad:
        file = tmp_path / "report.json"
        file.write_text(json.dumps(body | change))
        assert check(str(file), "--baseline", ONE) == 2
        error = capsys.readouterr().err
        assert message in error and str(file) in error


def test_check_accepts_a_baseline_file_of_recordings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "base.json"
    assert cli.run(["baseline", ONE, "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}: 1 run; 3 to 5 runs estimate the noise better\n"
    assert check(ONE, "--baseline", str(out), "--budget", "calls:exact") == 0
    assert cli.run(["baseline", ONE, OTHER, "--out", str(out)]) == 2
    assert "not comparable" in capsys.readouterr().err


def test_runs_of_a_store_record_their_result_and_link_to_the_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, artifacts = f"sqlite:///{tmp_path / 'store.db'}", str(tmp_path / "artifacts")
    store = Store.open(url, artifacts)
    ids = []
    for i, branch in enumerate(("main", "main", "other", "pr")):
        report = analysis().report
        shifted = tuple(slower(row, i) for row in report.steps)
        ids.append(add(store, f"run{i}", replace(report, steps=shifted, collectives=()), branch))
    words = ("--store", url, "--artifacts", artifacts, "--dashboard", "https://dash/")
    verdict = tmp_path / "verdict.json"
    status = check(
        "store:branch=pr", "--baseline", "store:branch=main,last=5", *words,
        "--budget", "step:200%", "--json", str(verdict),
    )  # fmt: skip
    found = from_json(verdict.read_bytes())
    assert found.baseline is not None and len(found.baseline.runs) == 2
    assert status == {"pass": 0, "inconclusive": 3}[found.answer]
    assert found.compare_url == f"https://dash/compare?baseline={ids[1]}&candidate={ids[3]}"
    judged = store.find_run(ids[3])
    assert judged is not None and judged.verdict is not None
    assert judged.verdict.answer == found.answer
    assert store.find_run(ids[0]).verdict is None  # type: ignore[union-attr]
    (entry,) = store.audit.list_entries(10)
    recorded = f"{ids[3]}: {found.answer}"
    assert (entry.action, entry.target) == ("check recorded", recorded)
    assert check(f"store:{ids[3]}", "--baseline", f"store:{ids[0]}", *words) == 3
    store.close()
    capsys.readouterr()


def test_a_dashboard_is_asked_for_runs_by_tag_over_http(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store.open(f"sqlite:///{tmp_path / 'store.db'}", tmp_path / "artifacts")
    report = replace(analysis().report, collectives=())
    ids = [add(store, f"run{i}", report, branch) for i, branch in enumerate(("main", "a/b", "pr"))]
    store.add("not finished", [Tag("branch", "main")])
    token = store.tokens.create("ci").secret
    server = create_server(store, Access(local=False, guarded=True))
    verdict, baseline = tmp_path / "verdict.json", tmp_path / "baseline.json"
    with Serving(server) as url:
        words = ("--budget", "step:200%", "--json", str(verdict), "--store", url)
        assert check("store:branch=pr", "--baseline", "store:branch=main", *words) == 2
        assert "set it with --token or STEPSPLIT_TOKEN" in capsys.readouterr().err
        words = (*words, "--token", token)
        status = check("store:branch=pr", "--baseline", "store:branch=main", *words)
        found = from_json(verdict.read_bytes())
        assert found.baseline is not None
        # The run that is not finished does not count.
        assert (len(found.baseline.runs), len(found.candidate.runs)) == (1, 1)
        assert status == {"pass": 0, "inconclusive": 3}[found.answer]
        assert found.compare_url == f"{url}/compare?baseline={ids[0]}&candidate={ids[2]}"
        assert check(f"store:{ids[2]}", "--baseline", "store:branch=a/b", *words) == status
        assert check(f"store:{ids[2]}", "--baseline", "store:branch=c", *words) == 2
        assert "the store has no finished run for branch=c" in capsys.readouterr().err
        assert check("store:nothing", "--baseline", "store:branch=main", *words) == 2
        assert "the server refused: run not found" in capsys.readouterr().err
        made = ("--store", url, "--token", token, "--out", str(baseline))
        assert cli.run(["baseline", "store:branch=main,last=1", *made]) == 0
    judged = store.find_run(ids[2])
    assert judged is not None and judged.verdict is not None
    assert judged.verdict.answer == found.answer
    assert len(read_baseline(baseline)) == 1
    store.close()


def slower(row: StepRow, by: int) -> StepRow:
    """The step, a little longer in idle."""
    more = by * 1_000
    return replace(row, step_ns=row.step_ns + more, idle_ns=row.idle_ns + more)


def add(store: Store, name: str, report: Report, branch: str) -> str:
    return store.import_report(name, report, analysis().tables, [Tag("branch", branch)])


def show(candidate: str, baseline: str) -> list[str]:
    return print_lines(build_verdict_screen(check_runs([candidate], [baseline])), width=80)


def test_the_screen_fits_eighty_columns(base: str, worse: str) -> None:
    lines = show(worse, base)
    assert "✗ exposed_comm  10%,1pt    10.0 %     12.0 %  +2.0 pt  +1.9 to +2.1 pt" in lines
    assert not any("…" in line for line in lines)


def test_changes_without_a_budget_are_listed_without_cutting_a_number(tmp_path: Path) -> None:
    sides = {}
    for name, step_ns in (("before", 202.9e6), ("after", 348.6e6)):
        runs = [run(f"{name}{i}", {"exposed_comm": 0.1, "step": step_ns + i * 5e6, "bubble": 0.0})
                for i in range(4)]  # fmt: skip
        sides[name] = tmp_path / f"{name}.json"
        sides[name].write_bytes(to_json(runs))
    lines = show(str(sides["after"]), str(sides["before"]))
    at = lines.index("OTHER SIGNIFICANT CHANGES (no budget)")
    assert lines[at + 1 : at + 3] == [
        "metric  baseline  candidate   change     96 % interval",
        "step      210 ms     356 ms  +69.2 %  +63.6 to +74.9 %",
    ]
    assert not any("…" in line for line in lines)
