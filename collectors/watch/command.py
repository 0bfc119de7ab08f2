"""stepsplit watch: runs a command whose ranks are watched."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from stepsplit.collectors.formats.watch_notes import Launch, count_incarnations, note_launch
from stepsplit.collectors.guard import warn_on_failure
from stepsplit.collectors.probes.launch_times import read_process_start
from stepsplit.collectors.record.command import make_folder, run_command
from stepsplit.collectors.record.environment import NcclLogs, build_environment
from stepsplit.collectors.record.plan import RecordPlan
from stepsplit.collectors.watch.plan import WATCH_VARIABLE, WatchPlan


def run_watched(command: Sequence[str], plan: WatchPlan) -> int:
    """Runs the command with each rank watched as planned, and returns its exit status.

    If the folder of the plan has notes of an earlier job, this one is a further incarnation of it.
    `stepsplit attach` records it as well. Status and errors are as in `record`.
    """
    out = Path(plan.out)
    make_folder(out)
    standby = RecordPlan(plan.out, plan.name, first=None)
    numbered = replace(plan, incarnation=count_incarnations(out))
    variables = build_environment(os.environ, standby, NcclLogs())
    if _KINETO_LOG not in os.environ:
        # Else Kineto prints four lines for each sample of each rank.
        variables[_KINETO_LOG] = "99"
    # With the start of this process, which the job has waited for.
    begin = read_process_start() or time.time_ns()
    launch = Launch(socket.gethostname(), os.getpid(), numbered.incarnation, begin)

    def note_begin() -> None:
        with warn_on_failure(0, "the begin of the command"):
            note_launch(out, launch)

    variables[WATCH_VARIABLE] = numbered.format_json()
    status = run_command(command, out, variables, note_begin)
    with warn_on_failure(0, "the end of the command"):
        note_launch(out, replace(launch, end_unix_ns=time.time_ns(), status=status))
    return status


_KINETO_LOG = "KINETO_LOG_LEVEL"
