"""examples/ci: what a workflow or a pipeline would run, run here."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.gate_builders import run
from support.required import absent

from stepsplit.analyzer.regression.checks import parse_budgets
from stepsplit.analyzer.regression.metrics import to_json

CI = Path(__file__).parents[2] / "examples" / "ci"
QUIET, MORE = (0.100, 0.101, 0.099, 0.1005, 0.0995), (0.120, 0.121, 0.119, 0.1205, 0.1195)
NOISY = (0.10, 0.15, 0.07)


def side(file: Path, exposed: tuple[float, ...]) -> str:
    """A file of runs, one for each value."""
    usual = {"bubble": 0.0, "peak_memory": 2.0**35}
    runs = [run(f"{file.stem}{i}", {"exposed_comm": v, **usual}) for i, v in enumerate(exposed)]
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(to_json(runs))
    return str(file)


def environment(folder: Path) -> dict[str, str]:
    own = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "GITHUB_ACTIONS": "true",
        "GITHUB_OUTPUT": str(folder / "output"),
        "GITHUB_STEP_SUMMARY": str(folder / "summary"),
    }
    return os.environ | own


def parsed(name: str) -> dict:
    yaml = pytest.importorskip("yaml") if not os.environ.get("STEPSPLIT_REQUIRE") else _yaml()
    return yaml.safe_load((CI / name).read_text())


def _yaml() -> object:
    try:
        import yaml
    except ImportError:
        absent("integrations", "no PyYAML: .ci/run installs it")
    return yaml


@pytest.mark.parametrize(
    ("exposed", "inconclusive", "status", "answer"),
    [
        (QUIET, "pass", 0, "pass"),
        (MORE, "pass", 1, "regressed"),
        (NOISY, "pass", 0, "inconclusive"),
        (NOISY, "fail", 3, "inconclusive"),
    ],
)
def test_the_action_answers_by_its_exit_its_output_and_its_summary(
    exposed: tuple[float, ...], inconclusive: str, status: int, answer: str, tmp_path: Path
) -> None:
    step, upload = parsed("action.yml")["runs"]["steps"]
    assert upload["if"] == "always()"
    given = {
        "CANDIDATE": side(tmp_path / "own.json", exposed),
        "BASELINE": side(tmp_path / "base.json", QUIET),
        "BUDGET": str(CI / "budgets.toml"),
        "INCONCLUSIVE": inconclusive,
    }
    assert set(step["env"]) == set(given)
    env = environment(tmp_path) | given | {"GITHUB_ACTION_PATH": str(CI)}
    ran = subprocess.run(
        ["bash", "-c", step["run"]], env=env, cwd=tmp_path, capture_output=True, text=True
    )
    assert ran.returncode == status, ran.stderr
    assert (tmp_path / "output").read_text() == f"answer={answer}\n"
    assert (tmp_path / "summary").read_text().startswith("### stepsplit")
    for name in upload["with"]["path"].split():
        assert (tmp_path / name).stat().st_size
    assert ("::error title=" in ran.stdout) == (answer == "regressed")


def test_the_action_fails_where_there_is_no_baseline(tmp_path: Path) -> None:
    given = {"CANDIDATE": side(tmp_path / "own.json", QUIET), "BASELINE": "none.json"}
    env = environment(tmp_path) | given
    ran = subprocess.run(
        ["bash", str(CI / "check.sh")], env=env, cwd=tmp_path, capture_output=True, text=True
    )
    assert ran.returncode == 2 and "none.json" in ran.stderr
    assert not (tmp_path / "output").exists()


def test_the_gitlab_job_writes_the_reports_that_it_names(tmp_path: Path) -> None:
    job = parsed("gitlab-ci.yml")["communication"]
    side(tmp_path / "ci" / "baseline.json", QUIET)
    (tmp_path / "ci" / "budgets.toml").write_bytes((CI / "budgets.toml").read_bytes())
    for i, exposed in enumerate(MORE[:3], 1):
        side(tmp_path / "runs" / str(i), (exposed,))
    ran = subprocess.run(shlex.split(job["script"][-1]), env=environment(tmp_path), cwd=tmp_path)
    assert ran.returncode == 1 and job["allow_failure"] == {"exit_codes": [3]}
    assert all((tmp_path / name).exists() for name in job["artifacts"]["reports"].values())


def test_the_workflow_uses_the_action_as_it_is() -> None:
    action, workflow = parsed("action.yml"), parsed("workflow.yml")
    *_, used = workflow["jobs"]["communication"]["steps"]
    needed = {name for name, option in action["inputs"].items() if option.get("required")}
    assert needed <= set(used["with"]) <= set(action["inputs"])


def test_the_budgets_are_budgets() -> None:
    assert [budget.metric for budget in parse_budgets([str(CI / "budgets.toml")])] == [
        "calls", "bytes", "exposed_comm", "bubble", "peak_memory",
    ]  # fmt: skip
