"""The command and the environment of the Python processes that stepsplit starts for itself.

They import nothing from the current folder, which may be a recording that somebody else made:
`python -m` and `python -c` search it first, and so does an empty or relative entry of PYTHONPATH.
A command of the user is never started by these: it keeps its environment, folder and path.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

PYTHON = (sys.executable, "-P")
"""This interpreter, which then searches neither the current folder nor that of a script."""


def build_helper_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of stepsplit."""
    return [*PYTHON, "-m", module, *arguments]


def build_helper_environment(added: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment with the variables added, for one that imports nothing from the
    current folder; nor do the Python processes that libraries start in it."""
    environment = dict(os.environ) | dict(added or {}) | {"PYTHONSAFEPATH": "1"}
    kept = filter(os.path.isabs, environment.pop("PYTHONPATH", "").split(os.pathsep))
    if path := os.pathsep.join(kept):
        environment["PYTHONPATH"] = path
    return environment
