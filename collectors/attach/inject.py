"""Starts the agent in an unprepared process (PEP 768); needs Python 3.14 or later on both sides."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from stepsplit.collectors.attach import messages, processes, sockets
from stepsplit.collectors.guard import CollectError
from stepsplit.collectors.record.environment import SITE
from stepsplit.collectors.record.plan import PLAN_VARIABLE, RecordPlan

# Code of sys.remote_exec runs at the main thread's next safe point; the agent answers after a step.
_AGENT_TIMEOUT_S = 30.0

_SCRIPT = """\
import os, runpy
os.environ[{name!r}] = {plan!r}
runpy.run_path({site!r})
"""


def inject_into_ranks(target: int, plan: RecordPlan) -> None:
    """Starts the agent in the process and in the ranks that it started. Raises CollectError."""
    for pid in processes.list_process_tree(target):
        if processes.read_environment(pid).get("RANK") is not None or pid == target:
            inject(pid, plan)


def inject(pid: int, plan: RecordPlan) -> None:
    """Starts the agent in the process (PEP 768) and waits until the process has ended a step.

    Raises CollectError if either Python does not support or permit it.
    """
    remote_exec = getattr(sys, "remote_exec", None)
    if remote_exec is None:
        version = ".".join(map(str, sys.version_info[:2]))
        raise CollectError(
            f"process {pid} has no agent, and Python {version} cannot start one (3.14 can); start"
            " the job with stepsplit record --standby -- ..."
        )
    script = _SCRIPT.format(
        name=PLAN_VARIABLE, plan=plan.format_json(), site=str(SITE / "sitecustomize.py")
    )
    # The process runs whatever is at this path by then.
    folder = sockets.make_socket_folder()
    with tempfile.NamedTemporaryFile("w", suffix=".py", delete=False, dir=folder) as file:
        file.write(script)
    try:
        remote_exec(pid, file.name)
        # The agent answers from the end of the next step on.
        deadline = time.monotonic() + _AGENT_TIMEOUT_S
        while messages.ask_status(pid) is None:
            if time.monotonic() > deadline:
                raise CollectError(f"process {pid} did not end a step in {_AGENT_TIMEOUT_S:.0f} s")
            time.sleep(0.2)
    except (OSError, RuntimeError) as error:
        raise CollectError(f"cannot run code in process {pid}: {error}") from None
    finally:
        Path(file.name).unlink()
