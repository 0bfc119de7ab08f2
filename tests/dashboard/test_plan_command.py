"""stepsplit plan: a job.toml in, the screen or JSON out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.screens import print_lines

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.model.config import JobConfig
from stepsplit.analyzer.model.config_file import parse_job
from stepsplit.analyzer.model.plan import from_json, plan, to_json
from stepsplit.analyzer.model.plan_space import Plan
from stepsplit.dashboard import cli
from stepsplit.dashboard.reporters.plan import build_plan_screen

RUN = """\
[model]
preset = "llama-2-13b"

[training]
seq_len = 4096
micro_batch = 1
global_batch = 16

[hardware]
preset = "h100-sxm"
"""
HEAVY = ("pandas", "numpy", "pyarrow", "msgspec", "torch", "dash", "plotly", "sqlalchemy")


@pytest.fixture(scope="module")
def job() -> JobConfig:
    return parse_job(RUN)


@pytest.fixture(scope="module")
def found(job: JobConfig) -> Plan:
    return plan(job, 16, top=4)


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    file = tmp_path / "job.toml"
    file.write_text(RUN)
    return file


def test_a_plan_round_trips_through_json(found: Plan) -> None:
    assert from_json(to_json(found)) == found


def test_json_names_its_schema_and_keeps_its_keys(found: Plan) -> None:
    body = json.loads(to_json(found))
    assert list(body) == [
        "schema", "gpus", "best", "runners_up", "tree", "places", "searched", "tokens",
        "price_per_gpu_hour", "cost_per_million_tokens", "pareto", "read_as",
        "margin",
    ]  # fmt: skip
    assert body["schema"] == "stepsplit.plan/1"
    assert body["best"]["step_ns"] == found.best.step_ns


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}", "not a stepsplit plan"),
        ("[", "not a stepsplit plan"),
        ('{"schema": "stepsplit.report/1"}', "schema is stepsplit.report/1"),
        ('{"schema": "stepsplit.plan/1", "gpus": 1}', "not a stepsplit plan"),
    ],
)
def test_an_invalid_plan_is_rejected(text: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        from_json(text)


def test_buckets_that_do_not_add_up_are_rejected(found: Plan) -> None:
    step_ns = found.best.step_ns
    torn = to_json(found).replace(f'"step_ns": {step_ns}', f'"step_ns": {step_ns + 1}')
    with pytest.raises(DataError, match="add up to"):
        from_json(torn)


@pytest.mark.parametrize("width", [80, 120])
def test_the_screen_ranks_and_explains_layouts(job: JobConfig, found: Plan, width: int) -> None:
    lines = print_lines(build_plan_screen(job, found), width=width)
    ranks = [line for line in lines if line[:1].isdigit() and " ms " in line]
    assert [line[0] for line in ranks] == ["1", "2", "3", "4"]
    assert all(any(word in line for word in ("high", "medium", "low")) for line in ranks)
    assert sum("+" in line for line in ranks) == 3
    assert any("memory of a GPU:" in line for line in lines)
    assert lines[-1].startswith("recompute = ")
    assert max(map(len, lines)) <= width


def test_the_command_prints_the_screen(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["plan", str(run_file), "--gpus", "8", "--top", "2"]) == 0
    screen = capsys.readouterr().out
    assert "layouts considered" in screen
    assert "[parallel]" in screen


def test_json_on_standard_output_is_json_alone(
    run_file: Path, found: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["plan", str(run_file), "--gpus", "16", "--top", "4", "--json", "-"]) == 0
    assert capsys.readouterr().out == to_json(found)


def test_json_in_a_file_still_prints_the_screen(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out" / "plan.json"
    assert cli.run(["plan", str(run_file), "--gpus", "8", "--json", str(file)]) == 0
    assert "rule of thumb" in capsys.readouterr().out
    assert from_json(file.read_text()).gpus == 8


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpus", "0"], "number of GPUs must be 1 to 1,000,000, not 0; set --gpus"),
        (["--gpus", "1"], "no layout on 1 x h100-sxm fits; the closest is tp 1 pp 1 cp 1 dp 1"),
        (["--gpus", "8", "--keep", "colour"], "--keep 'colour' is not a setting of the search"),
        (["--gpus", "8", "--top", "0"], "--top"),
        (["--gpus", "many"], "--gpus"),
        ([], "--gpus"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    run_file: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["plan", str(run_file), *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert words in output.err


def test_kept_settings_do_not_change(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_file.write_text(f"{RUN}\n[parallel]\ntp = 4\n")
    assert cli.run(["plan", str(run_file), "--gpus", "8", "--keep", "tp,cp", "--json", "-"]) == 0
    kept = from_json(capsys.readouterr().out)
    shown = [kept.best, *(each.candidate for each in kept.runners_up)]
    assert {(each.choice.tp, each.choice.cp) for each in shown} == {(4, 1)}


def test_nothing_heavy_is_loaded_on_the_way_to_the_screen() -> None:
    script = f"""
import sys
import stepsplit.dashboard.cli
import stepsplit.dashboard.commands.model
import stepsplit.analyzer.model.plan
import stepsplit.analyzer.model.plan
import stepsplit.dashboard.reporters.plan
sys.exit(", ".join(name for name in {HEAVY!r} if name in sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.stderr == "\n"


@pytest.mark.slow
def test_the_page_shows_what_a_search_prints() -> None:
    page = (Path(__file__).parents[2] / "docs" / "plan.md").read_text()
    job_text, screen = page.split("```toml\n")[1].split("```")[0], page.split("```\n")[2]
    shown = parse_job(job_text)
    lines = print_lines(build_plan_screen(shown, plan(shown, 1024, top=4)), width=80)
    text = screen.split("```")[0].rstrip().splitlines()
    assert lines[: len(text)] == text
