"""stepsplit model: a job.toml in, the screen or JSON out, and quickly."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from support.prediction_builders import prediction

from stepsplit.analyzer.model.prediction import prediction_from_json, prediction_to_json
from stepsplit.dashboard.commands.model import model_command

RUN = """\
[model]
layers = 24
hidden = 2048
heads = 16
ffn = 8192
vocab = 50000

[parallel]
tp = 2
pp = 2
dp = 2

[training]
seq_len = 2048
micro_batch = 1
global_batch = 16

[hardware]
preset = "h100-sxm"
"""
HEAVY = ("pandas", "numpy", "pyarrow", "msgspec", "torch", "dash", "plotly", "sqlalchemy")


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job.toml whose prediction is replaced by the one of prediction_builders."""
    module = "stepsplit.analyzer.model.predict"
    monkeypatch.setattr(f"{module}.predict", lambda job, rates: prediction())
    file = tmp_path / "job.toml"
    file.write_text(RUN)
    return file


def run(*arguments: object) -> Result:
    return CliRunner().invoke(model_command, [str(argument) for argument in arguments])


def test_the_screen_is_printed(run_file: Path) -> None:
    result = run(run_file)
    assert result.exit_code == 0
    assert "step 460 ms (430-500 ms)" in result.stdout
    assert "rule of thumb" not in result.stdout


def test_explain_adds_the_formulas(run_file: Path) -> None:
    assert 'rule of thumb "12 L h^2" gives 1.21B' in run(run_file, "--explain").stdout


def test_json_on_standard_output_is_json_alone(run_file: Path) -> None:
    result = run(run_file, "--json", "-", "--explain")
    assert result.stdout == prediction_to_json(prediction())


def test_json_in_a_file_still_prints_the_screen(run_file: Path, tmp_path: Path) -> None:
    result = run(run_file, "--json", tmp_path / "out" / "p.json")
    assert "step 460 ms" in result.stdout
    assert prediction_from_json((tmp_path / "out" / "p.json").read_text()) == prediction()


def test_a_place_that_cannot_be_written_is_named(run_file: Path) -> None:
    result = run(run_file, "--json", "/proc/nowhere/p.json")
    assert str(result.exception) == (
        "/proc/nowhere/p.json: No such file or directory; choose a place that can be written"
    )


def test_a_missing_file_is_named(run_file: Path) -> None:
    result = run(run_file.with_name("nowhere.toml"))
    assert result.exit_code != 0
    assert "nowhere.toml" in str(result.exception)


def test_nothing_heavy_is_loaded_on_the_way_to_the_screen_and_the_formulas() -> None:
    script = f"""
import sys
import stepsplit.dashboard.cli
import stepsplit.dashboard.commands.model
import stepsplit.analyzer.model.explain
import stepsplit.analyzer.model.config_file
import stepsplit.analyzer.model.prediction
import stepsplit.dashboard.reporters.prediction
import stepsplit.dashboard.reporters.prediction
sys.exit(", ".join(name for name in {HEAVY!r} if name in sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.stderr == "\n"


def test_listing_the_commands_does_not_load_rich() -> None:
    script = "import sys, stepsplit.dashboard.commands.model; sys.exit('rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_help_names_the_options() -> None:
    with click.Context(model_command) as context:
        text = model_command.get_help(context)
    assert [name for name in ("--json", "--explain", "job.toml") if name not in text] == []
