"""Runs the steps of a composite action in a folder, as a runner would.

Its shells are real, and so are their programs. Of what is not a shell step, the cache gives the
newest entry whose key begins as asked, and an upload of artifacts is noted.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True)
class StepsRun:
    """What the steps of one event came to.

    Attributes:
        status: The exit status of the first step that failed, else 0.
        printed: Standard output of all steps.
        errors: Standard error of all steps.
        outputs: The outputs of the action.
        summary: The markdown that steps have appended to the summary.
        artifacts: The names of the uploaded files.
    """

    status: int
    printed: str
    errors: str
    outputs: dict[str, str]
    summary: str
    artifacts: list[str]


@dataclass
class ActionRunner:
    """Runs an action for the events of one repository, whose cache it keeps.

    Attributes:
        action: The file of the action.
        programs: A folder of programs that come before all others, such as a `gh`.
        cache: What is kept between events, by key, oldest first.
    """

    action: Path
    programs: Path
    cache: dict[str, bytes] = field(default_factory=dict)

    def run(self, folder: Path, github: dict[str, str], **inputs: str) -> StepsRun:
        """Runs all steps in a new folder.

        github: The context of the event, by dotted names such as `event_name` and `base_ref`.
        """
        folder.mkdir()
        action = yaml.safe_load(self.action.read_text())
        assert set(inputs) <= set(action["inputs"]), "inputs that the action does not have"
        known = {f"github.{name}": value for name, value in github.items()}
        for name, option in action["inputs"].items():
            known[f"inputs.{name}"] = inputs.get(name, _fill(option["default"], known))
        status, printed, errors, artifacts = 0, "", "", []
        for number, step in enumerate(action["runs"]["steps"]):
            condition = step.get("if", "success()")
            if (status and "always()" not in condition) or not _holds(condition, known):
                continue
            if uses := step.get("uses"):
                artifacts += self._use(
                    uses, folder, {k: _fill(v, known) for k, v in step["with"].items()}
                )
                continue
            output = folder.parent / f"{folder.name}-output-{number}"
            output.touch()
            event = {
                f"GITHUB_{name.replace('.', '_').upper()}": value for name, value in github.items()
            }
            own = {name: _fill(value, known) for name, value in step.get("env", {}).items()}
            ran = subprocess.run(
                ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
                cwd=folder, capture_output=True, text=True, check=False,
                env=os.environ | event | own | {
                    "PATH": f"{self.programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
                    "GITHUB_ACTIONS": "true",
                    "GITHUB_ACTION_PATH": str(self.action.parent),
                    "GITHUB_OUTPUT": str(output),
                    "GITHUB_STEP_SUMMARY": str(folder.parent / f"{folder.name}-summary"),
                },
            )  # fmt: skip
            status = status or ran.returncode
            printed, errors = printed + ran.stdout, errors + ran.stderr
            for line in output.read_text().splitlines():
                name, _, value = line.partition("=")
                known[f"steps.{step['id']}.outputs.{name}"] = value
        outputs = {name: _fill(each["value"], known) for name, each in action["outputs"].items()}
        summary = folder.parent / f"{folder.name}-summary"
        return StepsRun(
            status, printed, errors, outputs,
            summary.read_text() if summary.exists() else "", artifacts,
        )  # fmt: skip

    def _use(self, uses: str, folder: Path, given: dict[str, str]) -> list[str]:
        """Does what another action would; returns the names of uploaded files."""
        names = given["path"].split()
        if uses.startswith("actions/upload-artifact@"):
            return [name for name in names if (folder / name).exists()]
        (name,) = names
        if uses.startswith("actions/cache/save@"):
            assert given["key"] not in self.cache, "an entry of a cache never changes"
            self.cache[given["key"]] = (folder / name).read_bytes()
        elif uses.startswith("actions/cache/restore@"):
            for key in reversed(self.cache):
                if key.startswith((given["key"], given["restore-keys"])):
                    (folder / name).write_bytes(self.cache[key])
                    break
        else:
            raise AssertionError(f"unknown action {uses}")
        return []


def _fill(text: Any, known: dict[str, str]) -> str:
    """The text with the values of its expressions; a name that is not known is empty."""
    return re.sub(r"\$\{\{\s*([\w.-]+)\s*\}\}", lambda found: known.get(found[1], ""), str(text))


def _holds(condition: str, known: dict[str, str]) -> bool:
    """Whether a condition of comparisons that are joined by && holds."""
    terms = [term.strip() for term in condition.split("&&")]
    comparisons = [term.split("==") for term in terms if term not in ("always()", "success()")]
    return all(known.get(name.strip(), "") == value.strip(" '") for name, value in comparisons)
