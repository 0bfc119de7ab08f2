"""Other processes of this host, from /proc."""

from __future__ import annotations

import os
from pathlib import Path

from stepsplit.collectors.job.launcher import is_rank, read_identity
from stepsplit.collectors.record.plan import PLAN_VARIABLE, RecordPlan


def read_environment(pid: int) -> dict[str, str]:
    """The initial environment of the process; empty if it cannot be read."""
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    entries = text.decode(errors="replace").split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def find_ranks_of_plan(plan: RecordPlan) -> dict[int, int]:
    """{rank: pid} of the processes that were started with the plan and are still running."""
    pids = sorted(int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
    environments = {pid: read_environment(pid) for pid in pids if pid != os.getpid()}
    found: dict[int, int] = {}
    for pid, environment in environments.items():
        if environment.get(PLAN_VARIABLE) == plan.format_json() and is_rank(environment):
            # Data loaders and compilers of a rank have its environment, and are started later.
            found.setdefault(read_identity(environment).rank, pid)
    return found


def read_command_line(pid: int) -> str:
    """The command line of the process; empty if it cannot be read."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def is_process_stopped(pid: int) -> bool:
    """Whether the process is stopped, by SIGSTOP or a debugger."""
    return _read_stat(pid)[:1] in (["T"], ["t"])


def is_process_alive(pid: int) -> bool:
    """Whether the process exists and has not ended (a zombie has)."""
    return _read_stat(pid)[:1] not in ([], ["Z"], ["X"])


def list_ancestors(pid: int) -> list[int]:
    """The ancestors of the process, its parent first."""
    parents: list[int] = []
    while (fields := _read_stat(pid)) and (pid := int(fields[1])) > 1:
        parents.append(pid)
    return parents


def list_process_tree(pid: int) -> list[int]:
    """The process and all of its descendants, in order."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return sorted(each for each in pids if each == pid or pid in list_ancestors(each))


def _read_stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; empty if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return []
    # The name in parentheses may itself contain spaces and parentheses, and its 15 bytes may end in
    # the middle of a letter.
    return text.rpartition(b")")[2].decode("ascii").split()
