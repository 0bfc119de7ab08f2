"""Words that a shell completes, by the function that it defines from stepsplit's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
eval "$(_STEPSPLIT_COMPLETE=bash_source stepsplit)"
read -ra COMP_WORDS <<<"$1"
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_stepsplit_completion stepsplit
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("stepsplit an", ["analyze"]),
        ("stepsplit check --bu", ["--budget"]),
        ("stepsplit dashboard --log-format j", ["json"]),
    ],
)
def test_bash_completes_commands_options_and_values(typed: str, completed: list[str]) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", SCRIPT, "bash", typed],
        env=os.environ | {"PATH": path}, capture_output=True, text=True, check=True,
    )  # fmt: skip

    assert done.stdout.splitlines() == completed
    assert done.stderr == ""
