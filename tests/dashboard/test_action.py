"""action.yml and examples/ci: what a workflow or a pipeline runs, run here."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.composite_action import ActionRunner
from support.gate_builders import run

from stepsplit.analyzer.regression.checks import parse_budgets
from stepsplit.analyzer.regression.metrics import to_json

ROOT = Path(__file__).parents[2]
CI = ROOT / "examples" / "ci"
QUIET, MORE = (0.100, 0.101, 0.099, 0.1005, 0.0995), (0.120, 0.121, 0.119, 0.1205, 0.1195)
NOISY = (0.10, 0.15, 0.07)

PUSH = {"event_name": "push", "ref_name": "main", "repository": "us/it", "run_attempt": "1"}
PULL = {
    "event_name": "pull_request", "base_ref": "main", "repository": "us/it", "ref_name": "7/merge",
    "event.pull_request.number": "7", "token": "secret",
}  # fmt: skip

GH = """#!/usr/bin/env bash
# Notes what it is called with, and has the comments of the pull request in a file.
set -euo pipefail
here=$(dirname "$0")
echo "${*//$here/}" | sed 's/body=.*/body/' >>"$here/calls"
[[ "$GH_TOKEN" == secret ]]
for word; do if [[ "$word" == body=@* ]]; then cp "${word#body=@}" "$here/comment"; fi; done
if [[ " $* " == *" --jq "* && -f "$here/comment" ]]; then echo 4711; fi
"""


@pytest.fixture
def actions(tmp_path: Path) -> ActionRunner:
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "gh").write_text(GH)
    (programs / "gh").chmod(0o755)
    return ActionRunner(ROOT / "action.yml", programs)


def side(file: Path, exposed: tuple[float, ...]) -> str:
    """A file of runs, one for each value."""
    usual = {"bubble": 0.0, "peak_memory": 2.0**35}
    runs = [run(f"{file.stem}{i}", {"exposed_comm": v, **usual}) for i, v in enumerate(exposed)]
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(to_json(runs))
    return str(file)


@pytest.mark.parametrize(
    ("exposed", "inconclusive", "status", "answer"),
    [
        (QUIET, "pass", 0, "pass"),
        (MORE, "pass", 1, "regressed"),
        (NOISY, "pass", 0, "inconclusive"),
        (NOISY, "fail", 3, "inconclusive"),
    ],
)
def test_recordings_are_judged_by_a_named_baseline(
    exposed: tuple[float, ...], inconclusive: str, status: int, answer: str,
    actions: ActionRunner, tmp_path: Path,
) -> None:  # fmt: skip
    judged = actions.run(
        tmp_path / "pull",
        PULL,
        recordings=side(tmp_path / "own.json", exposed),
        baseline=side(tmp_path / "base.json", QUIET),
        budget=str(CI / "budgets.toml"),
        inconclusive=inconclusive,
    )

    assert (judged.status, judged.outputs) == (status, {"answer": answer}), judged.errors
    assert judged.summary.startswith("### stepsplit")
    assert ("::error title=" in judged.printed) == (answer == "regressed")
    assert judged.artifacts == ["stepsplit.json", "stepsplit.xml", "stepsplit.md"]
    comment = (actions.programs / "comment").read_text()
    assert comment.startswith("<!-- stepsplit check -->\n### stepsplit")


@pytest.mark.slow
@pytest.mark.in_turn("action.yml", ".github/action", "dashboard/commands", "analyzer/regression")
def test_a_pull_request_is_judged_by_the_newest_push_to_its_branch(
    actions: ActionRunner, tmp_path: Path
) -> None:
    usual, more = side(tmp_path / "usual.json", QUIET), side(tmp_path / "more.json", MORE)

    before = actions.run(tmp_path / "before", PULL, recordings=more)
    first = actions.run(tmp_path / "first", PUSH | {"run_id": "1"}, recordings=more)
    newest = actions.run(tmp_path / "newest", PUSH | {"run_id": "2"}, recordings=usual)
    other = actions.run(
        tmp_path / "other", PUSH | {"ref_name": "main-2", "run_id": "3"}, recordings=more
    )
    pull = actions.run(tmp_path / "pull", PULL, recordings=more)
    again = actions.run(tmp_path / "again", PULL, recordings=usual)

    runs = (before, first, newest, other, pull, again)
    assert [(each.status, each.outputs["answer"]) for each in runs] == [
        (0, "no_baseline"), (0, "baseline"), (0, "baseline"), (0, "baseline"),
        (1, "regressed"), (0, "pass"),
    ]  # fmt: skip
    assert "no runs of main to compare with" in before.printed
    assert list(actions.cache) == [
        "stepsplit/check/main/1-1", "stepsplit/check/main/2-1", "stepsplit/check/main-2/3-1",
    ]  # fmt: skip
    listed = "api --paginate repos/us/it/issues/7/comments --jq"
    calls = (actions.programs / "calls").read_text().splitlines()
    assert [call[: len(listed)] == listed or call for call in calls] == [
        True, "api --method POST repos/us/it/issues/7/comments -F body",
        True, "api --method PATCH repos/us/it/issues/comments/4711 -F body",
    ]  # fmt: skip
    assert "✓ PASS" in (actions.programs / "comment").read_text()


def test_a_token_that_may_not_write_is_a_warning(actions: ActionRunner, tmp_path: Path) -> None:
    runs = side(tmp_path / "runs.json", QUIET)
    judged = actions.run(
        tmp_path / "pull", PULL | {"token": "of a fork"}, recordings=runs, baseline=runs
    )

    assert (judged.status, judged.outputs["answer"]) == (0, "pass")
    assert "::warning title=stepsplit::no comment" in judged.printed


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"recordings": "none.json", "baseline": "base.json"}, "base.json"),
        ({}, "a command to record, or recordings"),
        ({"recordings": "x", "name": "a b"}, "letters, digits, - and _ alone"),
    ],
)
def test_what_is_missing_fails_in_words(
    inputs: dict[str, str], words: str, actions: ActionRunner, tmp_path: Path
) -> None:
    failed = actions.run(tmp_path / "pull", PULL, **inputs)

    assert (failed.status, failed.outputs["answer"]) == (2, "")
    assert words in failed.printed + failed.errors
    assert not (actions.programs / "comment").exists()


@pytest.mark.slow
def test_a_command_is_recorded_on_pushes_and_on_pull_requests(
    actions: ActionRunner, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    script = (ROOT / "examples" / "plain_ddp.py").read_text()
    backward = "        loss.backward()\n"
    assert backward in script
    logging = f"{backward}        distributed.all_reduce(loss.detach())\n"
    folder = shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (folder / "logging_ddp.py").write_text(script.replace(backward, logging))
    train = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2 {folder}"
    usual = {"command": f"{train}/plain_ddp.py --steps 16", "runs": "1", "budget": "calls:exact"}
    changed = usual | {"command": f"{train}/logging_ddp.py --steps 16"}

    pushed = actions.run(tmp_path / "push", PUSH | {"run_id": "1"}, **usual)
    same = actions.run(tmp_path / "same", PULL, **usual)
    more = actions.run(tmp_path / "more", PULL, **changed)

    assert [each.outputs["answer"] for each in (pushed, same, more)] == [
        "baseline", "pass", "regressed",
    ], more.errors  # fmt: skip


def test_the_gitlab_job_writes_the_reports_that_it_names(tmp_path: Path) -> None:
    job = yaml.safe_load((CI / "gitlab-ci.yml").read_text())["communication"]
    side(tmp_path / "ci" / "baseline.json", QUIET)
    (tmp_path / "ci" / "budgets.toml").write_bytes((CI / "budgets.toml").read_bytes())
    for i, exposed in enumerate(MORE[:3], 1):
        side(tmp_path / "runs" / str(i), (exposed,))
    program, *arguments = shlex.split(job["script"][-1])
    ran = subprocess.run([Path(sys.executable).with_name(program), *arguments], cwd=tmp_path)
    assert ran.returncode == 1 and job["allow_failure"] == {"exit_codes": [3]}
    assert all((tmp_path / name).exists() for name in job["artifacts"]["reports"].values())


def test_the_workflow_uses_the_action_as_it_is() -> None:
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    workflow = yaml.safe_load((CI / "workflow.yml").read_text())
    *_, used = workflow["jobs"]["communication"]["steps"]
    assert set(used["with"]) <= set(action["inputs"])


def test_the_budgets_are_budgets() -> None:
    assert [budget.metric for budget in parse_budgets([str(CI / "budgets.toml")])] == [
        "calls", "bytes", "exposed_comm", "bubble", "peak_memory",
    ]  # fmt: skip
