"""docs/model.md agrees with the model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from support.published_checks import validate_published

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.model.config import DTYPES, OPTIMIZERS, Efficiency, Target
from stepsplit.analyzer.model.config_decode import list_required_keys
from stepsplit.analyzer.model.config_file import parse_job
from stepsplit.analyzer.model.hardware_config import (
    HARDWARE_KEYS,
    PEAKS,
    list_families,
    list_link_names,
)
from stepsplit.analyzer.model.layout_table import PARALLEL_KEYS
from stepsplit.analyzer.model.model_table import MODEL_KEYS
from stepsplit.analyzer.model.parameters import CONVENTIONS
from stepsplit.analyzer.model.preset_names import list_hardware_names, list_model_names
from stepsplit.analyzer.model.profile import list_frameworks, load_frameworks
from stepsplit.analyzer.model.schedule_names import SCHEDULES
from stepsplit.analyzer.model.training_table import RECOMPUTES, STATES, TRAINING_KEYS
from stepsplit.analyzer.validation.tables import Check

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "model.md").read_text()
RUN = ROOT / "docs" / "job.toml"
KEYS = {
    "model": {"preset", *MODEL_KEYS},
    "parallel": set(PARALLEL_KEYS),
    "training": set(TRAINING_KEYS),
    "hardware": {"preset", *HARDWARE_KEYS},
}
BASE = """
model.preset = "deepseek-v3"
training = { seq_len = 8192, micro_batch = 1, global_batch = 8 }
hardware.preset = "h100-sxm"
"""


def part(heading: str) -> str:
    """What stands under a heading, down to the next one of any depth."""
    return re.split(r"^##+ .*\n", PAGE.split(f"# {heading}\n", 1)[1], maxsplit=1, flags=re.M)[0]


def blocks(text: str) -> list[str]:
    """The fenced blocks of the text."""
    return re.findall(r"^```\w*\n(.*?)^```$", text, flags=re.M | re.S)


def cells(text: str) -> list[list[str]]:
    """The rows of the text's table, without its head."""
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def keys_of(section: str) -> list[str]:
    """Every key of a section's table as the page writes it: with a value."""
    return [
        found for row in cells(part(f"[{section}]")) for found in re.findall(r"`([^`]+)`", row[0])
    ]


WRITTEN = [(section, key) for section in KEYS for key in keys_of(section)]


def refusal(text: str) -> str:
    """The error of a job file; empty if it is accepted."""
    try:
        parse_job(text)
    except DataError as error:
        return str(error)
    return ""


def lines(section: str, key: str) -> str:
    """BASE with the key; what the key replaces is left out."""
    table = f"{section}.{key.split(' = ')[0].split('.')[0]}"
    kept = [line for line in BASE.splitlines() if not line.startswith(f"{table} ")]
    if table == "hardware.file":  # it has a preset of its own
        kept = [line for line in kept if not line.startswith("hardware.preset ")]
    if section != "training":
        return "\n".join([*kept, f"{section}.{key}"])
    name = key.split(" = ")[0]
    usual = {"seq_len": "8192", "micro_batch": "1", "global_batch": "8"}
    stated = [f"{each} = {value}" for each, value in usual.items() if each != name]
    kept = [line for line in kept if not line.startswith("training ")]
    return "\n".join([*kept, "[training]", *stated, key])


def test_the_job_file_of_the_page_is_the_example_file() -> None:
    assert blocks(PAGE)[0] == RUN.read_text()


def test_the_screen_of_the_page_is_what_the_command_prints() -> None:
    command = [sys.executable, "-m", "stepsplit.dashboard", "model", str(RUN)]
    environment = {**os.environ, "COLUMNS": "80"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert words(blocks(PAGE)[1]) == words(done.stdout)


def words(screen: str) -> list[str]:
    """The screen's words and numbers; bars and the breaks of lines are the terminal's."""
    return re.sub(r"[\u2580-\u259f]", "", screen).split()


def test_the_prediction_of_the_readme_is_what_the_command_prints(tmp_path: Path) -> None:
    """The readme shows the first table of the screen."""
    section = (ROOT / "README.md").read_text().split("\n## Model\n")[1]
    job, screen, *_ = blocks(section)
    (tmp_path / "gpt3.toml").write_text(job)
    command = [sys.executable, "-m", "stepsplit.dashboard", "model", str(tmp_path / "gpt3.toml")]
    environment = {**os.environ, "COLUMNS": "100"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert " ".join(words(screen)) in " ".join(words(done.stdout))


def test_the_error_of_the_page_is_that_of_the_command() -> None:
    (refused,) = blocks(part("What a step should cost"))[2:]
    refused_text = refusal(RUN.read_text().replace("micro_batch = 1", "micro_batch = 3"))
    assert f"stepsplit: {refused_text}\n" == refused


def test_every_key_of_the_page_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text('preset = "h100-sxm"\n')
    for section, key in WRITTEN:
        with subtests.test(f"{section}: {key}"):
            refused_text = refusal(lines(section, key))
            assert not refused_text.startswith(f"job.toml: {section}"), refused_text
            assert "TOML" not in refused_text.removeprefix("job.toml"), refused_text


def test_an_unknown_key_would_be_refused() -> None:
    assert refusal(lines("parallel", "tensor = 2")).startswith("job.toml: parallel.tensor: unknown")


@pytest.mark.parametrize("section", KEYS)
def test_every_key_of_a_job_file_is_on_the_page(section: str) -> None:
    assert {key.split(" = ")[0].split(".")[0] for key in keys_of(section)} == KEYS[section]


def test_every_constant_of_the_hardware_is_on_the_page() -> None:
    written = {key.split(" = ")[0] for key in keys_of("hardware")}
    known = {f"peaks.{dtype}" for dtype in PEAKS} | {
        f"efficiency.{name}" for name in list_required_keys(Efficiency)
    }
    assert known - written == set()


@pytest.mark.parametrize(
    ("section", "known"),
    [
        ("parallel", SCHEDULES),
        (
            "training",
            (*DTYPES, *OPTIMIZERS, *list_frameworks(), *RECOMPUTES, *STATES, *get_args(Target)),
        ),
        ("hardware", list_families()),
    ],
)
def test_every_value_of_a_key_is_on_the_page(section: str, known: tuple[str, ...]) -> None:
    assert set(known) - set(re.findall(r'"([^"]+)"', part(f"[{section}]"))) == set()


@pytest.mark.parametrize(
    ("place", "names"),
    [(0, list_model_names()), (1, list_hardware_names()), (2, list_link_names())],
)
def test_the_presets_of_the_page_are_all_presets(place: int, names: tuple[str, ...]) -> None:
    assert sorted(blocks(part("Presets"))[place].split()) == sorted(names)


def test_the_readme_counts_the_presets() -> None:
    counts = f"{len(list_model_names())} models, {len(list_hardware_names())} devices"
    assert f"Presets ({counts})" in (ROOT / "README.md").read_text()


def test_every_convention_is_on_the_page() -> None:
    assert [row[0] for row in cells(part("FLOPs and MFU"))] == list(CONVENTIONS)


def test_the_bands_of_the_page_are_those_of_the_frameworks() -> None:
    spread = {name: (one.memory.low, one.memory.high) for name, one in load_frameworks().items()}
    assert "megatron -3.5 to +3.5 %, others -20 to\n+45 %" in part("Memory")
    assert spread.pop("megatron") == (0.965, 1.035)
    assert set(spread.values()) == {(0.8, 1.45)}


OF_VALIDATION = pytest.mark.in_turn(
    "README.md", "analyzer/model", "analyzer/validation", "docs/model.md"
)


@pytest.fixture(scope="module")
def checks() -> tuple[Check, ...]:
    return validate_published()


@pytest.mark.slow
@OF_VALIDATION
def test_the_table_of_the_page_is_what_validation_finds(checks: tuple[Check, ...]) -> None:
    shown = [check for check in checks if check.measure != "equality"]
    assert cells(part("How well it does")) == [as_written(check) for check in shown]


README_CHECKS = (
    "A100 Megatron", "llm-foundry", "torchtitan", "H100 recipes, bf16", "H100 recipes, fp8",
    "Blackwell recipes, fp8", "Blackwell recipes, nvfp4", "LoRA recipes", "B200 dense",
    "recipes with experts", "A100 reports", "H100 reports",
    "AMD reports", "reports with experts", "measured jobs",
)  # fmt: skip


@pytest.mark.slow
@OF_VALIDATION
def test_the_numbers_of_the_readme_are_what_validation_finds(checks: tuple[Check, ...]) -> None:
    readme = (ROOT / "README.md").read_text()
    table = readme[readme.index("| | rows | mean error |") :].partition("\n\n")[0]
    named = {check.name: check for check in checks if check.measure == "mean/p90"}
    expected = [
        [str(len(check.reported)), *(f"{100 * ratio:.1f} %" for ratio in check.result)]
        for check in (named[f"{name}, step time"] for name in README_CHECKS)
    ]
    assert [row[1:] for row in cells(table)] == expected
    banded = [check for check in named.values() if check.banded]
    share = sum(check.inside for check in banded) / sum(len(check.banded) for check in banded)
    assert f"Of all these steps {share:.0%}".replace("%", " %") in readme


def as_written(check: Check) -> list[str]:
    measure = check.measure.replace("/", " / ")
    known = [percents(check.bar) or "none", percents(check.result), percents(check.baseline or ())]
    inside = f"{check.inside} of {len(check.banded)}" if check.banded else ""
    publishers = f" of {check.sources} publishers" if check.sources else ""
    return [check.name, f"{len(check.reported)}{publishers}", measure, *known, inside]


def percents(ratios: tuple[float, ...]) -> str:
    return " / ".join(f"{100 * ratio:.1f}" for ratio in ratios) + " %" * bool(ratios)


@pytest.mark.slow
@OF_VALIDATION
def test_the_equalities_of_the_page_hold_and_are_as_many(checks: tuple[Check, ...]) -> None:
    equalities = [check for check in checks if check.measure == "equality"]
    equal = sum(row.equal for check in equalities for row in check.reported)
    match = re.search(r"(\d+) checks are equalities,\s+(\d+) numbers in all", PAGE)
    assert match is not None
    assert [int(number) for number in match.groups()] == [len(equalities), equal]


def test_the_python_of_the_page_runs() -> None:
    (code,) = blocks(part("From Python"))
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
