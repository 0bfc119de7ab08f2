"""Starts the agent in a process that was not prepared: Python 3.14 and later, on both sides."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from stepsplit.collectors.control.wire import ask_status
from stepsplit.collectors.errors import CollectError
from stepsplit.collectors.plan import PLAN_VARIABLE, Plan
from stepsplit.collectors.record import SITE

_PATIENCE_S = 30.0
_SCRIPT = """\
import os, runpy
os.environ[{name!r}] = {plan!r}
runpy.run_path({site!r})
"""


def inject(pid: int, plan: Plan) -> None:
    """Runs the agent's start in the process (PEP 768) and waits until it has ended a step.

    Raises CollectError where this Python or the other cannot, or may not.
    """
    remote_exec = getattr(sys, "remote_exec", None)
    if remote_exec is None:
        version = ".".join(map(str, sys.version_info[:2]))
        raise CollectError(
            f"process {pid} has no agent, and Python {version} cannot start one in it (3.14 can):"
            " start the job with stepsplit record --standby -- ..."
        )
    script = _SCRIPT.format(
        name=PLAN_VARIABLE, plan=plan.text(), site=str(SITE / "sitecustomize.py")
    )
    with tempfile.NamedTemporaryFile("w", suffix=".py", delete=False) as file:
        file.write(script)
    try:
        remote_exec(pid, file.name)
        _await_agent(pid)
    except (OSError, RuntimeError) as error:
        raise CollectError(f"process {pid} lets no code in: {error}") from None
    finally:
        Path(file.name).unlink()


def _await_agent(pid: int) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while ask_status(pid) is None:
        if time.monotonic() > deadline:
            raise CollectError(f"process {pid} has ended no step in {_PATIENCE_S:.0f} s")
        time.sleep(0.2)
