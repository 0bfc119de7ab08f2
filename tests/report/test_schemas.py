"""The published JSON Schemas: every result is valid, a damaged one is not, changes are additive."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from generate.docs_schemas import FOLDER, write_schemas
from generate.released import RELEASED
from jsonschema import Draft202012Validator
from support.samples import SAMPLES
from support.schema_changes import find_breaking_changes

from stepsplit.analyzer.schemas import SCHEMAS, build_schema, schema_to_json
from stepsplit.dashboard import cli

FILES = Path(__file__).parents[1] / "golden" / "files"
REPORTS = sorted(
    [
        *SAMPLES.glob("*/report.json"),
        *RELEASED.glob("*/artifacts/*/report.json"),
        *FILES.glob("analyze_run_*.json"),
    ]
)
RESULTS = [
    *(("report", path) for path in REPORTS),
    *(("check", path) for path in sorted(FILES.glob("check_*.json"))),
    *(("comparison", path) for path in sorted(FILES.glob("compare*.json"))),
    ("hang", FILES / "hang.json"),
]
JOBS = sorted((FILES.parent / "jobs").glob("*.toml"))


def validate(name: str, content: Any) -> list[str]:
    """The problems of a document with the schema that is published."""
    schema = json.loads((FOLDER / f"{name}.json").read_text())
    return [error.message for error in Draft202012Validator(schema).iter_errors(content)]


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_published_schema_is_that_of_the_types(name: str) -> None:
    published = (FOLDER / f"{name}.json").read_text()
    Draft202012Validator.check_schema(json.loads(published))

    assert published == schema_to_json(name), "python -m generate.docs_schemas rewrites it"


@pytest.mark.parametrize(("name", "path"), RESULTS, ids=lambda one: str(one)[-40:])
def test_every_result_of_the_repository_is_valid(name: str, path: Path) -> None:
    assert validate(name, json.loads(path.read_text())) == []


def test_findings_and_predictions_inside_reports_are_valid() -> None:
    reports = [json.loads(path.read_text()) for path in REPORTS]
    findings = [finding for report in reports for finding in report["findings"]]
    predictions = [report["prediction"] for report in reports if report.get("prediction")]

    assert len(findings) > 10 and predictions
    assert [problem for one in findings for problem in validate("finding", one)] == []
    assert [problem for one in predictions for problem in validate("prediction", one)] == []


def test_a_prediction_of_the_command_is_valid(
    tmp_path: Path, subtests: pytest.Subtests, capsys: pytest.CaptureFixture[str]
) -> None:
    for job in [job for job in JOBS if job.stem != "plan"]:
        with subtests.test(job=job.stem):
            written = tmp_path / f"{job.stem}.json"
            assert cli.run(["model", str(job), "--json", str(written)]) == 0
            assert validate("prediction", json.loads(written.read_text())) == []


def lose_a_bucket(report: Any) -> None:
    del report["steps"][0]["bubble_ns"]


def write_milliseconds(report: Any) -> None:
    report["steps"][-1]["step_ns"] = 12.5


def name_another_format(report: Any) -> None:
    report["schema"] = "stepsplit.report/2"


def say_how_it_is_known(report: Any) -> None:
    report["findings"][0]["basis"]["kind"] = "guessed"


def make_a_rank_text(report: Any) -> None:
    report["groups"][0]["ranks"][0] = "0"


def leave_out_the_run(report: Any) -> None:
    del report["run"]


DAMAGES = [
    lose_a_bucket,
    write_milliseconds,
    name_another_format,
    say_how_it_is_known,
    make_a_rank_text,
    leave_out_the_run,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda one: one.__name__)
def test_a_damaged_report_is_not_valid(damage: Callable[[Any], None]) -> None:
    report = json.loads((SAMPLES / "built_tp_pp_dp_slow_rank" / "report.json").read_text())
    damage(report)

    assert len(validate("report", report)) == 1


# Changes within a version of a format.


def add_an_optional_property(schema: Any) -> None:
    schema["properties"]["energy_joules"] = {"type": ["number", "null"], "default": None}


def describe_differently(schema: Any) -> None:
    schema["$defs"]["StepRow"]["properties"]["rank"]["description"] = "the rank."


def rename_a_type(schema: Any) -> None:
    schema["$defs"]["Step"] = schema["$defs"].pop("StepRow")
    schema["properties"]["steps"]["items"]["$ref"] = "#/$defs/Step"


def require_a_property(schema: Any) -> None:
    schema["required"].append("mfu")


def drop_a_property(schema: Any) -> None:
    del schema["$defs"]["StepRow"]["properties"]["idle_ns"]


def widen_a_type(schema: Any) -> None:
    schema["$defs"]["StepRow"]["properties"]["rank"]["type"] = ["integer", "null"]


def add_a_value(schema: Any) -> None:
    schema["$defs"]["Basis"]["properties"]["kind"]["enum"].append("guessed")


@pytest.mark.parametrize("change", [add_an_optional_property, describe_differently, rename_a_type])
def test_an_additive_change_is_one(change: Callable[[Any], None]) -> None:
    changed = copy.deepcopy(build_schema("report"))
    change(changed)

    assert find_breaking_changes(build_schema("report"), changed) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (require_a_property, ".mfu: required now"),
        (drop_a_property, ".steps[].idle_ns: is gone"),
        (widen_a_type, ".steps[].rank: type is ['integer', 'null'], was integer"),
        (add_a_value, ".findings[].basis[].kind: enum is"),
    ],
)
def test_another_change_is_named(change: Callable[[Any], None], said: str) -> None:
    changed = copy.deepcopy(build_schema("report"))
    change(changed)
    (found,) = find_breaking_changes(build_schema("report"), changed)

    assert found.startswith(said)


def test_todays_schemas_are_additive_changes_of_released_ones() -> None:
    # Those of docs/schemas too, which are written anew between releases.
    for path in (*RELEASED.glob("*/schemas/*.json"), *FOLDER.glob("*.json")):
        released, today = json.loads(path.read_text()), build_schema(path.stem)
        if released["title"] == today["title"]:
            assert find_breaking_changes(released, today) == [], path


def test_a_breaking_change_is_not_written(tmp_path: Path) -> None:
    write_schemas(tmp_path)
    earlier = json.loads((tmp_path / "finding.json").read_text())
    earlier["properties"]["severity"] = {"type": "string"}
    (tmp_path / "finding.json").write_text(json.dumps(earlier))

    with pytest.raises(SystemExit, match=r"\.severity: is gone: raise the number"):
        write_schemas(tmp_path)


# The command.


def test_the_command_prints_a_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["schema", "report"]) == 0
    assert capsys.readouterr().out == schema_to_json("report")
    assert cli.run(["schema"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [*SCHEMAS]
    assert cli.run(["schema", "--help"]) == 0
    said = capsys.readouterr().out
    assert [name for name in SCHEMAS if name not in said] == []
    assert cli.run(["schema", "run"]) == 2
    assert capsys.readouterr().err == (
        "stepsplit: no schema 'run'; there are: report, prediction, ledger, roles, hang, check,"
        " comparison, finding\n"
    )
